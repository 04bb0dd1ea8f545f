"""`sparseserve serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import httpx

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """`with ServerProcess([...options...]) as server:`; `url` once it listens, `log` holds the last lines of its log.

    Args:
        options: of `sparseserve serve`; `--port 0` = any free one.
    """

    def __init__(self, options: Sequence[str], *, cache_dir: str = "") -> None:
        command = [sys.executable, "-m", "sparseserve_jax.cli", "serve", *options]
        command += ["--compilation-cache-dir", cache_dir] if cache_dir else []
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        self.log: deque[str] = deque(maxlen=2000)
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            found = re.search(r"running on (http://\S+?)[ (]", line + " ", re.IGNORECASE)
            if found:
                self.url = found[1]

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        """Until `/health` says so."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError("the server ended: " + "\n".join(list(self.log)[-20:]))
            try:
                if self.url and httpx.get(self.url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.05)
            time.sleep(0.1)
        raise RuntimeError("the server is not ready: " + "\n".join(list(self.log)[-20:]))

    def end(self, signal_number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Sends a signal and waits; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(signal.SIGKILL)
        self._reader.join(10)
        if self.process.stderr is not None:
            self.process.stderr.close()

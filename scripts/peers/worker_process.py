"""The host's side of the protocol: a worker as a process with an end that is certain."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import psutil


class WorkerError(RuntimeError):
    """A worker reported an error, died, or did not answer in time."""


class WorkerProcess:
    """A worker in a process group of its own, bound to the given CPUs. Use it as a context manager.

    Args:
        command: what to run; the settings are appended as one JSON argument.
        cpus: CPUs it may use, the same for every side.
        log: where its standard error goes.
        start_timeout_s: for loading and compiling.

    Attributes:
        info: what it said when it was ready.

    Raises:
        WorkerError: it did not start; the message ends with the last lines of its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, Any],
        *,
        env: Mapping[str, str],
        cpus: Sequence[int],
        log: Path,
        start_timeout_s: float = 1200.0,
    ) -> None:
        self.name, self._log = name, log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*command, json.dumps(settings)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                env=dict(env), text=True, start_new_session=True,
            )  # fmt: skip
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, cpus)  # before it has started a thread
        self._answers: queue.Queue[str | None] = queue.Queue()
        assert self._process.stdout is not None and self._process.stdin is not None
        self._pump = threading.Thread(target=_pump, args=(self._process.stdout, self._answers), daemon=True)
        self._pump.start()
        try:
            self.info: dict[str, Any] = self._answer("ready", start_timeout_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()

    def call(self, op: str, timeout_s: float = 7200.0, **args: Any) -> Any:
        """Asks for one operation and waits for its value.

        Raises:
            WorkerError: it failed, died, or took longer than `timeout_s`.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"{self.name} is gone ({error}); {self._tail()}") from error
        return self._answer("value", timeout_s)

    def cpu_s(self) -> float:
        """CPU seconds it has used so far, its children included."""
        total = 0.0
        try:
            root = psutil.Process(self._process.pid)
            for process in (root, *root.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
        return total

    def peak_resident_bytes(self) -> int:
        """The most memory it has held at once, as Linux counts it (mapped weights that were read included).

        Raises:
            OSError: not on Linux, or it is gone.
        """
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise OSError(f"the kernel does not say how much memory {self.name} has held")

    def close(self) -> None:
        """Ends the whole process group: by the end of its input, and by force if that takes more than two seconds."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                self._process.kill()  # it is gone, or will not read
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._signal(signal.SIGKILL)  # whatever it left behind
        self._pump.join()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _answer(self, key: str, timeout_s: float) -> Any:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise WorkerError(f"{self.name} did not answer in {timeout_s:.0f} s; {self._tail()}") from None
        if line is None:
            raise WorkerError(f"{self.name} ended with code {self._process.wait()}; {self._tail()}")
        message = json.loads(line)
        if key not in message:
            raise WorkerError(f"{self.name}: {message.get('error', line)}; {self._tail()}")
        return message[key]

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join([f"the last lines of {self._log}:", *lines])


def _pump(stream: TextIO, answers: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            answers.put(line)
    answers.put(None)


class IdleWatch:
    """How busy workers were while others were being measured: they should have been idle."""

    def __init__(self) -> None:
        self._cpu_s: dict[str, float] = {}
        self._wall_s: dict[str, float] = {}

    def call(self, active: WorkerProcess, idle: WorkerProcess, op: str, **args: Any) -> Any:
        """`active.call(...)`, noting the CPU time that `idle` used meanwhile."""
        before, started = idle.cpu_s(), time.perf_counter()
        value = active.call(op, **args)
        self._wall_s[idle.name] = self._wall_s.get(idle.name, 0.0) + time.perf_counter() - started
        self._cpu_s[idle.name] = self._cpu_s.get(idle.name, 0.0) + idle.cpu_s() - before
        return value

    def busy_cores(self) -> dict[str, float]:
        """Cores that each worker used on average while it should have been idle."""
        return {name: self._cpu_s[name] / self._wall_s[name] for name in self._cpu_s}

"""A server with a given engine on a real port, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx
import uvicorn

from sparseserve_jax import Engine
from sparseserve_jax.server.app import make_app
from sparseserve_jax.server.service import Service
from sparseserve_jax.server.settings import ServerSettings

MODEL = "tiny"


class RunningServer:
    """`with RunningServer(engine, ...) as server:`; the engine is used by the server's thread until the end."""

    def __init__(
        self, engine: Engine | Callable[[], Engine], settings: ServerSettings | None = None, *, tracer: Any = None
    ) -> None:
        build = engine if callable(engine) else lambda: engine
        self.service = Service(settings or ServerSettings(), build, [MODEL])
        self.app = make_app(self.service, tracer=tracer)
        config = uvicorn.Config(self.app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=5)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        wait_until(lambda: self._server.started)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def wait_ready(self) -> None:
        wait_until(lambda: self.client.get("/health").status_code == 200, timeout_s=120)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """The response to a completion that must succeed."""
        response = self.client.post("/v1/completions", json={"model": MODEL, "temperature": 0} | fields)
        assert response.status_code == 200, response.text
        return response.json()

    def gauges(self) -> dict[str, float]:
        """All series without labels but the model's, by name without prefix."""
        values = {}
        for line in self.client.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name.replace('{model_name="tiny"}', "").partition(":")[2] or name] = float(value)
        return values

    def assert_idle(self) -> None:
        """Everything is back to zero, soon."""
        names = ("num_requests_running", "num_requests_waiting", "num_requests_parked", "kv_cache_usage_perc",
                 "device_kv_bytes", "host_kv_bytes", "working_set_blocks")  # fmt: skip
        wait_until(lambda: not any(self.gauges()[name] for name in names))
        engine = self.service.engine
        assert all(pool.used == 0 for pool in engine.scheduler.pool_usage().values())
        assert not engine.runner._sequences and not engine.has_unfinished()


def wait_until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response in OpenAI's shape."""
    assert response.status_code == status, (response.status_code, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    return error

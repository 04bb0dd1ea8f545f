"""`run_server`: an engine, the application and uvicorn, until a signal ends them."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from pathlib import Path
from types import FrameType

import uvicorn

from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.server.app import make_app
from sparseserve_jax.server.context import configure_logging
from sparseserve_jax.server.service import Service
from sparseserve_jax.server.settings import ServerSettings
from sparseserve_jax.server.tracing import tracer_to

logger = logging.getLogger("sparseserve.server")

EMBEDDED_NAME = "smollm2-135m-instruct"
THREAD_SWITCH_S = 0.001
"""How long a thread of Python keeps the others waiting; the default of 5 ms would be felt in every first token."""


def own_name(model: str | Path | None) -> str:
    """What a model is called if nobody says: the last part of its path."""
    return EMBEDDED_NAME if model is None else Path(model).resolve().name.removesuffix(".gguf")


class DrainingServer(uvicorn.Server):
    """uvicorn, whose first signal makes the service take no new requests while the running ones finish."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT; the second ends everything at once. Unlike uvicorn's this makes for exit code 0."""
        self._service.is_draining = True
        self.force_exit = self.should_exit
        self.should_exit = True


def run_server(
    model: str | Path | None,
    config: EngineConfig,
    settings: ServerSettings,
    *,
    host: str,
    port: int,
    log_format: str = "text",
    otlp_endpoint: str | None = None,
    warm_up: bool = True,
) -> bool:
    """Serves until a signal comes. The port is open from the start; `/health` says when the model is there.

    Returns:
        whether the engine lived to the end. One that cannot be loaded ends the server; one that dies later does not:
        `/health` says 503, and whoever watches it decides.

    Raises:
        ValueError: tracing is wanted and not installed.
    """
    configure_logging(log_format)
    tracer = tracer_to(otlp_endpoint) if otlp_endpoint else None
    if tracer is not None:
        config = dataclasses.replace(config, record_timeline=True)
    names = settings.served_model_names or (own_name(model),)
    service = Service(settings, lambda: Engine(model, config), names, warm_up=warm_up)

    def on_dead(problem: BaseException) -> None:
        if not service.was_ready:
            logger.critical("the model cannot be served: %s", problem)
            server.should_exit = True

    app = make_app(service, tracer=tracer, on_dead=on_dead)
    drain_s = None if settings.drain_timeout_s == math.inf else math.ceil(settings.drain_timeout_s)
    server = DrainingServer(
        uvicorn.Config(
            app, host=host, port=port, log_config=None, access_log=False, server_header=False,
            timeout_graceful_shutdown=drain_s,
        ),
        service,
    )  # fmt: skip
    if host not in ("127.0.0.1", "localhost", "::1") and not settings.api_keys:
        logger.warning("listening at %s without an API key: everybody who reaches it can use it (--api-key)", host)
    sys.setswitchinterval(THREAD_SWITCH_S)
    server.run()
    return service.status != "dead"

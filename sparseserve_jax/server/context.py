"""Around every request: an id, a line in the log, and a last resort for what nobody caught."""

from __future__ import annotations

import datetime
import json
import logging
import re
import time
import uuid
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparseserve_jax.server.errors import APIError

logger = logging.getLogger("sparseserve.server")
access_logger = logging.getLogger("sparseserve.access")

QUIET_PATHS = ("/health", "/metrics")
"""Asked for all the time: logged only when something is wrong."""


def note(request: Request, **figures: Any) -> None:
    """Adds figures to the request's line in the log."""
    request.scope.setdefault("sparseserve_figures", {}).update(figures)


class ContextMiddleware:
    """The outermost middleware: `X-Request-Id` (the client's or a new one), access log, 500 for what was not caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, and says what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        scope["sparseserve_figures"] = {}
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.error("request %s: %s", request_id, error, exc_info=error, extra={"request_id": request_id})
            if status:
                raise
            response = APIError(500, f"the server failed; its log has more at request {request_id}").response()
            await response(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS and status < 400 else logging.INFO
            figures = {
                "request_id": request_id, "method": scope["method"], "path": scope["path"], "status": status or 499,
                "duration_s": round(time.perf_counter() - started_s, 6), **scope["sparseserve_figures"],
            }  # fmt: skip
            access_logger.log(level, "%(method)s %(path)s %(status)s", figures, extra={"figures": figures})


def _request_id(given: str | None) -> str:
    """The client's own, if it is harmless in a log."""
    return given if given and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given) else uuid.uuid4().hex


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the figures of the record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        content: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"), "level": record.levelname.lower(),
            "logger": record.name, "message": record.getMessage(),
        }  # fmt: skip
        content |= getattr(record, "figures", {})
        if hasattr(record, "request_id"):
            content["request_id"] = record.request_id  # type: ignore[attr-defined]
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, and the figures as `name=value`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line (or lines, with a traceback)."""
        figures: dict[str, Any] = getattr(record, "figures", {})
        shown = " ".join(f"{k}={v}" for k, v in figures.items() if k not in ("method", "path", "status"))
        return super().format(record) + (f" {shown}" if shown else "")


def configure_logging(log_format: str) -> None:
    """Sends the logs of server and engine to standard error, as "text" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in ("sparseserve", "uvicorn"):
        target = logging.getLogger(name)
        target.handlers[:] = [handler]
        target.propagate = False
        target.setLevel(logging.INFO)
    logging.getLogger("uvicorn.access").disabled = True  # the context has a line of its own

"""Errors as OpenAI's clients expect them: `APIError` and how it becomes a response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
         429: "rate_limit_error", 500: "server_error", 503: "server_error"}  # fmt: skip
MAX_MESSAGE_CHARS = 2000


class APIError(Exception):
    """A request that gets an error instead of an answer.

    Attributes:
        param: the field at fault.
        code: for programs, e.g. "model_not_found".
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 3] + "..."
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole response."""
        return json_response(self.body(), self.status, self.headers)


def dumps(content: object) -> str:
    """Strict JSON in ASCII: no NaN, and nothing (such as half a surrogate pair) that could not be sent."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with `dumps(content)`."""
    return Response(dumps(content), status, headers=dict(headers or {}), media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Gives every error of the framework (404, 405, 422) the same shape."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, APIError)
        return error.response()

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            message = f"{request.url.path} is not served here; see /openapi.json for what is"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed at {request.url.path}"
        else:
            message = str(error.detail)
        return APIError(error.status_code, message, headers=error.headers).response()

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return APIError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}").response()

    app.add_exception_handler(APIError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid)

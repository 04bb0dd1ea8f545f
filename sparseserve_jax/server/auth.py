"""API keys: a middleware that lets nothing but `/health` through without one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sparseserve_jax.server.errors import APIError

OPEN_PATHS = ("/health",)


def read_key_file(text: str) -> list[str]:
    """Keys of a file: one a line; empty lines and those that begin with # do not count."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


class KeyMiddleware:
    """Asks for `Authorization: Bearer KEY` (or Basic with the key as password, which browsers know how to ask for)."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets through who has a key."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = APIError(
            401, "a valid API key is needed: send it as `Authorization: Bearer KEY`", code="invalid_api_key",
            headers={"WWW-Authenticate": "Basic" if scope["path"] == "/" else "Bearer"},
        )  # fmt: skip
        await error.response()(scope, receive, send)

    def _is_known(self, headers: Headers) -> bool:
        """Compares with every key in constant time; digests make keys of all lengths alike."""
        given = _digest(_key_of(headers.get("authorization", "")))
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return any(matches)


def _key_of(authorization: str) -> bytes:
    scheme, _, value = authorization.strip().partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value.encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

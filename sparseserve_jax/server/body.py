"""Bodies of requests: read up to a limit, parsed as strict JSON, checked against a model."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic
from fastapi import Request
from starlette.requests import ClientDisconnect

from sparseserve_jax.request import short_repr
from sparseserve_jax.server.errors import APIError

LARGE_BODY_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread."""
MAX_DISCARDED = 8
"""A body that is too large is read on up to this many times the limit, so that the client gets to see the answer."""
MAX_DISCARD_S = 5.0
MAX_DIGITS = 100
"""Of an integer."""
MAX_BODY_S = 60.0

Model = TypeVar("Model", bound=pydantic.BaseModel)


async def read_body(request: Request, model: type[Model], *, max_bytes: int) -> Model:
    """The body as an instance of `model`.

    Raises:
        APIError: 415 other content types, 413 too large, 408 too slow, 400 not JSON or not the fields of the model.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, f"content type {kind[:100]!r} is not supported; send application/json")
    try:
        async with asyncio.timeout(MAX_BODY_S):
            data = await _read(request, max_bytes)
    except ClientDisconnect as error:
        raise APIError(400, "the connection was closed before the body was complete") from error
    except TimeoutError as error:
        raise APIError(408, f"the body did not arrive within {MAX_BODY_S:g} s") from error
    parse: Callable[[], Model] = lambda: parse_model(data, model)  # noqa: E731
    return await asyncio.to_thread(parse) if len(data) > LARGE_BODY_BYTES else parse()


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = declared.isdigit() and int(declared[:20]) > max_bytes
    parts: list[bytes] = []
    size, deadline = 0, math.inf
    async for part in request.stream():
        size += len(part)
        too_large = too_large or size > max_bytes
        if not too_large:
            parts.append(part)
            continue
        parts.clear()
        deadline = min(deadline, time.monotonic() + MAX_DISCARD_S)
        if size > MAX_DISCARDED * max_bytes or time.monotonic() > deadline:
            break
    if too_large:
        raise APIError(
            413, f"the body is larger than {max_bytes} bytes; shorten it (the server's --max-body-bytes)",
            code="request_too_large", headers={"Connection": "close"},
        )  # fmt: skip
    return b"".join(parts)


def parse_model(data: bytes, model: type[Model]) -> Model:
    """Strict JSON into a model.

    Raises:
        APIError: 400.
    """
    content = parse_json(data)
    if not isinstance(content, dict):
        raise APIError(400, f"the body must be a JSON object, not a {type(content).__name__}")
    try:
        return model.model_validate(content)
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False)
        same_field = [e for e in errors if e["loc"][:1] == errors[0]["loc"][:1]]
        first = max(same_field, key=lambda e: len(e["loc"]))  # of a field's alternatives the one that got farthest
        where = ".".join(str(part) for part in first["loc"] if not _is_alternative(part))
        message = f"{where}: {first['msg']}" if where else first["msg"]
        if first["type"] != "missing":
            message += f" (got {short_repr(first['input'])})"
        raise APIError(400, message, param=str(first["loc"][0]) if first["loc"] else None) from error


def parse_json(data: bytes) -> Any:
    """JSON without NaN, infinities (also by overflow, 1e400) and repeated keys.

    Raises:
        APIError: 400.
    """
    try:
        return json.loads(
            data.decode("utf-8"), parse_float=_finite, parse_int=_short, parse_constant=_no_constant,
            object_pairs_hook=_unique,
        )  # fmt: skip
    except RecursionError as error:
        raise APIError(400, "the body is nested too deeply") from error
    except ValueError as error:  # also of UTF-8
        raise APIError(400, f"the body is not valid JSON: {error}") from error


def _is_alternative(part: object) -> bool:
    """Whether this part of an error's place names a type among several that the field may have."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)


def _short(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the integer {text[:40]}... has more than {MAX_DIGITS} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is out of range")
    return value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:100]!r} appears twice")
            seen.add(key)
    return content

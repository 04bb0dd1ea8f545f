"""One request to an OpenAI-compatible server: sent, streamed, timed. Every way to fail has a name.

| status | meaning |
|---|---|
| ok | the answer is whole: a finish reason or `[DONE]` came |
| http_429, http_503, ... | refused with this status |
| connect | no connection to the server |
| timeout | not finished in time |
| disconnect | the connection broke |
| stream_error | the server reported an error in the middle of the stream |
| truncated | the stream ended without a finish reason and without `[DONE]` |
| not_streamed | a whole answer came instead of a stream, which cannot be timed |
| bad_response | what came is not an answer |
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import httpx

from sparseserve_jax.load_generator.records import PlannedRequest, RequestRecord
from sparseserve_jax.load_generator.server_sent_events import Event, EventStream

Endpoint = Literal["completions", "chat"]
PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
IDLE_CONNECTION_S = 2.0
"""Shorter than servers keep a connection, so that none is used at the moment that the server closes it."""
AFTER_DONE_S = 1.0
"""How long a stream may stay open after `[DONE]`: its end frees the connection for the next request."""
MAX_ERROR_CHARACTERS = 300
MAX_ERROR_BYTES = 2**16
SETUP_TIMEOUT_S = 60.0


def base_url(url: str) -> str:
    """The server's root: what the user gave, with or without `/v1`.

    Raises:
        ValueError: no HTTP address, or one with a password in it.
    """
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url={url!r} must be an HTTP address, e.g. http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL has a name or password in it; give a key by --api-key")
    if parts.query or parts.fragment:
        raise ValueError(f"url={url!r} must have no query and no fragment")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


class StreamError(Exception):
    """The server's error object in the middle of a stream."""


class OpenAIClient:
    """Talks to one server; connections are kept and there is no limit to their number. Proxies are not used.

    Args:
        url: the server, with or without `/v1`.
        endpoint: where requests go.
        api_key: sent as a bearer token.
        timeout_s: for a whole request.
    """

    def __init__(self, url: str, *, endpoint: Endpoint, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s={timeout_s} must be above 0 and finite")
        self.url, self.endpoint, self._timeout_s = base_url(url), endpoint, timeout_s
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }  # compression would hold text back
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise ValueError("the API key has characters that no header can carry")
            headers["Authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers, timeout=None, trust_env=False, verify=ssl.create_default_context(),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_CONNECTION_S
            ),
        )  # fmt: skip

    async def __aenter__(self) -> Self:
        """Opens nothing yet."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Closes all connections."""
        await self._http.aclose()

    # --- before the clock runs ---------------------------------------------------------------------------------------

    async def models(self) -> list[dict[str, Any]]:
        """What `/v1/models` lists.

        Raises:
            ValueError: the server cannot be reached, refuses, or answers something else.
        """
        content = await self._ask("GET", "/v1/models")
        models = content.get("data") if isinstance(content, dict) else None
        if not isinstance(models, list) or not all(
            isinstance(m, dict) and isinstance(m.get("id"), str) for m in models
        ):
            raise ValueError(f"{self.url}/v1/models did not answer a list of models; is this an OpenAI-compatible URL?")
        return models

    async def count_tokens(self, text: str, model: str) -> int | None:
        """Tokens of a text as the server's `/tokenize` counts them; None where it has no such thing.

        Raises:
            ValueError: it has, and it failed.
        """
        question = {"model": model, "prompt": text, "add_special_tokens": False}
        content = await self._ask("POST", "/tokenize", question, absent=(404, 405, 501))
        if content is None:
            return None
        count = content.get("count") if isinstance(content, dict) else None
        if isinstance(content, dict) and count is None and isinstance(content.get("tokens"), list):
            count = len(content["tokens"])
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{self.url}/tokenize answered no count of tokens")
        return count

    async def optional(self, path: str) -> Any | None:
        """A JSON document of the server; None if it does not offer it."""
        try:
            return await self._ask("GET", path)
        except ValueError:
            return None

    async def _ask(self, method: str, path: str, body: Any = None, absent: tuple[int, ...] = ()) -> Any:
        try:
            async with asyncio.timeout(SETUP_TIMEOUT_S):
                response = await self._http.request(method, self.url + path, json=body)
        except (httpx.HTTPError, TimeoutError) as error:
            raise ValueError(f"{self.url}{path}: {_words_of(error)}") from error
        if response.status_code in absent:
            return None
        if response.status_code != 200:
            raise ValueError(f"{self.url}{path} answered {response.status_code}: {_error_text(response.content)}")
        try:
            return response.json()
        except ValueError as error:
            raise ValueError(f"{self.url}{path} did not answer JSON") from error

    # --- while it runs -----------------------------------------------------------------------------------------------

    async def send(self, request: PlannedRequest, now_s: Callable[[], float]) -> RequestRecord:
        """Sends a request and follows its stream to the end. Never raises for what the server or the network does.

        Args:
            request: what to send.
            now_s: the run's clock.
        """
        record = RequestRecord(index=request.index, arrival_s=request.arrival_s, sent_s=now_s())
        record.input_tokens = request.input_tokens
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._stream(request, record, now_s, limit)
        except TimeoutError:
            if not record.done_marker:
                _fail(record, "timeout", f"not finished after {self._timeout_s:g} s")
        except httpx.ConnectError as error:
            _fail(record, "connect", _words_of(error))
        except httpx.TransportError as error:
            if not record.done_marker:
                _fail(record, "disconnect", _words_of(error))
        except StreamError as error:
            _fail(record, "stream_error", str(error))
        except (ValueError, RecursionError, httpx.HTTPError) as error:
            _fail(record, "bad_response", _words_of(error))
        if not record.ok:
            record.end_s = now_s()
        if record.usage_from == "estimate":
            record.output_tokens = sum(map(len, record.text_s.values()))
        return record

    async def _stream(
        self, request: PlannedRequest, record: RequestRecord, now_s: Callable[[], float], limit: asyncio.Timeout
    ) -> None:
        url = self.url + PATHS[self.endpoint]
        async with self._http.stream("POST", url, content=request.body) as response:
            if response.status_code != 200:
                return _fail(record, f"http_{response.status_code}", _error_text(await _beginning(response)))
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                content = await _beginning(response)
                kind = "not_streamed" if b'"choices"' in content else "bad_response"
                return _fail(record, kind, _error_text(content))
            events, record.end_s = EventStream(), now_s()
            async for chunk in response.aiter_bytes():
                arrived_s = now_s()
                for event in events.feed(chunk):
                    _note(event, record, arrived_s)
                if record.done_marker:
                    limit.reschedule(asyncio.get_running_loop().time() + AFTER_DONE_S)
            for event in events.close():
                _note(event, record, now_s())
        if not record.done_marker and record.finish_reason is None:
            _fail(record, "truncated", "the stream ended without a finish reason and without [DONE]")


def _note(event: Event, record: RequestRecord, arrived_s: float) -> None:
    """What one event says of a request."""
    if record.done_marker:
        return
    if event.data.strip() == "[DONE]":
        record.done_marker = True
        return
    content = json.loads(event.data)
    if not isinstance(content, dict):
        raise ValueError(f"an event that is no object: {event.data[:80]}")
    if content.get("error") or content.get("object") == "error" or event.type == "error":
        raise StreamError(_error_text(event.data.encode()))
    choices = content.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"choices that are no list of objects: {event.data[:80]}")
    for choice in choices:
        if _has_text(choice):
            index = choice.get("index")
            record.text_s.setdefault(index if isinstance(index, int) else 0, []).append(arrived_s)
            record.end_s = arrived_s
        if choice.get("finish_reason") is not None:
            record.finish_reason = record.finish_reason or str(choice["finish_reason"])
            record.end_s = arrived_s
    usage = content.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        record.usage_from, record.output_tokens = "server", usage["completion_tokens"]
        if isinstance(usage.get("prompt_tokens"), int):
            record.input_tokens = usage["prompt_tokens"]


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk shows the user something: text, reasoning, or a part of a tool call."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal"))
    return bool(choice.get("text"))


def _fail(record: RequestRecord, kind: str, error: str) -> None:
    record.status, record.error = kind, error[:MAX_ERROR_CHARACTERS]


async def _beginning(response: httpx.Response) -> bytes:
    """The first bytes of a body that will only be shown."""
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_ERROR_BYTES:
            break
    return content[:MAX_ERROR_BYTES]


def _error_text(content: bytes) -> str:
    """The message of an error body in any of the usual shapes, or its beginning."""
    text = content.decode(errors="replace").strip()
    try:
        found: Any = json.loads(text)
    except ValueError:
        return text[:MAX_ERROR_CHARACTERS]
    for name in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(name):
            found = found[name]
    return (found if isinstance(found, str) else json.dumps(found))[:MAX_ERROR_CHARACTERS]


def _words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""A server that answers a whole HTTP exchange with the bytes that a test wants, cut into packets where it wants."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

PAUSE_S = 0.02
"""Between two packets: long enough that they arrive apart."""
MODELS = {"object": "list", "data": [{"id": "stub", "object": "model", "max_model_len": 4096}]}

Packets = AsyncIterator[bytes]


@dataclasses.dataclass
class Exchange:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        return json.loads(self.body)


def event(content: Any, end: str = "\n\n") -> bytes:
    return f"data: {content if isinstance(content, str) else json.dumps(content)}{end}".encode()


def piece(text: str, *, index: int = 0, finish_reason: str | None = None, **more: Any) -> bytes:
    """A chunk of a streamed completion."""
    choice = {"index": index, "text": text, "finish_reason": finish_reason}
    return event({"object": "text_completion", "choices": [choice], **more})


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": counts | {"total_tokens": prompt_tokens + completion_tokens}})


DONE = event("[DONE]")
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole(status: int, content: Any, *, headers: str = "", kind: str = "application/json") -> bytes:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} Status\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{headers}"
    return (head + "Connection: close\r\n\r\n").encode() + body


class StubServer:
    """Listens on a port of its own while `running` lasts.

    Args:
        answer: gives the packets of a completion's stream; what it raises breaks the connection.
        tokenize: offer `/tokenize`, which takes every word for `tokens_per_word` tokens.
        pages: whole answers by path.
    """

    def __init__(
        self,
        answer: Callable[[Exchange], Packets],
        *,
        tokenize: bool = False,
        tokens_per_word: float = 1.0,
        pages: Mapping[str, Callable[[Exchange], bytes]] = MappingProxyType({}),
    ) -> None:
        self._pages = pages
        self._answer, self._tokenize, self._tokens_per_word = answer, tokenize, tokens_per_word
        self.exchanges: list[Exchange] = []
        self.url = ""

    @property
    def completions(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.path.endswith("completions")]

    @contextlib.contextmanager
    def running(self) -> Iterator[StubServer]:
        """In a thread, so that the code under test may have an event loop of its own."""
        loop, ready = asyncio.new_event_loop(), threading.Event()
        stopped = asyncio.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()
            await stopped.wait()
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stopped.set)
            thread.join(10)
            loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            exchange = await _read(reader)
            self.exchanges.append(exchange)
            async for packet in self._packets(exchange):
                writer.write(packet)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()

    async def _packets(self, exchange: Exchange) -> Packets:
        if exchange.path in self._pages:
            yield self._pages[exchange.path](exchange)
        elif exchange.path == "/v1/models":
            yield whole(200, MODELS)
        elif exchange.path == "/tokenize" and self._tokenize:
            yield whole(200, {"count": round(len(exchange.content["prompt"].split()) * self._tokens_per_word)})
        elif exchange.path.endswith("completions"):
            async for packet in self._answer(exchange):
                yield packet
        else:
            yield whole(404, {"detail": "Not Found"})


async def _read(reader: asyncio.StreamReader) -> Exchange:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    method, path, _ = first.split(" ")
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Exchange(method, path, headers, body)


def streaming(*packets: bytes, pause_s: float = PAUSE_S, end: bool = True) -> Callable[[Exchange], Packets]:
    """Answers every request with these packets of an event stream, a pause before each; `end` = it ends properly."""

    async def answer(exchange: Exchange) -> Packets:
        yield HEAD
        for packet in packets:
            await asyncio.sleep(pause_s)
            yield chunked(packet)
        if end:
            yield b"0\r\n\r\n"

    return answer


def refusing(status: int, content: Any, headers: str = "") -> Callable[[Exchange], Packets]:
    """Answers every request with a status."""

    async def answer(exchange: Exchange) -> Packets:
        yield whole(status, content, headers=headers)

    return answer

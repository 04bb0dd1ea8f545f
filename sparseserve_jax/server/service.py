"""`Service`: what stands between HTTP and the engine's thread: admission, tokenising, aborts, time limits."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from sparseserve_jax.engine import Engine, PreparedRequest
from sparseserve_jax.request import Prompt, Request
from sparseserve_jax.server.engine_thread import EngineStatus, EngineThread
from sparseserve_jax.server.errors import APIError
from sparseserve_jax.server.metrics import EngineState, Metrics
from sparseserve_jax.server.settings import ServerSettings
from sparseserve_jax.server.structured import GrammarService
from sparseserve_jax.server.tickets import Piece, Ticket
from sparseserve_jax.text.chat_template import ChatTemplateError
from sparseserve_jax.validation import RequestError

logger = logging.getLogger("sparseserve.server")

NUM_TOKENIZING_THREADS = 2


class Service:
    """One engine in its thread, and the requests that are in it. Used from one event loop.

    Args:
        build: makes the engine (in its thread).
        model_names: names that requests may use; the first is on responses and metrics.
        warm_up: compile everything before the first request.
    """

    def __init__(
        self,
        settings: ServerSettings,
        build: Callable[[], Engine],
        model_names: Sequence[str],
        *,
        warm_up: bool = False,
    ) -> None:
        self.settings, self.model_names = settings, tuple(model_names)
        self.metrics = Metrics(settings.metrics_prefix, self.model_names[0], self._num_waiting)
        self.is_draining = False
        self.was_ready = False
        self.created_s = int(time.time())
        self._thread = EngineThread(build, self.metrics, warm_up=warm_up)
        self._num_open = 0  # continuations, from their admission to their end
        self._tokenizing = concurrent.futures.ThreadPoolExecutor(NUM_TOKENIZING_THREADS, "tokenize")
        self._grammars: GrammarService | None = None
        self._on_dead: Callable[[BaseException], None] = lambda problem: None

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, on_dead: Callable[[BaseException], None] | None = None) -> None:
        """Starts to load the engine; `on_dead` is told when it cannot be loaded, or dies."""
        self._on_dead = on_dead or self._on_dead
        self._thread.start(self._note_status)

    async def stop(self) -> None:
        """Ends the engine."""
        await self._thread.stop()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()

    def _note_status(self, status: EngineStatus) -> None:
        logger.info("engine: %s", status)
        self.was_ready = self.was_ready or status == "ready"
        if status == "dead" and self._thread.problem is not None:
            self._on_dead(self._thread.problem)

    @property
    def status(self) -> str:
        """ "loading", "ready", "draining", "dead" or "stopped"."""
        status = self._thread.status
        return "draining" if status == "ready" and self.is_draining else status

    @property
    def engine(self) -> Engine:
        """The engine, for what any thread may use.

        Raises:
            APIError: 503: it is not there yet, or no more.
        """
        if self.status == "ready":
            return self._thread.engine
        explanations = {
            "loading": "the model is being loaded; try again later",
            "draining": "the server is shutting down; no new requests are taken",
        }
        message = explanations.get(self.status, "the engine is dead; the server has to be restarted")
        raise APIError(503, message, code=f"engine_{self.status}", headers={"Retry-After": "5"})

    # --- parts of a request ------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """The name that the response carries.

        Raises:
            APIError: 404.
        """
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            served = ", ".join(self.model_names)
            raise APIError(
                404, f"the model {name[:200]!r} is not served here; use {served}", param="model", code="model_not_found"
            )
        return name

    @property
    def capacity(self) -> int:
        """Continuations that can run and wait."""
        return self._thread.engine.layout.max_num_seqs + self.settings.max_waiting

    def _num_waiting(self, state: EngineState) -> int:
        return max(self._num_open - state.num_running - state.num_parked, 0)

    async def in_thread(self, call: Callable[[], Any]) -> Any:
        """The result of something that takes time, such as tokenising."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call)

    def grammars(self) -> GrammarService:
        """Compiles grammars."""
        if self._grammars is None:
            self._grammars = GrammarService(self.engine.tokenizer, self.settings.grammar_timeout_s)
        return self._grammars

    def check_length(self, text: str, param: str) -> None:
        """Refuses what cannot fit without tokenising it.

        Raises:
            APIError: 400.
        """
        longest, limit = self.engine.tokenizer.max_token_chars, self.engine.layout.max_model_len
        if longest is not None and len(text) > longest * limit:
            raise APIError(
                400, f"the prompt has {len(text)} characters, more than {limit} tokens can hold (max_model_len)",
                param=param, code="context_length_exceeded",
            )  # fmt: skip

    def render_chat(self, messages: Sequence[Mapping[str, Any]], template: str) -> list[int]:
        """Token ids of a chat by a template that the request brought. It takes time: call it by `in_thread`.

        Raises:
            APIError: 400.
        """
        if not self.settings.trust_request_chat_template:
            raise APIError(
                400, "requests may not bring a chat_template; the server would have to be started with "
                "--trust-request-chat-template", param="chat_template",
            )  # fmt: skip
        engine = self.engine
        try:
            return engine.tokenizer.encode_chat(engine.chat_template(template).render(messages))
        except ChatTemplateError as error:
            raise APIError(400, str(error), param="chat_template") from error

    async def prepare(self, prompt: Prompt, param: str, **fields: Any) -> PreparedRequest:
        """A prompt tokenised and checked, with an id of its own.

        Args:
            param: the field of the HTTP request that holds the prompt.
            fields: the rest of `Request`.

        Raises:
            APIError: 400.
        """
        engine = self.engine
        if isinstance(prompt, str):
            self.check_length(prompt, param)
        elif prompt and isinstance(prompt[0], Mapping):
            self.check_length("".join(_texts(prompt)), param)
        request = Request(prompt=prompt, request_id=uuid.uuid4().hex, **fields)
        try:
            return await self.in_thread(lambda: engine.prepare(request))
        except RequestError as error:
            name = param if error.param in ("prompt", "messages") else error.param
            message = str(error)
            code = "context_length_exceeded" if "max_model_len=" in message else None
            raise APIError(400, message, param=name, code=code) from error

    # --- jobs --------------------------------------------------------------------------------------------------------

    def admit(self, num_continuations: int, param: str) -> Job:
        """Room for a request, before anything is done for it. Close what it gives.

        Args:
            param: the field that asks for so many.

        Raises:
            APIError: 429 when the queue is full, 400 when it is too small for this request altogether.
        """
        engine = self.engine  # or 503
        if num_continuations > self.capacity:
            raise APIError(
                400, f"the request asks for {num_continuations} continuations (prompts x n); at most {self.capacity} "
                "can run and wait (the server's --max-waiting)", param=param,
            )  # fmt: skip
        if self._num_open + num_continuations > self.capacity:
            self.metrics.note_rejected("overload")
            raise APIError(
                429, f"the queue is full: {engine.layout.max_num_seqs} run and {self.settings.max_waiting} wait; try "
                "again later", code="queue_full", headers={"Retry-After": str(self._retry_after_s())},
            )  # fmt: skip
        self._num_open += num_continuations
        return Job(self, self._thread, num_continuations)

    def _retry_after_s(self) -> int:
        """A guess of when there may be room: longer for a longer queue, within a minute."""
        return min(1 + self._num_open // self._thread.engine.layout.max_num_seqs, 60)

    def note_closed(self, num_continuations: int) -> None:
        """A job gives its room back."""
        self._num_open -= num_continuations


class Job:
    """The prompts of one HTTP request in the engine.

    Attributes:
        prompts: as prepared, by place.
        last: of each (place, index) the piece that it ended with, with its metrics.
        num_generated: tokens so far, of all continuations.
    """

    def __init__(self, service: Service, thread: EngineThread, num_continuations: int) -> None:
        self._service, self._thread, self._num_continuations = service, thread, num_continuations
        self._queue: asyncio.Queue[Piece] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._is_closed = False
        timeout_s = service.settings.request_timeout_s
        self._deadline_s = None if timeout_s == math.inf else asyncio.get_running_loop().time() + timeout_s
        self.started_ns = time.time_ns()
        self.submitted_ns = 0
        self.ended_ns = 0
        self.prompts: list[PreparedRequest] = []
        self.last: dict[tuple[int, int], Piece] = {}
        self.num_generated = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    def submit(self, prompts: Sequence[PreparedRequest], *, stream: bool) -> None:
        """Hands the prompts to the engine."""
        self.prompts = list(prompts)
        self.submitted_ns = time.time_ns()
        self._tickets = [
            Ticket(prepared=prepared, place=place, queue=self._queue, stream=stream)
            for place, prepared in enumerate(prompts)
        ]
        self._thread.submit(self._tickets)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces as they come, until every continuation has ended.

        Raises:
            APIError: 500 a continuation failed, 503 the engine died, 408 it took too long, 499 it was aborted.
        """
        while len(self.last) < self._num_continuations:
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    piece = await self._queue.get()
            except TimeoutError as error:
                limit = self._service.settings.request_timeout_s
                raise APIError(
                    408, f"the request was not served within {limit:g} s and has been aborted", code="timeout"
                ) from error
            self.num_generated += len(piece.token_ids)
            if piece.finish_reason is not None:
                self.last[piece.place, piece.index] = piece
            if piece.finish_reason == "error":
                if self._service.status == "dead":
                    raise APIError(503, piece.error or "the engine is dead", code="engine_dead")
                raise APIError(500, piece.error or "the engine failed", code="engine_error")
            yield piece

    def close(self) -> None:
        """Aborts what is unfinished and gives the room back. Once is enough, more does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.ended_ns = time.time_ns()
        num_ended = collections.Counter(place for place, _ in self.last)
        unfinished = [t.request_id for t in self._tickets if num_ended[t.place] < t.prepared.num_continuations]
        if unfinished:
            self._thread.abort(unfinished)
        self._service.note_closed(self._num_continuations)


def _texts(messages: Sequence[Any]) -> list[str]:
    """All text of chat messages, roughly: enough to bound its length."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    texts = [content for content in contents if isinstance(content, str)]
    for content in contents:
        if isinstance(content, list):
            texts += [p["text"] for p in content if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
    return texts

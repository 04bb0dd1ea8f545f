"""What completions and chats have in common: from fields to a job, and from its pieces to a response."""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request, Response

from sparseserve_jax.engine import PreparedRequest
from sparseserve_jax.request import Prompt, SamplingParams
from sparseserve_jax.server.context import note
from sparseserve_jax.server.disconnect import ClientGone, while_connected
from sparseserve_jax.server.errors import APIError, json_response
from sparseserve_jax.server.protocol import GenerationFields
from sparseserve_jax.server.service import Job, Service
from sparseserve_jax.server.streaming import EventStream, event
from sparseserve_jax.server.tickets import Piece
from sparseserve_jax.server.tracing import RequestTracer
from sparseserve_jax.text.tokenizer import Tokenizer


class Generation(abc.ABC):
    """One request for text, of either kind; subclasses say how it looks.

    Attributes:
        id: on the response and its chunks.
        model: the name that the request used.
        job: once admitted.
        tokenizer: the model's, also when the engine is shutting down.
    """

    id_prefix: str
    prompt_param: str

    def __init__(self, service: Service, fields: GenerationFields, tracer: RequestTracer | None) -> None:
        self.service, self._fields, self._tracer = service, fields, tracer
        self.tokenizer: Tokenizer = service.engine.tokenizer
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.created_s = int(time.time())
        self.model = service.check_model(fields.model)
        fields.check_extra()
        self.sampling = self.make_sampling()
        options = fields.stream_options
        self._with_usage = options is not None and options.include_usage
        self._with_usage_always = options is not None and options.continuous_usage_stats and options.include_usage

    @abc.abstractmethod
    def make_sampling(self) -> SamplingParams:
        """Sampling parameters of the request."""

    @abc.abstractmethod
    async def prompts(self) -> Sequence[Prompt]:
        """Its prompts."""

    @abc.abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the whole response."""

    @abc.abstractmethod
    def first_choices(self, place: int, index: int) -> list[dict[str, Any]]:
        """What a stream says of a choice before its first text."""

    @abc.abstractmethod
    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """What a chunk says of a choice; None if there is nothing to say."""

    @abc.abstractmethod
    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """A response, or a chunk of a stream, around choices."""

    # --- the way of a request ----------------------------------------------------------------------------------------

    async def respond(self, request: Request) -> Response:
        """The response: as soon as there is a first piece (a stream), or all (else).

        Raises:
            APIError: whatever went wrong before the response began.
        """
        try:
            return await while_connected(self._respond(request), request.receive)
        except ClientGone:
            return Response(status_code=499)

    async def _respond(self, request: Request) -> Response:
        prompts = await self.prompts()
        job = self.job = self.service.admit(
            len(prompts) * self.sampling.n, self.prompt_param if len(prompts) > self.sampling.n else "n"
        )
        close = self._closer(job, request)
        handed_over = False
        try:
            grammar = await self.service.grammars().grammar_for(self._fields)
            extra: dict[str, Any] = {"priority": self._fields.priority or 0, "grammar": grammar}
            if self._fields.sparse_budget_tokens is not None:
                dense = self._fields.sparse_budget_tokens == "dense"
                extra["sparse_budget_tokens"] = None if dense else self._fields.sparse_budget_tokens
            prepared = [await self._prepare(place, prompts, extra) for place in range(len(prompts))]
            job.submit(prepared, stream=bool(self._fields.stream))
            pieces = job.pieces()
            if not self._fields.stream:
                return self._whole([piece async for piece in pieces])
            first = await anext(pieces)
            handed_over = True
            return EventStream(self._events(first, pieces), close)
        finally:
            if not handed_over:
                close()

    async def _prepare(self, place: int, prompts: Sequence[Prompt], extra: dict[str, Any]) -> PreparedRequest:
        try:
            return await self.service.prepare(prompts[place], self.prompt_param, sampling=self.sampling, **extra)
        except APIError as error:
            if len(prompts) > 1:
                error.message = f"{self.prompt_param}[{place}]: {error.message}"
            raise

    def _closer(self, job: Job, request: Request) -> Callable[[], None]:
        def close() -> None:
            job.close()
            reasons = sorted({str(piece.finish_reason) for piece in job.last.values()}) or ["abort"]
            ttft_s = [p.metrics.ttft_s for p in job.last.values() if p.metrics is not None and p.metrics.ttft_s]
            note(
                request, completion_id=self.id, model=self.model, prompt_tokens=job.num_prompt_tokens,
                completion_tokens=job.num_generated, finish_reasons=reasons, ttft_s=min(ttft_s, default=None),
            )  # fmt: skip
            if self._tracer is not None:
                self._tracer.record(job, name=self.prompt_param, model=self.model, response_id=self.id,
                                    sampling=self.sampling, headers=dict(request.headers))  # fmt: skip

        return close

    def _whole(self, pieces: Sequence[Piece]) -> Response:
        pieces = sorted(pieces, key=lambda piece: (piece.place, piece.index))
        content = self.envelope([self.choice(piece) for piece in pieces], is_chunk=False)
        return json_response(content | {"usage": self.usage()})

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        begun: set[tuple[int, int]] = set()

        def chunks(piece: Piece) -> list[bytes]:
            key = (piece.place, piece.index)
            choices = [] if key in begun else self.first_choices(*key)
            begun.add(key)
            delta = self.delta(piece)
            if delta is not None:
                choices.append(delta)
            return [self._chunk([choice]) for choice in choices]

        for chunk in chunks(first):
            yield chunk
        async for piece in pieces:
            for chunk in chunks(piece):
                yield chunk
        if self._with_usage:
            yield event(self.envelope([], is_chunk=True) | {"usage": self.usage()})

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        usage: dict[str, Any] = {}
        if self._with_usage:
            usage["usage"] = self.usage() if self._with_usage_always else None
        return event(self.envelope(choices, is_chunk=True) | usage)

    # --- for the subclasses ------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        num_prompt, num_generated = self.job.num_prompt_tokens, self.job.num_generated
        return {
            "prompt_tokens": num_prompt, "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }  # fmt: skip

    def choice_index(self, piece: Piece) -> int:
        """The place of a continuation among all choices."""
        return piece.place * self.sampling.n + piece.index

    def prompt(self, piece: Piece) -> PreparedRequest:
        """The prompt that a piece continues."""
        return self.job.prompts[piece.place]

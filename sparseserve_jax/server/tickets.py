"""`Ticket`: one prompt on its way through the engine's thread, and `Piece`: what comes back of it."""

from __future__ import annotations

import asyncio
import dataclasses

from sparseserve_jax.engine import PreparedRequest
from sparseserve_jax.request import FinishReason, RequestMetrics, RequestOutput, TokenLogprob


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What a continuation gained: its text since the last piece, or (not streamed) all of it at its end.

    Attributes:
        place: of the prompt in its HTTP request.
        index: of the continuation of that prompt.
        prompt_logprobs: with the first piece, if asked for.
        metrics: whole, with the last piece.
        error: why, when `finish_reason` is "error".
    """

    place: int
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None
    prompt_logprobs: list[list[TokenLogprob] | None] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None
    error: str | None


@dataclasses.dataclass(kw_only=True)
class Ticket:
    """A prompt for the engine's thread.

    Attributes:
        prepared: with a `request_id` of its own.
        queue: where pieces go (in the event loop's thread); shared by the prompts of one HTTP request.
        stream: a piece for every token instead of one at the end.
    """

    prepared: PreparedRequest
    place: int
    queue: asyncio.Queue[Piece]
    stream: bool
    num_ended: int = 0
    _num_sent: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """Known to the engine."""
        assert self.prepared.request.request_id is not None
        return self.prepared.request.request_id

    def take(self, output: RequestOutput) -> Piece | None:
        """The piece that a snapshot brings, if any. In the engine's thread; small, since readers may be slow."""
        ended = output.finish_reason is not None
        self.num_ended += ended
        if not self.stream and not ended:
            return None
        sent = self._num_sent.get(output.index, 0)
        is_first = output.index not in self._num_sent
        self._num_sent[output.index] = len(output.token_ids)
        return Piece(
            place=self.place, index=output.index, text=output.delta if self.stream else output.text,
            token_ids=output.token_ids[sent:], logprobs=None if output.logprobs is None else output.logprobs[sent:],
            prompt_logprobs=output.prompt_logprobs if is_first else None,
            finish_reason=output.finish_reason, stop_reason=output.stop_reason,
            metrics=output.metrics if ended else None, error=output.error,
        )  # fmt: skip

    def failed(self, reason: str) -> list[Piece]:
        """Pieces that end all its continuations, when there is no engine any more."""
        return [
            Piece(place=self.place, index=index, text="", token_ids=[], logprobs=None, prompt_logprobs=None,
                  finish_reason="error", stop_reason=None, metrics=None, error=reason)
            for index in range(self.prepared.num_continuations)
        ]  # fmt: skip

    @property
    def is_ended(self) -> bool:
        """All its continuations have ended."""
        return self.num_ended >= self.prepared.num_continuations

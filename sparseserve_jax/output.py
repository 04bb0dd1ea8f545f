"""From tokens to outputs: `OutputProcessor`, one per continuation. No JAX here."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

from sparseserve_jax.request import FinishReason, RequestMetrics, RequestOutput, SamplingParams, TokenLogprob
from sparseserve_jax.text.stop import StopChecker


class Detokenizer(Protocol):
    """Token ids to text, piece by piece (`text.detokenizer.IncrementalDetokenizer`)."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token: whole characters only."""
        ...

    def finish(self) -> str:
        """What was held back; an incomplete character as U+FFFD, once."""
        ...


class OutputProcessor:
    """Grows one continuation, decides when it ends, and gives snapshots of it.

    A continuation ends with reason "stop" at an EOS id (unless `ignore_eos`), a stop token or the completion of a stop
    string, else with "length" at `max_tokens`. The token that ends it is counted and kept in `token_ids`; an EOS or
    stop token leaves no text. Like in vLLM, neither ids nor text of the first `min_tokens` tokens can stop it, nor of
    forced ones, and `stop_reason` is the stop token or string, None for EOS.

    Text is the same however often it is taken: all deltas in a row are the text.

    Args:
        sampling: with `max_tokens` resolved (`validate_request`).
        eos_token_ids: the union of all the model's EOS ids.
        arrival_s: when the request came, on the clock of the `now_s` arguments.
        prompt_logprobs: a list that grows while the prompt is worked on, complete when it has an entry for each token;
            continuations of one prefilled prompt share it. It holds at least the candidates that were asked for.
    """

    def __init__(
        self,
        *,
        request_id: str,
        index: int,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        eos_token_ids: Collection[int],
        arrival_s: float,
        detokenizer: Detokenizer,
        prompt_logprobs: list[list[TokenLogprob] | None] | None = None,
    ) -> None:
        assert sampling.max_tokens is not None, "validate_request resolves max_tokens"
        self.request_id, self.index, self.sampling = request_id, index, sampling
        self.metrics = RequestMetrics()
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._prompt, self._prompt_token_ids = prompt, list(prompt_token_ids)
        self._max_tokens = sampling.max_tokens
        self._num_unstoppable = max(sampling.min_tokens, len(sampling.forced_token_ids))
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._detokenizer = detokenizer
        self._stop = StopChecker(sampling.stop, sampling.include_stop_str_in_output)
        self._logprobs: list[list[TokenLogprob]] | None = None if sampling.logprobs is None else []
        self.prompt_logprobs: list[list[TokenLogprob] | None] = [None] if prompt_logprobs is None else prompt_logprobs
        self._prompt_logprobs: list[list[TokenLogprob] | None] | None = None
        self.arrival_s = arrival_s
        self._started = False
        self._last_token_s: float | None = None
        self._text = ""
        self._new_pieces: list[str] = []

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.finish_reason is not None

    def note_started(self, now_s: float) -> None:
        """The first prefill work begins: the end of queueing. Later calls change nothing."""
        if not self._started:
            self._started = True
            self.metrics.queue_s = now_s - self.arrival_s

    def note_restarted(self, now_s: float) -> None:
        """It begins now, with a prompt that is through the layers already: times count from here."""
        self.arrival_s = now_s
        self._started = True

    def append(self, token_id: int, logprobs: list[TokenLogprob] | None, now_s: float) -> FinishReason | None:
        """Takes the next token; returns why the continuation ends with it, None if it goes on.

        Args:
            logprobs: the token's candidates, itself first; kept if the request asked for them.
        """
        assert self.finish_reason is None, f"{self.request_id} got a token after its end ({self.finish_reason})"
        self._note_time(now_s)
        self.token_ids.append(token_id)
        if self._logprobs is not None:
            self._logprobs.append(logprobs or [])
        may_stop = len(self.token_ids) > self._num_unstoppable
        if may_stop and token_id in self._eos_token_ids:
            return self._finish("stop")
        if may_stop and token_id in self._stop_token_ids:
            return self._finish("stop", token_id)
        if self._add_text(self._detokenizer.add(token_id), may_stop):
            return self._finish("stop", self._stop.matched)
        if len(self.token_ids) >= self._max_tokens:
            return self._finish("length")
        return None

    def complete(self) -> None:
        """Ends it as an EOS would: its grammar is at its end. Does nothing if it has ended."""
        if self.finish_reason is None:
            self._finish("stop")

    def abort(self) -> None:
        """Ends it on behalf of the caller; what it has stays. Does nothing if it has ended."""
        if self.finish_reason is None:
            self._finish("abort")

    def fail(self, error: str) -> None:
        """Ends it with an error; what it has stays. Does nothing if it has ended."""
        if self.finish_reason is None:
            self.error = error
            self._finish("error")

    def take_output(self, final: bool = False) -> RequestOutput:
        """A snapshot that later tokens do not change; its `delta` is the text since the last one.

        Args:
            final: the caller expects the end; asserted.
        """
        assert not final or self.is_finished, f"{self.request_id} has not ended"
        delta = "".join(self._new_pieces)
        self._new_pieces.clear()
        self._text += delta
        metrics = dataclasses.replace(
            self.metrics,
            tbt_s=list(self.metrics.tbt_s),
            selected_block_ids=list(self.metrics.selected_block_ids),
        )
        return RequestOutput(
            request_id=self.request_id,
            index=self.index,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            text=self._text,
            delta=delta,
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            prompt_logprobs=self._take_prompt_logprobs(),
            metrics=metrics,
            error=self.error,
        )

    def _take_prompt_logprobs(self) -> list[list[TokenLogprob] | None] | None:
        """As many candidates as were asked for, cut out once, when the prompt's list is complete."""
        most, is_complete = self.sampling.prompt_logprobs, len(self.prompt_logprobs) == len(self._prompt_token_ids)
        if self._prompt_logprobs is None and most is not None and is_complete:
            self._prompt_logprobs = [
                entry and [c for place, c in enumerate(entry) if place == 0 or c.rank <= most]
                for entry in self.prompt_logprobs
            ]
        return self._prompt_logprobs

    def _note_time(self, now_s: float) -> None:
        if self._last_token_s is None:
            self.metrics.ttft_s = now_s - self.arrival_s
        else:
            self.metrics.tbt_s.append(now_s - self._last_token_s)
        self._last_token_s = now_s

    def _add_text(self, text: str, may_stop: bool) -> bool:
        """Whether the text completed a stop string."""
        if not may_stop:
            self._new_pieces.append(text)
            return False
        shown, matched = self._stop.feed(text)
        self._new_pieces.append(shown)
        return matched is not None

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> FinishReason:
        """Releases held text: first half a character (which may itself complete a stop string), then near-matches."""
        if self._stop.matched is None:
            completes = self._add_text(self._detokenizer.finish(), len(self.token_ids) > self._num_unstoppable)
            if completes and reason in ("stop", "length"):
                reason, stop_reason = "stop", self._stop.matched
            self._new_pieces.append(self._stop.flush())
        self.finish_reason, self.stop_reason = reason, stop_reason
        return reason

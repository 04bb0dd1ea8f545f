"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparseserve_jax.request import Prompt, SamplingParams
from sparseserve_jax.server.generation import Generation
from sparseserve_jax.server.logprobs import CompletionLogprobs, prompt_logprobs
from sparseserve_jax.server.protocol import CompletionRequest, as_prompts
from sparseserve_jax.server.sampling_fields import completion_sampling
from sparseserve_jax.server.tickets import Piece


class Completion(Generation):
    """Text that continues prompts."""

    id_prefix = "cmpl"
    prompt_param = "prompt"
    _fields: CompletionRequest

    def make_sampling(self) -> SamplingParams:
        """Sampling parameters of the request."""
        self._echo_due: set[tuple[int, int]] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice
        self._shows_tokens = self._fields.max_tokens != 0
        return completion_sampling(self._fields)

    async def prompts(self) -> Sequence[Prompt]:
        """The prompts of the field `prompt`."""
        return as_prompts(self._fields.prompt)

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the whole response."""
        logprobs = self._take_logprobs(piece, with_prompt=bool(self._fields.echo))
        return self._choice(piece, self._echoed(piece) + self._text(piece), logprobs)

    def first_choices(self, place: int, index: int) -> list[dict[str, Any]]:
        """Nothing: an echoed prompt comes with the first text."""
        if self._fields.echo:
            self._echo_due.add((place, index))
        return []

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """What a chunk says of a choice."""
        key = (piece.place, piece.index)
        echoes = key in self._echo_due
        self._echo_due.discard(key)
        text = (self._echoed(piece) if echoes else "") + self._text(piece)
        logprobs = self._take_logprobs(piece, with_prompt=echoes)
        if not text and logprobs is None and piece.finish_reason is None:
            return None
        return self._choice(piece, text, logprobs)

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """A response or a chunk (they look alike)."""
        return {"id": self.id, "object": "text_completion", "created": self.created_s, "model": self.model,
                "choices": choices}  # fmt: skip

    def usage(self) -> dict[str, int]:
        """Tokens so far; one that only made the prompt's log-probabilities does not count."""
        usage = super().usage()
        if not self._shows_tokens:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, piece: Piece, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self.choice_index(piece), "text": text, "logprobs": logprobs,
            "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason,
        }  # fmt: skip
        if self._fields.prompt_logprobs is not None and piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, piece.prompt_logprobs)
        return choice

    def _text(self, piece: Piece) -> str:
        return piece.text if self._shows_tokens else ""

    def _echoed(self, piece: Piece) -> str:
        if not self._fields.echo:
            return ""
        prompt = self.prompt(piece)
        if prompt.text is not None:
            return prompt.text
        return self.tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)

    def _take_logprobs(self, piece: Piece, *, with_prompt: bool) -> dict[str, Any] | None:
        if self._fields.logprobs is None:
            return None
        builder = self._logprobs.setdefault(
            self.choice_index(piece), CompletionLogprobs(self.tokenizer, self._fields.logprobs)
        )
        token_ids, found = list[int](), list[Any]()
        if with_prompt and piece.prompt_logprobs is not None:
            token_ids += self.prompt(piece).token_ids.tolist()
            found += piece.prompt_logprobs
        if self._shows_tokens:
            token_ids += piece.token_ids
            found += piece.logprobs or []
        return builder.add(token_ids, found) if token_ids else None

"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparseserve_jax.request import Prompt, SamplingParams
from sparseserve_jax.server.errors import APIError
from sparseserve_jax.server.generation import Generation
from sparseserve_jax.server.logprobs import chat_logprobs, prompt_logprobs
from sparseserve_jax.server.protocol import ChatCompletionRequest
from sparseserve_jax.server.sampling_fields import chat_sampling
from sparseserve_jax.server.tickets import Piece


class Chat(Generation):
    """The next message of a chat."""

    id_prefix = "chatcmpl"
    prompt_param = "messages"
    _fields: ChatCompletionRequest

    def make_sampling(self) -> SamplingParams:
        """Sampling parameters of the request."""
        return chat_sampling(self._fields)

    async def prompts(self) -> Sequence[Prompt]:
        """The messages, as one prompt."""
        fields = self._fields
        if not fields.messages:
            raise APIError(400, "messages is empty; at least one message is needed", param="messages")
        if fields.chat_template is None:
            return [fields.messages]
        template = fields.chat_template
        return [await self.service.in_thread(lambda: self.service.render_chat(fields.messages, template))]

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the whole response."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._choice(piece, "message", message)

    def first_choices(self, place: int, index: int) -> list[dict[str, Any]]:
        """The role."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": place * self.sampling.n + index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def delta(self, piece: Piece) -> dict[str, Any] | None:
        """What a chunk says of a choice."""
        if not piece.text and not self._fields.logprobs and piece.finish_reason is None:
            return None
        return self._choice(piece, "delta", {"content": piece.text} if piece.text else {})

    def envelope(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        """A response or a chunk."""
        return {"id": self.id, "object": "chat.completion.chunk" if is_chunk else "chat.completion",
                "created": self.created_s, "model": self.model, "choices": choices}  # fmt: skip

    def _choice(self, piece: Piece, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._fields.logprobs:
            logprobs = chat_logprobs(self.tokenizer, piece.logprobs or [], self._fields.top_logprobs or 0)
        choice = {
            "index": self.choice_index(piece), name: message, "logprobs": logprobs,
            "finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason,
        }  # fmt: skip
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokenizer, piece.prompt_logprobs)
        return choice

"""Log-probabilities in the two shapes of OpenAI's API, and vLLM's shape for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from sparseserve_jax.request import TokenLogprob
from sparseserve_jax.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON does not have (OpenAI's own value)."""


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; part of a character as `bytes:\\xe2\\x80`, as in OpenAI's completions."""
    if tokenizer.decoder_kind == "other":
        return tokenizer.decode([token_id], skip_special_tokens=False)
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes_of(tokenizer: Tokenizer, token_id: int) -> bytes:
    if tokenizer.decoder_kind == "other":
        return tokenizer.decode([token_id], skip_special_tokens=False).encode()
    return tokenizer.token_bytes(token_id)


class CompletionLogprobs:
    """Builds the `logprobs` of one choice of `/v1/completions`, chunk by chunk.

    Args:
        num_top: how many of the best go into `top_logprobs`.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer, self._num_top = tokenizer, num_top
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, token_ids: Sequence[int], candidates: Sequence[Sequence[TokenLogprob] | None]) -> dict[str, Any]:
        """The object for some more tokens; candidates with the token first, None for a prompt's first token."""
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, found in zip(token_ids, candidates, strict=True):
            result["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(_bytes_of(self._tokenizer, token_id)))
            result["tokens"].append(token_text(self._tokenizer, token_id))
            if not found:
                result["token_logprobs"].append(None)
                result["top_logprobs"].append(None)
                continue
            result["token_logprobs"].append(_number(found[0].logprob))
            best: dict[str, float] = {}
            for item in sorted(found, key=lambda item: item.rank):
                if item is found[0] or item.rank <= self._num_top:
                    best.setdefault(token_text(self._tokenizer, item.token_id), _number(item.logprob))
            result["top_logprobs"].append(best)
        return result


def chat_logprobs(tokenizer: Tokenizer, candidates: Sequence[Sequence[TokenLogprob]], num_top: int) -> dict[str, Any]:
    """The `logprobs` of a choice of `/v1/chat/completions`."""
    content = []
    for found in candidates:
        if found:
            top = [item for item in sorted(found, key=lambda item: item.rank) if item.rank <= num_top]
            content.append(
                _chat_entry(tokenizer, found[0]) | {"top_logprobs": [_chat_entry(tokenizer, item) for item in top]}
            )
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, item: TokenLogprob) -> dict[str, Any]:
    data = _bytes_of(tokenizer, item.token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _number(item.logprob), "bytes": list(data)}


def prompt_logprobs(
    tokenizer: Tokenizer, candidates: Sequence[Sequence[TokenLogprob] | None]
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id; None for the first token."""
    return [
        None
        if found is None
        else {
            str(item.token_id): {
                "logprob": _number(item.logprob), "rank": item.rank,
                "decoded_token": token_text(tokenizer, item.token_id),
            }
            for item in found
        }
        for found in candidates
    ]  # fmt: skip


def _number(value: float) -> float:
    return max(value, MIN_LOGPROB)

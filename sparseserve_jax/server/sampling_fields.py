"""From fields of a request to `SamplingParams`."""

from __future__ import annotations

import re
from typing import Any

from sparseserve_jax.request import SamplingParams, short_repr
from sparseserve_jax.server.errors import APIError
from sparseserve_jax.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields

DEFAULT_COMPLETION_TOKENS = 16

_SAME_NAME = (
    "n", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop_token_ids", "include_stop_str_in_output", "min_tokens", "ignore_eos", "skip_special_tokens",
)  # fmt: skip


def completion_sampling(fields: CompletionRequest) -> SamplingParams:
    """For `/v1/completions`.

    Raises:
        APIError: 400, naming the field.
    """
    num_best = fields.best_of
    if num_best is not None and num_best != (fields.n or 1):
        raise APIError(400, f"best_of={short_repr(num_best)} is not supported unless it equals n", param="best_of")
    max_tokens = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if max_tokens == 0 and fields.echo:
        max_tokens = 1  # for the prompt's log-probabilities; the token is not shown
    given: dict[str, Any] = {"max_tokens": max_tokens}
    if fields.logprobs is not None:
        given["logprobs"] = fields.logprobs
        if fields.echo:
            given["prompt_logprobs"] = fields.logprobs
    return _sampling(fields, given)


def chat_sampling(fields: ChatCompletionRequest) -> SamplingParams:
    """For `/v1/chat/completions`.

    Raises:
        APIError: 400, naming the field.
    """
    limits = {n for n in (fields.max_tokens, fields.max_completion_tokens) if n is not None}
    if len(limits) > 1:
        raise APIError(
            400, "max_tokens and max_completion_tokens differ; give one of them", param="max_completion_tokens"
        )
    given: dict[str, Any] = {"max_tokens": limits.pop() if limits else None}
    if fields.logprobs:
        given["logprobs"] = fields.top_logprobs or 0
    elif fields.top_logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return _sampling(fields, given)


def _sampling(fields: GenerationFields, given: dict[str, Any]) -> SamplingParams:
    for name in _SAME_NAME:
        value = getattr(fields, name)
        if value is not None:
            given[name] = value
    if fields.top_k is not None:
        given["top_k"] = 0 if fields.top_k == -1 else fields.top_k
    if fields.stop is not None:
        given["stop"] = fields.stop if isinstance(fields.stop, str) else tuple(fields.stop)
    if fields.logit_bias is not None:
        given["logit_bias"] = {_token_id(key): value for key, value in fields.logit_bias.items()}
    if fields.prompt_logprobs is not None:
        asked = fields.prompt_logprobs  # below 0 it is refused as it is
        given["prompt_logprobs"] = asked if asked < 0 else max(asked, given.get("prompt_logprobs", 0))
    if fields.stream_options is not None and not fields.stream:
        raise APIError(400, "stream_options needs stream: true", param="stream_options")
    try:
        return SamplingParams(**given)
    except ValueError as error:
        raise APIError(400, str(error), param=_named_field(str(error), fields)) from error


def _token_id(key: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", key, re.ASCII):
        raise APIError(400, f"logit_bias has the key {short_repr(key)}; keys must be token ids", param="logit_bias")
    return int(key)


def _named_field(message: str, fields: GenerationFields) -> str | None:
    """Messages begin with the field at fault."""
    name = re.match(r"\w*", message)
    return name[0] if name and name[0] in type(fields).model_fields else None

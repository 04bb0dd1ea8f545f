"""Checks of a request that need the model: `validate_request`. No JAX here."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence

from sparseserve_jax.config import SELECTION_METHODS, DecodeSetting, EngineConfig
from sparseserve_jax.request import SamplingParams, short_repr


class RequestError(ValueError):
    """A request that can never be served as it is.

    Attributes:
        param: the field to change.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def validate_request(
    prompt_token_ids: Sequence[int], params: SamplingParams, *, vocab_size: int, max_model_len: int
) -> SamplingParams:
    """`params` with `max_tokens` resolved (None = what the model's length leaves).

    Args:
        prompt_token_ids: integers (numpy's too).
        max_model_len: the limit in force on prompt + generated tokens.

    Raises:
        RequestError: empty prompt, a token id outside the vocabulary, or more tokens than fit.
    """
    _check_prompt(prompt_token_ids, vocab_size)
    num_prompt_tokens = len(prompt_token_ids)
    for name in ("stop_token_ids", "logit_bias", "forced_token_ids"):
        for token in getattr(params, name):
            if token >= vocab_size:
                raise RequestError(
                    f"{name} names token id {short_repr(token)}; ids must be below vocab_size={vocab_size}", name
                )
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens; with at least one generated token that is over the limit "
            f"max_model_len={max_model_len}; shorten the prompt to at most {max_model_len - 1} tokens",
            "prompt",
        )
    if params.max_tokens is None:
        num_forced = len(params.forced_token_ids)
        for name, least, given in (
            ("min_tokens", params.min_tokens, f"min_tokens={short_repr(params.min_tokens)}"),
            ("forced_token_ids", num_forced, f"forced_token_ids of {num_forced} tokens"),
        ):
            if least > room:
                raise RequestError(
                    f"{given} with a prompt of {num_prompt_tokens} tokens is over the limit "
                    f"max_model_len={max_model_len}; lower {name} to at most {room} or shorten the prompt",
                    name,
                )
        return dataclasses.replace(params, max_tokens=room)
    if params.max_tokens > room:
        raise RequestError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens={short_repr(params.max_tokens)}; "
            f"together they are over the limit max_model_len={max_model_len}; lower max_tokens to at most {room} or "
            "shorten the prompt",
            "max_tokens",
        )
    return params


def choose_decode_setting(config: EngineConfig, sparse_budget_tokens: object, selection: object) -> DecodeSetting:
    """The setting that a request's `sparse_budget_tokens` and `selection` name.

    Raises:
        RequestError: the engine does not have it; lists those that it has.
    """
    wanted_budget = config.sparse_budget_tokens if sparse_budget_tokens == "default" else sparse_budget_tokens
    wanted_selection = config.selection if selection is None else selection
    for setting in config.decode_settings:
        budget = setting.sparse_budget_tokens
        if budget is None and wanted_budget is None:
            if wanted_selection in SELECTION_METHODS:
                return setting
        elif type(wanted_budget) is int and (wanted_budget, wanted_selection) == (budget, setting.selection):
            return setting
    allowed = ", ".join(map(str, config.decode_settings))
    shown = "dense" if sparse_budget_tokens is None else short_repr(sparse_budget_tokens)
    raise RequestError(
        f"sparse_budget_tokens={shown} with selection={short_repr(selection)} is not among "
        f"the decode settings of this engine; it has {allowed} (the first is the default). Choose one of them, or "
        "start the engine with extra_decode_settings",
        "selection" if sparse_budget_tokens == "default" else "sparse_budget_tokens",
    )


def _check_prompt(prompt_token_ids: Sequence[int], vocab_size: int) -> None:
    if len(prompt_token_ids) == 0:
        raise RequestError("the prompt has no tokens; give at least one", "prompt")
    if set(map(type, prompt_token_ids)) == {int} and 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < vocab_size:
        return
    for place, token in enumerate(prompt_token_ids):
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise RequestError(f"prompt token {place} is a {type(token).__name__}; ids must be integers", "prompt")
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"prompt token {place} is {short_repr(token)}; ids must lie in [0, {vocab_size})", "prompt"
            )

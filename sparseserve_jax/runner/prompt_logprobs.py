"""Log-probabilities of prompt tokens, from the activations of prefill calls, some rows at a time.

Logits of a whole call would be its largest array by far: 1.6 GB for 8,192 tokens and 49,152 entries. They exist for at
most `MOST_ROWS` rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from host_offload.memory import to_device
from sparseserve_jax.models.kv_state import StepSpec
from sparseserve_jax.models.prefill import prefill_logits
from sparseserve_jax.request import TokenLogprob
from sparseserve_jax.runner.prefill_calls import OpenCall
from sparseserve_jax.sampling.sampler import Logprobs, gather_logprobs, token_logprobs

FEW_ROWS, MOST_ROWS = 128, 512


@dataclasses.dataclass(frozen=True)
class PendingPromptLogprobs:
    """What the device may still be computing of one call.

    Attributes:
        owners: (request id, tokens, candidates for each), in the order of the rows.
        slices: (tokens of the slice, its padded figures).
        targets: the tokens, of all owners.
    """

    owners: list[tuple[str, int, int]]
    slices: list[tuple[int, Logprobs]]
    targets: np.ndarray

    def fetch(self) -> dict[str, list[list[TokenLogprob]]]:
        """Waits; by request id an entry for each token."""
        parts = [
            jax.tree.map(lambda array, count=count: np.asarray(array)[:count], figures)
            for count, figures in self.slices
        ]
        whole: Logprobs = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        entries, row = {}, 0
        for request_id, count, num_logprobs in self.owners:
            entries[request_id] = [
                token_logprobs(whole, row + place, int(self.targets[row + place]), num_logprobs)
                for place in range(count)
            ]
            row += count
        return entries


def score_prompts(params: Any, call: OpenCall, *, spec: StepSpec) -> PendingPromptLogprobs | None:
    """Dispatches the log-probabilities that prompts of a call want, when its last layer has been dispatched."""
    scored = [item for item in call.scored_rows() if len(item[1])]
    if not scored:
        return None
    rows = np.concatenate([rows for _, rows, _ in scored])
    targets = np.concatenate([targets for _, _, targets in scored]).astype(np.int32)
    owners = [(s.request_id, len(rows), s.num_prompt_logprobs or 0) for s, rows, _ in scored]
    slices, start = [], 0
    for size in slice_sizes(len(rows), call.num_tokens):
        padded = [np.zeros(size, np.int32), np.zeros(size, np.int32)]
        count = min(size, len(rows) - start)
        for array, values in zip(padded, (rows, targets), strict=True):
            array[:count] = values[start : start + count]
        slices.append((count, score_rows(params, call.hidden, *to_device(padded), spec=spec)))
        start += count
    return PendingPromptLogprobs(owners, slices, targets)


def slice_sizes(num_rows: int, num_tokens: int) -> Iterator[int]:
    """Rows of each slice of `num_rows` rows of a call of `num_tokens` tokens: a large one where it is half full."""
    while num_rows > 0:
        size = MOST_ROWS if num_tokens >= MOST_ROWS and 2 * num_rows > MOST_ROWS else FEW_ROWS
        yield size
        num_rows -= size


def possible_slices(num_tokens: int) -> tuple[int, ...]:
    """All sizes that slices of a call of `num_tokens` tokens can have."""
    return (FEW_ROWS, MOST_ROWS) if num_tokens >= MOST_ROWS else (FEW_ROWS,)


@functools.partial(jax.jit, static_argnames=("spec",))
def score_rows(
    params: Any,
    hidden: Float[Array, "num_tokens hidden"],
    rows: Int[Array, " num_rows"],
    targets: Int[Array, " num_rows"],
    *,
    spec: StepSpec,
) -> Logprobs:
    """Log-probabilities of `targets` and of the best tokens, each after the token of its row."""
    return gather_logprobs(prefill_logits(params, hidden, rows, spec=spec), targets)

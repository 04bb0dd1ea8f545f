"""Repetition, presence and frequency penalties over token counts that live on the device.

The counts are dense (`bool` and `int32`, 5 bytes a row and vocabulary entry: 2 MB for 8 rows of 49,152), so a step
neither sends token lists nor compiles for their lengths. Only rows of requests with penalties need to be kept current:
neutral penalties leave logits unchanged to the last bit whatever the row holds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

PADDING_ROW = 2**30
"""The row of padding: reads of it are inert under neutral penalties, writes to it are dropped."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PenaltyState:
    """Which tokens each row's prompt holds and how often each was generated. Donated and rebound at each update."""

    prompt_mask: Bool[Array, "num_rows vocab"]
    output_counts: Int[Array, "num_rows vocab"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PenaltyParams:
    """Penalties of a batch; `rows` index `PenaltyState` (`PADDING_ROW` for padding)."""

    rows: Int[Array | np.ndarray, " num_seqs"]
    repetition: Float[Array | np.ndarray, " num_seqs"]
    presence: Float[Array | np.ndarray, " num_seqs"]
    frequency: Float[Array | np.ndarray, " num_seqs"]


def allocate_penalty_state(num_rows: int, vocab_size: int) -> PenaltyState:
    """Empty counts of `num_rows` rows."""
    return PenaltyState(
        prompt_mask=jnp.zeros((num_rows, vocab_size), jnp.bool_),
        output_counts=jnp.zeros((num_rows, vocab_size), jnp.int32),
    )


def count_tokens(
    prompt_token_ids: Sequence[int] | np.ndarray, output_token_ids: Sequence[int] | np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """A row's contents for `set_row`, counted on the host: of one shape whatever the prompt's length."""
    prompt_mask = np.zeros(vocab_size, np.bool_)
    prompt_mask[np.asarray(prompt_token_ids, np.int64)] = True
    output_counts = np.bincount(np.asarray(output_token_ids, np.int64), minlength=vocab_size).astype(np.int32)
    return prompt_mask, output_counts


@functools.partial(jax.jit, donate_argnums=0)
def set_row(
    state: PenaltyState,
    row: Int[Array | np.ndarray | np.generic, ""],
    prompt_mask: Bool[Array | np.ndarray, " vocab"],
    output_counts: Int[Array | np.ndarray, " vocab"],
) -> PenaltyState:
    """Replaces a row: when a request enters it."""
    return PenaltyState(
        prompt_mask=state.prompt_mask.at[row].set(prompt_mask),
        output_counts=state.output_counts.at[row].set(output_counts),
    )


@functools.partial(jax.jit, donate_argnums=0)
def add_tokens(
    state: PenaltyState,
    rows: Int[Array | np.ndarray, " num_seqs"],
    token_ids: Int[Array | np.ndarray, " num_seqs"],
) -> PenaltyState:
    """Counts one generated token a row. Rows and tokens outside the state (padding, -1) are dropped."""
    vocab_size = state.output_counts.shape[1]
    kept_ids = jnp.where(token_ids < 0, vocab_size, token_ids)  # a negative index would wrap in spite of mode="drop"
    return PenaltyState(
        prompt_mask=state.prompt_mask, output_counts=state.output_counts.at[rows, kept_ids].add(1, mode="drop")
    )


@jax.jit
def apply_penalties(
    logits: Float[Array, "num_seqs vocab"], state: PenaltyState, params: PenaltyParams
) -> Float[Array, "num_seqs vocab"]:
    """Repetition (arXiv 1909.05858: prompt and output), then presence and frequency (OpenAI's: output), in float32."""
    logits = logits.astype(jnp.float32)
    counts = state.output_counts.at[params.rows].get(mode="clip")
    in_output = counts > 0
    seen = state.prompt_mask.at[params.rows].get(mode="clip") | in_output
    repetition = params.repetition[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - params.frequency[:, None] * counts
    return logits - params.presence[:, None] * in_output

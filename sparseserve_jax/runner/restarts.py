"""Jitted moves that let a request begin at the end of another's prompt: its logits, and a block that was rounded."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparseserve_jax.models.kv_state import KVState
from sparseserve_jax.runner.buckets import NUM_PREFILL_PROMPTS


@jax.jit
def take_row(logits: Float[Array, "num_prompts vocab"], row: Int[Array, ""]) -> Float[Array, " vocab"]:
    """One prompt's logits, a copy of their own."""
    return logits[row]


@jax.jit
def as_batch(logits: Float[Array, " vocab"]) -> Float[Array, "num_prompts vocab"]:
    """Logits as the first row of a batch of the shape that completed prompts are sampled in; the others are padding."""
    return jnp.broadcast_to(logits, (NUM_PREFILL_PROMPTS, *logits.shape))


@jax.jit
def take_block(state: KVState, block_id: Int[Array, ""]) -> tuple[tuple[Array, Array], ...]:
    """By layer a copy of a quantised block and its scales."""
    return tuple((pool[block_id], scale[block_id]) for pool, scale in zip(state.pools, state.scales, strict=True))


@functools.partial(jax.jit, donate_argnums=0)
def put_block(state: KVState, block: tuple[tuple[Array, Array], ...], block_id: Int[Array, ""]) -> KVState:
    """Puts a block of `take_block` back where it was."""
    pools = tuple(pool.at[block_id].set(values) for pool, (values, _) in zip(state.pools, block, strict=True))
    scales = tuple(scale.at[block_id].set(values) for scale, (_, values) in zip(state.scales, block, strict=True))
    return dataclasses.replace(state, pools=pools, scales=scales)

"""Jitted moves between the tiers, over all layers at once where that is possible."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from host_offload.flash_d2h import save_blocks, save_pieces
from host_offload.flash_h2d import load_blocks
from sparseserve_jax.models.kv_state import NEVER

save_layer = jax.jit(save_blocks, donate_argnums=0)
"""FlashD2H of one prefill call's blocks of one layer."""

load_layer = jax.jit(load_blocks, donate_argnums=0)
"""Whole blocks of one layer from the host: earlier tokens for chunked prefill, dense layers of a resumed request."""


@functools.partial(jax.jit, donate_argnums=0)
def save_newest(
    host_pools: tuple[Array, ...],
    dense_pools: tuple[Array, ...],
    sparse_pools: tuple[Array, ...],
    resident: tuple[Array, ...],
    rows: Int[Array, "num_saved"],
    logical: Int[Array, "num_saved"],
    block_ids: Int[Array, "num_saved"],
    dense_ids: Int[Array, "num_saved"],
    slot_tables: Int[Array, "num_saved max_slots"],
) -> tuple[Array, ...]:
    """Writes block `logical` of each row through to the host, in every layer (decode: the block that just filled).

    Padding: null row, block ids 0.
    """
    out = []
    num_heads = host_pools[0].shape[1]
    for host, pool in zip(host_pools, dense_pools, strict=False):
        out.append(save_pieces(host, pool, jnp.broadcast_to(dense_ids[:, None], (len(rows), num_heads)), block_ids))
    for host, pool, table in zip(host_pools[len(dense_pools) :], sparse_pools, resident, strict=True):
        index = jnp.argmax(table[rows] == logical[:, None, None], axis=-1)  # [num_saved, heads]: resident by contract
        slots = jnp.take_along_axis(slot_tables, index, axis=1)
        out.append(save_pieces(host, pool, slots, block_ids))
    return tuple(out)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def forget(
    resident: tuple[Array, ...],
    last_selected: tuple[Array, ...],
    row: Int[Array, ""],
    first_slot: Int[Array, ""],
    forget_history: Array,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Empties a row's slots from `first_slot` on and, if asked, its selection history (a new request)."""

    def empty(table: Array) -> Array:
        return table.at[row].set(jnp.where(jnp.arange(table.shape[2]) >= first_slot, -1, table[row]))

    def clear(table: Array) -> Array:
        return table.at[row].set(jnp.where(forget_history, NEVER, table[row]))

    return tuple(map(empty, resident)), tuple(map(clear, last_selected))

"""Jitted moves between the tiers, over all layers at once where that is possible."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.api import Kernels
from sparseserve_jax.models.kv_state import NEVER


@functools.partial(jax.jit, static_argnames="kernels", donate_argnames="host_pool")
def save_layer(host_pool: Array, blocks: Array, block_ids: Int[Array, "num_saved"], *, kernels: Kernels) -> Array:
    """FlashD2H of one prefill call's blocks of one layer."""
    return kernels.save_blocks(host_pool, blocks, block_ids)


@functools.partial(jax.jit, static_argnames="kernels", donate_argnames="device_pool")
def load_layer(
    device_pool: Array,
    host_pool: Array,
    slot_ids: Int[Array, "num_loaded"],
    block_ids: Int[Array, "num_loaded"],
    *,
    kernels: Kernels,
) -> Array:
    """Whole blocks of one layer from the host: earlier tokens (chunked prefill), dense layers (a resumed request)."""
    return kernels.load_blocks(device_pool, host_pool, slot_ids, block_ids)


@functools.partial(jax.jit, static_argnames=("dense_layers", "kernels"), donate_argnames="host_pools")
def save_newest(
    host_pools: tuple[Array, ...],
    pools: tuple[Array, ...],
    resident: tuple[Array, ...],
    rows: Int[Array, "num_saved"],
    logical: Int[Array, "num_saved"],
    block_ids: Int[Array, "num_saved"],
    dense_ids: Int[Array, "num_saved"],
    slot_tables: Int[Array, "num_saved max_slots"],
    *,
    dense_layers: tuple[int, ...],
    kernels: Kernels,
) -> tuple[Array, ...]:
    """Writes block `logical` of each row through to the host, in every layer (decode: the block that just filled).

    Padding: null row, block ids 0.

    Args:
        resident: of the sparse layers, in order.
    """
    out, tables = [], iter(resident)
    num_heads = host_pools[0].shape[1]
    for layer, (host, pool) in enumerate(zip(host_pools, pools, strict=True)):
        if layer in dense_layers:
            slots = jnp.broadcast_to(dense_ids[:, None], (len(rows), num_heads))
        else:  # [num_saved, heads]; resident by contract
            index = jnp.argmax(next(tables)[rows] == logical[:, None, None], axis=-1)
            slots = jnp.take_along_axis(slot_tables, index, axis=1)
        out.append(kernels.save_pieces(host, pool, slots, block_ids))
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

"""FlashH2D (paper section 3.2): fetch all pieces a layer misses in one go, from pinned host memory into device slots.

A piece is one block of one KV head, contiguous in both tiers, so pools are seen flat as
`[num_blocks * num_kv_heads, piece]`. Only misses move; what hits costs nothing. Here in XLA: the misses are packed to
the front and copied CHUNK at a time in a loop that runs as long as there are any, inside the decode step's program.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num

CHUNK = 32
"""Pieces of one copy."""


def flash_h2d(
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    block_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    missing: Bool[Array, "num_seqs num_kv_heads num_selected"],
) -> Num[Array, "num_slots num_kv_heads 2 block_size head_dim"]:
    """Copies host piece (block_ids, head) to device piece (slot_ids, head) wherever `missing`; in place if donated.

    Args:
        slot_ids / block_ids: where to and where from; only entries with `missing` are looked at.
    """
    num_kv_heads = device_pool.shape[1]
    piece = device_pool.shape[2] * device_pool.shape[3] * device_pool.shape[4]
    heads = jnp.arange(num_kv_heads)[None, :, None]
    order = jnp.argsort(~missing.reshape(-1), stable=True)
    count = missing.sum()
    live = jnp.arange(order.shape[0]) < count
    source = jnp.where(live, (block_ids * num_kv_heads + heads).reshape(-1)[order], 0)
    target = jnp.where(live, (slot_ids * num_kv_heads + heads).reshape(-1)[order], 0)  # piece 0 is a null piece
    source = jnp.pad(source, (0, -source.shape[0] % CHUNK))
    target = jnp.pad(target, (0, -target.shape[0] % CHUNK))
    flat_host = host_pool.reshape(-1, piece)

    def copy(index: Array, flat: Array) -> Array:
        ids = jax.lax.dynamic_slice_in_dim(source, index * CHUNK, CHUNK)
        slots = jax.lax.dynamic_slice_in_dim(target, index * CHUNK, CHUNK)
        ids = jax.device_put(ids, jax.memory.Space.Host)
        pieces = jax.device_put(flat_host.at[ids].get(mode="promise_in_bounds"), jax.memory.Space.Device)
        return flat.at[slots].set(pieces, mode="promise_in_bounds")

    flat = jax.lax.fori_loop(0, (count + CHUNK - 1) // CHUNK, copy, device_pool.reshape(-1, piece))
    return flat.reshape(device_pool.shape)


def load_blocks(
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_loaded"],
    block_ids: Int[Array, "num_loaded"],
) -> Num[Array, "num_slots num_kv_heads 2 block_size head_dim"]:
    """Copies whole blocks (all heads): a resumed request's dense layers, or a chunked prefill's earlier tokens.

    Padding copies the null block onto itself.
    """
    ids = jax.device_put(block_ids, jax.memory.Space.Host)
    blocks = jax.device_put(host_pool.at[ids].get(mode="promise_in_bounds"), jax.memory.Space.Device)
    return device_pool.at[slot_ids].set(blocks, mode="promise_in_bounds")

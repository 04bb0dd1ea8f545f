"""FlashD2H (paper section 3.2): new KV leaves the device as one contiguous copy and is scattered on the host side.

The gather to a contiguous run happens on the device, then one transfer, then a scatter into the donated host pool in
host memory. Write-through: a block is saved when it fills (decode), when its layer is done (prefill) or when its
request is parked, so that forgetting is all that eviction needs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def save_blocks(
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    blocks: Num[Array, "num_saved num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_saved"],
) -> Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"]:
    """Writes whole blocks to the host pool, in place when donated; padding goes to the null block."""
    ids = jax.device_put(block_ids, jax.memory.Space.Host)
    saved = host_pool.at[ids].set(jax.device_put(blocks, jax.memory.Space.Host), mode="promise_in_bounds")
    return jax.device_put(saved, jax.memory.Space.Host)  # no copy: says where the result is, or jit assumes the device


def save_pieces(
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_saved num_kv_heads"],
    block_ids: Int[Array, "num_saved"],
) -> Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"]:
    """Saves blocks whose heads lie in different slots (decode: residency is per head)."""
    num_kv_heads = device_pool.shape[1]
    flat = device_pool.reshape(device_pool.shape[0] * num_kv_heads, *device_pool.shape[2:])
    pieces = jnp.take(flat, slot_ids * num_kv_heads + jnp.arange(num_kv_heads)[None, :], axis=0, mode="clip")
    return save_blocks(host_pool, pieces, block_ids)

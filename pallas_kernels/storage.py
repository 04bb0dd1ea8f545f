"""How KV pools are stored.

XLA's CPU backend copies a whole bfloat16 pool for every in-place update, but not a uint16 one, so on the CPU bfloat16
pools are carried as their bits. Only gathered blocks are ever bitcast, never a pool.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """dtype of pool arrays for values of `dtype` on `platform` ("cpu", "gpu")."""
    if platform == "cpu" and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def to_storage(values: Array, pool_dtype: jnp.dtype) -> Array:
    """`values` (float) in the pool's dtype, bit for bit."""
    if pool_dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(pool_dtype)


def from_storage(blocks: Array) -> Array:
    """Gathered blocks back as floats."""
    if blocks.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(blocks, jnp.bfloat16)
    return blocks

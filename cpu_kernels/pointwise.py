"""Norm, rotary embedding and keys and values as blocks, as native calls; see `pallas_kernels.pointwise`.

XLA's fusions of the last two run many times slower than memory on a CPU: they interleave halves of rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from cpu_kernels.loader import target


def rms_norm(
    x: Float[Array, "num_tokens features"], scale: Float[Array, "features"], *, eps: float, dtype: jnp.dtype
) -> Float[Array, "num_tokens features"]:
    """Root-mean-square layer norm in float32, rounded to `dtype` (bfloat16 or float32)."""
    out = jax.ShapeDtypeStruct(x.shape, dtype)
    arrays = (x.astype(jnp.float32), scale.astype(jnp.float32))
    return jax.ffi.ffi_call(target("rms_norm"), out)(*arrays, eps=np.float32(eps))


def split_and_rotate(
    qkv: Float[Array, "num_tokens width"],
    cos: Float[Array, "num_tokens head_dim"],
    sin: Float[Array, "num_tokens head_dim"],
    *,
    num_q_heads: int,
    num_kv_heads: int,
    dtype: jnp.dtype,
) -> tuple[
    Float[Array, "num_tokens num_q_heads head_dim"],
    Float[Array, "num_tokens num_kv_heads head_dim"],
    Float[Array, "num_tokens num_kv_heads head_dim"],
]:
    """Queries, keys and values of a fused projection; queries and keys rotated; all rounded to `dtype`."""
    num_tokens, head_dim = cos.shape
    q = jax.ShapeDtypeStruct((num_tokens, num_q_heads, head_dim), dtype)
    kv = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), dtype)
    q, k, v = jax.ffi.ffi_call(target("split_and_rotate"), (q, kv, kv))(qkv, cos, sin)
    return q, k, v


def make_blocks(
    k: Num[Array, "num_tokens num_kv_heads head_dim"],
    v: Num[Array, "num_tokens num_kv_heads head_dim"],
    block_tokens: Int[Array, "num_runs"],
    *,
    block_size: int,
) -> Num[Array, "num_runs num_kv_heads 2 block_size head_dim"]:
    """Keys and values as KV blocks; zeros from `block_tokens` on."""
    shape = (k.shape[0] // block_size, k.shape[1], 2, block_size, k.shape[2])
    blocks = jax.ShapeDtypeStruct(shape, k.dtype)
    return jax.ffi.ffi_call(target("make_blocks"), blocks)(k, v, block_tokens.astype(jnp.int32))

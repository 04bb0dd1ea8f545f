"""What a layer does beside products and attention, in plain XLA: norm, rotary embedding, keys and values as blocks.

On a GPU the compiler fuses these well; on a CPU they were a fifth of a long prompt's time, so that there are native
versions (cpu_kernels/pointwise.py).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num


def rms_norm(
    x: Float[Array, "num_tokens features"], scale: Float[Array, "features"], *, eps: float, dtype: jnp.dtype
) -> Float[Array, "num_tokens features"]:
    """Root-mean-square layer norm (arXiv 1910.07467), computed in float32, rounded to `dtype`."""
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale).astype(dtype)


def apply_rope(
    x: Float[Array, "num_tokens num_heads head_dim"],
    cos: Float[Array, "num_tokens head_dim"],
    sin: Float[Array, "num_tokens head_dim"],
) -> Float[Array, "num_tokens num_heads head_dim"]:
    """Rotates queries or keys: `x * cos + rotate_half(x) * sin` in float32, returned in the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    out = x.astype(jnp.float32) * cos[:, None, :] + turned * sin[:, None, :]
    return out.astype(x.dtype)


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
    """Queries, keys and values of a fused projection; queries and keys rotated in float32; all rounded to `dtype`.

    Args:
        qkv: `[num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]`, float32.
        cos / sin: of each token's position; the second half of `head_dim` repeats the first.
    """
    heads = qkv.reshape(qkv.shape[0], num_q_heads + 2 * num_kv_heads, -1)
    q, k, v = jnp.split(heads, (num_q_heads, num_q_heads + num_kv_heads), axis=1)
    return apply_rope(q, cos, sin).astype(dtype), apply_rope(k, cos, sin).astype(dtype), v.astype(dtype)


def make_blocks(
    k: Num[Array, "num_tokens num_kv_heads head_dim"],
    v: Num[Array, "num_tokens num_kv_heads head_dim"],
    block_tokens: Int[Array, "num_runs"],
    *,
    block_size: int,
) -> Num[Array, "num_runs num_kv_heads 2 block_size head_dim"]:
    """Keys and values as KV blocks, one for every `block_size` tokens; zeros from `block_tokens` on."""
    real = (jnp.arange(block_size)[None, :] < block_tokens[:, None]).reshape(-1, 1, 1, 1)
    kv = jnp.where(real, jnp.stack([k, v], axis=1), 0)  # [num_tokens, 2, heads, head_dim]
    return kv.reshape(-1, block_size, 2, *k.shape[1:]).transpose(0, 3, 2, 1, 4)

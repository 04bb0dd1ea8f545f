"""Appending keys and values to the pool and renewing block digests, in one kernel each.

A pool is `[num_blocks, num_kv_heads, 2, block_size, head_dim]` (K at 0, V at 1), digests are
`[num_digests, num_kv_heads, 2, head_dim]`: the box (centre, radius) of a block's post-RoPE keys by which blocks are
scored (ArkVale's cuboid-mean, Quest's minimum and maximum, or the plain mean; `reference.block_digests` has the maths).
One program a (sequence or new block, KV head). A digest is computed in float32 from keys that are in registers: a
decode step reads the keys of the newest block and nothing else, a prefill reads each new block once.

Both arrays are updated in place; padding goes to block 0 and digest 0, which several programs may write at once and
nobody reads. Keys at or past `num_valid` are never read into a digest. There is no kernel for int8 pools, so there are
no scales either.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.reference import NEG_INF
from pallas_kernels.storage import from_storage, to_storage
from pallas_kernels.support import check_digest_method, check_supported
from pallas_kernels.triton import IN_PLACE, kernel_call, load, read, store

K, V = np.int32(0), np.int32(1)
"""Typed, because loads and stores in interpret mode do not take Python integers as indices."""
KEYS_PER_THREAD = 32
"""Elements of the key tile that one thread holds, in float32: few enough that a block of 64 x 256 does not spill (107
of 255 registers), and many enough that a reduction over the block stays mostly within threads and warps."""


def append_tokens(
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    digests: Num[Array, "num_digests num_kv_heads 2 head_dim"] | None,
    k: Float[Array, "num_seqs num_kv_heads head_dim"],
    v: Float[Array, "num_seqs num_kv_heads head_dim"],
    block_ids: Int[Array, "num_seqs num_kv_heads"],
    num_valid: Int[Array, "num_seqs"],
    digest_ids: Int[Array, "num_seqs"],
    kv_scales: None = None,
    *,
    method: str,
    interpret: bool,
) -> tuple[Array, Array | None, None]:
    """Writes one token a sequence (decode) as the last of its newest block, which may lie elsewhere for each head.

    Args:
        digests: (centre, radius) by global block id; None for a dense layer.
        num_valid: tokens of the newest block, the new one included; 0 = padding (block 0, digest 0).
        digest_ids: the row of `digests` of each newest block.

    Raises:
        NotImplementedError: no kernel for the pool's shape or dtype, or no such digest.
    """
    _check("append_tokens", pool, digests, method)
    num_seqs, num_kv_heads, head_dim = k.shape
    row = pl.BlockSpec((None,), lambda seq, head: (seq,))
    by_head = pl.BlockSpec((None, None), lambda seq, head: (seq, head))
    token = pl.BlockSpec((None, None, head_dim), lambda seq, head: (seq, head, 0))
    return _call(
        functools.partial(_append_token, method=method), pool, digests,
        (k, token), (v, token), (block_ids, by_head), (num_valid, row), (digest_ids, row),
        name="append_tokens", grid=(num_seqs, num_kv_heads), interpret=interpret,
    )  # fmt: skip


def append_blocks(
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    digests: Num[Array, "num_digests num_kv_heads 2 head_dim"] | None,
    blocks: Num[Array, "num_new num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_new"],
    num_valid: Int[Array, "num_new"],
    digest_ids: Int[Array, "num_new"],
    kv_scales: None = None,
    *,
    method: str,
    interpret: bool,
) -> tuple[Array, Array | None, None]:
    """Writes whole blocks (prefill) and their digests.

    Args:
        digests: (centre, radius) by global block id; None for a dense layer.
        blocks: in the pool's dtype.
        num_valid: tokens of each block that exist; 0 = padding (block 0, digest 0), whose digest is zero.
        digest_ids: the row of `digests` of each block (in a staging pool it is not `block_ids`).

    Raises:
        NotImplementedError: no kernel for the pool's shape or dtype, or no such digest.
    """
    _check("append_blocks", pool, digests, method)
    assert blocks.dtype == pool.dtype, f"blocks are {blocks.dtype}, the pool is {pool.dtype}: see storage.to_storage"
    row = pl.BlockSpec((None,), lambda new, head: (new,))
    return _call(
        functools.partial(_append_block, method=method), pool, digests,
        (blocks, IN_PLACE), (block_ids, row), (num_valid, row), (digest_ids, row),
        name="append_blocks", grid=blocks.shape[:2], interpret=interpret,
    )  # fmt: skip


def _check(operation: str, pool: Array, digests: Array | None, method: str) -> None:
    check_supported(operation, head_dim=pool.shape[4], block_size=pool.shape[3], dtype=pool.dtype)
    if digests is not None:
        check_digest_method(method)


def _call(
    kernel: Any, pool: Array, digests: Array | None, *inputs: tuple[Array, pl.BlockSpec],
    name: str, grid: tuple[int, ...], interpret: bool,
) -> tuple[Array, Array | None, None]:  # fmt: skip
    arrays, specs = zip(*inputs, strict=True)
    in_place = [pool] if digests is None else [pool, digests]
    *_, block_size, head_dim = pool.shape
    out = kernel_call(
        kernel, *arrays, *in_place,
        name=name, grid=grid, in_specs=[*specs, *[IN_PLACE] * len(in_place)],
        out_specs=[IN_PLACE] * len(in_place), out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in in_place],
        num_warps=max(1, block_size * head_dim // (32 * KEYS_PER_THREAD)),
        aliases={len(arrays) + index: index for index in range(len(in_place))}, interpret=interpret,
    )  # fmt: skip
    return out[0], None if digests is None else out[1], None


def _append_token(
    k_ref: Any,  # [head_dim], as v_ref
    v_ref: Any,
    block_ref: Any,  # [], as num_valid_ref and digest_id_ref
    num_valid_ref: Any,
    digest_id_ref: Any,
    *pool_and_digests: Any,
    method: str,
) -> None:
    pool_ref, digests_ref = _updated(pool_and_digests)
    head, block, num_valid = pl.program_id(1), read(block_ref), read(num_valid_ref)
    offset = jnp.maximum(num_valid - 1, 0)
    k, v = to_storage(read(k_ref), pool_ref.dtype), to_storage(read(v_ref), pool_ref.dtype)
    if digests_ref is not None:
        rows = _rows(pool_ref)
        # The older keys only: no other program and no store of this one touches them, so no order is needed.
        keys = load(pool_ref.at[block, head, K], mask=rows < offset, other=0)
        keys = jnp.where(rows == offset, from_storage(k)[None, :].astype(jnp.float32), _float32(keys))
        _store_digest(digests_ref, read(digest_id_ref), keys, num_valid, method)
    store(pool_ref.at[block, head, K, offset], k)
    store(pool_ref.at[block, head, V, offset], v)


def _append_block(
    blocks_ref: Any,  # [num_new, num_kv_heads, 2, block_size, head_dim]
    block_ref: Any,  # [], as num_valid_ref and digest_id_ref
    num_valid_ref: Any,
    digest_id_ref: Any,
    *pool_and_digests: Any,
    method: str,
) -> None:
    pool_ref, digests_ref = _updated(pool_and_digests)
    new, head, block = pl.program_id(0), pl.program_id(1), read(block_ref)
    k, v = load(blocks_ref.at[new, head, K]), load(blocks_ref.at[new, head, V])
    store(pool_ref.at[block, head, K], k)
    store(pool_ref.at[block, head, V], v)
    if digests_ref is not None:
        _store_digest(digests_ref, read(digest_id_ref), _float32(k), read(num_valid_ref), method)


def _updated(pool_and_digests: tuple[Any, ...]) -> tuple[Any, Any]:
    """The outputs of (pool, digests, pool, digests) or (pool, pool)."""
    outputs = pool_and_digests[len(pool_and_digests) // 2 :]
    return outputs if len(outputs) == 2 else (outputs[0], None)


def _store_digest(digests_ref: Any, digest_id: Array, keys: Array, num_valid: Array, method: str) -> None:
    """`keys` are `[block_size, head_dim]` float32, of which the first `num_valid` rows count."""
    valid = jax.lax.broadcasted_iota(jnp.int32, keys.shape, 0) < num_valid
    count = jnp.maximum(num_valid, 1).astype(jnp.float32)
    if method == "mean":
        centre = jnp.sum(jnp.where(valid, keys, 0.0), axis=0) / count
        radius = jnp.zeros_like(centre)
    else:
        mx = jnp.max(jnp.where(valid, keys, NEG_INF), axis=0)
        mn = jnp.min(jnp.where(valid, keys, -NEG_INF), axis=0)
        centre = (mx + mn) / 2
        if method == "quest":
            radius = (mx - mn) / 2
        else:
            radius = jnp.sum(jnp.where(valid, jnp.abs(keys - centre[None, :]), 0.0), axis=0) / count
    head = pl.program_id(1)
    for half, value in enumerate((centre, radius)):
        value = jnp.where(num_valid > 0, value, 0.0)
        store(digests_ref.at[digest_id, head, np.int32(half)], to_storage(value, digests_ref.dtype))


def _rows(pool_ref: Any) -> Array:
    """Row of every element of a key tile."""
    return jax.lax.broadcasted_iota(jnp.int32, pool_ref.shape[3:], 0)


def _float32(keys: Array) -> Array:
    return from_storage(keys).astype(jnp.float32)

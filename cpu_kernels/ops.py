"""The operations as native calls. Signatures and meaning are those of `pallas_kernels.reference`.

Pools are updated in place: an output takes the memory of its input, which XLA copies first if it is not donated.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Num

from cpu_kernels.loader import target
from host_offload.memory import as_host_array
from pallas_kernels.support import DIGEST_METHODS, check_digest_method


def append_blocks(
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    digests: Num[Array, "num_digests num_kv_heads 2 head_dim"] | None,
    blocks: Num[Array, "num_new num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_new"],
    num_valid: Int[Array, "num_new"],
    digest_ids: Int[Array, "num_new"],
    kv_scales: Float[Array, "num_blocks num_kv_heads 2"] | None = None,
    *,
    method: str,
) -> tuple[Array, Array | None, Array | None]:
    """Writes whole blocks (prefill) and their digests; see `reference.append_blocks`."""
    assert kv_scales is not None or blocks.dtype == pool.dtype, (
        f"blocks are {blocks.dtype}, the pool is {pool.dtype}: see storage.to_storage"
    )
    arrays = (blocks, block_ids, num_valid, digest_ids)
    return _append("append_blocks", pool, digests, kv_scales, *arrays, method=method)


def append_tokens(
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    digests: Num[Array, "num_digests num_kv_heads 2 head_dim"] | None,
    k: Float[Array, "num_seqs num_kv_heads head_dim"],
    v: Float[Array, "num_seqs num_kv_heads head_dim"],
    block_ids: Int[Array, "num_seqs num_kv_heads"],
    num_valid: Int[Array, "num_seqs"],
    digest_ids: Int[Array, "num_seqs"],
    kv_scales: Float[Array, "num_blocks num_kv_heads 2"] | None = None,
    *,
    method: str,
) -> tuple[Array, Array | None, Array | None]:
    """Writes one token a sequence (decode) and renews its block's digest; see `reference.append_tokens`."""
    arrays = (k, v, block_ids, num_valid, digest_ids)
    return _append("append_tokens", pool, digests, kv_scales, *arrays, method=method)


def _append(
    name: str, pool: Array, digests: Array | None, kv_scales: Array | None, *arrays: Array, method: str
) -> tuple[Array, Array | None, Array | None]:
    check_digest_method(method)
    _, num_kv_heads, _, _, head_dim = pool.shape
    rows = jnp.zeros((0, num_kv_heads, 2, head_dim), jnp.float32) if digests is None else digests
    scales = jnp.zeros((0, num_kv_heads, 2), jnp.float32) if kv_scales is None else kv_scales
    updated = (pool, rows, scales)
    new_pool, new_digests, new_scales = jax.ffi.ffi_call(
        target(name), tuple(map(_like, updated)), input_output_aliases={0: 0, 1: 1, 2: 2}
    )(*updated, *map(_ints, arrays), method=np.int32(DIGEST_METHODS.index(method)))  # fmt: skip
    return new_pool, None if digests is None else new_digests, None if kv_scales is None else new_scales


def score_blocks(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    digests: Num[Array, "num_blocks num_kv_heads 2 head_dim"],
    block_table: Int[Array, "num_seqs max_blocks"],
    num_blocks: Int[Array, "num_seqs"],
    *,
    scale: float,
    per_query_head: bool,
    num_sink_blocks: int,
    num_newest_blocks: int,
    allow_amx: bool = True,
) -> Float[Array, "num_seqs num_select_heads max_blocks"]:
    """Ranks of every block of every sequence; see `reference.score_blocks`.

    Args:
        allow_amx: use AMX where the CPU has it and the shapes suit it.
    """
    num_seqs, num_q_heads, _ = q.shape
    shape = (num_seqs, num_q_heads if per_query_head else digests.shape[1], block_table.shape[1])
    return jax.ffi.ffi_call(target("score_blocks"), jax.ShapeDtypeStruct(shape, jnp.float32))(
        q, digests, _ints(block_table), _ints(num_blocks),
        scale=np.float32(scale), per_query_head=per_query_head,
        num_sink_blocks=np.int32(num_sink_blocks), num_newest_blocks=np.int32(num_newest_blocks),
        allow_amx=allow_amx,
    )  # fmt: skip


def select_blocks(
    ranks: Float[Array, "num_seqs num_select_heads max_blocks"], *, num_selected: int
) -> Int[Array, "num_seqs num_select_heads num_selected"]:
    """The ids of the best ranked blocks, ascending, -1 after the last; see `reference.select_blocks`."""
    shape = (*ranks.shape[:2], num_selected)
    return jax.ffi.ffi_call(target("select_blocks"), jax.ShapeDtypeStruct(shape, jnp.int32))(ranks)


def union_over_group(
    selected: Int[Array, "num_seqs num_q_heads num_selected"],
    *,
    num_kv_heads: int,
    max_blocks: int,
    num_union: int,
) -> tuple[Int[Array, "num_seqs num_kv_heads num_union"], Bool[Array, "num_seqs num_kv_heads group num_union"]]:
    """Per-query-head selections as one list a KV head, and who chose what; see `reference.union_over_group`."""
    num_seqs, num_q_heads, _ = selected.shape
    shape = (num_seqs, num_kv_heads, num_union)
    mask_shape = (num_seqs, num_kv_heads, num_q_heads // num_kv_heads, num_union)
    results = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(mask_shape, jnp.bool_))
    ids, mask = jax.ffi.ffi_call(target("union_over_group"), results)(_ints(selected), max_blocks=np.int32(max_blocks))
    return ids, mask


def match_slots(
    selected: Int[Array, "num_seqs num_kv_heads num_selected"],
    resident: Int[Array, "num_seqs num_kv_heads num_slots"],
    last_selected: Int[Array, "num_seqs num_kv_heads max_blocks"],
    num_slots: Int[Array, "num_seqs"],
) -> tuple[
    Int[Array, "num_seqs num_kv_heads num_selected"],
    Bool[Array, "num_seqs num_kv_heads num_selected"],
    Int[Array, "num_seqs num_kv_heads num_slots"],
]:
    """Each selected block's slot, whether it missed, and the residency after loading; see `reference.match_slots`.

    The slot of an unused entry is 0.
    """
    results = (
        jax.ShapeDtypeStruct(selected.shape, jnp.int32),
        jax.ShapeDtypeStruct(selected.shape, jnp.bool_),
        jax.ShapeDtypeStruct(resident.shape, jnp.int32),
    )
    arrays = (selected, resident, last_selected, num_slots)
    slots, missed, after = jax.ffi.ffi_call(target("match_slots"), results)(*map(_ints, arrays))
    return slots, missed, after


def decode_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    num_valid: Int[Array, "num_seqs num_kv_heads num_selected"],
    query_mask: Bool[Array, "num_seqs num_kv_heads group num_selected"] | None,
    *,
    scale: float,
    kv_scales: Float[Array, "num_blocks num_kv_heads 2"] | None = None,
    allow_amx: bool = True,
) -> Float[Array, "num_seqs num_q_heads head_dim"]:
    """One query token a sequence over the given blocks; see `reference.decode_attention`.

    Args:
        allow_amx: use AMX where the CPU has it and the shapes suit it; weights are then rounded to bfloat16.
    """
    mask = jnp.zeros((0,), bool) if query_mask is None else query_mask
    scales = jnp.zeros((0,), jnp.float32) if kv_scales is None else kv_scales.astype(jnp.float32)
    return jax.ffi.ffi_call(target("decode_attention"), jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        q, pool, _ints(block_ids), _ints(num_valid), mask, scales, scale=np.float32(scale), allow_amx=allow_amx
    )


def flash_h2d(
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    block_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    missing: Bool[Array, "num_seqs num_kv_heads num_selected"],
) -> Num[Array, "num_slots num_kv_heads 2 block_size head_dim"]:
    """Copies host piece (block_ids, head) to device piece (slot_ids, head) wherever `missing`; in place if donated.

    Args:
        host_pool: in pinned host memory, which native code reads where it lies.
        slot_ids / block_ids: only entries with `missing` are looked at.
    """
    return jax.ffi.ffi_call(target("flash_h2d"), _like(device_pool), input_output_aliases={0: 0})(
        device_pool, host_pool, _ints(slot_ids), _ints(block_ids), missing
    )


def load_blocks(
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_loaded"],
    block_ids: Int[Array, "num_loaded"],
) -> Num[Array, "num_slots num_kv_heads 2 block_size head_dim"]:
    """Copies whole blocks (all heads) to the device pool; see `host_offload.flash_h2d.load_blocks`."""
    return jax.ffi.ffi_call(target("copy_blocks"), _like(device_pool), input_output_aliases={0: 0})(
        device_pool, host_pool, _ints(slot_ids), _ints(block_ids)
    )


def save_blocks(
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    blocks: Num[Array, "num_saved num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_saved"],
) -> Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"]:
    """Writes whole blocks to the host pool, in place when donated; padding goes to the null block."""
    saved = jax.ffi.ffi_call(target("copy_blocks"), _like(host_pool), input_output_aliases={0: 0})(
        host_pool, blocks, _ints(block_ids), jnp.zeros((0,), jnp.int32)
    )
    return as_host_array(saved)


def save_pieces(
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_saved num_kv_heads"],
    block_ids: Int[Array, "num_saved"],
) -> Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"]:
    """Saves blocks whose heads lie in different slots (decode: residency is per head)."""
    saved = jax.ffi.ffi_call(target("save_pieces"), _like(host_pool), input_output_aliases={0: 0})(
        host_pool, device_pool, _ints(slot_ids), _ints(block_ids)
    )
    return as_host_array(saved)


@functools.partial(jax.jit, static_argnums=(0, 1))
def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> Num[Array, "..."]:
    """A zeroed array, in huge pages where Linux has them (scattered reads of blocks are then about a fifth faster)."""
    return jax.ffi.ffi_call(target("zeros"), jax.ShapeDtypeStruct(shape, dtype))()


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _ints(array: Array) -> Array:
    """Index arrays as int32, which the library takes; other arrays as they are."""
    return array.astype(jnp.int32) if jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.itemsize == 8 else array

"""FlashH2D (SparseServe, section 3.2) as one kernel: missing pieces from pinned host memory into device slots.

Pools of both tiers are `[num_blocks, num_kv_heads, 2, block_size, head_dim]`; a piece `[block, head]` is contiguous
(16 KiB at 32 x 128 in bfloat16). One program a (sequence, head, selected block): it exits at once when its block is
there, else it reads the piece over PCIe where it lies (no copy engine, no staging, no packing of the misses) and writes
it to its slot of the donated device pool. Exactly the missing pieces cross the link. XLA has no equal: the gather of
`host_offload.flash_h2d` does not compile for CUDA (jax 0.10.2), and gathers that do go through a buffer on the host.

Interpret mode cannot read pinned memory, so there the host pool is first copied to the device: for tests.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int, Num

from host_offload.memory import to_device_space
from pallas_kernels.pieces import copy_piece, warps_for_piece
from pallas_kernels.support import check_supported
from pallas_kernels.triton import IN_PLACE, kernel_call, read


def flash_h2d(
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    block_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    missing: Bool[Array, "num_seqs num_kv_heads num_selected"],
    *,
    interpret: bool,
) -> Num[Array, "num_slots num_kv_heads 2 block_size head_dim"]:
    """Copies host piece (block_ids, head) to device piece (slot_ids, head) wherever `missing`; in place if donated.

    Args:
        slot_ids / block_ids: where to and where from; only entries with `missing` are followed.

    Raises:
        NotImplementedError: no kernel for the pool's shape or dtype.
    """
    entry = pl.BlockSpec((None, None, None), lambda seq, head, index: (seq, head, index))
    return _call(
        _copy_missing, device_pool, host_pool, slot_ids, block_ids, missing,
        name="flash_h2d", grid=missing.shape, entry=entry, interpret=interpret,
    )  # fmt: skip


def load_blocks(
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_loaded"],
    block_ids: Int[Array, "num_loaded"],
    *,
    interpret: bool,
) -> Num[Array, "num_slots num_kv_heads 2 block_size head_dim"]:
    """Copies whole blocks (all heads): a resumed request's dense layers, or a chunked prefill's earlier tokens.

    Padding copies the null block onto itself.

    Raises:
        NotImplementedError: no kernel for the pool's shape or dtype.
    """
    entry = pl.BlockSpec((None,), lambda index, head: (index,))
    return _call(
        _copy_all, device_pool, host_pool, slot_ids, block_ids,
        name="load_blocks", grid=(slot_ids.shape[0], device_pool.shape[1]), entry=entry, interpret=interpret,
    )  # fmt: skip


def _copy_missing(
    slot_ref: Any,  # [], as block_ref and missing_ref: this program's entry
    block_ref: Any,
    missing_ref: Any,
    host_ref: Any,  # [num_blocks, num_kv_heads, 2, block_size, head_dim], pinned host memory
    _: Any,
    device_ref: Any,  # [num_slots, num_kv_heads, 2, block_size, head_dim]
) -> None:
    # All before the branch, so that the three loads wait for memory together.
    slot, block, missing, head = read(slot_ref), read(block_ref), read(missing_ref), pl.program_id(1)

    @pl.when(missing)
    def _() -> None:
        copy_piece(host_ref, block, device_ref, slot, head)


def _copy_all(slot_ref: Any, block_ref: Any, host_ref: Any, _: Any, device_ref: Any) -> None:
    copy_piece(host_ref, read(block_ref), device_ref, read(slot_ref), pl.program_id(1))


def _call(
    kernel: Any, device_pool: Array, host_pool: Array, *entries: Array,
    name: str, grid: tuple[int, ...], entry: pl.BlockSpec, interpret: bool,
) -> Array:  # fmt: skip
    *_, block_size, head_dim = device_pool.shape
    check_supported(name, head_dim=head_dim, block_size=block_size, dtype=device_pool.dtype)
    assert host_pool.shape[1:] == device_pool.shape[1:] and host_pool.dtype == device_pool.dtype, "tiers differ"
    if interpret:
        host_pool = to_device_space(host_pool)
    return kernel_call(
        kernel, *entries, host_pool, device_pool,
        name=name, grid=grid, in_specs=[entry] * len(entries) + [IN_PLACE, IN_PLACE],
        out_specs=IN_PLACE, out_shape=jax.ShapeDtypeStruct(device_pool.shape, device_pool.dtype),
        num_warps=warps_for_piece(device_pool.shape[2:], device_pool.dtype),
        aliases={len(entries) + 1: 0}, interpret=interpret,
    )  # fmt: skip

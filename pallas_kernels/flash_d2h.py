"""FlashD2H (SparseServe, section 3.2) as one kernel: new pieces from the device straight into the pinned host pool.

Pools of both tiers are `[num_blocks, num_kv_heads, 2, block_size, head_dim]`; one program a (block, head) writes its
piece where it belongs, with 16-byte stores over PCIe, in place in the donated host pool.

The paper copies new KV in one contiguous run to a staging buffer, from which CPU threads scatter it, so that saving
takes no SMs from prefill. Inside an XLA program there is no such second half: a scatter on the host
(`compute_on("device_host")`) copies the whole host pool, and XLA's scatter on the device writes a bfloat16 pool with a
compare-and-swap loop over PCIe for every element (jax 0.10.2). The price of writing directly is that the compute stream
waits for the link: the paper measures prefill at 1.28x with a saving kernel, against 1.00x (its figure 14).

Interpret mode cannot write pinned memory, so there the host pool goes to the device and back: for tests.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int, Num

from host_offload.memory import as_host_array, to_device_space
from pallas_kernels.pieces import copy_piece, warps_for_piece
from pallas_kernels.support import check_supported
from pallas_kernels.triton import IN_PLACE, kernel_call, read


def save_blocks(
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    blocks: Num[Array, "num_saved num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_saved"],
    *,
    interpret: bool,
) -> Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"]:
    """Writes whole blocks to the host pool, in place when donated; padding goes to the null block.

    Raises:
        NotImplementedError: no kernel for the pool's shape or dtype.
    """
    specs = [pl.BlockSpec((None,), lambda index, head: (index,))]
    return _call(_save_block, host_pool, blocks, block_ids, specs=specs, name="save_blocks", interpret=interpret)


def save_pieces(
    host_pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    device_pool: Num[Array, "num_slots num_kv_heads 2 block_size head_dim"],
    slot_ids: Int[Array, "num_saved num_kv_heads"],
    block_ids: Int[Array, "num_saved"],
    *,
    interpret: bool,
) -> Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"]:
    """Saves blocks whose heads lie in different slots (decode: residency is per head); padding as in `save_blocks`.

    Raises:
        NotImplementedError: no kernel for the pool's shape or dtype.
    """
    specs = [
        pl.BlockSpec((None,), lambda index, head: (index,)),
        pl.BlockSpec((None, None), lambda index, head: (index, head)),
    ]
    return _call(
        _save_piece, host_pool, device_pool, block_ids, slot_ids, specs=specs, name="save_pieces", interpret=interpret
    )


def _save_block(
    block_ref: Any,  # []
    source_ref: Any,  # [num_saved, num_kv_heads, 2, block_size, head_dim]
    _: Any,
    host_ref: Any,  # [num_blocks, num_kv_heads, 2, block_size, head_dim], pinned host memory
) -> None:
    copy_piece(source_ref, pl.program_id(0), host_ref, read(block_ref), pl.program_id(1))


def _save_piece(block_ref: Any, slot_ref: Any, source_ref: Any, _: Any, host_ref: Any) -> None:
    copy_piece(source_ref, read(slot_ref), host_ref, read(block_ref), pl.program_id(1))


def _call(
    kernel: Any, host_pool: Array, source: Array, *entries: Array,
    specs: list[pl.BlockSpec], name: str, interpret: bool,
) -> Array:  # fmt: skip
    *_, block_size, head_dim = host_pool.shape
    check_supported(name, head_dim=head_dim, block_size=block_size, dtype=host_pool.dtype)
    assert source.shape[1:] == host_pool.shape[1:] and source.dtype == host_pool.dtype, "tiers differ"
    if interpret:
        host_pool = to_device_space(host_pool)
    saved = kernel_call(
        kernel, *entries, source, host_pool,
        name=name, grid=(entries[0].shape[0], host_pool.shape[1]), in_specs=[*specs, IN_PLACE, IN_PLACE],
        out_specs=IN_PLACE, out_shape=jax.ShapeDtypeStruct(host_pool.shape, host_pool.dtype),
        num_warps=warps_for_piece(host_pool.shape[2:], host_pool.dtype),
        aliases={len(entries) + 1: 0}, interpret=interpret,
    )  # fmt: skip
    return as_host_array(saved)

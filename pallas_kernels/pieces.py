"""Moving one piece (a block of one KV head: `[2, block_size, head_dim]`, contiguous) with one program.

FlashH2D and FlashD2H are this body over different grids.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.triton import load, store

BYTES_PER_THREAD = 128
"""Eight 16-byte loads of every thread, all issued before the first store. What matters over PCIe is bytes in flight
(32 GB/s x 1-2 us of latency = 32-64 KiB), so a few pieces of 16 KiB fill the link whatever the number of warps; fewer
threads would run out of registers (a float32 piece of 64 x 256 is 128 KiB), more would make the many programs that only
look and exit dearer."""
MAX_WARPS = 16


def copy_piece(source_ref: Any, source: Array, target_ref: Any, target: Array, head: Array) -> None:
    """In a kernel: block `source` of `source_ref` to block `target` of `target_ref`, for one head."""
    store(target_ref.at[target, head], load(source_ref.at[source, head]))


def warps_for_piece(shape: tuple[int, ...], dtype: jnp.dtype) -> int:
    """Warps of a program that moves a piece of this shape."""
    warps = math.prod(shape) * jnp.dtype(dtype).itemsize // (32 * BYTES_PER_THREAD)
    return min(max(warps, 1), MAX_WARPS)

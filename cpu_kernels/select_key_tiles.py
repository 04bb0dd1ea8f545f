"""Selection of key tiles for sparse prefill as a native call; see `pallas_kernels.select_key_tiles`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from cpu_kernels.loader import target
from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.select_key_tiles import check_threshold


def select_key_tiles(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    block_tables: Int[Array, "num_prompts max_blocks"],
    tile_prompt: Int[Array, "num_tiles"],
    tile_start: Int[Array, "num_tiles"],
    tile_tokens: Int[Array, "num_tiles"],
    *,
    scale: float,
    threshold: float,
    dense_tokens: int = 0,
    kv_scales: Float[Array, "num_blocks num_kv_heads 2"] | None = None,
    allow_amx: bool = True,
) -> Bool[Array, "num_tiles num_q_heads num_key_tiles"]:
    """The `tile_mask` for `prefill_attention`; see `pallas_kernels.select_key_tiles.select_key_tiles`.

    Args:
        pool: float32, or bfloat16 as its bits (uint16); queries are rounded to the same. Or int8 with `kv_scales`,
            which becomes bfloat16 as it is read.
        allow_amx: use AMX where the CPU has it.

    Raises:
        NotImplementedError: pools of another type, or a head_dim that is no multiple of 4.
        ValueError: a threshold outside (0, 1].
    """
    check_threshold(threshold)
    head_dim = pool.shape[-1]
    if pool.dtype not in (jnp.uint16, jnp.float32, jnp.int8) or head_dim % 4:
        raise NotImplementedError(
            f"select_key_tiles: no native kernel for pools of {pool.dtype} with head_dim {head_dim}; supported: uint16 "
            "(the bits of bfloat16), float32 and int8, head_dim a multiple of 4. implementation='reference' runs every "
            "shape"
        )
    num_key_tiles = -(-block_tables.shape[1] * pool.shape[3] // PREFILL_TILE)
    shape = jax.ShapeDtypeStruct((tile_start.shape[0], q.shape[1], num_key_tiles), jnp.bool_)
    scales = jnp.zeros((0,), jnp.float32) if kv_scales is None else kv_scales
    indices = (a.astype(jnp.int32) for a in (block_tables, tile_prompt, tile_start, tile_tokens))
    return jax.ffi.ffi_call(target("select_key_tiles"), shape)(
        q.astype(jnp.float32 if pool.dtype == jnp.float32 else jnp.bfloat16), pool, *indices, scales,
        scale=np.float32(scale), threshold=np.float32(threshold), dense_tokens=np.int32(dense_tokens),
        allow_amx=allow_amx,
    )  # fmt: skip

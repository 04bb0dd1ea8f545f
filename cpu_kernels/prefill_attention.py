"""Prefill attention as a native call; signature and meaning of `pallas_kernels.reference.prefill_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from cpu_kernels.loader import target


def prefill_attention(
    q: Float[Array, "num_tokens num_q_heads head_dim"],
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    block_tables: Int[Array, "num_prompts max_blocks"],
    tile_prompt: Int[Array, "num_tiles"],
    tile_start: Int[Array, "num_tiles"],
    tile_tokens: Int[Array, "num_tiles"],
    tile_mask: Bool[Array, "num_tiles num_q_heads num_key_tiles"] | None = None,
    *,
    scale: float,
    merge_tiles: int = 1,
    kv_scales: Float[Array, "num_blocks num_kv_heads 2"] | None = None,
    allow_amx: bool = True,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """Causal flash attention of packed prompts; see `reference.prefill_attention`.

    Args:
        pool: float32, or bfloat16 as its bits (uint16); queries are rounded to the same. Or int8 with `kv_scales`,
            which becomes bfloat16 as it is read.
        merge_tiles: not used: tiles of one prompt that follow each other are merged as the work needs it.
        allow_amx: use AMX where the CPU has it.

    Raises:
        NotImplementedError: pools of another type, or an odd head_dim.
    """
    head_dim = pool.shape[-1]
    if pool.dtype not in (jnp.uint16, jnp.float32, jnp.int8) or head_dim % 2:
        raise NotImplementedError(
            f"prefill_attention: no native kernel for pools of {pool.dtype} with head_dim {head_dim}; supported: "
            "uint16 (the bits of bfloat16), float32 and int8, even head_dim. implementation='reference' runs every "
            "shape"
        )
    if tile_mask is None:
        tile_mask = jnp.zeros((tile_start.shape[0], q.shape[1], 0), bool)  # without key tiles: no mask
    elif tile_mask.shape[2] == 0:
        return jnp.zeros(q.shape, jnp.float32)  # nothing to attend to
    scales = jnp.zeros((0,), jnp.float32) if kv_scales is None else kv_scales
    indices = (a.astype(jnp.int32) for a in (block_tables, tile_prompt, tile_start, tile_tokens))
    return jax.ffi.ffi_call(target("prefill_attention"), jax.ShapeDtypeStruct(q.shape, jnp.float32))(
        q.astype(jnp.float32 if pool.dtype == jnp.float32 else jnp.bfloat16),
        pool,
        *indices,
        tile_mask,
        scales,
        scale=np.float32(scale),
        allow_amx=allow_amx,
    )

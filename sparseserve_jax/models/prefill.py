"""One layer of prefill (paper section 3.3): the unit that layer-segmented prefill schedules.

A call takes a run of prompt tokens through one layer. Their K and V are written as whole blocks and attention reads
them back from there, together with the earlier tokens of the same prompts. Unified: `pool` is the layer's pool.
Tiered: it is the staging buffer, which holds one layer of the prompt; the blocks come back as an output, contiguous,
for FlashD2H.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Num

from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.storage import to_storage
from sparseserve_jax.models.kv_state import StepSpec
from sparseserve_jax.models.llama import embed, run_layer, unembed
from sparseserve_jax.models.rope import rope_cos_sin, rope_frequencies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCall:
    """Where the tokens of one prefill call belong. Padding: block 0, no valid tokens.

    Attributes:
        positions: position of each token in its prompt.
        pool_ids / digest_ids: for every block-sized run of the call, its block in `pool` and its global block.
        block_tokens: real tokens in each run.
        block_tables: for each prompt in the call its blocks in `pool`.
        tile_prompt / tile_start / tile_tokens: see `prefill_attention`.
    """

    positions: Int[Array, "num_tokens"]
    pool_ids: Int[Array, "num_runs"]
    digest_ids: Int[Array, "num_runs"]
    block_tokens: Int[Array, "num_runs"]
    block_tables: Int[Array, "num_prompts max_blocks"]
    tile_prompt: Int[Array, "num_tiles"]
    tile_start: Int[Array, "num_tiles"]
    tile_tokens: Int[Array, "num_tiles"]


@functools.partial(jax.jit, static_argnames=("spec",))
def begin_prefill(
    params: Any, token_ids: Int[Array, "num_tokens"], positions: Int[Array, "num_tokens"], *, spec: StepSpec
) -> tuple[Float[Array, "num_tokens hidden"], tuple[Array, Array]]:
    """Embeddings of a call's tokens, and the cosines and sines `[num_tokens, head_dim]` of their positions."""
    return embed(params, token_ids), rope_cos_sin(positions, *rope_frequencies(spec.model))


@functools.partial(
    jax.jit,
    static_argnames=("spec", "single_prompt", "sparse"),
    donate_argnames=("hidden", "pool", "digests", "scales"),
)
def prefill_layer(
    layer_params: Any,
    hidden: Float[Array, "num_tokens hidden"],
    rope: tuple[Float[Array, "num_tokens head_dim"], Float[Array, "num_tokens head_dim"]],
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    digests: tuple[Num[Array, "num_digests num_kv_heads 2 head_dim"], ...],
    scales: Float32[Array, "num_blocks num_kv_heads 2"] | None,
    call: PrefillCall,
    *,
    spec: StepSpec,
    single_prompt: bool,
    sparse: bool = False,
) -> tuple[Array, Array, tuple[Array, ...], Array | None, Num[Array, "num_runs num_kv_heads 2 block_size head_dim"]]:
    """Runs one layer over the call's tokens.

    Args:
        rope: cosines and sines of `begin_prefill`, the same for every layer.
        digests: the layer's digests by each of `spec.digest_methods`; none for a dense layer.
        scales: those of an int8 pool, or None.
        single_prompt: the call holds one prompt, so attention may use larger tiles.
        sparse: queries attend to the key tiles that `select_key_tiles` keeps, by `spec.prefill_sparsity`.

    Returns:
        hidden, pool, digests and scales (donated, updated), and the call's KV blocks, not quantised.
    """
    config, kernels, block_size = spec.model, spec.kernels, spec.layout.block_size
    num_tokens = hidden.shape[0]
    merge = 1 if not single_prompt else max(m for m in (1, 2, 4) if num_tokens % (m * PREFILL_TILE) == 0)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, tuple[Array, tuple[Array, ...], Array | None, Array]]:
        blocks = kernels.make_blocks(k, v, call.block_tokens, block_size=block_size)
        stored = to_storage(blocks, pool.dtype) if scales is None else blocks
        new_pool, new_scales, new_digests = pool, scales, []
        # Of a second method only the digests are new: the blocks are written once more as they are.
        for method, old in zip(spec.digest_methods, digests or (None,), strict=False):
            new_pool, new, new_scales = kernels.append_blocks(
                new_pool, old, stored, call.pool_ids, call.block_tokens, call.digest_ids, new_scales, method=method
            )
            new_digests.append(new)
        where = (q, new_pool, call.block_tables, call.tile_prompt, call.tile_start, call.tile_tokens)
        tile_mask = None
        if sparse:
            tile_mask = kernels.select_key_tiles(
                *where, scale=spec.scale, threshold=spec.prefill_sparsity, dense_tokens=spec.prefill_dense_tokens,
                kv_scales=new_scales,
            )  # fmt: skip
        out = kernels.prefill_attention(*where, tile_mask, scale=spec.scale, merge_tiles=merge, kv_scales=new_scales)
        return out, (new_pool, tuple(new_digests) if digests else (), new_scales, stored)

    hidden, (pool, digests, scales, blocks) = run_layer(
        config, spec.dtype, layer_params, hidden, *rope, attend, kernels=kernels
    )
    return hidden, pool, digests, scales, blocks


@functools.partial(jax.jit, static_argnames=("spec",))
def prefill_logits(
    params: Any, hidden: Float[Array, "num_tokens hidden"], last: Int[Array, "num_prompts"], *, spec: StepSpec
) -> Float[Array, "num_prompts vocab"]:
    """Logits of the prompts' last tokens, whose rows of the call are `last`."""
    return unembed(spec.model, params, jnp.take(hidden, last, axis=0, mode="clip"), kernels=spec.kernels)

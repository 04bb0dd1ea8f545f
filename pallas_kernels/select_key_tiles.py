"""Which key tiles a prompt needs, in plain XLA: block selection of sparse prefill by sampled queries.

Of every STRIDE consecutive queries the last one stands for all: its attention to the whole prompt is computed as it is.
The mean over the sampled queries of a tile, summed over the keys of a tile, is that key tile's share. For every query
head and tile of queries the largest shares are kept until they reach `threshold` of the whole.

XAttention (arXiv 2503.16428) selects tiles in the same way from sums along antidiagonals of the score matrix. They cost
more and tell less: sums of 8 scores are much flatter than the scores (docs/performance.md, sparse prefill quality).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.reference import NEG_INF, PREFILL_TILE, gather_halves

STRIDE = 16
"""Queries that one stands for; the estimate costs 1 / STRIDE of the scores."""
_SAMPLES = PREFILL_TILE // STRIDE


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
) -> Bool[Array, "num_tiles num_q_heads num_key_tiles"]:
    """The `tile_mask` for `prefill_attention`, whose arguments these are.

    The first key tile (attention sinks) and those that hold the queries' own tokens are always kept.

    Args:
        threshold: share of the estimated attention to keep, in (0, 1]; 1 keeps all that is causal.
        dense_tokens: a tile whose queries see no more tokens than this keeps all that is causal.
        kv_scales: of an int8 pool, whose keys are multiplied as bfloat16.

    Raises:
        ValueError: a threshold outside (0, 1].
    """
    check_threshold(threshold)
    num_key_tiles = -(-block_tables.shape[1] * pool.shape[3] // PREFILL_TILE)
    shares, causal, forced = _tile_shares(
        q, pool, block_tables, tile_prompt, tile_start, tile_tokens, kv_scales,
        scale=scale, num_key_tiles=num_key_tiles,
    )  # fmt: skip
    if threshold == 1:  # shares that vanish in float32 count, too
        return jnp.broadcast_to(causal, shares.shape)
    # What is kept anyway comes first, so that the rest has less to add.
    order = jnp.argsort(jnp.where(forced, jnp.inf, shares), axis=-1, descending=True, stable=True)
    ordered = jnp.take_along_axis(shares, order, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    needed = jnp.put_along_axis(jnp.zeros(shares.shape, bool), order, before < threshold, axis=-1, inplace=False)
    short = (tile_start + tile_tokens <= dense_tokens)[:, None, None]
    return ((needed | short) & causal) | forced


def check_threshold(threshold: float) -> None:
    """Raises ValueError for a share that is not one."""
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold {threshold} must be in (0, 1]")


def _tile_shares(
    q: Array, pool: Array, block_tables: Array, tile_prompt: Array, tile_start: Array, tile_tokens: Array,
    kv_scales: Array | None, *, scale: float, num_key_tiles: int,
) -> tuple[
    Float[Array, "num_tiles num_q_heads num_key_tiles"],
    Bool[Array, "num_tiles 1 num_key_tiles"],
    Bool[Array, "num_tiles 1 num_key_tiles"],
]:  # fmt: skip
    """Shares (of 1, 0 where not causal), which key tiles are causal, and which are kept whatever their share."""
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = pool.shape[1]
    group = num_q_heads // num_kv_heads
    every_head = (block_tables.shape[0], num_kv_heads, block_tables.shape[1])
    keys = gather_halves(pool, jnp.broadcast_to(block_tables[:, None], every_head), 0)
    if kv_scales is not None:
        scales = jnp.take(kv_scales[:, :, 0], block_tables, axis=0, mode="clip").swapaxes(1, 2)
        keys = (keys.astype(jnp.float32) * scales[..., None, None]).astype(jnp.bfloat16)
    keys = keys.reshape(*every_head[:2], -1, head_dim)
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, num_key_tiles * PREFILL_TILE - keys.shape[2]), (0, 0)))
    tile_end = jnp.where(tile_tokens > 0, tile_start + tile_tokens, 0)
    ends = jnp.zeros(every_head[0], tile_end.dtype).at[tile_prompt].max(tile_end)
    keys = jnp.where((jnp.arange(keys.shape[2]) < ends[:, None])[:, None, :, None], keys, 0)
    keys = jax.lax.optimization_barrier(keys)  # made once, not for every tile
    sample = jnp.arange(_SAMPLES)
    token = jnp.clip((sample + 1) * STRIDE, max=tile_tokens[:, None]) - 1  # [num_tiles, samples], of the tile
    exists = sample * STRIDE < tile_tokens[:, None]
    tiles = q.reshape(-1, PREFILL_TILE, num_q_heads, head_dim)
    queries = jnp.take_along_axis(tiles, jnp.maximum(token, 0)[:, :, None, None], axis=1)
    queries = jnp.where(exists[:, :, None, None], queries, 0).astype(keys.dtype)
    queries = queries.reshape(-1, _SAMPLES, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(-1, num_kv_heads, group * _SAMPLES, head_dim)

    def one_tile(args: tuple[Array, ...]) -> Array:
        of_tile, prompt, positions, exists = args
        k = jax.lax.dynamic_index_in_dim(keys, prompt, keepdims=False)
        scores = jax.lax.dot_general(of_tile, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        scores = scores.reshape(num_q_heads, _SAMPLES, -1)
        seen = jnp.arange(scores.shape[2]) <= positions[:, None]
        scores = jnp.where(seen, scores, NEG_INF)
        weights = jnp.exp((scores - scores.max(axis=-1, keepdims=True)) * scale)
        sums = weights.reshape(num_q_heads, _SAMPLES, num_key_tiles, PREFILL_TILE).sum(axis=-1)
        sums = sums / sums.sum(axis=-1, keepdims=True)
        return jnp.where(exists[:, None], sums, 0.0).sum(axis=1) / jnp.maximum(1, exists.sum())

    shares = jax.lax.map(one_tile, (queries, tile_prompt, tile_start[:, None] + token, exists))
    first = jnp.arange(num_key_tiles)[None, :] * PREFILL_TILE
    causal = first < (tile_start + tile_tokens)[:, None]
    some = (tile_tokens > 0)[:, None]
    own = causal & (first + PREFILL_TILE > tile_start[:, None])
    return shares, (causal & some)[:, None], ((own | (first == 0)) & some)[:, None]

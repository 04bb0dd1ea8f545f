"""Which key tiles a prompt needs, in plain XLA: block selection of sparse prefill by XAttention (arXiv 2503.16428).

The attention of a tile of queries to a tile of keys is estimated from sums along antidiagonals of the score matrix,
which cross every vertical and every slanted line of it. With queries and keys in groups of STRIDE consecutive tokens,
the sum over the antidiagonal of one group by another is one product of vectors `STRIDE * head_dim` long, the queries of
a group in reversed order:

    s[g, h] = sum_i q[STRIDE g + STRIDE - 1 - i] . k[STRIDE h + i]

A softmax over key groups makes weights of them; summed over a tile, that is the tile's share. For every query head and
tile of queries the largest shares are kept until they reach `threshold` of the whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.reference import NEG_INF, PREFILL_TILE, gather_halves

STRIDE = 8
"""Tokens of a group; the estimate costs 1 / STRIDE of the scores. The paper takes 8 or 16."""
_GROUPS = PREFILL_TILE // STRIDE


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
        tile_start: multiples of STRIDE.
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
    width = STRIDE * head_dim
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
    keys = jax.lax.optimization_barrier(keys.reshape(*every_head[:2], -1, width))  # made once, not for every tile
    tiles = jnp.where(
        (jnp.arange(PREFILL_TILE) < tile_tokens[:, None])[:, :, None, None],
        q.reshape(-1, PREFILL_TILE, num_q_heads, head_dim),
        0,
    )
    tiles = tiles.astype(keys.dtype).reshape(-1, _GROUPS, STRIDE, num_kv_heads, group, head_dim)[:, :, ::-1]
    tiles = tiles.transpose(0, 3, 4, 1, 2, 5).reshape(-1, num_kv_heads, group * _GROUPS, width)

    def one_tile(args: tuple[Array, ...]) -> Array:
        tile, prompt, start, count = args
        k = jax.lax.dynamic_index_in_dim(keys, prompt, keepdims=False)
        scores = jax.lax.dot_general(tile, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        scores = scores.reshape(num_q_heads, _GROUPS, -1)
        row = jnp.arange(_GROUPS)[:, None]
        seen = jnp.arange(scores.shape[2])[None, :] <= start // STRIDE + row
        scores = jnp.where(seen, scores, NEG_INF)
        weights = jnp.exp((scores - scores.max(axis=-1, keepdims=True)) * (scale / STRIDE))
        sums = weights.reshape(num_q_heads, _GROUPS, num_key_tiles, _GROUPS).sum(axis=-1)
        sums = sums / sums.sum(axis=-1, keepdims=True)
        return jnp.where(row * STRIDE < count, sums, 0.0).sum(axis=1) / jnp.maximum(1, -(-count // STRIDE))

    shares = jax.lax.map(one_tile, (tiles, tile_prompt, tile_start, tile_tokens))
    first = jnp.arange(num_key_tiles)[None, :] * PREFILL_TILE
    causal = first < (tile_start + tile_tokens)[:, None]
    exists = (tile_tokens > 0)[:, None]
    own = causal & (first + PREFILL_TILE > tile_start[:, None])
    return shares, (causal & exists)[:, None], ((own | (first == 0)) & exists)[:, None]

"""Ranking KV blocks by their digests: one pass over the digests, one over the scores.

A digest (centre c, radius r) is a box around a block's keys (Quest, arXiv 2406.10774; ArkVale, NeurIPS 2024). The most
that a query can score anywhere in the box is

    score = scale * (q . c + |q| . r) = scale * [q, |q|] . [c, r],

so a tile of blocks is one matrix product, on tensor cores for bfloat16. The group of query heads that shares a KV head
shares one load of the digest. The rank of a KV head's block is the mean over the group of softmax(scores), which needs
all scores of a head; so, flash style, the first kernel leaves raw scores with the (maximum, sum of exponentials) of
every tile, and the second merges those and writes the ranks. Ranks of query heads are scores: one kernel.

A program of the first kernel is one (KV head, tile of blocks, sequence). Both halves of a (block, head) are contiguous
and are gathered through the block table, `TILE_BYTES` of them in flight at once: there is no loop to pipeline, the
programs of an SM overlap each other. Heads are the fastest grid axis, so that programs that run together read
neighbouring memory. Tiles past a sequence's end load nothing.

Bytes from device memory: at head_dim 128 and bfloat16 the digest of a (block, head) is 512, raw scores are 4 for each
query head of the group, the block table and queries are read once: 1.035x the digests at group 4, 1.07x at group 8 or
at head_dim 64. By the meter, which takes one KV head: 1.04x at group 4, 1.08x at group 8,
1.15x at group 8 and head_dim 64 (bounds in tests/pallas_kernels/test_a100.py). The second
kernel reads the raw scores back (from L2 as a rule: they are 1 MiB at batch 8, 32 query heads, 1,024 blocks) and writes
4 for each (block, KV head). It is a kernel of ours because XLA makes three or four of it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.storage import from_storage
from pallas_kernels.support import BLOCK_SIZES, check_supported
from pallas_kernels.triton import IN_PLACE, dot, kernel_call, load, store

NEG_INF = -1e30
"""Finite: the difference of two maxima of nothing is 0 and not NaN."""
TILE_BYTES = 32768
"""Digests of one program: 64 blocks at head_dim 128 in bfloat16. Held in registers before they go to shared memory, 64
of a thread, which leaves four programs and so 128 KiB in flight to an SM (8 KiB would hide the latency)."""
MIN_TILE, MAX_TILE = 32, 128
"""Blocks of a tile. No fewer, so that tiles (hence their statistics) stay few; no more, because more would not load
faster and waste more of short sequences."""
SCORE_WARPS = 4
MMA_ROWS = 16
"""The group is padded to this for tensor cores."""
FLOAT32_ROWS = 8
"""Query heads of one program in float32, where products are plain multiplications: a program of more would spill."""

MERGE_TILE = 256
"""Blocks that one program of the second kernel ranks."""
MERGE_HEADS = 4
"""Query heads it takes at a time."""
MERGE_STATS = 64
"""Tile statistics it takes at a time."""
MERGE_WARPS = 2


def score_blocks(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    digests: Num[Array, "num_digests num_kv_heads 2 head_dim"],
    block_table: Int[Array, "num_seqs max_blocks"],
    num_blocks: Int[Array, "num_seqs"],
    *,
    scale: float,
    per_query_head: bool,
    num_sink_blocks: int,
    num_newest_blocks: int,
    interpret: bool,
) -> Float[Array, "num_seqs num_select_heads max_blocks"]:
    """Ranks of every block of every sequence, for each KV head (or query head): what `select_blocks` chooses by.

    Sink and newest blocks rank +inf, blocks at or past `num_blocks` -inf. The newest block's digest (it may be
    stale) is never loaded and has no part in the softmax.

    Args:
        digests: (centre, radius) by block id; bfloat16, its bits as uint16, or float32. The query is rounded to it.
        num_newest_blocks: at least 1.

    Raises:
        NotImplementedError: no kernel for the head_dim, dtype or group.
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_digests, num_kv_heads = digests.shape[:2]
    max_blocks = block_table.shape[1]
    group = num_q_heads // num_kv_heads
    check_supported(  # digests of any block size look alike
        "score_blocks", head_dim=head_dim, block_size=BLOCK_SIZES[0], dtype=digests.dtype, group=group
    )
    assert num_newest_blocks >= 1, "the newest block has no score to be ranked by"
    rows = pl.next_power_of_2(group)
    rows = min(rows, FLOAT32_ROWS) if digests.dtype == jnp.float32 else max(rows, MMA_ROWS)
    parts = pl.cdiv(group, rows)
    tile = TILE_BYTES // (2 * head_dim * digests.dtype.itemsize)
    tile = min(max(tile, MIN_TILE), MAX_TILE)
    num_tiles = pl.cdiv(max_blocks, tile)
    forced = {"num_sink_blocks": num_sink_blocks, "num_newest_blocks": num_newest_blocks}
    by_query_head = jax.ShapeDtypeStruct((num_seqs, num_q_heads, max_blocks), jnp.float32)
    statistic = jax.ShapeDtypeStruct((num_seqs, num_q_heads, num_tiles), jnp.float32)
    out_shape = [by_query_head] if per_query_head else [by_query_head, statistic, statistic]
    kernel = functools.partial(_score_tile, group=group, parts=parts, rows=rows, tile=tile, scale=scale, forced=forced)
    out = kernel_call(
        kernel, q, digests.reshape(num_digests, num_kv_heads, 2 * head_dim), block_table, num_blocks,
        name="score_blocks", grid=(num_kv_heads * parts, num_tiles, num_seqs), in_specs=[IN_PLACE] * 4,
        out_specs=[IN_PLACE] * len(out_shape), out_shape=out_shape, num_warps=SCORE_WARPS, interpret=interpret,
    )  # fmt: skip
    if per_query_head:
        return out[0]
    (ranks,) = kernel_call(
        functools.partial(_merge_tiles, group=group, tile=tile, forced=forced), *out, num_blocks,
        name="merge_scores", grid=(num_kv_heads, pl.cdiv(max_blocks, MERGE_TILE), num_seqs), in_specs=[IN_PLACE] * 4,
        out_specs=[IN_PLACE], out_shape=[jax.ShapeDtypeStruct((num_seqs, num_kv_heads, max_blocks), jnp.float32)],
        num_warps=MERGE_WARPS, interpret=interpret,
    )  # fmt: skip
    return ranks


def _score_tile(
    q_ref: Any,  # [num_seqs, num_q_heads, head_dim]
    digests_ref: Any,  # [num_digests, num_kv_heads, 2 * head_dim]
    table_ref: Any,  # [num_seqs, max_blocks]
    count_ref: Any,  # [num_seqs]
    scores_ref: Any,  # [num_seqs, num_q_heads, max_blocks]: raw scores, or with nothing after it, ranks
    *stats_refs: Any,  # maximum, sum: [num_seqs, num_q_heads, num_tiles]
    group: int,
    parts: int,
    rows: int,
    tile: int,
    scale: float,
    forced: dict[str, int],
) -> None:
    head, part = pl.program_id(0) // parts, pl.program_id(0) % parts
    tile_idx, seq = pl.program_id(1), pl.program_id(2)
    head_dim, max_blocks = q_ref.shape[2], table_ref.shape[1]
    num_heads, num_tiles = digests_ref.shape[1], pl.cdiv(max_blocks, tile)
    end = load(count_ref.at[seq])
    start = tile_idx * tile
    blocks = start + jnp.arange(tile)
    members = part * rows + jnp.arange(rows)
    q_heads = head * group + members
    in_group = members < group

    # Masked by the table's width and not by the sequence's length: of that the compiler knows enough to use vectors.
    in_table = blocks < max_blocks

    def write(scores: Array) -> None:  # [rows, tile]
        where = scores_ref.at[seq, q_heads[:, None], blocks[None, :]]
        store(where, scores, mask=in_group[:, None] & in_table[None, :])

    @pl.when(start < end - 1)
    def _() -> None:
        scored = blocks < end - 1
        # Every head reads the table, every tile the query: from cache.
        ids = load(table_ref.at[seq, blocks], mask=in_table, other=0, repeats=num_heads)
        dims = jnp.arange(head_dim)[None, :]
        q = load(q_ref.at[seq, q_heads[:, None], dims], mask=in_group[:, None], other=0.0, repeats=num_tiles)
        centre = _load_boxes(digests_ref.at[ids[:, None], head, dims], scored)  # [tile, head_dim]
        radius = _load_boxes(digests_ref.at[ids[:, None], head, head_dim + dims], scored)
        q = q.astype(centre.dtype)
        scores = (dot(q, centre, trans_b=True) + dot(jnp.abs(q), radius, trans_b=True)) * scale
        if not stats_refs:
            return write(_with_forced(scores, blocks[None, :], end, **forced))
        write(scores)
        scores = jnp.where(scored[None, :], scores, NEG_INF)
        maximum = scores.max(axis=1)
        total = jnp.exp(scores - maximum[:, None]).sum(axis=1)  # unscored: exp(NEG_INF - maximum) = 0
        for ref, statistic in zip(stats_refs, (maximum, total), strict=True):
            store(ref.at[seq, q_heads, jnp.full_like(q_heads, tile_idx)], statistic, mask=in_group)

    if not stats_refs:

        @pl.when(start >= end - 1)
        def _() -> None:
            write(_with_forced(jnp.zeros((rows, tile), jnp.float32), blocks[None, :], end, **forced))


def _load_boxes(where: Any, scored: Array) -> Array:
    return from_storage(load(where, mask=scored[:, None], other=0))


def _merge_tiles(
    scores_ref: Any,  # [num_seqs, num_q_heads, max_blocks]
    maximum_ref: Any,  # [num_seqs, num_q_heads, num_tiles]
    total_ref: Any,  # [num_seqs, num_q_heads, num_tiles]
    count_ref: Any,  # [num_seqs]
    ranks_ref: Any,  # [num_seqs, num_kv_heads, max_blocks]
    *,
    group: int,
    tile: int,
    forced: dict[str, int],
) -> None:
    head, part, seq = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    end = load(count_ref.at[seq])
    start = part * MERGE_TILE
    blocks = start + jnp.arange(MERGE_TILE)
    scored = blocks < end - 1
    in_table = blocks < ranks_ref.shape[2]
    num_tiles = pl.cdiv(jnp.maximum(end - 1, 0), tile)
    rows = min(MERGE_HEADS, pl.next_power_of_2(group))
    stats = min(MERGE_STATS, pl.next_power_of_2(maximum_ref.shape[2]))

    def add_heads(step: Array, mean: Array) -> Array:  # mean: [MERGE_TILE]
        members = step * rows + jnp.arange(rows)
        q_heads = (head * group + members)[:, None]
        in_group = (members < group)[:, None]

        def add_tiles(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:  # [rows, stats] each
            tiles = (step * stats + jnp.arange(stats))[None, :]
            exists = in_group & (tiles < num_tiles)
            maximum = load(maximum_ref.at[seq, q_heads, tiles], mask=exists, other=NEG_INF)
            total = load(total_ref.at[seq, q_heads, tiles], mask=exists, other=0.0)
            return _merge(carry, (maximum, total))

        nothing = jnp.full((rows, stats), NEG_INF), jnp.zeros((rows, stats))
        maximum, total = jax.lax.fori_loop(0, pl.cdiv(num_tiles, stats), add_tiles, nothing)
        of_head = maximum.max(axis=1, keepdims=True)
        total = (total * jnp.exp(maximum - of_head)).sum(axis=1, keepdims=True)
        scores = load(scores_ref.at[seq, q_heads, blocks[None, :]], mask=in_group & in_table[None, :], other=NEG_INF)
        weights = jnp.exp(scores - of_head) / (jnp.where(in_group, total, 1.0) * group)
        return mean + jnp.where(in_group & scored[None, :], weights, 0.0).sum(axis=0)

    num_steps = jnp.where(start < end - 1, jnp.int32(pl.cdiv(group, rows)), jnp.int32(0))
    ranks = jax.lax.fori_loop(jnp.int32(0), num_steps, add_heads, jnp.zeros(MERGE_TILE))
    ranks = _with_forced(ranks, blocks, end, **forced)
    store(ranks_ref.at[seq, head, blocks], ranks, mask=in_table)


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Online softmax (Milakov and Gimelshein, arXiv 1805.02867): two (maximum, sum of exponentials) as one."""
    maximum = jnp.maximum(a[0], b[0])
    return maximum, a[1] * jnp.exp(a[0] - maximum) + b[1] * jnp.exp(b[0] - maximum)


def _with_forced(ranks: Array, blocks: Array, end: Array, *, num_sink_blocks: int, num_newest_blocks: int) -> Array:
    """Sink and newest blocks are always chosen, blocks past the end never."""
    forced = (blocks < num_sink_blocks) | (blocks >= end - num_newest_blocks)
    return jnp.where(blocks < end, jnp.where(forced, jnp.inf, ranks), -jnp.inf)

"""The operations in plain XLA: the serving path where no kernel of ours runs, and what kernels are compared with.

Layout (docs/design): a pool of one layer is `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, K at 0 and V at 1,
so one (block, head) *piece* is contiguous. Block 0 is the null block: padding points there, and its content (even NaN)
never reaches a result. All sums are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.quantise import dequantise, quantise, requantise, scales_of
from pallas_kernels.storage import from_storage, to_storage
from pallas_kernels.support import check_digest_method

NEG_INF = -1e30
"""Finite, so that a fully masked row gives zeros instead of NaN."""
DECODE_CHUNK_TOKENS = 256
"""Keys of one step of `decode_attention`: small, so that short contexts cost little (on the CPU 8x less than 2,048 at
5 blocks) and a chunk stays in cache (1.2x faster also at 64 blocks)."""
PREFILL_TILE = 128
"""Query tokens of one tile of `prefill_attention`; every prompt in a packed call starts on a tile."""
PREFILL_KEY_TOKENS = 512


def _dot(a: Array, b: Array, dims: tuple) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


# --- append ----------------------------------------------------------------------------------------------------------


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
    """Writes whole blocks (prefill) and their digests. In place when donated; padding goes to block 0.

    Args:
        digests: (centre, radius) by global block id; None for a dense layer.
        blocks: in the pool's dtype; bfloat16 or float32 for an int8 pool, which are quantised by the tokens that exist.
        num_valid: tokens of each block that exist.
        digest_ids: the row of `digests` of each block (in a staging pool it is not `block_ids`).
        kv_scales: of an int8 pool (see `quantise`), whose digests are those of the keys as they are stored.

    Returns:
        pool, digests and scales, updated; None for what there is none of.
    """
    if kv_scales is not None:
        return _append_quantised_blocks(
            pool, digests, from_storage(blocks), block_ids, num_valid, digest_ids, kv_scales, method=method
        )
    assert blocks.dtype == pool.dtype, f"blocks are {blocks.dtype}, the pool is {pool.dtype}: see storage.to_storage"
    pool = pool.at[block_ids].set(blocks, mode="drop")
    if digests is None:
        return pool, None, None
    summary = block_digests(from_storage(blocks[:, :, 0]), num_valid, method=method)
    return pool, digests.at[digest_ids].set(to_storage(summary, digests.dtype), mode="drop"), None


def _append_quantised_blocks(
    pool: Array, digests: Array | None, blocks: Array, block_ids: Array, num_valid: Array, digest_ids: Array,
    kv_scales: Array, *, method: str,
) -> tuple[Array, Array | None, Array]:  # fmt: skip
    exist = (jnp.arange(pool.shape[3]) < num_valid[:, None])[:, None, None, :, None]
    values = jnp.where(exist, blocks, 0)
    scales = scales_of(values)  # [num_new, num_kv_heads, 2]
    stored = quantise(values, scales)
    pool = pool.at[block_ids].set(stored, mode="drop")
    kv_scales = kv_scales.at[block_ids].set(scales, mode="drop")
    digests = _renew_quantised_digests(digests, stored, scales, num_valid, digest_ids, method=method)
    return pool, digests, kv_scales


def _renew_quantised_digests(
    digests: Array | None, stored: Array, scales: Array, num_valid: Array, digest_ids: Array, *, method: str
) -> Array | None:
    """Digests of pieces `[num_new, num_kv_heads, 2, block_size, head_dim]`, from the integers of their keys."""
    if digests is None:
        return None
    summary = dequantise(block_digests(stored[:, :, 0], num_valid, method=method), scales[:, :, 0])
    summary = jnp.where((num_valid > 0)[:, None, None, None], summary, 0.0)
    return digests.at[digest_ids].set(to_storage(summary, digests.dtype), mode="drop")


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
    """Writes one token a sequence (decode) as the last of its newest block, which may lie elsewhere for each head.

    The block's digest is renewed from its keys, so it is exact also while the block is partial. In an int8 pool the
    first token of a block sets the scale; a later one with a larger magnitude raises it, and the older tokens are
    rounded once more, to the new scale.

    Args:
        digests, kv_scales: as for `append_blocks`, as are the results.
        num_valid: tokens of the newest block, the new one included; 0 = padding (block 0, digest 0).
    """
    if kv_scales is not None:
        kv = jnp.stack([k, v], axis=2)
        return _append_quantised_tokens(pool, digests, kv, block_ids, num_valid, digest_ids, kv_scales, method=method)
    kv = to_storage(jnp.stack([k, v], axis=2), pool.dtype)  # [num_seqs, num_kv_heads, 2, head_dim]
    heads = jnp.arange(pool.shape[1])[None, :, None]
    offsets = jnp.maximum(num_valid - 1, 0)[:, None, None]
    pool = pool.at[block_ids[:, :, None], heads, jnp.arange(2)[None, None, :], offsets].set(kv, mode="drop")
    if digests is None:
        return pool, None, None
    keys = gather_halves(pool, block_ids[:, :, None], 0)[:, :, 0]  # [num_seqs, num_kv_heads, block_size, head_dim]
    summary = block_digests(keys, num_valid, method=method)
    return pool, digests.at[digest_ids].set(to_storage(summary, digests.dtype), mode="drop"), None


def _append_quantised_tokens(
    pool: Array, digests: Array | None, kv: Array, block_ids: Array, num_valid: Array, digest_ids: Array,
    kv_scales: Array, *, method: str,
) -> tuple[Array, Array | None, Array]:  # fmt: skip
    where = (block_ids, jnp.arange(pool.shape[1])[None, :])
    kv = kv[..., None, :]  # [num_seqs, num_kv_heads, 2, 1, head_dim]
    older = jnp.where((num_valid > 1)[:, None, None], kv_scales[where], 0.0)
    scales = jnp.maximum(older, scales_of(kv))
    row = jnp.arange(pool.shape[3])[:, None]
    offset = jnp.maximum(num_valid - 1, 0)[:, None, None, None, None]
    before = pool[where]  # [num_seqs, num_kv_heads, 2, block_size, head_dim]
    stored = jnp.where(row < offset, requantise(before, older, scales), before)
    stored = jnp.where(row == offset, quantise(kv, scales), stored)
    pool = pool.at[where].set(stored, mode="drop")
    kv_scales = kv_scales.at[where].set(scales, mode="drop")
    digests = _renew_quantised_digests(digests, stored, scales, num_valid, digest_ids, method=method)
    return pool, digests, kv_scales


def gather_halves(
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    half: int,
) -> Num[Array, "num_seqs num_kv_heads num_selected block_size head_dim"]:
    """The keys (half 0) or values (half 1) of every head's own block ids.

    A flat take, and one for each half: on the CPU 3x faster than indexing two axes, 1.4x than taking both at once.
    """
    num_blocks, num_kv_heads, _, block_size, head_dim = pool.shape
    flat = pool.reshape(num_blocks * num_kv_heads * 2, block_size * head_dim)
    ids = (block_ids * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]) * 2 + half
    return from_storage(jnp.take(flat, ids, axis=0, mode="clip")).reshape(*block_ids.shape, block_size, head_dim)


# --- digests and selection -------------------------------------------------------------------------------------------


def block_digests(
    k: Num[Array, "num_new num_kv_heads block_size head_dim"],
    num_valid: Int[Array, "num_new"],
    *,
    method: str,
) -> Float[Array, "num_new num_kv_heads 2 head_dim"]:
    """Summaries (centre, radius) of blocks of post-RoPE keys; the first `num_valid` tokens count.

    With per-channel maximum mx and minimum mn, c = (mx + mn) / 2:
    cuboid-mean (ArkVale): centre c, radius mean |k - c|; quest: centre c, radius (mx - mn) / 2; mean: mean key, 0.
    A block's score is q . centre + |q| . radius, which is Quest's sum of per-channel maxima for a box.
    """
    check_digest_method(method)
    k = k.astype(jnp.float32)
    valid = (jnp.arange(k.shape[2])[None, :] < num_valid[:, None])[:, None, :, None]
    count = jnp.maximum(num_valid, 1).astype(jnp.float32)[:, None, None]
    if method == "mean":
        centre = jnp.where(valid, k, 0.0).sum(2) / count
        radius = jnp.zeros_like(centre)
    else:
        mx = jnp.where(valid, k, NEG_INF).max(2)
        mn = jnp.where(valid, k, -NEG_INF).min(2)
        centre = (mx + mn) / 2
        if method == "quest":
            radius = (mx - mn) / 2
        else:
            radius = jnp.where(valid, jnp.abs(k - centre[:, :, None]), 0.0).sum(2) / count
    digests = jnp.stack([centre, radius], axis=2)
    return jnp.where((num_valid > 0)[:, None, None, None], digests, 0.0)


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
) -> Float[Array, "num_seqs num_select_heads max_blocks"]:
    """Ranks of every block of every sequence, for each KV head (or query head): what `select_blocks` chooses by.

    Per KV head the rank is the mean over the query group of the softmax over block scores, so that no head of the group
    can drown the others; per query head it is the score. Sink and newest blocks rank +inf, blocks at or past
    `num_blocks` -inf. The newest block is never scored: it is chosen anyway, and when it has just begun its digest is
    still that of the block id's last owner, which must not take part in the softmax.
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads = digests.shape[1]
    group = num_q_heads // num_kv_heads
    taken = from_storage(jnp.take(digests, block_table, axis=0, mode="clip"))  # [seqs, blocks, kv_heads, 2, head_dim]
    index = jnp.arange(block_table.shape[1])[None, None, :]
    end = num_blocks[:, None, None]
    scored = (index < end - 1)[:, :, None, :]
    taken = jnp.where(scored[:, 0, 0, :, None, None, None], taken, 0)
    boxes = jnp.moveaxis(taken, 2, 1).reshape(num_seqs, num_kv_heads, -1, 2 * head_dim)
    q = q.reshape(num_seqs, num_kv_heads, group, head_dim)
    queries = jnp.concatenate([q, jnp.abs(q)], axis=-1).astype(boxes.dtype)
    scores = _dot(queries, boxes, (((3,), (3,)), ((0, 1), (0, 1)))) * scale  # [seqs, kv_heads, group, blocks]
    if per_query_head:
        ranks = scores.reshape(num_seqs, num_q_heads, -1)
    else:
        ranks = jax.nn.softmax(jnp.where(scored, scores, NEG_INF), axis=-1).mean(axis=2)
    forced = (index < num_sink_blocks) | (index >= end - num_newest_blocks)
    return jnp.where(index < end, jnp.where(forced, jnp.inf, ranks), -jnp.inf)


def select_blocks(
    ranks: Float[Array, "num_seqs num_select_heads max_blocks"], *, num_selected: int
) -> Int[Array, "num_seqs num_select_heads num_selected"]:
    """The ids of the best ranked blocks, ascending, -1 after the last; a rank of -inf is never chosen.

    Ties go to the lower id. When a sequence has no more than `num_selected` blocks, all of them are chosen.
    """
    max_blocks = ranks.shape[-1]
    values, chosen = jax.lax.top_k(ranks, min(num_selected, max_blocks))
    chosen = jnp.sort(jnp.where(values > -jnp.inf, chosen, max_blocks), axis=-1)
    chosen = jnp.where(chosen < max_blocks, chosen, -1)
    missing = num_selected - chosen.shape[-1]
    return jnp.pad(chosen, ((0, 0), (0, 0), (0, max(0, missing))), constant_values=-1)


def union_over_group(
    selected: Int[Array, "num_seqs num_q_heads num_selected"],
    *,
    num_kv_heads: int,
    max_blocks: int,
    num_union: int,
) -> tuple[Int[Array, "num_seqs num_kv_heads num_union"], Bool[Array, "num_seqs num_kv_heads group num_union"]]:
    """Per-query-head selections as one list a KV head and, for each query head, which of the list it chose."""
    num_seqs, num_q_heads, k = selected.shape
    group = num_q_heads // num_kv_heads
    grouped = selected.reshape(num_seqs, num_kv_heads, group, k)
    chosen = (grouped[..., None] == jnp.arange(max_blocks)).any(axis=3)  # [seqs, kv_heads, group, max_blocks]
    ids = jnp.where(chosen.any(axis=2), jnp.arange(max_blocks), max_blocks)
    union = jnp.sort(ids, axis=-1)[..., :num_union]
    union = jnp.pad(union, ((0, 0), (0, 0), (0, num_union - union.shape[-1])), constant_values=max_blocks)
    padded = jnp.pad(chosen, ((0, 0), (0, 0), (0, 0), (0, 1)))
    mask = jnp.take_along_axis(padded, jnp.broadcast_to(union[:, :, None], (*chosen.shape[:3], num_union)), axis=-1)
    return jnp.where(union < max_blocks, union, -1), mask


# --- residency -------------------------------------------------------------------------------------------------------


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
    """Finds each selected block's slot, or the least recently selected slot for it to move into.

    Args:
        selected: logical block ids, -1 = unused.
        resident: logical block in each slot of the sequence's grant, -1 = empty.
        last_selected: the step at which a block was last selected.
        num_slots: slots of the grant; the rest of the row is not used.

    Returns:
        slot index of every selected block, whether it missed, and the residency after loading the misses.
    """
    used = selected >= 0
    granted = jnp.arange(resident.shape[-1])[None, None, :] < num_slots[:, None, None]
    usable = jnp.where(granted, resident, -1)
    equal = (selected[..., None] == usable[..., None, :]) & used[..., None]  # [seqs, heads, selected, slots]
    hit = equal.any(-1)
    hit_slot = jnp.argmax(equal, axis=-1)
    miss = used & ~hit
    never = jnp.iinfo(jnp.int32).min // 2
    age = jnp.take_along_axis(last_selected, jnp.maximum(resident, 0), axis=-1)
    age = jnp.where(resident >= 0, age, never)
    age = jnp.where(equal.any(2) | ~granted, -never, age)
    num_victims = min(selected.shape[-1], resident.shape[-1])
    _, victims = jax.lax.top_k(-age, num_victims)
    rank = jnp.clip(jnp.cumsum(miss, axis=-1) - 1, 0, num_victims - 1)
    slot = jnp.where(hit, hit_slot, jnp.take_along_axis(victims, rank, axis=-1))
    lanes = (jnp.arange(resident.shape[0])[:, None, None], jnp.arange(resident.shape[1])[None, :, None])
    target = jnp.where(miss, slot, resident.shape[-1])  # dropped unless it missed
    resident = resident.at[(*lanes, target)].set(selected, mode="drop")
    return slot, miss, resident


# --- attention -------------------------------------------------------------------------------------------------------


def decode_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    num_valid: Int[Array, "num_seqs num_kv_heads num_selected"],
    query_mask: Bool[Array, "num_seqs num_kv_heads group num_selected"] | None,
    *,
    scale: float,
    kv_scales: Float[Array, "num_blocks num_kv_heads 2"] | None = None,
) -> Float[Array, "num_seqs num_q_heads head_dim"]:
    """One query token a sequence over the given blocks, whose first `num_valid` tokens count (0 = skip the block).

    Flash-style over chunks of DECODE_CHUNK_TOKENS, as many as the batch needs. A row with nothing to attend to gives
    zeros. Of an int8 pool, a value is its integer times the `kv_scales` of its (block, KV head, K or V).
    """
    num_seqs, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[1], pool.shape[3]
    group = num_q_heads // num_kv_heads
    chunk = min(DECODE_CHUNK_TOKENS // block_size, block_ids.shape[-1])
    pad = -block_ids.shape[-1] % chunk
    block_ids = jnp.pad(block_ids, ((0, 0), (0, 0), (0, pad)))
    num_valid = jnp.pad(num_valid, ((0, 0), (0, 0), (0, pad)))
    q = q.reshape(num_seqs, num_kv_heads, group, head_dim)
    if kv_scales is not None:
        q = q.astype(jnp.bfloat16)  # as a kernel multiplies them

    def gather(ids: Array, half: int) -> Array:
        values = gather_halves(pool, ids, half)
        if kv_scales is not None:
            values = values * kv_scales[ids, jnp.arange(num_kv_heads)[None, :, None], half][..., None, None]
        return values.reshape(num_seqs, num_kv_heads, chunk * block_size, head_dim)

    def body(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start = index * chunk
        ids = jax.lax.dynamic_slice_in_dim(block_ids, start, chunk, axis=2)
        counts = jax.lax.dynamic_slice_in_dim(num_valid, start, chunk, axis=2)
        ids = jnp.where(counts > 0, ids, 0)
        ok = (jnp.arange(block_size) < counts[..., None]).reshape(num_seqs, num_kv_heads, 1, chunk * block_size)
        if query_mask is not None:
            padded = jnp.pad(query_mask, ((0, 0), (0, 0), (0, 0), (0, pad)))
            mask = jax.lax.dynamic_slice_in_dim(padded, start, chunk, axis=3)
            ok = ok & jnp.repeat(mask, block_size, axis=3)
        k, v = gather(ids, 0), gather(ids, 1)
        v = jnp.where((jnp.arange(block_size) < counts[..., None]).reshape(*v.shape[:3], 1), v, 0)
        s = _dot(q.astype(k.dtype), k, (((3,), (3,)), ((0, 1), (0, 1))))  # [seqs, heads, group, tokens]
        return _flash_update(*carry, jnp.where(ok, s, NEG_INF), ok, v, (((3,), (2,)), ((0, 1), (0, 1))), scale)

    shape = (num_seqs, num_kv_heads, group, 1)
    init = (jnp.full(shape, NEG_INF), jnp.zeros(shape), jnp.zeros((num_seqs, num_kv_heads, group, head_dim)))
    used = (num_valid > 0).any(axis=(0, 1))
    num_chunks = (jnp.max(jnp.where(used, jnp.arange(used.shape[0]), -1)) + chunk) // chunk
    _, total, acc = jax.lax.fori_loop(0, num_chunks, body, init)
    return (acc / jnp.where(total == 0.0, 1.0, total)).reshape(num_seqs, num_q_heads, head_dim)


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
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """Causal flash attention of packed prompts; keys and values come from the pool, those of this call included.

    Args:
        q: queries of `num_tiles` tiles of PREFILL_TILE tokens.
        block_tables: the blocks of each prompt in this call.
        tile_prompt: row of `block_tables` that a tile belongs to.
        tile_start: position of the tile's first token in its prompt.
        tile_tokens: tokens of the tile that are real; the rest gives zeros.
        tile_mask: the key tiles that a query head attends to in a tile (sparse prefill); the j-th is the PREFILL_TILE
            tokens of the prompt from `j * PREFILL_TILE` on. There is none past the last. A query with no key to attend
            to gives zeros.
        merge_tiles: tiles taken as one (a power of two), when the whole call is one prompt.
        kv_scales: of an int8 pool, whose keys and values are multiplied as bfloat16.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[1], pool.shape[3]
    group = num_q_heads // num_kv_heads
    tile = PREFILL_TILE * merge_tiles
    key_blocks = PREFILL_KEY_TOKENS // block_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % key_blocks)))
    tile_prompt, tile_start = tile_prompt[::merge_tiles], tile_start[::merge_tiles]
    tile_tokens = tile_tokens.reshape(-1, merge_tiles).sum(1)
    tiles = q.reshape(-1, tile, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    tiles = tiles.reshape(-1, num_kv_heads, group * tile, head_dim)
    row_in_tile = jnp.arange(group * tile) % tile
    if tile_mask is not None:  # [merged tiles, kv_heads, group, merge_tiles, key tiles that the tables can hold]
        missing = -(-tables.shape[1] * block_size // PREFILL_TILE) - tile_mask.shape[2]
        kept = jnp.pad(tile_mask, ((0, 0), (0, 0), (0, max(0, missing))))
        kept = kept.reshape(-1, merge_tiles, num_kv_heads, group, kept.shape[2]).transpose(0, 2, 3, 1, 4)

    def one_tile(args: tuple[Array, ...]) -> Array:
        tile_q, prompt, start, count, *keep = args
        positions = start + row_in_tile
        table = tables[prompt]

        def scores(index: Array) -> tuple[Array, Array]:
            ids = jax.lax.dynamic_slice_in_dim(table, index * key_blocks, key_blocks)
            kv = from_storage(jnp.take(pool, ids, axis=0, mode="clip"))  # [key_blocks, heads, 2, block_size, head_dim]
            if kv_scales is not None:
                kv = dequantise(kv, jnp.take(kv_scales, ids, axis=0, mode="clip")).astype(jnp.bfloat16)
            kv = kv.transpose(2, 1, 0, 3, 4).reshape(2, num_kv_heads, key_blocks * block_size, head_dim)
            return _dot(tile_q.astype(kv.dtype), kv[0], (((2,), (2,)), ((0,), (0,)))), kv[1]

        def past(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            s, v = scores(index)  # every query of the tile sees every key: no masks
            return _flash_update(*carry, s, None, v, (((2,), (1,)), ((0,), (0,))), scale)

        def diagonal(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            s, v = scores(index)
            keys = index * PREFILL_KEY_TOKENS + jnp.arange(PREFILL_KEY_TOKENS)
            v = jnp.where((keys < start + count)[None, :, None], v, 0)
            ok = ((keys[None, :] <= positions[:, None]) & (row_in_tile < count)[:, None])[None]
            if keep:
                width = PREFILL_KEY_TOKENS // PREFILL_TILE
                here = jax.lax.dynamic_slice_in_dim(keep[0], index * width, width, axis=3)
                here = jnp.repeat(here, PREFILL_TILE, axis=2).reshape(num_kv_heads, group * tile, width)
                ok = ok & jnp.repeat(here, PREFILL_TILE, axis=2)
            return _flash_update(*carry, jnp.where(ok, s, NEG_INF), ok, v, (((2,), (1,)), ((0,), (0,))), scale)

        shape = (num_kv_heads, group * tile, 1)
        carry = (jnp.full(shape, NEG_INF), jnp.zeros(shape), jnp.zeros((num_kv_heads, group * tile, head_dim)))
        num_past = jnp.where(count > 0, start // PREFILL_KEY_TOKENS, 0) if tile_mask is None else 0
        num_chunks = jnp.where(count > 0, (start + count + PREFILL_KEY_TOKENS - 1) // PREFILL_KEY_TOKENS, 0)
        carry = jax.lax.fori_loop(0, num_past, past, carry)
        _, total, acc = jax.lax.fori_loop(num_past, num_chunks, diagonal, carry)
        return jnp.where((row_in_tile < count)[None, :, None], acc / jnp.where(total == 0.0, 1.0, total), 0.0)

    per_tile = (tiles, tile_prompt, tile_start, tile_tokens)
    out = jax.lax.map(one_tile, per_tile if tile_mask is None else (*per_tile, kept))
    out = out.reshape(-1, num_kv_heads, group, tile, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(num_tokens, num_q_heads, head_dim)


def _flash_update(
    m: Array, total: Array, acc: Array, s: Array, ok: Array | None, v: Array, dims: tuple, scale: float
) -> tuple[Array, Array, Array]:
    """One step of online softmax (Milakov and Gimelshein, arXiv 1805.02867): new maximum, sum and weighted values.

    Scores and maxima are unscaled; the scale goes into the exponent. The barrier keeps XLA's CPU backend from computing
    the exponentials once for the sum and once more for the product (1.25x on prefill attention).
    """
    m_new = jnp.maximum(m, s.max(axis=-1, keepdims=True))
    p = jnp.exp((s - m_new) * scale)
    if ok is not None:
        p = jnp.where(ok, p, 0.0)
    p = jax.lax.optimization_barrier(p.astype(v.dtype))
    alpha = jnp.exp((m - m_new) * scale)
    total = total * alpha + p.sum(axis=-1, keepdims=True, dtype=jnp.float32)
    return m_new, total, acc * alpha + _dot(p, v, dims)

"""Causal flash attention of packed prompts on the GPU, keys and values read straight from the paged pool.

One program takes a tile of queries of one query head through all keys that it may see, some tokens a step, with the
online softmax of FlashAttention-2 (arXiv 2307.08691; Milakov and Gimelshein, arXiv 1805.02867): scores s = q k^T, their
running maximum m, p = 2^((s - m) e) with e = scale log2(e); the sum of p and p v in float32, and one division at the
end. Steps before the tile's first token need no mask and run in a loop of their own; the few on the diagonal are masked
in a second one.

Layout: the pool `[num_blocks, num_kv_heads, 2, block_size, head_dim]` is read as rows of `Tiling.width` values. A
token's key is at row `((block * num_kv_heads + head) * 2 * block_size + offset) * (head_dim / width)`, its value
block_size tokens further. The block ids of a step are loaded one step ahead and carried: were they loaded in the step
that needs them, the compiler would spend one stage of its pipeline on them, and K and V would no longer arrive during
the products of the step before.

`tile_mask` (sparse prefill; `select_key_tiles` finds such tiles) says which key tiles of PREFILL_TILE tokens
to keep. The steps kept are the bits of 32 words, one in each lane of a warp, and the loop pops the lowest of them: it
runs once for each step kept, and stays a counted loop, the only kind the compiler pipelines. Nothing else is loaded.

Order: the last tiles start first, since in a long prompt they see the most keys and short ones should fill the tail.
All heads of a tile come next to each other, so that a group finds the keys of its KV head in L2, and so does the next
tile.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels.reference import NEG_INF, PREFILL_TILE
from pallas_kernels.storage import from_storage
from pallas_kernels.support import check_supported
from pallas_kernels.triton import IN_PLACE, dot, exp2_scaled, kernel_call, load, store

LANES = 32
"""Words of kept steps: the threads of a warp, so that their minimum needs neither shared memory nor a barrier."""
WINDOW_BITS = 16
"""Bits used of each word: 512 steps, found with 16 loads that are in flight together."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Sizes of one program.

    Attributes:
        queries / keys: tokens of its query tile and of one step; powers of two that divide PREFILL_TILE.
        width: of the slices that head_dim is taken in; smaller products keep fewer operands in registers at a time.
        num_warps / num_stages: see `kernel_call`. Three stages: K and V of a step arrive while the one before computes.
    """

    queries: int
    keys: int
    width: int
    num_warps: int
    num_stages: int


# Compiled for sm_80 these spill nothing and leave at least 8 warps on an SM. bfloat16 at head_dim 64 and 128 has the
# tiles and warps that PyTorch FlexAttention takes on an A100 (torch/_inductor, `_a100_default_config`). Triton gives a
# warp all keys of its queries, and softmax within the warp, where queries >= width. At head_dim 256 the output alone
# takes 128 registers of every thread, and 32 keys a step would spill. float32 products are FMAs, on small tiles.
_BF16 = {
    16: Tiling(64, 64, 16, 4, 2),
    32: Tiling(64, 32, 32, 4, 3),
    64: Tiling(128, 64, 32, 4, 3),
    128: Tiling(128, 64, 32, 8, 3),
    256: Tiling(128, 16, 128, 8, 3),
}
_FLOAT32 = {
    16: Tiling(64, 32, 16, 4, 2),
    32: Tiling(64, 32, 32, 4, 2),
    64: Tiling(64, 32, 32, 4, 2),
    128: Tiling(32, 32, 32, 4, 2),
    256: Tiling(32, 16, 64, 4, 2),
}


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
    kv_scales: None = None,
    interpret: bool,
) -> Float[Array, "num_tokens num_q_heads head_dim"]:
    """See `reference.prefill_attention`.

    Args:
        merge_tiles: has no effect; tiles are as large as registers allow.
        kv_scales: of int8 pools, for which there is no kernel.
        interpret: see `kernel_call`.
    """
    _, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = pool.shape[1], pool.shape[3]
    group = num_q_heads // num_kv_heads
    check_supported("prefill_attention", head_dim=head_dim, block_size=block_size, dtype=pool.dtype, group=group)
    tiling = (_FLOAT32 if pool.dtype == jnp.float32 else _BF16)[head_dim]
    num_places = tile_prompt.shape[0] * (PREFILL_TILE // tiling.queries)
    rows = pl.BlockSpec((tiling.queries, None, head_dim), lambda head, order: (num_places - 1 - order, head, 0))
    arrays = [q, pool.reshape(-1, tiling.width), block_tables, tile_prompt, tile_start, tile_tokens]
    if tile_mask is not None:
        arrays.append(tile_mask)
    kernel = functools.partial(
        _kernel, tiling=tiling, num_kv_heads=num_kv_heads, group=group, block_size=block_size,
        exponent=scale * math.log2(math.e), interpret=interpret,
    )  # fmt: skip
    return kernel_call(
        kernel, *arrays, name="prefill_attention", grid=(num_q_heads, num_places),  # heads vary fastest
        in_specs=[rows, *[IN_PLACE] * (len(arrays) - 1)], out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, interpret=interpret,
    )  # fmt: skip


State = tuple[Array, ...]
"""m [queries], sum [queries] and, for each slice of head_dim, p v [queries, width]."""


def _kernel(
    q_ref: Any,  # [queries, head_dim], of one head
    pool_ref: Any,  # [num_blocks * num_kv_heads * 2 * block_size * head_dim / width, width]
    tables_ref: Any,  # [num_prompts, max_blocks]
    prompt_ref: Any,  # [num_tiles]
    start_ref: Any,  # [num_tiles]
    tokens_ref: Any,  # [num_tiles]
    *rest: Any,  # the mask [num_tiles, num_q_heads, num_key_tiles], if any; the output [queries, head_dim]
    tiling: Tiling,
    num_kv_heads: int,
    group: int,
    block_size: int,
    exponent: float,
    interpret: bool,
) -> None:
    *mask_refs, out_ref = rest
    queries, keys, width = tiling.queries, tiling.keys, tiling.width
    slices = [pl.ds(first, width) for first in range(0, out_ref.shape[1], width)]
    head, place = pl.program_id(0), pl.num_programs(1) - 1 - pl.program_id(1)
    parts = PREFILL_TILE // queries
    tile, first_row = jax.lax.div(place, parts), jax.lax.rem(place, parts) * queries
    start = load(start_ref.at[tile]) + first_row
    count = jnp.clip(load(tokens_ref.at[tile]) - first_row, 0, queries)
    prompt = load(prompt_ref.at[tile])
    end = start + count
    num_past = jnp.where(count > 0, jax.lax.div(start, keys), 0)
    num_steps = jnp.where(count > 0, jax.lax.div(end + keys - 1, keys), 0)

    row = jnp.arange(queries)
    is_query = jnp.broadcast_to((row < count)[:, None], (queries, width))
    dtype = jnp.bfloat16 if pool_ref.dtype == jnp.uint16 else pool_ref.dtype
    q = [load(q_ref.at[:, columns], mask=is_query, other=0).astype(dtype) for columns in slices]
    column = jnp.arange(width)[None, :]
    head_token = jax.lax.div(head, group) * (2 * block_size)
    block_shift = _log2(block_size)  # shifts and masks, because // and % cost more for the sake of negative numbers

    def block_ids(step: Array) -> Array:
        """The block of each key of a step; past the last step, any."""
        blocks = (step * keys + jnp.arange(keys)) >> block_shift
        last = tables_ref.shape[1] - 1
        return load(tables_ref.at[prompt, jnp.minimum(blocks, last)], repeats=min(block_size, keys))

    def attend(step: Array, ids: Array, state: State, diagonal: bool) -> State:
        m, total, *acc = state
        position = step * keys + jnp.arange(keys)
        token = ids * (num_kv_heads * 2 * block_size) + head_token + (position & (block_size - 1))
        real = {"mask": jnp.broadcast_to((position < end)[:, None], (keys, width)), "other": 0} if diagonal else {}

        def loaded(token: Array) -> list[Array]:
            first = token[:, None] * len(slices)
            return [
                from_storage(load(pool_ref.at[first + i, column], repeats=group, **real)) for i in range(len(slices))
            ]

        s = functools.reduce(jnp.add, map(functools.partial(dot, trans_b=True), q, loaded(token)))  # [queries, keys]
        if diagonal:
            s = jnp.where(position[None, :] <= start + row[:, None], s, -jnp.inf)
        m_new = jnp.maximum(m, s.max(axis=1))
        p = exp2_scaled(s, exponent, (m_new * exponent)[:, None], interpret=interpret)
        alpha = jnp.exp2((m - m_new) * exponent)
        total = total * alpha + p.sum(axis=1)
        v = loaded(token + block_size)
        return m_new, total, *(a * alpha[:, None] + dot(p.astype(dtype), b) for a, b in zip(acc, v, strict=True))

    def loop(
        num: Array, take: Callable[[Array], tuple[Array, Array]], left: Array, state: State, diagonal: bool
    ) -> State:
        """Attends to `num` steps that `take` takes from what is left of them."""
        step, left = take(left)

        def body(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            step, ids, left, *state = carry
            state = attend(step, ids, tuple(state), diagonal)
            step, left = take(left)
            return step, block_ids(step), left, *state

        return jax.lax.fori_loop(0, num, body, (step, block_ids(step), left, *state))[3:]

    def kept(first: Array, stop: Array, bits: int, state: State, diagonal: bool) -> State:
        """Attends to the steps kept among `LANES * bits` from `first` on, before `stop`."""
        words, counts = jnp.zeros((LANES,), jnp.int32), jnp.zeros((LANES,), jnp.int32)
        for bit in range(bits):
            step = first + jnp.arange(LANES) * bits + bit
            key_tile = step >> _log2(PREFILL_TILE // keys)
            inside = (step < stop) & (key_tile < mask_refs[0].shape[2])
            keep = load(mask_refs[0].at[tile, head, key_tile], mask=inside, other=False).astype(jnp.int32)
            words, counts = words | (keep << bit), counts + keep

        def take(words: Array) -> tuple[Array, Array]:
            index, words = _pop(words, bits)
            return first + index, words

        return loop(counts.sum(), take, words, state, diagonal)

    state = (jnp.full((queries,), NEG_INF), jnp.zeros((queries,)), *(jnp.zeros((queries, width)) for _ in slices))
    if mask_refs:
        window = LANES * WINDOW_BITS
        state = jax.lax.fori_loop(
            0, jax.lax.div(num_past + window - 1, window),
            lambda i, state: kept(i * window, num_past, WINDOW_BITS, state, diagonal=False), state,
        )  # fmt: skip
        state = kept(num_past, num_steps, 1, state, diagonal=True)
    else:

        def following(step: Array) -> tuple[Array, Array]:
            return step + 1, step + 1

        state = loop(num_past, following, jnp.int32(-1), state, diagonal=False)
        state = loop(num_steps - num_past, following, num_past - 1, state, diagonal=True)
    _, total, *acc = state
    share = jnp.where((row < count) & (total > 0.0), 1.0 / total, 0.0)
    for columns, a in zip(slices, acc, strict=True):
        store(out_ref.at[:, columns], a * share[:, None])


def _pop(words: Int[Array, "lanes"], bits: int) -> tuple[Int[Array, ""], Int[Array, "lanes"]]:
    """The index of the lowest bit set, `bits` to a word, and the words without it; one past the last if none is set."""
    lane = jnp.arange(LANES)
    lowest = 31 - jax.lax.clz(words & -words)
    index = jnp.where(words != 0, lane * bits + lowest, LANES * bits).min()
    return index, jnp.where(lane == index >> _log2(bits), words & (words - 1), words)


def _log2(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1

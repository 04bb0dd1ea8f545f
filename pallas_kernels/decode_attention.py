"""Block-sparse paged decode attention: one query token a sequence over the blocks that each KV head was given.

Maths: softmax(scale * q K^T) V over the first `num_valid` tokens of every block, with online softmax (Milakov and
Gimelshein, arXiv 1805.02867): a running maximum of the unscaled scores, the sum and the weighted values, all float32.

Layout: the pool is read as rows `[num_blocks * num_kv_heads * 2 * block_size, head_dim]`; block_size rows of K and as
many of V lie side by side, one (block, KV head). A program takes the whole query group of one KV head, so that keys and
values are read once for all of it, padded to 16, 32 or 64 rows for the tensor cores. Its loop takes a *unit* of blocks
a step (64 tokens, with large head_dim 32 or 16), gathers their rows and keeps the rows of the next steps in flight.

Long rows of blocks are split over programs (split-K, as in Flash-Decoding, Dao et al. 2023): with n splits, program s
takes units s, s + n, s + 2n, ... so that a row that ends early (a wide table of a dense layer) is shared evenly too,
and a program need only look at its own entries to know where its loop ends. The partial results are merged by plain XLA
operations: they compile to one kernel, as a Pallas kernel would be, and XLA puts the cast that follows into it as well.

A block that does not count costs its table entries and nothing else: its rows are masked, and a masked row is zeros
that were never loaded. So no content of such a row, not even NaN, reaches a result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from pallas_kernels.a100.target import NUM_SMS
from pallas_kernels.storage import from_storage
from pallas_kernels.support import check_supported
from pallas_kernels.triton import IN_PLACE, dot, kernel_call, load, store

NEG_INF = -1e30
"""Where the running maximum starts. Finite, while masked scores are -inf: a weight is then exp2(-inf) = 0, not NaN."""
MAX_PROGRAMS = 2 * NUM_SMS
"""Splits stop here: two programs an SM are resident whatever the shape, and more would only be a second wave."""
LONG_ROW_TOKENS = 8192
LONG_ROW_SPLITS = 4
"""A row of n times LONG_ROW_TOKENS is split n times, up to this, in any batch: dense layers have sequences of uneven
length, and a single program for each head of the longest would read at a fraction of the bandwidth once the others are
done (32 KiB a step of about 1 us: 35 GB/s a program)."""
MAX_PARTIAL_SHARE = 0.04
"""Of the selected blocks' bytes: what all splits together move besides (query and partial results)."""
STEP_BYTES = 32 * 1024
"""K and V of one step. With one more in flight behind it a program hides the latency of memory (32 KiB for each of 108
SMs are 4x the product of 1.56 TB/s and 0.6 us), and two programs fit an SM's shared memory."""
MAX_STEP_TOKENS = 64
"""Compiled for sm_80 at head_dim 128: 350 instructions a warp and step, a tenth of the cycles that its bytes take."""
SCAN = 4096
"""Table entries looked at together when a program looks for its last used unit."""


def decode_attention(
    q: Float[Array, "num_seqs num_q_heads head_dim"],
    pool: Num[Array, "num_blocks num_kv_heads 2 block_size head_dim"],
    block_ids: Int[Array, "num_seqs num_kv_heads num_selected"],
    num_valid: Int[Array, "num_seqs num_kv_heads num_selected"],
    query_mask: Bool[Array, "num_seqs num_kv_heads group num_selected"] | None,
    *,
    scale: float,
    kv_scales: Float32[Array, "num_blocks num_kv_heads 2"] | None = None,
    interpret: bool,
) -> Float32[Array, "num_seqs num_q_heads head_dim"]:
    """Same meaning as `reference.decode_attention`.

    Args:
        num_valid: how many tokens of each block count; 0 = the block is not read, whatever its id.
        query_mask: which query heads of the group attend to a block; None = all.
        kv_scales: of an int8 pool: a value is its integer times the scale of its (block, KV head, K or V).

    Raises:
        NotImplementedError: no kernel for the shape or dtype.
    """
    num_seqs, num_q_heads, head_dim = q.shape
    _, num_kv_heads, _, block_size, _ = pool.shape
    num_selected = block_ids.shape[-1]
    group = num_q_heads // num_kv_heads
    check_supported("decode_attention", head_dim=head_dim, block_size=block_size, dtype=pool.dtype, group=group)
    assert (kv_scales is not None) == (pool.dtype == jnp.int8), "int8 pools, and only these, have scales"
    if pool.dtype == jnp.int8 and 2**31 < pool.size <= 2**32:
        # Pallas counts bytes, up to 2**32, to choose 32-bit offsets, but these are signed and count elements.
        raise NotImplementedError(
            f"decode_attention: an int8 pool of {pool.size} bytes; supported: up to {2**31} or more than {2**32} bytes"
        )
    splits = num_splits(
        num_seqs=num_seqs, num_kv_heads=num_kv_heads, group=group, num_selected=num_selected,
        block_size=block_size, head_dim=head_dim, dtype=pool.dtype,
    )  # fmt: skip

    arrays = [q.reshape(num_seqs, num_kv_heads, group, head_dim), pool.reshape(-1, head_dim), block_ids, num_valid]
    table = pl.BlockSpec((None, None, num_selected), lambda seq, head, split: (seq, head, 0))
    whole_group = pl.BlockSpec((None, None, group, head_dim), lambda seq, head, split: (seq, head, 0, 0))
    in_specs = [whole_group, IN_PLACE, table, table]
    if query_mask is not None:
        arrays.append(query_mask)
        in_specs.append(pl.BlockSpec((None, None, group, num_selected), lambda seq, head, split: (seq, head, 0, 0)))
    if kv_scales is not None:
        arrays.append(kv_scales.reshape(-1))
        in_specs.append(IN_PLACE)
    if splits == 1:
        out_specs = whole_group
        out_shape = jax.ShapeDtypeStruct((num_seqs, num_kv_heads, group, head_dim), jnp.float32)
    else:
        statistic = pl.BlockSpec((None, None, group, None), lambda seq, head, split: (seq, head, 0, split))
        out_specs = [
            pl.BlockSpec((None, None, group, None, head_dim), lambda seq, head, split: (seq, head, 0, split, 0)),
            statistic,
            statistic,
        ]
        shape = (num_seqs, num_kv_heads, group, splits)
        out_shape = [jax.ShapeDtypeStruct((*shape, *last), jnp.float32) for last in ((head_dim,), (), ())]

    tiling = _tiling(group, block_size, head_dim, pool.dtype)
    exponent = scale * math.log2(math.e)
    out = kernel_call(
        functools.partial(
            _attend, tiling=tiling, splits=splits, exponent=exponent, block_size=block_size,
            has_mask=query_mask is not None, has_scales=kv_scales is not None,
        ),
        *arrays,
        name="decode_attention", grid=(num_seqs, num_kv_heads, splits),
        in_specs=in_specs, out_specs=out_specs, out_shape=out_shape,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, interpret=interpret,
    )  # fmt: skip
    if splits > 1:
        acc, maximum, total = out
        out = _merge_splits(acc, maximum, total, exponent)
    return out.reshape(q.shape)


def num_splits(
    *,
    num_seqs: int,
    num_kv_heads: int,
    group: int,
    num_selected: int,
    block_size: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> int:
    """Programs that share the blocks of one (sequence, KV head): at least 1.

    As many as run at once (MAX_PROGRAMS in all; for long rows, LONG_ROW_SPLITS anyway), but no more than keep the
    partial results within MAX_PARTIAL_SHARE of the selected blocks' bytes, nor than shorten the longest program.
    """
    block_bytes = 2 * block_size * head_dim * jnp.dtype(dtype).itemsize
    # The query, and values, maximum and sum in float32, written and read again.
    partial_bytes = group * (head_dim * 2 + 2 * (head_dim + 2) * 4)
    splits = min(
        max(
            MAX_PROGRAMS // (num_seqs * num_kv_heads),
            min(LONG_ROW_SPLITS, num_selected * block_size // LONG_ROW_TOKENS),
        ),
        int(MAX_PARTIAL_SHARE * num_selected * block_bytes / partial_bytes),
    )
    units = pl.cdiv(num_selected, _tiling(group, block_size, head_dim, dtype).blocks)
    return pl.cdiv(units, pl.cdiv(units, max(splits, 1)))


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How a program takes its blocks.

    Attributes:
        rows: query heads of the group, padded.
        tokens: of one step.
        blocks: of one unit.
        steps: of one unit; more than one only where a block is larger than a step, and then `blocks` is 1.
    """

    rows: int
    tokens: int
    blocks: int
    steps: int
    num_warps: int
    num_stages: int


def _tiling(group: int, block_size: int, head_dim: int, dtype: jnp.dtype) -> _Tiling:
    row_bytes = 2 * head_dim * jnp.dtype(dtype).itemsize
    rows = max(16, pl.next_power_of_2(group))
    large = dtype == jnp.float32 or rows > 32  # multiplied without tensor cores, or with large operands
    tokens = min(MAX_STEP_TOKENS, (STEP_BYTES // 2 if large else STEP_BYTES) // row_bytes)
    return _Tiling(
        rows=rows,
        tokens=tokens,
        blocks=max(1, tokens // block_size),
        steps=max(1, block_size // tokens),
        num_warps=8 if large else 4,
        num_stages=3 if tokens * row_bytes == STEP_BYTES else 4,
    )


def _attend(
    q_ref: Any,  # [group, head_dim]
    pool_ref: Any,  # [num_blocks * num_kv_heads * 2 * block_size, head_dim]
    ids_ref: Any,  # [num_selected]
    valid_ref: Any,  # [num_selected]
    *refs: Any,
    tiling: _Tiling,
    splits: int,
    exponent: float,
    block_size: int,
    has_mask: bool,
    has_scales: bool,
) -> None:
    more = iter(refs)
    mask_ref = next(more) if has_mask else None  # [group, num_selected]
    scales_ref = next(more) if has_scales else None  # [num_blocks * num_kv_heads * 2]
    out_ref, *statistics = more  # [group, head_dim]; [group] each: maximum and sum
    (group, head_dim), (num_selected,) = q_ref.shape, ids_ref.shape
    head, num_kv_heads, split = pl.program_id(1), pl.num_programs(1), pl.program_id(2)
    compute_dtype = jnp.float32 if pool_ref.dtype == jnp.float32 else jnp.bfloat16

    rows, columns, tokens = jnp.arange(tiling.rows), jnp.arange(head_dim)[None, :], jnp.arange(tiling.tokens)
    real = rows < group

    def fetch(step: Array) -> tuple[tuple[Array, ...], ...]:
        """(id, valid tokens, query mask) of every block of a step. Scalars, a step ahead: loads of K and V that hang on
        loads of the same step would not be pipelined deep enough."""
        first = ((step >> _log2(tiling.steps)) * splits + split) * tiling.blocks
        blocks = []
        for index in range(tiling.blocks):
            inside = first + index < num_selected
            entry = [load(ref.at[first + index], mask=inside, other=0) for ref in (ids_ref, valid_ref)]
            if mask_ref is not None:
                entry.append(load(mask_ref.at[rows, first + index], mask=real & inside, other=False))
            blocks.append(tuple(entry))
        return tuple(blocks)

    def by_token(values: list[Array]) -> Array:
        """One value (or column `[rows, 1]`) a block, repeated for each of its tokens."""
        out = values[0]
        for index in range(1, tiling.blocks):
            out = jnp.where(tokens >> _log2(block_size) >= index, values[index], out)
        return out

    def attend(step: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        acc, maximum, total, blocks = carry
        following = fetch(step + 1)
        offsets = (
            tokens & (block_size - 1) if tiling.steps == 1 else (step & (tiling.steps - 1)) * tiling.tokens + tokens
        )
        exists = offsets < by_token([entry[1] for entry in blocks])
        half = jnp.broadcast_to((by_token([entry[0] for entry in blocks]) * num_kv_heads + head) * 2, tokens.shape)
        where = (half * block_size + offsets)[:, None]

        k = load(pool_ref.at[where, columns], mask=exists[:, None], other=0)
        s = dot(q, from_storage(k).astype(compute_dtype), trans_b=True)  # [rows, tokens]
        if scales_ref is not None:
            s = s * load(scales_ref.at[half], mask=exists, other=0.0, repeats=block_size)[None, :]
        seen = exists[None, :]
        if mask_ref is not None:
            seen = seen & by_token([entry[2][:, None] for entry in blocks])
        s = jnp.where(seen, s, -jnp.inf)

        new_maximum = jnp.maximum(maximum, s.max(axis=1))
        p = jnp.exp2((s - new_maximum[:, None]) * exponent)
        alpha = jnp.exp2((maximum - new_maximum) * exponent)[:, None]
        total = total * alpha + p
        if scales_ref is not None:
            p = p * load(scales_ref.at[half + 1], mask=exists, other=0.0, repeats=block_size)[None, :]
        v = load(pool_ref.at[where + block_size, columns], mask=exists[:, None], other=0)
        acc = acc * alpha + dot(p.astype(compute_dtype), from_storage(v).astype(compute_dtype))
        return acc, new_maximum, total, following

    first_blocks = fetch(jnp.int32(0))  # before the scan, so that both wait for memory together
    q = load(q_ref.at[rows[:, None], columns], mask=real[:, None], other=0.0).astype(compute_dtype)
    carry = (
        jnp.zeros((tiling.rows, head_dim), jnp.float32),
        jnp.full((tiling.rows,), NEG_INF),
        jnp.zeros(
            (tiling.rows, tiling.tokens), jnp.float32
        ),  # summed over tokens, that is across warps, only at the end
        first_blocks,
    )
    num_steps = _last_used_unit(valid_ref, split, splits, tiling.blocks) * tiling.steps
    acc, maximum, total, _ = jax.lax.fori_loop(0, num_steps, attend, carry)
    total = total.sum(axis=1)
    if statistics:
        max_ref, sum_ref = statistics
        store(out_ref.at[rows[:, None], columns], acc, mask=(real & (total > 0))[:, None])
        store(max_ref.at[rows], maximum, mask=real)
        store(sum_ref.at[rows], total, mask=real)
    else:
        acc = acc / jnp.where(total == 0, 1.0, total)[:, None]
        store(out_ref.at[rows[:, None], columns], acc, mask=real[:, None])


def _last_used_unit(valid_ref: Any, split: Array, splits: int, blocks: int) -> Array:
    """How many units, counted along this program's own, there are up to the last with a token."""
    (num_selected,) = valid_ref.shape
    num_entries = pl.cdiv(pl.cdiv(num_selected, blocks), splits) * blocks
    size = min(SCAN, pl.next_power_of_2(num_entries))

    def look(index: Array, last: Array) -> Array:
        entry = index * size + jnp.arange(size)
        unit = entry >> _log2(blocks)
        place = (unit * splits + split) * blocks + (entry & (blocks - 1))
        counts = load(valid_ref.at[place], mask=place < num_selected, other=0)
        return jnp.where(counts > 0, unit + 1, last)

    nothing = jnp.zeros((size,), jnp.int32)
    if num_entries <= size:
        return look(jnp.int32(0), nothing).max()
    return jax.lax.fori_loop(0, pl.cdiv(num_entries, size), look, nothing).max()


def _merge_splits(
    acc: Float32[Array, "num_seqs num_kv_heads group splits head_dim"],
    maximum: Float32[Array, "num_seqs num_kv_heads group splits"],
    total: Float32[Array, "num_seqs num_kv_heads group splits"],
    exponent: float,
) -> Float32[Array, "num_seqs num_kv_heads group head_dim"]:
    """The splits' results as one. Where `total` is 0 a split saw nothing, and its `acc` was never written."""
    weights = jnp.exp2((maximum - maximum.max(axis=-1, keepdims=True)) * exponent)
    merged = (jnp.where(total[..., None] > 0, acc, 0.0) * weights[..., None]).sum(axis=-2)
    total = (total * weights).sum(axis=-1)
    return merged / jnp.where(total == 0, 1.0, total)[..., None]


def _log2(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1

"""The shapes that programs are compiled for. Everything else is padded up to one of them."""

from __future__ import annotations

from pallas_kernels.reference import PREFILL_TILE
from sparseserve_jax.cache.layout import MAX_PACKED_PROMPTS

MIN_DECODE_SEQS = 2
"""XLA's CPU backend multiplies a one-row bfloat16 matrix 13 times slower than a two-row one."""
DETERMINISTIC_SEQS = 8
MIN_TABLE_BLOCKS = 64


def decode_seq_buckets(max_num_seqs: int, *, deterministic: bool) -> tuple[int, ...]:
    """Batch sizes of the decode step: 2, 8, 16, 32, ... and `max_num_seqs`.

    If `deterministic`, one: larger batches run as several of it, so that a sequence's arithmetic is always the same.
    """
    if deterministic:
        return (DETERMINISTIC_SEQS,)
    top = max(max_num_seqs, MIN_DECODE_SEQS)
    sizes = [size for size in (MIN_DECODE_SEQS, *(8 << i for i in range(12))) if size < top]
    return (*sizes, top)


def table_buckets(max_blocks: int, *, deterministic: bool) -> tuple[int, ...]:
    """Widths of block tables, in steps of 4 (only scoring grows with the width; attention stops at the context)."""
    if deterministic:
        return (max_blocks,)
    sizes, size = [], MIN_TABLE_BLOCKS
    while size < max_blocks:
        sizes.append(size)
        size *= 4
    return (*sizes, max_blocks)


def prefill_token_buckets(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Tokens of a prefill call: powers of two from one tile on."""
    sizes, size = [], PREFILL_TILE
    while size <= max_num_batched_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sizes)


def copy_buckets(max_blocks: int) -> tuple[int, ...]:
    """Blocks of one load: 16, 64, 256, ... and `max_blocks`."""
    sizes, size = [], 16
    while size < max_blocks:
        sizes.append(size)
        size *= 4
    return (*sizes, max_blocks)


def bucket_for(value: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `value`."""
    for size in buckets:
        if value <= size:
            return size
    raise AssertionError(f"{value} is over the largest bucket {buckets[-1]}")


NUM_PREFILL_PROMPTS = MAX_PACKED_PROMPTS
"""Prompts of one prefill call, and so rows of the logits that complete prompts."""

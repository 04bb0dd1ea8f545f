"""Choosing the best ranked blocks of every head: a selection, not a sort.

float32 ranks become int32 keys of the same order, and bisection over the keys finds the num_selected-th largest: each
step counts the keys at or above a threshold (radix select, one bit at a time, as keys stay in registers; Alabi et al.,
"Fast k-selection algorithms for graphics processing units", 2012). It ends as soon as a threshold has exactly
num_selected keys above it: after 14 steps on average for 64 of 256 to 4,096 random softmax weights, after 32 at most.
A prefix sum over what is chosen is its place in the output, so ids come out ascending with nothing sorted, and of equal
ranks the first few.

One program a (sequence, head) while a row fits in registers, `CHUNK` ranks. A longer row is cut into chunks: the best
of each chunk, by the same kernel, are the candidates of another pass (any block among the best of the row, ties
included, is among the best of its chunk).

Of top_k and sort, 64 of a row for 8 x 8 rows, XLA makes 4 kernels at 1,024 and 4,096 blocks, which sort whole rows with
their indices: 3 times the bytes of the ranks move. At 32,768 blocks it makes 13, which pass over 16 MiB ten times
(compiled without a GPU, where it cannot take CUB's sort). Here it is one kernel that reads ranks once and writes ids,
and at 32,768 two that also pass 128 KiB of candidates.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.triton import IN_PLACE, kernel_call, load, store

CHUNK = 4096
"""Ranks that one program selects from: 16 registers of each of 256 threads."""
KEYS_PER_THREAD = 16
MAX_CHUNKED_SELECTION = CHUNK // 2
"""More than this from a longer row than `CHUNK`, and a pass would not leave half as many candidates."""
NEVER = jnp.iinfo(jnp.int32).min
"""The key of what is not to be chosen."""


def select_blocks(
    ranks: Float[Array, "num_seqs num_select_heads max_blocks"], *, num_selected: int, interpret: bool
) -> Int[Array, "num_seqs num_select_heads num_selected"]:
    """The ids of the best ranked blocks, ascending, -1 after the last; a rank of -inf is never chosen.

    Ties go to the lower id. Where no more than `num_selected` ranks are above -inf, all of those are chosen.

    Raises:
        NotImplementedError: more than MAX_CHUNKED_SELECTION of a row longer than CHUNK.
    """
    num_seqs, num_heads, width = ranks.shape
    if width > CHUNK and num_selected > MAX_CHUNKED_SELECTION:
        raise NotImplementedError(
            f"select_blocks: no Pallas kernel for {num_selected} of {width} blocks; supported: up to "
            f"{MAX_CHUNKED_SELECTION} of more than {CHUNK}. implementation='reference' runs every shape"
        )
    candidates = []
    while True:
        chunk = min(CHUNK, pl.next_power_of_2(width))
        num_chunks = pl.cdiv(width, chunk)
        out = jax.ShapeDtypeStruct((num_seqs, num_heads, num_chunks * num_selected), jnp.int32)
        (chosen,) = kernel_call(
            functools.partial(_select, chunk=chunk, width=width, num_selected=num_selected), ranks, *candidates,
            name="select_blocks", grid=(num_chunks, num_heads, num_seqs), in_specs=[IN_PLACE] * (1 + len(candidates)),
            out_specs=[IN_PLACE], out_shape=[out], num_warps=max(1, chunk // (32 * KEYS_PER_THREAD)),
            interpret=interpret,
        )  # fmt: skip
        if num_chunks == 1:
            return chosen
        candidates, width = [chosen], chosen.shape[-1]


def _select(
    ranks_ref: Any,  # [num_seqs, num_heads, max_blocks]
    *refs: Any,  # candidates, if they are not all blocks: [num_seqs, num_heads, width], -1 = none; chosen (output)
    chunk: int,
    width: int,
    num_selected: int,
) -> None:
    *candidates_ref, chosen_ref = refs  # chosen: [num_seqs, num_heads, num_chunks * num_selected]
    part, head, seq = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    ids = part * chunk + jnp.arange(chunk)
    exists = ids < width
    if candidates_ref:
        ids = load(candidates_ref[0].at[seq, head, ids], mask=exists, other=-1)
        exists = ids >= 0
    ranks = load(ranks_ref.at[seq, head, ids], mask=exists, other=-jnp.inf)
    chosen, place, count = choose_largest(_ordered_keys(ranks), jnp.int32(num_selected))
    start, end = part * num_selected, chosen_ref.shape[2]
    store(chosen_ref.at[seq, head, jnp.where(chosen, start + place, end)], ids, mask=chosen)
    places = jnp.arange(pl.next_power_of_2(num_selected))
    unused = (places >= count) & (places < num_selected)
    nothing = jnp.full(places.shape, -1, jnp.int32)
    store(chosen_ref.at[seq, head, jnp.where(unused, start + places, end)], nothing, mask=unused)


def _ordered_keys(ranks: Float[Array, "_"]) -> Int[Array, "_"]:
    """int32 in the order of the floats: the bits, the lower 31 inverted where negative. -0 is 0, -inf is NEVER."""
    bits = jax.lax.bitcast_convert_type(jnp.where(ranks == 0.0, 0.0, ranks), jnp.int32)
    keys = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
    return jnp.where(ranks == -jnp.inf, NEVER, keys)


def choose_largest(keys: Int[Array, "_"], num_wanted: Int[Array, ""]) -> tuple[Bool[Array, "_"], Array, Array]:
    """In a kernel: which keys are among the `num_wanted` largest, ties to the first; keys of NEVER never are.

    Args:
        keys: less than the largest int32, and fewer than 2**15.

    Returns:
        whether each is chosen, how many chosen ones there are before it, and how many there are.
    """

    def count(threshold: Array) -> Array:
        return (keys >= threshold).astype(jnp.int32).sum()

    def too_many(state: tuple[Array, Array, Array]) -> Array:
        low, high, num_from_low = state
        return (num_from_low > num_wanted) & (low + 1 < high)

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, num_from_low = state  # more than num_wanted keys from low on, fewer from high on
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        num_from_middle = count(middle)
        enough = num_from_middle >= num_wanted
        return (
            jnp.where(enough, middle, low),
            jnp.where(enough, high, middle),
            jnp.where(enough, num_from_middle, num_from_low),
        )

    lowest = jnp.where(keys == NEVER, jnp.iinfo(jnp.int32).max, keys).min()
    lowest = jnp.where(num_wanted > 0, lowest, keys.max())  # nothing wanted (no misses): nothing to look for
    low, _, num_from_low = jax.lax.while_loop(too_many, halve, (lowest, keys.max() + 1, count(lowest)))
    above, equal = keys > low, keys == low
    num_equal_wanted = num_wanted - above.astype(jnp.int32).sum()
    both = jnp.cumsum((above.astype(jnp.int32) << 16) + equal.astype(jnp.int32))  # two prefix sums in one
    equal_so_far = both & 0xFFFF
    chosen = above | (equal & (equal_so_far <= num_equal_wanted))
    through = (both >> 16) + jnp.minimum(equal_so_far, num_equal_wanted)
    return chosen, through - 1, jnp.minimum(num_from_low, num_wanted)

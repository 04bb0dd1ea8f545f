"""An int8 pool: what appending stores, to the last integer, and what attention makes of it.

Expected integers and scales come from NumPy loops of this file, one rule after the other; attention is compared with
`oracle` on the values that the pool stands for, and with the values before quantisation within what the scales allow.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.api import get_kernels
from pallas_kernels.reference import PREFILL_TILE
from tests.pallas_kernels import oracle
from tests.pallas_kernels.test_conformance import (
    NO_LIBRARY,
    PLATFORM,
    SHAPES,
    Shape,
    assert_close,
    assert_digests,
    assert_not_close,
    call,
    exact,
    floats,
    prefill_case,
    seeds,
    stored,
)

IMPLEMENTATIONS = ("reference", pytest.param("cpu", marks=NO_LIBRARY))
all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
all_shapes = pytest.mark.parametrize("shape", (*SHAPES[:4], Shape(2, 2, 8, 16, 36)), ids=str)
few_examples = settings(max_examples=4, deadline=None, derandomize=True)
F32 = np.float32


def scale_of(values):
    return F32(np.abs(values).max(initial=0)) * F32(1 / 127)


def quantised(values, scale, older=1.0):
    """Integers of float32 values (or of integers whose scale was `older`); numpy rounds to even, as it should."""
    factor = F32(0) if scale == 0 else F32(older) / scale
    return np.clip(np.round(values.astype(F32) * factor), -127, 127).astype(np.int8)


def values_of(pool, scales):
    """What the pool stands for, in float64."""
    return pool.astype(np.float64) * scales[..., None, None].astype(np.float64)


def int8_state(rng, shape, num_blocks):
    """A pool and scales of blocks that have other owners."""
    pool = rng.integers(-127, 128, (num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim), np.int8)
    return pool, rng.uniform(0.01, 0.1, pool.shape[:3]).astype(F32)


def values(rng, *size, dtype):
    """Values whose magnitudes differ by channel, as those of keys do."""
    return exact(rng.normal(size=size) * np.exp(rng.normal(size=size[-1])) / 16, dtype)


@all_implementations
@all_dtypes
@all_shapes
@few_examples
@given(seed=seeds)
def test_append_blocks(implementation, dtype, shape, seed):
    rng = np.random.default_rng(seed)
    size = shape.block_size
    pool, scales = int8_state(rng, shape, 9)
    blocks = values(rng, 5, shape.num_kv_heads, 2, size, shape.head_dim, dtype=dtype)
    ids, digest_ids = np.array([3, 1, 7, 5, 0]), np.array([6, 2, 4, 1, 0])
    num_valid = np.array([1, size, size - 1, rng.integers(1, size), 0])
    for block, count in enumerate(num_valid):
        blocks[block, :, :, count:] = np.nan
    blocks[1, :, 1] = 0  # a scale of zero
    digests = rng.normal(size=(8, shape.num_kv_heads, 2, shape.head_dim)).astype(F32)
    args = (pool, digests, stored(blocks, dtype), ids, num_valid, digest_ids, scales)
    out, out_digests, out_scales = call(implementation, "append_blocks", *args, method="cuboid-mean")
    expected, expected_scales = pool.copy(), scales.copy()
    for block, count in enumerate(num_valid[:4]):
        for head, half in np.ndindex(shape.num_kv_heads, 2):
            content = blocks[block, head, half, :count]
            scale = expected_scales[ids[block], head, half] = scale_of(content)
            expected[ids[block], head, half] = 0
            expected[ids[block], head, half, :count] = quantised(content, scale)
    np.testing.assert_array_equal(out[1:], expected[1:])
    np.testing.assert_array_equal(out_scales[1:], expected_scales[1:])
    error = np.abs(values_of(out, out_scales)[ids[:4]] - blocks[:4])
    assert (error <= 0.5001 * out_scales[ids[:4]][..., None, None])[~np.isnan(error)].all()
    keys = values_of(out, out_scales)[ids[:4], :, 0]
    assert_digests(out_digests, digest_ids[:4], *oracle.block_digests(keys, num_valid[:4], "cuboid-mean"), "float32")
    assert not out_digests[0].any()
    untouched = np.setdiff1d(np.arange(8), digest_ids)
    np.testing.assert_array_equal(out_digests[untouched], digests[untouched])
    plain, none, _ = call(implementation, "append_blocks", pool, None, *args[2:], method="cuboid-mean")
    assert none is None
    np.testing.assert_array_equal(plain[1:], out[1:])


@all_implementations
@all_dtypes
@all_shapes
@pytest.mark.parametrize("method", ["cuboid-mean", "quest", "mean"])
def test_append_tokens(implementation, dtype, shape, method):
    """A block filled token by token, beside a row of padding; what its older owner left must not show."""
    rng = np.random.default_rng(0)
    heads, size, width = shape.num_kv_heads, shape.block_size, shape.head_dim
    pool, scales = int8_state(rng, shape, 5)
    digests = np.zeros((5, heads, 2, width), F32)
    ids = np.stack([1 + rng.permutation(4)[:heads] if heads < 4 else rng.integers(1, 5, heads), np.zeros(heads, int)])
    tokens = values(rng, size, 2, heads, width, dtype=dtype)
    tokens[size // 2] *= 4  # raises every scale late
    expected, expected_scales, num_raised = pool.copy(), scales.copy(), 0
    for count, kv in enumerate(tokens):
        k, v = (np.stack([half, np.full_like(half, np.nan)]) for half in kv)
        args = (floats(k, dtype), floats(v, dtype), ids, np.array([count + 1, 0]), np.array([3, 0]))
        pool, digests, scales = call(implementation, "append_tokens", pool, digests, *args, scales, method=method)
        for head, half in np.ndindex(heads, 2):
            where = ids[0, head], head, half
            older = expected_scales[where] if count else F32(0)
            scale = expected_scales[where] = max(older, scale_of(kv[half, head]))
            if scale > older and count:
                expected[where][:count] = quantised(expected[where][:count], scale, older)
                num_raised += 1
            expected[where][count] = quantised(kv[half, head], scale)
        np.testing.assert_array_equal(pool[1:], expected[1:])
        np.testing.assert_array_equal(scales[1:], expected_scales[1:])
        keys = values_of(pool, scales)[ids[0], np.arange(heads), 0][None]
        assert_digests(digests, np.array([3]), *oracle.block_digests(keys, [count + 1], method), "float32")
    assert num_raised >= 2 * heads
    error = np.abs(values_of(pool, scales)[ids[0], np.arange(heads)].transpose(2, 1, 0, 3) - tokens)
    by = scales[ids[0], np.arange(heads)].T[None, ..., None]
    assert (error <= 0.5001 * by * (1 + num_raised)).all()
    assert (error > 0.5001 * by).any(), "rounding twice did not show: the bound above was not tried"


@all_implementations
def test_appending_is_in_place(implementation):
    shape, rng = SHAPES[1], np.random.default_rng(0)
    kernels = get_kernels(implementation, PLATFORM)
    pool, scales = (jax.jit(jnp.copy)(a).block_until_ready() for a in int8_state(rng, shape, 9))
    blocks = jnp.asarray(stored(rng.normal(size=(2, *pool.shape[1:])), "bfloat16"))
    token = jnp.ones((2, shape.num_kv_heads, shape.head_dim), jnp.bfloat16)
    ids, num_valid = jnp.array([3, 4]), jnp.array([1, 6])
    every_head = jnp.broadcast_to(ids[:, None], token.shape[:2])
    for op, *args in (
        (kernels.append_blocks, blocks, ids, num_valid, ids),
        (kernels.append_tokens, token, token, every_head, num_valid, ids),
    ):
        before, addresses = (pool, scales), [a.unsafe_buffer_pointer() for a in (pool, scales)]
        donating = jax.jit(functools.partial(op, method="quest"), donate_argnames=("pool", "kv_scales"))
        pool, _, scales = jax.block_until_ready(donating(pool, None, *args, kv_scales=scales))
        assert all(array.is_deleted() for array in before)
        assert [a.unsafe_buffer_pointer() for a in (pool, scales)] == addresses


# --- attention -------------------------------------------------------------------------------------------------------


def append_prompt(implementation, shape, rng, num_tokens):
    """A prompt as blocks, then 20 tokens one at a time; the pool, its scales, the table and the values that went in."""
    size, heads = shape.block_size, shape.num_kv_heads
    num_blocks = -(-(num_tokens + 20) // size)
    pool = np.full((num_blocks + 1, heads, 2, size, shape.head_dim), 127, np.int8)
    scales = np.full(pool.shape[:3], np.nan, F32)
    kv = values(rng, num_tokens + 20, 2, heads, shape.head_dim, dtype="bfloat16")
    padded = np.full((num_blocks * size, *kv.shape[1:]), np.nan)
    padded[:num_tokens] = kv[:num_tokens]
    blocks = padded.reshape(num_blocks, size, 2, heads, shape.head_dim).transpose(0, 3, 2, 1, 4)
    table = 1 + rng.permutation(num_blocks)
    counts = np.clip(num_tokens - np.arange(num_blocks) * size, 0, size)
    pool, _, scales = call(
        implementation, "append_blocks", pool, None, stored(blocks, "bfloat16"), np.where(counts, table, 0), counts,
        table, scales, method="mean",
    )  # fmt: skip
    for position in range(num_tokens, num_tokens + 20):
        k, v = floats(kv[position], "bfloat16")[:, None]
        where = np.full((1, heads), table[position // size])
        args = (k, v, where, np.array([position % size + 1]), np.array([1]))
        pool, _, scales = call(implementation, "append_tokens", pool, None, *args, scales, method="mean")
    whole = np.full((num_blocks + 1, heads, 2, size, shape.head_dim), np.nan)
    padded[: len(kv)] = kv
    whole[table] = padded.reshape(num_blocks, size, 2, heads, shape.head_dim).transpose(0, 3, 2, 1, 4)
    return pool, scales, table, whole


@all_implementations
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_append_then_attend(implementation, shape):
    """Against what is stored: the tolerance of bfloat16. Against what went in: an error of some steps of the scale."""
    rng, num_tokens = np.random.default_rng(0), 100
    pool, scales, table, whole = append_prompt(implementation, shape, rng, num_tokens)
    q = exact(8 * rng.normal(size=(1, shape.num_kv_heads * shape.group, shape.head_dim)), "bfloat16")
    counts = np.clip(num_tokens + 20 - np.arange(len(table)) * shape.block_size, 0, shape.block_size)
    ids, counts = (np.broadcast_to(a, (1, shape.num_kv_heads, len(table))) for a in (table, counts))
    arrays = (floats(q, "bfloat16"), pool, ids, counts, None)
    op = functools.partial(get_kernels(implementation, PLATFORM).decode_attention, scale=shape.scale)
    out = np.asarray(jax.jit(op)(*(None if a is None else jnp.asarray(a) for a in arrays), kv_scales=scales))
    seen = oracle.decode_attention(q, np.nan_to_num(values_of(pool, scales)), ids, counts, None, shape.scale)
    assert_close(out, seen, "bfloat16", "attention")
    original = oracle.decode_attention(q, whole, ids, counts, None, shape.scale)
    # Errors of values are up to half a step of the scale (one and a half where they were rounded again), those of
    # scores as large a part of |q|; they differ from token to token, so that of an average is smaller than a step.
    steps = np.nanmax(scales[1:], axis=0).repeat(shape.group, axis=0)  # [query heads, K | V]
    error_of_scores = steps[:, 0] * np.linalg.norm(q[0], axis=1) * shape.scale
    bound = steps[:, 1] + error_of_scores * np.abs(original[0]).max(axis=1)
    assert (np.abs(out - original)[0].max(axis=1) < bound).all()
    swapped = oracle.decode_attention(q, whole[:, :, ::-1], ids, counts, None, shape.scale)
    assert (np.abs(out - swapped)[0].max(axis=1) > bound).any()


@all_implementations
@pytest.mark.parametrize("shape", [Shape(3, 1, 3, 16, 32), Shape(3, 2, 4, 32, 64), Shape(3, 1, 7, 64, 128)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "tile_mask"])
def test_prefill_attention(implementation, shape, masked):
    """Packed prompts with earlier tokens; what no token owns is the largest integer with a scale of NaN."""
    case = prefill_case(shape, "bfloat16", 1, ((576, 130), (0, 128), (512, 1)))
    rng = np.random.default_rng(1)
    nothing = np.isnan(case.pool)
    pool = np.where(nothing, 127, rng.integers(-127, 128, case.pool.shape)).astype(np.int8)
    scales = np.where(nothing.all(axis=(3, 4)), np.nan, rng.uniform(0.005, 0.02, pool.shape[:3])).astype(F32)
    case.pool = values_of(pool, scales)
    if masked:
        key_tiles = -(-case.block_tables.shape[1] * shape.block_size // PREFILL_TILE)
        case.tile_mask = rng.random((case.num_tiles, case.q.shape[1], key_tiles)) < 0.5
    q, _, *where = case.arrays("bfloat16")
    op = functools.partial(get_kernels(implementation, PLATFORM).prefill_attention, scale=shape.scale)
    ready = [a if a is None or a.dtype != np.int64 else a.astype(np.int32) for a in where]

    def run(scales):
        return np.asarray(jax.jit(op)(q, pool, *ready, kv_scales=scales))

    # The pool's values are rounded to bfloat16 as they are multiplied.
    case.pool = case.pool.astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = case.expected(shape.scale)
    assert_close(run(scales), expected, "bfloat16", "attention")
    assert_not_close(run(scales[..., ::-1]), expected, "bfloat16", "attention")

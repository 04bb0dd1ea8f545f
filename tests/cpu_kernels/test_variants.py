"""Every library that this CPU can run computes the same: a part of the conformance suite for each instruction set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import loader, ops
from pallas_kernels import reference
from tests.pallas_kernels import oracle
from tests.pallas_kernels.test_conformance import (
    Shape,
    assert_close,
    assert_digests,
    decode_case,
    exact,
    floats,
    loaded,
    random_pool,
    score_case,
    stored,
)

BUILT = loader.available()
if not BUILT:
    pytest.skip("no native kernels were built for this CPU", allow_module_level=True)

# Whole vectors of every instruction set, none of any, and both; groups of one pass and of two; with AMX, more
# dimensions than there are tiles for, and a block that is more than a chunk.
SHAPES = (
    Shape(3, 2, 3, 32, 64),
    Shape(2, 1, 5, 16, 24),
    Shape(2, 2, 8, 16, 36),
    Shape(2, 1, 4, 64, 128, num_selected=3),
    Shape(2, 1, 7, 16, 160, num_selected=3),
    Shape(2, 1, 8, 320, 32, num_selected=2),
)
DTYPES = ("float32", "bfloat16")
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.fixture(params=BUILT, autouse=True)
def variant(request, monkeypatch):
    """The library that `ops` calls in a test."""
    monkeypatch.setattr(loader, "in_force", lambda: loader.load(request.param))
    return request.param


@pytest.fixture(params=[True, False], ids=["", "no_amx"])
def allow_amx(request, variant):
    """Whether AMX may be used, where a library would."""
    if not request.param and not loader.load(variant).has_amx:
        pytest.skip("this library does not use AMX here")
    return request.param


def call(op, *arrays, **fixed):
    ready = [a.astype(np.int32) if isinstance(a, np.ndarray) and a.dtype == np.int64 else a for a in arrays]
    return jax.tree.map(np.asarray, jax.jit(functools.partial(op, **fixed))(*ready))


def test_a_library_has_its_own_operations(variant):
    assert loader.target("decode_attention") == f"sparseserve_decode_attention_{variant}"


@all_dtypes
@all_shapes
@pytest.mark.parametrize("masked", [False, True], ids=["", "query_mask"])
def test_decode_attention(dtype, shape, masked, allow_amx):
    case = decode_case(shape, dtype, 0, ["some tokens", "everything", "nothing"], masked)
    arrays = (floats(case.q, dtype), stored(case.pool, dtype), case.block_ids, case.num_valid, case.query_mask)
    out = call(ops.decode_attention, *arrays, scale=shape.scale, allow_amx=allow_amx)
    assert_close(out, case.expected(shape.scale), dtype, "attention")


@all_shapes
def test_decode_attention_of_an_int8_pool(shape):
    rng = np.random.default_rng(0)
    case = decode_case(shape, "bfloat16", 0, ["everything", "some tokens", "one token"])
    values = rng.integers(-127, 128, case.pool.shape)
    scales = np.abs(rng.normal(size=case.pool.shape[:3])).astype(np.float32) / 100
    case.pool = values * scales[..., None, None].astype(np.float64)
    arrays = (floats(case.q, "bfloat16"), values.astype(np.int8), case.block_ids, case.num_valid, None)
    op = functools.partial(ops.decode_attention, scale=shape.scale)
    out = call(lambda *args: op(*args[:-1], kv_scales=args[-1]), *arrays, scales)
    # With AVX512-VNNI queries and weights are int16: 2^-16 of the largest of each.
    np.testing.assert_allclose(out, case.expected(shape.scale), rtol=1e-4, atol=1e-4)


def test_a_result_does_not_depend_on_batch_mates_or_on_the_width_of_the_table(allow_amx):
    shape = Shape(3, 2, 3, 16, 64, num_selected=40)
    case = decode_case(shape, "bfloat16", 3, ["everything"] * 3)
    op = functools.partial(ops.decode_attention, scale=shape.scale, allow_amx=allow_amx)
    q, pool = floats(case.q, "bfloat16"), stored(case.pool, "bfloat16")
    out = call(op, q, pool, case.block_ids, case.num_valid, None)
    wide_ids, wide_valid = (np.pad(a, ((0, 0), (0, 0), (0, 200))) for a in (case.block_ids, case.num_valid))
    np.testing.assert_array_equal(call(op, q, pool, wide_ids, wide_valid, None), out)
    alone = call(op, q[1:2], pool, case.block_ids[1:2], case.num_valid[1:2], None)
    np.testing.assert_array_equal(alone[0], out[1])


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["", "few_tokens_win"])
def test_decode_attention_by_tiles_is_that_by_vectors(variant, scale):
    """Many chunks, tokens that differ a lot, queries without any block."""
    if not loader.load(variant).has_amx:
        pytest.skip("this library does not use AMX here")
    shape = Shape(3, 2, 3, 32, 64, num_selected=40)
    case = decode_case(shape, "bfloat16", 3, ["everything", "some tokens", "everything"], masked=True)
    mask = np.array(case.query_mask)
    mask[2, :, 1] = False
    arrays = (
        floats(case.q, "bfloat16"),
        stored(case.pool, "bfloat16"),
        case.block_ids,
        case.num_valid,
        mask,
    )
    tiles, vectors = (
        call(ops.decode_attention, *arrays, scale=scale * shape.scale, allow_amx=allowed) for allowed in (True, False)
    )
    assert not tiles[2].reshape(2, 3, 64)[:, 1].any()
    assert_close(tiles, vectors, "bfloat16", "attention")
    assert (tiles != vectors).any()  # both were used


@all_dtypes
@all_shapes
@pytest.mark.parametrize("method", ["cuboid-mean", "quest", "mean"])
def test_append(dtype, shape, method):
    rng = np.random.default_rng(0)
    pool = random_pool(rng, shape, dtype, 9)
    digests = np.zeros((9, shape.num_kv_heads, 2, shape.head_dim), np.float32)
    blocks, ids = random_pool(rng, shape, dtype, 3), np.array([3, 1, 7])
    num_valid = np.array([1, shape.block_size, shape.block_size - 3])
    for block, count in enumerate(num_valid):
        blocks[block, :, :, count:] = np.nan
    args = (stored(pool, dtype), digests, stored(blocks, dtype), ids, num_valid, ids)
    out, out_digests, _ = call(ops.append_blocks, *args, method=method)
    expected = oracle.append_blocks(pool, blocks, ids)
    np.testing.assert_array_equal(loaded(out), expected)
    assert_digests(out_digests, ids, *oracle.block_digests(blocks[:, :, 0], num_valid, method), dtype)

    k, v = exact(rng.normal(size=(2, 1, shape.num_kv_heads, shape.head_dim)), dtype)
    where = np.full((1, shape.num_kv_heads), 7)
    count = np.array([shape.block_size - 2])
    args = (out, out_digests, floats(k, dtype), floats(v, dtype), where, count, np.array([2]))
    out, out_digests, _ = call(ops.append_tokens, *args, method=method)
    expected = oracle.append_tokens(expected, k, v, where, count - 1)
    np.testing.assert_array_equal(loaded(out), expected)
    keys = expected[7:8, :, 0]
    assert_digests(out_digests, np.array([2]), *oracle.block_digests(keys, count, method), dtype)


@all_dtypes
@all_shapes
@pytest.mark.parametrize("per_query_head", [False, True], ids=["kv_head", "query_head"])
def test_score_and_select(dtype, shape, per_query_head, allow_amx):
    case = score_case(shape, dtype, 0, [40, 23, 2], width=40)
    fixed = {
        "scale": shape.scale, "per_query_head": per_query_head, "num_sink_blocks": 1, "num_newest_blocks": 2
    }  # fmt: skip
    arrays = (floats(case.q, dtype), stored(case.digests, dtype), case.block_table, case.num_blocks)
    ranks = call(ops.score_blocks, *arrays, **fixed, allow_amx=allow_amx)
    assert_close(ranks, case.expected(**fixed), dtype, "scores")
    for num_selected in (1, 7, 64):
        chosen = call(ops.select_blocks, ranks, num_selected=num_selected)
        np.testing.assert_array_equal(chosen, oracle.select_blocks(ranks, num_selected))


@pytest.mark.parametrize("num_blocks", [1, 300, 1000])
def test_scores_of_more_blocks_than_one_chunk(num_blocks, allow_amx):
    shape, rng = Shape(2, 2, 3, 32, 64), np.random.default_rng(0)
    q = floats(rng.normal(size=(2, 6, 64)), "bfloat16")
    digests = stored(rng.normal(size=(num_blocks, 2, 2, 64)), "bfloat16")
    table = np.stack([rng.permutation(num_blocks)] * 2)
    args = (q, digests, table, np.array([num_blocks, num_blocks - 1]))
    fixed = {"scale": shape.scale, "per_query_head": False, "num_sink_blocks": 1, "num_newest_blocks": 1}
    ranks = call(ops.score_blocks, *args, **fixed, allow_amx=allow_amx)
    np.testing.assert_allclose(ranks, call(reference.score_blocks, *args, **fixed), rtol=1e-5, atol=1e-7)


def test_selection_at_the_ends_of_float32():
    ranks = np.zeros((1, 1, 8), np.float32)
    ranks[0, 0] = [0.0, -0.0, np.float32(1e-45), -np.inf, np.finfo(np.float32).max, np.inf, -1.0, np.inf]
    for num_selected in range(1, 9):
        chosen = call(ops.select_blocks, ranks, num_selected=num_selected)
        np.testing.assert_array_equal(chosen, oracle.select_blocks(ranks, num_selected))


def test_weights_are_as_exact_as_the_scores():
    """Scores span the range of exponents; the value of one token is 1, so that the result is its weight."""
    pool = np.zeros((2, 1, 2, 64, 32), np.float32)
    pool[1, 0, 0, :, 0] = scores = np.linspace(-80.0, 0.0, 64, dtype=np.float32)
    weights = np.exp(scores.astype(np.float64))
    q = np.zeros((1, 1, 32), np.float32)
    q[0, 0, 0] = 1.0
    one = np.ones((1, 1, 1), np.int32)
    for token in (0, 1, 31, 62, 63):
        pool[1, 0, 1] = 0.0
        pool[1, 0, 1, token, 0] = 1.0
        out = call(ops.decode_attention, q, jnp.asarray(pool), one, one * 64, None, scale=1.0)
        np.testing.assert_allclose(out[0, 0, 0], weights[token] / weights.sum(), rtol=1e-5)

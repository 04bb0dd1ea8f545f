"""The prefill attention kernel, interpreted, against the oracle; which key tiles it skips; what it refuses.

`tile_mask` is tested for the reference as well.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import prefill_attention as kernel
from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.support import BLOCK_SIZES, HEAD_DIMS
from pallas_kernels.triton import TrafficMeter
from tests.pallas_kernels.test_conformance import (
    INTERPRET,
    Shape,
    all_dtypes,
    all_implementations,
    assert_close,
    assert_not_close,
    prefill_case,
    seeds,
)

SHAPES = (
    Shape(2, 1, 1, 16, 16),
    Shape(2, 2, 3, 32, 64),
    Shape(2, 1, 4, 64, 32),
    Shape(2, 1, 7, 16, 128),
    Shape(2, 1, 8, 32, 16),
    Shape(2, 1, 2, 64, 256),
)
MAX_START = 192
"""Of most cases here: small pools, since the interpreter copies one for every program."""
chunks_of_two_tiles = st.sampled_from([(1,), (2,), (1, 1)]).flatmap(
    lambda tiles: st.tuples(*(
        st.tuples(
            st.sampled_from([0, 64, 130, MAX_START]), st.integers((n - 1) * PREFILL_TILE + 1, n * PREFILL_TILE)
        )
        for n in tiles
    ))
)  # fmt: skip
densities = st.sampled_from([0.0, 0.3, 0.7, 1.0])


def small_case(shape, dtype, seed, chunks, num_tiles=2):
    return prefill_case(shape, dtype, seed, chunks, num_tiles, MAX_START)


def random_mask(case, shape, seed, density, num_key_tiles=4):
    """Key tiles at random; `small_case` has 4 at most."""
    size = (case.num_tiles, shape.num_kv_heads * shape.group, num_key_tiles)
    return np.random.default_rng(seed).random(size) < density


def test_every_size_that_matters_is_covered():
    assert {s.group for s in SHAPES} >= {1, 3, 4, 7, 8}
    assert {s.head_dim for s in SHAPES} == set(HEAD_DIMS)
    assert {s.block_size for s in SHAPES} == set(BLOCK_SIZES)
    for tilings in (kernel._BF16, kernel._FLOAT32):
        assert set(tilings) == set(HEAD_DIMS)
        for head_dim, tiling in tilings.items():
            assert PREFILL_TILE % tiling.queries == PREFILL_TILE % tiling.keys == head_dim % tiling.width == 0
            assert PREFILL_TILE // tiling.keys < kernel.LANES  # one word a step holds the diagonal


# --- what it computes ------------------------------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(seed=seeds, chunks=chunks_of_two_tiles)
@example(seed=0, chunks=((0, 1), (130, 100)))
@example(seed=1, chunks=())
def test_conformance(dtype, shape, seed, chunks):
    case = small_case(shape, dtype, seed, chunks)
    out = case.run("pallas", dtype, shape.scale)
    assert_close(out, case.expected(shape.scale), dtype, "attention")
    assert not out[np.isnan(case.q).any((1, 2))].any()


@all_implementations
@all_dtypes
@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(seed=seeds, chunks=chunks_of_two_tiles, density=densities)
@example(seed=0, chunks=((130, 200),), density=0.0)
@example(seed=1, chunks=((0, 1), (MAX_START, 128)), density=0.5)
@example(seed=2, chunks=(), density=1.0)
def test_key_tiles_by_mask(implementation, dtype, shape, seed, chunks, density):
    case = small_case(shape, dtype, seed, chunks)
    case.tile_mask = random_mask(case, shape, seed, density)
    out = case.run(implementation, dtype, shape.scale)
    assert_close(out, case.expected(shape.scale), dtype, "attention")
    if density == 0.0:
        assert not out.any()


@all_implementations
def test_a_mask_of_everything_changes_nothing(implementation):
    shape = SHAPES[1]
    case = small_case(shape, "float32", 0, ((130, 200),))
    dense = case.run(implementation, "float32", shape.scale)
    case.tile_mask = random_mask(case, shape, 0, 1.0)
    assert_close(case.run(implementation, "float32", shape.scale), dense, "float32", "attention")


@all_implementations
def test_a_narrow_mask_keeps_nothing_past_its_end(implementation):
    shape = SHAPES[1]
    case = small_case(shape, "float32", 0, ((130, 200),))
    case.tile_mask = random_mask(case, shape, 0, 0.7, num_key_tiles=2)
    assert_close(case.run(implementation, "float32", shape.scale), case.expected(shape.scale), "float32", "attention")


def test_merged_tiles_of_the_reference_keep_their_own_masks():
    shape = Shape(1, 1, 2, 32, 16)
    case = prefill_case(shape, "float32", 7, ((MAX_START, 450),), max_start=MAX_START)
    case.tile_mask = random_mask(case, shape, 1, 0.5, num_key_tiles=6)
    expected = case.expected(shape.scale)
    for merge_tiles in (1, 2, 4):
        assert_close(case.run("reference", "float32", shape.scale, merge_tiles), expected, "float32", "attention")


@all_dtypes
def test_the_comparison_has_teeth(dtype):
    shape = SHAPES[1]
    case = small_case(shape, dtype, 3, ((64, 200),))
    case.tile_mask = random_mask(case, shape, 0, 0.6)
    expected = case.expected(shape.scale)
    assert_close(case.run("pallas", dtype, shape.scale), expected, dtype, "attention")
    swapped = dataclasses.replace(case, pool=case.pool[:, :, ::-1])
    assert_not_close(swapped.run("pallas", dtype, shape.scale), expected, dtype, "attention")
    assert_not_close(case.run("pallas", dtype, shape.scale * 1.1), expected, dtype, "attention")
    other_heads = dataclasses.replace(case, tile_mask=np.roll(case.tile_mask, 1, axis=1))
    assert_not_close(other_heads.run("pallas", dtype, shape.scale), expected, dtype, "attention")
    shifted = dataclasses.replace(case, tile_mask=np.roll(case.tile_mask, 1, axis=2))
    assert_not_close(shifted.run("pallas", dtype, shape.scale), expected, dtype, "attention")
    dense = dataclasses.replace(case, tile_mask=None)
    assert_not_close(dense.run("pallas", dtype, shape.scale), expected, dtype, "attention")


# --- what it skips ---------------------------------------------------------------------------------------------------


def traffic(case, shape, dtype="float32"):
    """What the kernel loads and multiplies."""
    with TrafficMeter() as meter:
        arrays: Any = [None if a is None else jnp.asarray(a) for a in case.arrays(dtype)]
        kernel.prefill_attention(*arrays, scale=shape.scale, interpret=True)
    return meter.calls[0]


def test_skipped_key_tiles_may_hold_anything():
    """What no query head of a KV head keeps is NaN here."""
    shape = SHAPES[1]
    case = small_case(shape, "float32", 0, ((MAX_START, 256),))
    case.tile_mask = random_mask(case, shape, 0, 0.9)
    case.tile_mask[:, : shape.group, 0] = case.tile_mask[:, shape.group :, 1] = False
    expected = case.expected(shape.scale)
    blocks = case.block_tables[0].reshape(-1)[: 2 * PREFILL_TILE // shape.block_size].reshape(2, -1)
    case.pool[blocks[0], 0] = case.pool[blocks[1], 1] = np.nan
    assert_close(case.run("pallas", "float32", shape.scale), expected, "float32", "attention")


@pytest.mark.parametrize("density", [None, 0.3])
def test_skipped_key_tiles_cost_nothing(density):
    shape = SHAPES[4]
    case = small_case(shape, "float32", 0, ((130, 200),))
    case.tile_mask = None if density is None else random_mask(case, shape, 3, density)
    tiling, num_steps = kernel._FLOAT32[shape.head_dim], 0
    for head in range(shape.group):
        for first in range(0, 200, tiling.queries):
            end = 130 + min(first + tiling.queries, 200)
            for step in range(-(-end // tiling.keys)):
                key_tile = step * tiling.keys // PREFILL_TILE
                num_steps += case.tile_mask is None or case.tile_mask[first // PREFILL_TILE, head, key_tile]
    done = traffic(case, shape)
    assert done.flops == num_steps * 4 * tiling.queries * tiling.keys * shape.head_dim
    keys = num_steps * 2 * tiling.keys * shape.head_dim * 4 // shape.group
    others = 200 * shape.group * shape.head_dim * 4 + done.grid[0] * done.grid[1] * 4096  # queries; ids, masks
    assert done.loaded_bytes <= keys + others


def test_padding_tiles_cost_nothing():
    assert traffic(small_case(SHAPES[4], "float32", 0, ()), SHAPES[4]).flops == 0


@pytest.mark.parametrize("density", [0.0, 0.3])
def test_more_steps_than_one_window_holds(monkeypatch, density):
    monkeypatch.setattr(kernel, "WINDOW_BITS", 1)
    shape = Shape(1, 1, 2, 32, 16)
    assert kernel.LANES * kernel._FLOAT32[shape.head_dim].keys < 1100
    case = prefill_case(shape, "float32", 0, ((1100, 100),), num_tiles=1, max_start=1100)
    case.tile_mask = random_mask(case, shape, 1, density, num_key_tiles=10)
    function = jax.jit(functools.partial(kernel.prefill_attention, scale=shape.scale, interpret=INTERPRET))
    assert_close(function(*case.arrays("float32")), case.expected(shape.scale), "float32", "attention")


@pytest.mark.parametrize("bits", [1, 4, 16, 32])
def test_pop(bits):
    kept = np.random.default_rng(bits).random(kernel.LANES * bits) < 0.3
    kept[[0, -1]] = True
    words = (kept.reshape(kernel.LANES, bits).astype(np.uint32) << np.arange(bits, dtype=np.uint32)).sum(1)
    words, popped = jnp.asarray(words.astype(np.uint32).view(np.int32)), []
    pop = jax.jit(functools.partial(kernel._pop, bits=bits))
    for _ in range(kept.sum() + 1):
        index, words = pop(words)
        popped.append(int(index))
    assert popped == [*np.flatnonzero(kept), len(kept)]
    assert not words.any()


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"head_dim": 96}, "head_dim 96; supported: 16, 32, 64, 128, 256"),
        ({"block_size": 8}, "block_size 8; supported: 16, 32, 64"),
        ({"dtype": "float16"}, "dtype float16; supported: bfloat16, float32"),
        ({"dtype": "int8"}, "dtype int8; supported: bfloat16, float32"),
        ({"group": 65}, "query heads for each KV head 65; supported: 1 to 64"),
    ],
)
def test_unsupported_shapes_are_refused_by_name(wrong, message):
    size = {"head_dim": 64, "block_size": 32, "dtype": "bfloat16", "group": 2, **wrong}
    q = jnp.zeros((PREFILL_TILE, size["group"], size["head_dim"]))
    pool = jnp.zeros((3, 1, 2, size["block_size"], size["head_dim"]), size["dtype"])
    tile = jnp.zeros(1, jnp.int32)
    with pytest.raises(NotImplementedError, match=f"prefill_attention: no Pallas kernel for {message}"):
        kernel.prefill_attention(q, pool, tile[None], tile, tile, tile, scale=1.0, interpret=True)

"""Sparse prefill's selection of key tiles against plain loops, and what its masks keep of the real attention."""

import functools
import os
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kernels import loader
from cpu_kernels.select_key_tiles import select_key_tiles as native
from pallas_kernels.api import get_kernels
from pallas_kernels.select_key_tiles import select_key_tiles
from pallas_kernels.storage import storage_dtype

TILE, STRIDE = 128, 16
KV_HEADS, GROUP, SIZE, DIM = 2, 3, 16, 32
SCALE = DIM**-0.5
FORCED = os.environ.get(loader.VARIABLE)
ENGINES = ("reference", *((FORCED,) if FORCED == loader.SANITIZED else loader.available()))
"""Plain XLA, and every native library that this machine can run, or the one with sanitizers."""
all_engines = pytest.mark.parametrize("engine", ENGINES)


@functools.cache
def jitted(engine, threshold, **fixed):
    function = select_key_tiles if engine == "reference" else native
    return jax.jit(functools.partial(function, scale=SCALE, threshold=threshold, **fixed))


def select(engine, threshold, call, **fixed):
    """The mask of one engine, by arrays as `make_call` gives them."""
    variant = engine if engine != "reference" else ENGINES[-1]
    with mock.patch.object(loader, "in_force", functools.partial(loader.load, variant)):
        return np.asarray(jitted(engine, threshold, **fixed)(*call))


def as_bfloat16(call):
    """The same call with queries and pool in bfloat16, as they are carried."""
    kind = jnp.dtype("bfloat16")
    return (call[0].astype(kind), call[1].astype(kind).view(storage_dtype(kind, "cpu")), *call[2:])


def make_call(q, k, start, max_tokens):
    """The arguments for queries `[count, heads, dim]` at `start` of keys `[start + count, kv_heads, dim]`."""
    count, num_blocks = len(q), -(-len(k) // SIZE)
    pool = np.full((num_blocks + 2, KV_HEADS, 2, SIZE, DIM), np.nan, np.float32)
    ids = 1 + np.random.default_rng(0).permutation(num_blocks)
    for token, key in enumerate(k):
        pool[ids[token // SIZE], :, 0, token % SIZE] = key
    table = np.zeros((1, max_tokens // SIZE), np.int32)
    table[0, :num_blocks] = ids
    num_tiles = -(-count // TILE) + 1  # and one of padding
    padded = np.full((num_tiles * TILE, *q.shape[1:]), np.nan, np.float32)
    padded[:count] = q
    offsets = np.arange(num_tiles) * TILE
    tokens = np.clip(count - offsets, 0, TILE)
    return (
        padded,
        pool,
        table,
        np.zeros(num_tiles, np.int32),
        (start + offsets).astype(np.int32),
        tokens.astype(np.int32),
    )


def expected_shares(q, k, start):
    """Of every tile of queries and head, the share of each key tile."""
    count, end = len(q), len(k)
    shares = np.zeros((-(-count // TILE), q.shape[1], -(-end // TILE)))
    for head in range(q.shape[1]):
        for first in range(0, count, STRIDE):
            token = min(first + STRIDE, count) - 1
            scores = k[: start + token + 1, head // GROUP] @ q[token, head] * SCALE
            weights = np.exp(scores - scores.max())
            np.add.at(shares[first // TILE, head], np.arange(len(scores)) // TILE, weights / weights.sum())
    return shares / shares.sum(axis=-1, keepdims=True)


@all_engines
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    start=st.sampled_from([0, 64, 384]),
    count=st.integers(1, 300),
    threshold=st.sampled_from([0.3, 0.9]),
    sharpness=st.sampled_from([1.0, 6.0]),
)
def test_the_smallest_set_that_reaches_the_threshold(engine, seed, start, count, threshold, sharpness):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(count, KV_HEADS * GROUP, DIM)).astype(np.float32) * sharpness
    k = rng.normal(size=(start + count, KV_HEADS, DIM)).astype(np.float32)
    kept = select(engine, threshold, make_call(q, k, start, 768))
    shares = expected_shares(q.astype(float), k.astype(float), start)
    assert not kept[shares.shape[0] :].any()
    for tile, head in np.ndindex(shares.shape[:2]):
        share, mask = shares[tile, head], kept[tile, head]
        own = {j for j in range(len(share)) if (j + 1) * TILE > start + tile * TILE and j * TILE < start + count}
        own = {j for j in own if j * TILE < min(start + count, start + (tile + 1) * TILE)} | {0}
        assert not mask[len(share) :].any()
        assert own <= set(np.flatnonzero(mask))
        assert share[mask[: len(share)]].sum() >= threshold - 1e-5
        others = [share[j] for j in np.flatnonzero(mask) if j not in own]
        if others:
            assert share[mask[: len(share)]].sum() - min(others) < threshold + 1e-5


@all_engines
def test_threshold_one_keeps_all_that_is_causal(engine):
    rng = np.random.default_rng(0)
    q = 40 * rng.normal(size=(300, KV_HEADS * GROUP, DIM))  # sharp: some shares vanish
    kept = select(engine, 1.0, make_call(q, rng.normal(size=(428, KV_HEADS, DIM)), 128, 640))
    assert kept.shape == (4, KV_HEADS * GROUP, 5)
    assert (kept == (np.arange(5)[None] <= np.array([1, 2, 3, -1])[:, None])[:, None]).all()


@all_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_finds_where_attention_goes(engine, dtype):
    """Sinks, a near window and one far passage, as in trained models: few tiles are kept, and most real attention."""
    rng = np.random.default_rng(1)
    count = 1536
    q = np.broadcast_to(rng.normal(size=(1, KV_HEADS * GROUP, DIM)), (count, KV_HEADS * GROUP, DIM))
    q = q + 0.5 * rng.normal(size=q.shape)
    k = rng.normal(size=(count, KV_HEADS, DIM))
    direction = q.mean(axis=0).reshape(KV_HEADS, GROUP, DIM).mean(axis=1)
    k[:8] += 4 * direction
    k[400:480] += 3 * direction
    call = make_call(q, k, 0, count)
    kept = select(engine, 0.9, as_bfloat16(call) if dtype == "bfloat16" else call)
    for tile in (8, 11):
        assert kept[tile, :, 3].all()  # the passage
        assert kept[tile].mean() < 0.75
        rows = np.arange(tile * TILE, (tile + 1) * TILE)
        for head in range(KV_HEADS * GROUP):
            scores = q[rows, head] @ k[:, head // GROUP].T * SCALE
            scores[np.arange(count) > rows[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            of_tile = np.add.reduceat(weights.mean(axis=0), np.arange(0, count, TILE))
            assert of_tile[kept[tile, head]].sum() > 0.8  # of all queries, not only of the sampled ones


@all_engines
@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_a_threshold_must_be_a_share(engine, threshold):
    with pytest.raises(ValueError, match=r"threshold .* must be in \(0, 1\]"):
        select(engine, threshold, make_call(jnp.zeros((8, 6, DIM)), np.zeros((8, KV_HEADS, DIM)), 0, 128))


@all_engines
def test_short_contexts_keep_everything(engine):
    rng = np.random.default_rng(2)
    call = make_call(8 * rng.normal(size=(640, 6, DIM)), rng.normal(size=(640, KV_HEADS, DIM)), 0, 640)
    kept = select(engine, 0.2, call)
    mixed = select(engine, 0.2, call, dense_tokens=512)
    assert mixed[3, :, :4].all() and not kept[3, :, :4].all()
    np.testing.assert_array_equal(mixed[4:], kept[4:])


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_native_libraries_select_what_xla_does(engine):
    """Packed prompts in bfloat16, a head_dim with and one without whole AMX tiles, with AMX and without."""
    rng = np.random.default_rng(3)
    for head_dim in (64, 48):
        prompts = ((0, 700), (256, 384), (64, 130))
        tiles = np.array([
            (row, start + offset, min(TILE, count - offset))
            for row, (start, count) in enumerate(prompts) for offset in range(0, count, TILE)
        ], np.int32)  # fmt: skip
        tables = 1 + np.arange(3 * 44, dtype=np.int32).reshape(3, 44)
        pool = rng.normal(size=(1 + tables.size, KV_HEADS, 2, SIZE, head_dim))
        q = 2 * rng.normal(size=(len(tiles) * TILE, KV_HEADS * GROUP, head_dim))
        call = as_bfloat16((q, pool, tables, *tiles.T))
        expected = select("reference", 0.7, call)
        assert expected.sum() < 0.9 * select("reference", 1.0, call).sum()
        for allow_amx in (True, False):
            different = select(engine, 0.7, call, allow_amx=allow_amx) != expected
            assert different.mean() < 2e-4  # shares that tie to the last bits of a sum


def test_it_is_in_the_dispatch_table():
    assert get_kernels("reference", "cpu").select_key_tiles is select_key_tiles
    if loader.is_there():
        assert get_kernels("cpu", "cpu").select_key_tiles is native


@pytest.mark.skipif(len(ENGINES) == 1, reason="no native library is built")
def test_what_the_native_kernel_does_not_support_is_refused():
    call = make_call(np.zeros((8, 6, DIM)), np.zeros((8, KV_HEADS, DIM)), 0, 128)
    with pytest.raises(NotImplementedError, match="pools of float16 with head_dim 32; supported: uint16"):
        select(ENGINES[1], 0.9, (call[0], call[1].astype(np.float16), *call[2:]))

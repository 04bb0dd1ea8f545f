"""The native prefill attention against the oracle, for every library that this machine can run, with AMX and without.

As in the conformance suite, whatever has no business in a result is NaN: the null block, tails of partial blocks,
blocks that no table names, queries that do not exist.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpu_kernels import loader
from cpu_kernels.prefill_attention import prefill_attention
from pallas_kernels.storage import storage_dtype
from tests.pallas_kernels import oracle

BUILT = loader.available()
if not BUILT:
    pytest.skip("no native library is built (`pip install -e .` with a C++17 compiler)", allow_module_level=True)

ENGINES = [(variant, True) for variant in BUILT] + [(variant, False) for variant in BUILT if variant == "avx512bf16"]
"""Every library in turn, and whether it may use AMX."""
TILE = 128
TOLERANCES = {"float32": 4e-6, "bfloat16": 6e-3}  # of tests/pallas_kernels/test_conformance.py
SHAPES = {  # num_kv_heads, group, block_size, head_dim
    "1x3": (1, 3, 16, 32),
    "2x4": (2, 4, 32, 64),
    "1x7": (1, 7, 64, 128),
    "2x8": (2, 8, 16, 16),
    "3x1": (3, 1, 32, 96),
}


@dataclasses.dataclass
class Case:
    q: np.ndarray
    pool: np.ndarray
    block_tables: np.ndarray
    prompts: list[tuple[int, int, int, int]]
    """(row of the first token in `q`, row of `block_tables`, position of the first token, tokens) each."""
    tile_mask: np.ndarray | None = None

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def expected(self):
        where = (self.block_tables, self.prompts, self.scale, self.tile_mask, TILE)
        return oracle.prefill_attention(self.q, self.pool, *where)

    def run(self, engine, dtype, scale=None):
        tiles = np.zeros((3, len(self.q) // TILE), np.int32)  # prompt, start, tokens
        for row, table, start, count in self.prompts:
            for offset in range(0, count, TILE):
                tiles[:, (row + offset) // TILE] = table, start + offset, min(TILE, count - offset)
        kind = jnp.dtype(dtype)
        pool = self.pool.astype(kind).view(storage_dtype(kind, "cpu"))
        with mock.patch.object(loader, "in_force", functools.partial(loader.load, engine[0])):
            function = jitted(engine, scale or self.scale)
            return np.asarray(function(self.q.astype(kind), pool, self.block_tables, *tiles, self.tile_mask))


@functools.cache
def jitted(engine, scale):
    return jax.jit(functools.partial(prefill_attention, scale=scale, allow_amx=engine[1]))


def make_case(shape, dtype, seed, chunks, *, num_tiles=4, masked=False):
    """Packs prompts given as (start, tokens), each from a tile on."""
    rng = np.random.default_rng(seed)
    num_kv_heads, group, block_size, head_dim = shape
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32

    def exact(*size):
        return rng.normal(size=size).astype(kind).astype(np.float64)

    max_blocks = max((start + count for start, count in chunks), default=1) // block_size + 2
    tables = np.zeros((max(1, len(chunks)), max_blocks), np.int32)
    pool = np.full((tables.size + 1, num_kv_heads, 2, block_size, head_dim), np.nan)
    ids = 1 + rng.permutation(tables.size).reshape(tables.shape)
    q = np.full((num_tiles * TILE, num_kv_heads * group, head_dim), np.nan)
    prompts, row = [], 0
    for table, (start, count) in enumerate(chunks):
        for block in range(-(-(start + count) // block_size)):
            filled = min(block_size, start + count - block * block_size)
            tables[table, block] = ids[table, block]
            pool[ids[table, block], :, :, :filled] = exact(num_kv_heads, 2, filled, head_dim)
        q[row : row + count] = exact(count, *q.shape[1:])
        prompts.append((row, table, start, count))
        row += -(-count // TILE) * TILE
    num_key_tiles = -(-max_blocks * block_size // TILE) - 1  # the last one is not covered
    mask = rng.random((num_tiles, q.shape[1], num_key_tiles)) < 0.5 if masked else None
    return Case(q, pool, tables, prompts, mask)


def assert_close(actual, expected, dtype):
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def assert_not_close(actual, expected, dtype):
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(actual, expected, dtype)


all_engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e[0] + ("" if e[1] else "-without-amx"))
all_dtypes = pytest.mark.parametrize("dtype", TOLERANCES)
chunks_of_four_tiles = st.sampled_from([(1,), (4,), (1, 1, 1), (2, 1)]).flatmap(
    lambda tiles: st.tuples(*(
        st.tuples(st.sampled_from([0, 64, 288]), st.integers((n - 1) * TILE + 1, n * TILE)) for n in tiles
    ))
)  # fmt: skip


@all_engines
@all_dtypes
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@settings(max_examples=1, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), chunks=chunks_of_four_tiles, masked=st.booleans())
@example(seed=0, chunks=((0, 1),), masked=False)
@example(seed=1, chunks=((288, 130), (0, 128), (32, 1)), masked=True)
def test_agrees_with_the_oracle(dtype, engine, shape, seed, chunks, masked):
    case = make_case(shape, dtype, seed, chunks, masked=masked)
    assert_close(case.run(engine, dtype), case.expected(), dtype)


@all_engines
@all_dtypes
def test_a_long_prompt_of_merged_tiles(dtype, engine):
    case = make_case(SHAPES["1x3"], dtype, 2, ((96, 1100),), num_tiles=9)
    case.pool[case.block_tables[0, 60:], :, 0] *= 2  # maxima that grow late
    assert_close(case.run(engine, dtype), case.expected(), dtype)


@all_engines
@all_dtypes
def test_key_tiles_that_are_masked_are_not_read(dtype, engine):
    case = make_case(SHAPES["2x4"], dtype, 3, ((512, 200),))
    mask = np.ones((4, 8, 6), bool)
    mask[:, :, 1:3] = False
    for block in case.block_tables[0, TILE // 32 : 3 * TILE // 32]:
        case.pool[block] = np.nan
    case = dataclasses.replace(case, tile_mask=mask)
    expected = dataclasses.replace(case, pool=np.nan_to_num(case.pool)).expected()
    assert_close(case.run(engine, dtype), expected, dtype)


@all_engines
@all_dtypes
@pytest.mark.parametrize("num_key_tiles", [0, 3])
def test_nothing_to_attend_to_gives_zeros(dtype, num_key_tiles, engine):
    nothing = np.zeros((4, 3, num_key_tiles), bool)
    masked = dataclasses.replace(make_case(SHAPES["1x3"], dtype, 4, ((64, 200),)), tile_mask=nothing)
    assert not masked.run(engine, dtype).any()
    assert not make_case(SHAPES["1x3"], dtype, 4, ()).run(engine, dtype).any()


@all_engines
@all_dtypes
def test_the_comparison_has_teeth(dtype, engine):
    case = make_case(SHAPES["1x3"], dtype, 5, ((0, 100), (64, 128)))
    expected = case.expected()
    swapped = dataclasses.replace(case, pool=case.pool[:, :, ::-1])
    assert_not_close(swapped.run(engine, dtype), expected, dtype)
    assert_not_close(case.run(engine, dtype, case.scale * 1.1), expected, dtype)
    early = dataclasses.replace(case, prompts=[(row, table, max(0, s - 1), n) for row, table, s, n in case.prompts])
    assert_not_close(early.run(engine, dtype), expected, dtype)


def test_what_is_not_supported_is_refused():
    case = make_case(SHAPES["1x3"], "float32", 6, ((0, 10),))
    with pytest.raises(NotImplementedError, match=r"pools of float16 with head_dim 32; supported: uint16"):
        case.run(ENGINES[0], "float16")
    past = dataclasses.replace(case, prompts=[(0, 0, 32, 10)])
    # Which of the two depends on whether the call has ended before its result is asked for.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="tile past its block table"):
        past.run(ENGINES[0], "float32")

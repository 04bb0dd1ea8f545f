"""One suite for every kernel implementation: what it computes, and what it must never read.

An implementation joins by its name in IMPLEMENTATIONS. Expected values come from `oracle` (NumPy, float64). Whatever an
operation has no business with (the null block, the tail of a partial block, blocks that are not named, padding rows) is
NaN here, so a read of it shows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpu_kernels import loader
from pallas_kernels.api import get_kernels
from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.storage import from_storage, storage_dtype, to_storage
from tests.pallas_kernels import oracle

PLATFORM = jax.default_backend()
NO_LIBRARY = pytest.mark.skipif(
    PLATFORM != "cpu" or not loader.is_there(), reason="no native kernels here (see cpu_kernels/loader.py)"
)
IMPLEMENTATIONS = ("reference", "pallas", pytest.param("cpu", marks=NO_LIBRARY))
INTERPRET = PLATFORM == "cpu"
"""For tests that call kernels past the table: on a GPU (scripts/gpu_check.py) they run as they are."""

# Inputs are exact in the dtype and of magnitude 1. float32 errs by rounding in another order. bfloat16 attention rounds
# its weights to 8 bits (relative error 2^-9 each); digests and scores accumulate exact products in float32.
TOLERANCES = {  # rtol, atol
    "float32": {
        "digests": (1e-6, 1e-6),
        "scores": (2e-6, 2e-6),
        "attention": (4e-6, 4e-6),
    },
    "bfloat16": {
        "digests": (1e-6, 1e-6),
        "scores": (2e-6, 2e-6),
        "attention": (6e-3, 6e-3),
    },
}
DTYPES = tuple(TOLERANCES)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one compiled case."""

    num_seqs: int
    num_kv_heads: int
    group: int
    block_size: int
    head_dim: int
    num_selected: int = 5

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def __str__(self) -> str:
        return f"{self.num_kv_heads}x{self.group}heads-block{self.block_size}-dim{self.head_dim}"


SHAPES = (
    Shape(3, 1, 1, 16, 32),
    Shape(3, 2, 3, 32, 64),
    Shape(2, 8, 4, 64, 128, num_selected=3),
    Shape(3, 1, 7, 32, 128),
    Shape(2, 2, 8, 16, 64),
    Shape(1, 32, 1, 32, 64, num_selected=2),
)
all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
pool_shapes = pytest.mark.parametrize("shape", SHAPES[:3], ids=str)  # every head count, block size and head_dim
few_examples = settings(max_examples=4, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


@functools.cache
def jitted(implementation, op, **fixed):
    """`op` compiled once for each shape, with its keyword arguments fixed."""
    kernels = get_kernels(implementation, PLATFORM)
    # What is interpreted runs for milliseconds and compiles for seconds.
    options = {"xla_backend_optimization_level": 0} if kernels.interpreted else None
    return jax.jit(functools.partial(getattr(kernels, op), **fixed), compiler_options=options)


def call(implementation, op, *arrays, **fixed):
    """Runs one operation; index arrays go in as int32."""
    ready = [a.astype(np.int32) if isinstance(a, np.ndarray) and a.dtype == np.int64 else a for a in arrays]
    return jax.tree.map(np.asarray, jitted(implementation, op, **fixed)(*ready))


def exact(values, dtype):
    """float64 values that `dtype` represents exactly."""
    return np.asarray(values).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32).astype(np.float64)


def floats(values, dtype):
    """Values as an activation."""
    return np.asarray(values).astype(jnp.dtype(dtype))


def stored(values, dtype):
    """Values as a pool or digest array: as they are, or as their bits."""
    return floats(values, dtype).view(storage_dtype(jnp.dtype(dtype), PLATFORM))


def loaded(array):
    """A pool or digest array as float64."""
    return array.view(ml_dtypes.bfloat16 if array.dtype == np.uint16 else array.dtype).astype(np.float64)


def assert_close(actual, expected, dtype, kind):
    rtol, atol = TOLERANCES[dtype][kind]
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=atol)


def assert_not_close(actual, expected, dtype, kind):
    """The comparison has teeth: it tells this wrong result from the right one."""
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(actual, expected, dtype, kind)


def test_every_size_that_matters_is_covered():
    assert {s.group for s in SHAPES} == {1, 3, 4, 7, 8}
    assert {s.num_kv_heads for s in SHAPES} == {1, 2, 8, 32}
    assert {s.block_size for s in SHAPES} == {16, 32, 64}
    assert {s.head_dim for s in SHAPES} == {32, 64, 128}


def test_says_where_it_runs(record_property):
    """scripts/gpu_check.py reads it: a suite that ran elsewhere proves nothing."""
    record_property("platform", PLATFORM)


def test_the_dispatch_table_names_what_it_has():
    assert get_kernels("auto", "cpu").name == ("cpu" if loader.is_there() else "reference")
    for name in ("reference", "pallas", *(["cpu"] if loader.is_there() else [])):
        assert get_kernels(name, PLATFORM).name == name
    with pytest.raises(NotImplementedError, match=r"kernel implementation 'cuda'; available: .*reference"):
        get_kernels("cuda", PLATFORM)


def test_storage_keeps_every_bit():
    values = jnp.array([0.0, -0.0, 1.0, -3.140625, jnp.inf, 1e-40], jnp.bfloat16)
    bits = to_storage(values, jnp.dtype(jnp.uint16))
    assert bits.dtype == jnp.uint16
    assert from_storage(bits).dtype == jnp.bfloat16
    assert np.asarray(bits).tobytes() == np.asarray(values).tobytes() == np.asarray(from_storage(bits)).tobytes()
    assert storage_dtype(jnp.dtype("bfloat16"), "cpu") == jnp.uint16
    assert storage_dtype(jnp.dtype("bfloat16"), "gpu") == jnp.bfloat16
    assert storage_dtype(jnp.dtype("float32"), "cpu") == jnp.float32


# --- append ----------------------------------------------------------------------------------------------------------


def random_pool(rng, shape, dtype, num_blocks):
    return exact(rng.normal(size=(num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim)), dtype)


def assert_digests(digests, rows, hi, lo, dtype):
    """`digests[rows]` are the boxes (hi, lo), as centre and radius, both rounded to float32."""
    centre, radius = (digests[rows][:, :, half].astype(np.float64) for half in (0, 1))
    assert_close(centre + radius, hi, dtype, "digests")
    assert_close(centre - radius, lo, dtype, "digests")
    assert (radius >= 0).all()


METHODS = ("cuboid-mean", "quest", "mean")
methods = pytest.mark.parametrize("method", METHODS)
every_method = [*((shape, METHODS[0]) for shape in SHAPES[:3]), *((SHAPES[0], method) for method in METHODS[1:])]
appending = pytest.mark.parametrize(("shape", "method"), every_method, ids=str)


@all_implementations
@appending
@all_dtypes
@few_examples
@given(seed=seeds, num_padding=st.integers(0, 6))
def test_append_blocks(implementation, dtype, shape, method, seed, num_padding):
    rng = np.random.default_rng(seed)
    size = shape.block_size
    pool, blocks = random_pool(rng, shape, dtype, 9), random_pool(rng, shape, dtype, 6)
    blocks[:, :, 0] = exact(blocks[:, :, 0] + 0.5, dtype)
    ids, digest_ids = 1 + rng.permutation(8)[:6], 1 + rng.permutation(11)[:6]
    num_valid = np.array([1, size, size, *rng.integers(2, size, 3)])
    padding = np.arange(6) >= 6 - num_padding
    for array in (ids, digest_ids, num_valid):
        array[padding] = 0
    for block, count in enumerate(num_valid):
        blocks[block, :, :, count:] = np.nan
    digests = rng.normal(size=(12, shape.num_kv_heads, 2, shape.head_dim)).astype(np.float32)
    args = (stored(pool, dtype), digests, stored(blocks, dtype), ids, num_valid, digest_ids)
    out, out_digests, _ = call(implementation, "append_blocks", *args, method=method)
    expected = oracle.append_blocks(pool, blocks, ids)
    np.testing.assert_array_equal(loaded(out)[1:], expected[1:])
    untouched = np.setdiff1d(np.arange(1, 12), digest_ids)
    np.testing.assert_array_equal(out_digests[untouched], digests[untouched])
    hi, lo = oracle.block_digests(blocks[~padding][:, :, 0], num_valid[~padding], method)
    assert_digests(out_digests, digest_ids[~padding], hi, lo, dtype)
    if padding.any():
        assert not out_digests[0].any()
    plain, none, _ = call(implementation, "append_blocks", args[0], None, *args[2:], method=method)
    assert none is None
    np.testing.assert_array_equal(plain[1:], out[1:])


@all_implementations
@all_dtypes
@methods
def test_append_blocks_comparison_has_teeth(implementation, dtype, method):
    shape, rng = SHAPES[1], np.random.default_rng(0)
    pool, blocks = random_pool(rng, shape, dtype, 9), random_pool(rng, shape, dtype, 4)
    ids, num_valid = np.array([3, 1, 7, 5]), np.full(4, shape.block_size)
    digests = np.zeros((9, shape.num_kv_heads, 2, shape.head_dim), np.float32)
    hi, lo = oracle.block_digests(blocks[:, :, 0], num_valid, method)
    for wrong_blocks, wrong_valid in ((blocks[:, :, ::-1], num_valid), (blocks, num_valid - 1)):
        args = (stored(pool, dtype), digests, stored(wrong_blocks, dtype), ids, wrong_valid, ids)
        _, out_digests, _ = call(implementation, "append_blocks", *args, method=method)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_digests(out_digests, ids, hi, lo, dtype)
    swapped, _, _ = call(
        implementation, "append_blocks", stored(pool, dtype), None, stored(blocks[:, :, ::-1], dtype), ids, num_valid,
        ids, method=method,
    )  # fmt: skip
    assert not np.array_equal(loaded(swapped)[1:], oracle.append_blocks(pool, blocks, ids)[1:])


@all_implementations
@appending
@all_dtypes
@few_examples
@given(seed=seeds, num_padding=st.integers(0, 2))
def test_append_tokens(implementation, dtype, shape, method, seed, num_padding):
    """The newest block holds NaN from the new token on; its digest counts the new token and no more."""
    rng = np.random.default_rng(seed)
    pool = random_pool(rng, shape, dtype, 9)
    k, v = exact(rng.normal(size=(2, shape.num_seqs, shape.num_kv_heads, shape.head_dim)), dtype)
    ids = 1 + np.stack([rng.permutation(8)[: shape.num_seqs] for _ in range(shape.num_kv_heads)], axis=1)
    num_valid = rng.integers(1, shape.block_size + 1, size=shape.num_seqs)
    num_valid[0] = rng.choice([1, shape.block_size])
    digest_ids = 1 + rng.permutation(8)[: shape.num_seqs]
    padding = np.arange(shape.num_seqs) >= shape.num_seqs - num_padding
    ids[padding], k[padding], v[padding], num_valid[padding], digest_ids[padding] = 0, np.nan, np.nan, 0, 0
    for (seq, head), block in np.ndenumerate(ids):
        pool[block, head, :, max(num_valid[seq] - 1, 0) :] = np.nan
    digests = rng.normal(size=(9, shape.num_kv_heads, 2, shape.head_dim)).astype(np.float32)
    args = [stored(pool, dtype), digests, floats(k, dtype), floats(v, dtype), ids, num_valid, digest_ids]
    out, out_digests, _ = call(implementation, "append_tokens", *args, method=method)
    expected = oracle.append_tokens(pool, k, v, ids, np.maximum(num_valid - 1, 0))
    np.testing.assert_array_equal(loaded(out)[1:], expected[1:])
    untouched = np.setdiff1d(np.arange(1, 9), digest_ids)
    np.testing.assert_array_equal(out_digests[untouched], digests[untouched])
    real = np.flatnonzero(~padding)
    newest = expected[ids[real], np.arange(shape.num_kv_heads), 0]  # [real seqs, heads, block_size, head_dim]
    assert_digests(out_digests, digest_ids[real], *oracle.block_digests(newest, num_valid[real], method), dtype)
    plain, none, _ = call(implementation, "append_tokens", args[0], None, *args[2:], method=method)
    assert none is None
    np.testing.assert_array_equal(plain[1:], out[1:])
    if real.size:
        args[2:4] = args[3], args[2]
        swapped, _, _ = call(implementation, "append_tokens", *args, method=method)
        assert not np.array_equal(loaded(swapped)[1:], expected[1:])


@all_implementations
@all_dtypes
def test_appending_to_a_donated_pool_is_in_place(implementation, dtype):
    if get_kernels(implementation, PLATFORM).interpreted:
        pytest.skip("interpretation copies every array: the compile tests show that the kernels alias")
    shape, rng = SHAPES[0], np.random.default_rng(0)
    kernels = get_kernels(implementation, PLATFORM)
    blocks = jnp.asarray(stored(random_pool(rng, shape, dtype, 2), dtype))
    token = jnp.asarray(floats(np.ones((2, shape.num_kv_heads, shape.head_dim)), dtype))
    ids, num_valid = jnp.array([3, 4]), jnp.array([1, 6])
    pool = jax.jit(jnp.copy)(stored(random_pool(rng, shape, dtype, 9), dtype)).block_until_ready()
    digests = jax.jit(jnp.copy)(stored(np.zeros((9, shape.num_kv_heads, 2, shape.head_dim)), dtype)).block_until_ready()
    for op, *args in (
        (kernels.append_blocks, blocks, ids, num_valid, ids),
        (kernels.append_tokens, token, token, ids[:, None], num_valid, ids),
    ):
        before, addresses = (pool, digests), [a.unsafe_buffer_pointer() for a in (pool, digests)]
        pool, digests, _ = jax.block_until_ready(
            jax.jit(functools.partial(op, method="quest"), donate_argnums=(0, 1))(*before, *args)
        )
        assert all(array.is_deleted() for array in before)
        assert [a.unsafe_buffer_pointer() for a in (pool, digests)] == addresses


@all_implementations
def test_an_unknown_digest_is_refused_by_name(implementation):
    shape, rng = SHAPES[0], np.random.default_rng(0)
    pool, ids = stored(random_pool(rng, shape, "float32", 2), "float32"), np.ones(1, int)
    digests = np.zeros((2, 1, 2, 32), np.float32)
    with pytest.raises(NotImplementedError, match=r"'max'; supported: cuboid-mean, quest, mean"):
        call(implementation, "append_blocks", pool, digests, pool[:1], ids, ids, ids, method="max")


# --- digests and selection -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ScoreCase:
    q: np.ndarray
    digests: np.ndarray
    block_table: np.ndarray
    num_blocks: np.ndarray

    def run(self, implementation, dtype, **fixed):
        arrays = (floats(self.q, dtype), stored(self.digests, dtype), self.block_table, self.num_blocks)
        return call(implementation, "score_blocks", *arrays, **fixed)

    def expected(self, **fixed):
        centre, radius = self.digests[:, :, 0], self.digests[:, :, 1]
        return oracle.score_blocks(self.q, centre + radius, centre - radius, self.block_table, self.num_blocks, **fixed)


def score_case(shape, dtype, seed, lengths, width=7):
    """Digests of the blocks that sequences have, but for their newest; NaN in all others and in padding queries."""
    rng = np.random.default_rng(seed)
    num_blocks = np.array(lengths[: shape.num_seqs])
    pool_blocks = shape.num_seqs * width + 1
    ids = 1 + rng.permutation(pool_blocks - 1).reshape(shape.num_seqs, width)
    digests = np.full((pool_blocks, shape.num_kv_heads, 2, shape.head_dim), np.nan)
    q = exact(rng.normal(size=(shape.num_seqs, shape.num_kv_heads * shape.group, shape.head_dim)), dtype)
    for seq, count in enumerate(num_blocks):
        scored = max(count - 1, 0)
        content = rng.normal(size=(scored, shape.num_kv_heads, 2, shape.head_dim))
        content[:, :, 1] = np.abs(content[:, :, 1])
        digests[ids[seq, :scored]] = exact(content, dtype)
        ids[seq, count:] = rng.choice([0, *ids[seq, count:]], size=width - count)
        if count == 0:
            q[seq] = np.nan
    return ScoreCase(q, digests, ids, num_blocks)


FORCED = ({"num_sink_blocks": 1, "num_newest_blocks": 2}, {"num_sink_blocks": 0, "num_newest_blocks": 1})


@all_implementations
@all_dtypes
@all_shapes
@pytest.mark.parametrize("per_query_head", [False, True], ids=["kv_head", "query_head"])
@few_examples
@given(seed=seeds, lengths=st.lists(st.integers(0, 7), min_size=3, max_size=3))
@example(seed=0, lengths=[0, 0, 0])
@example(seed=1, lengths=[1, 7, 0])
def test_score_blocks(implementation, dtype, shape, per_query_head, seed, lengths):
    case = score_case(shape, dtype, seed, lengths)
    fixed = {"scale": shape.scale, "per_query_head": per_query_head} | FORCED[seed % 2]
    assert_close(case.run(implementation, dtype, **fixed), case.expected(**fixed), dtype, "scores")


@all_implementations
@all_dtypes
@pytest.mark.parametrize("per_query_head", [False, True], ids=["kv_head", "query_head"])
def test_score_blocks_comparison_has_teeth(implementation, dtype, per_query_head):
    shape = SHAPES[1]
    case = score_case(shape, dtype, 0, [7, 7, 7])
    fixed = {
        "scale": shape.scale, "per_query_head": per_query_head, "num_sink_blocks": 0, "num_newest_blocks": 1
    }  # fmt: skip
    expected = case.expected(**fixed)
    assert_not_close(
        case.run(implementation, dtype, **fixed | {"scale": shape.scale * 1.01}), expected, dtype, "scores"
    )
    swapped = dataclasses.replace(case, digests=case.digests[:, :, ::-1])
    assert_not_close(swapped.run(implementation, dtype, **fixed), expected, dtype, "scores")
    for wrong in ({"num_sink_blocks": 1}, {"num_newest_blocks": 2}):
        assert_not_close(case.run(implementation, dtype, **fixed | wrong), expected, dtype, "scores")


@all_implementations
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=seeds,
    lengths=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    num_selected=st.sampled_from([1, 4, 8, 12, 15]),
    num_levels=st.sampled_from([1, 3, 1000]),
)
def test_select_blocks(implementation, seed, lengths, num_selected, num_levels):
    """Few rank levels make ties; some ranks are forced."""
    rng, num_blocks = np.random.default_rng(seed), np.array(lengths)
    ranks = rng.integers(-num_levels, num_levels, size=(3, 2, 12)) / num_levels
    ranks[rng.random(ranks.shape) < 0.2] = np.inf
    ranks[np.broadcast_to(np.arange(12) >= num_blocks[:, None, None], ranks.shape)] = -np.inf
    ranks = ranks.astype(np.float32)
    out = call(implementation, "select_blocks", ranks, num_selected=num_selected)
    np.testing.assert_array_equal(out, oracle.select_blocks(ranks, num_selected))


@all_implementations
@few_examples
@given(seed=seeds)
@pytest.mark.parametrize(("num_kv_heads", "group", "num_union"), [(1, 7, 10), (2, 3, 14), (8, 1, 10)])
def test_union_over_group(implementation, num_kv_heads, group, num_union, seed):
    rng = np.random.default_rng(seed)
    selected = np.full((3, num_kv_heads * group, 4), -1)
    for row in selected.reshape(-1, 4):
        count = rng.integers(0, 5)
        row[:count] = np.sort(rng.permutation(10)[:count])
    fixed = {"num_kv_heads": num_kv_heads, "max_blocks": 10, "num_union": num_union}
    union, mask = call(implementation, "union_over_group", selected, **fixed)
    expected = oracle.union_over_group(selected, num_kv_heads, num_union)
    np.testing.assert_array_equal(union, expected[0])
    np.testing.assert_array_equal(np.asarray(mask), expected[1])


# --- residency -------------------------------------------------------------------------------------------------------


@all_implementations
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=seeds,
    grants=st.lists(st.integers(4, 9), min_size=3, max_size=3),
    sizes=st.sampled_from([(4, 9, 20), (6, 9, 5), (4, 4, 20)]),
)
def test_match_slots_over_some_steps(implementation, seed, grants, sizes):
    """Steps that follow each other, with two rows of sequences and a row of padding (no grant, nothing selected)."""
    rng = np.random.default_rng(seed)
    num_selected, num_columns, max_blocks = sizes
    num_slots = np.array([min(g, num_columns) for g in grants])
    num_slots[2] = 0
    beyond = np.broadcast_to(np.arange(num_columns) >= num_slots[:, None, None], (3, 2, num_columns))
    resident = np.where(beyond, rng.integers(0, max_blocks, beyond.shape), -1)  # no part of the grant: must not be used
    last_selected = np.full((3, 2, max_blocks), -1000)
    for step in range(5):
        selected = np.full((3, 2, num_selected), -1)
        for row in selected[:2].reshape(-1, num_selected):
            count = rng.integers(0, 5)
            row[:count] = np.sort(rng.permutation(max_blocks)[:count])
        slots, missed, after = call(implementation, "match_slots", selected, resident, last_selected, num_slots)
        expected_slots, expected_missed, expected_after = oracle.match_slots(
            selected, resident, last_selected, num_slots
        )
        np.testing.assert_array_equal(missed, expected_missed)
        np.testing.assert_array_equal(after, expected_after)
        np.testing.assert_array_equal(np.where(selected >= 0, slots, -1), expected_slots)
        resident = expected_after
        for place in np.argwhere(selected >= 0):
            last_selected[place[0], place[1], selected[tuple(place)]] = step // 2  # two steps a stamp: ties


@all_implementations
def test_match_slots_evicts_the_least_recent_and_never_what_is_selected(implementation):
    resident = np.array([[[7, 3, 5, -1]]])
    last_selected = np.array([[[0, 0, 0, 2, 0, 9, 0, 1, 0, 0]]])
    selected = np.array([[[1, 2, 7, -1]]])
    slots, missed, after = call(implementation, "match_slots", selected, resident, last_selected, np.array([4]))
    assert missed.tolist() == [[[True, True, False, False]]]
    assert slots[0, 0, :3].tolist() == [3, 1, 0]  # the empty slot, the oldest that is not wanted (3), the hit
    assert after.tolist() == [[[7, 2, 5, 1]]]


# --- decode attention ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class DecodeCase:
    q: np.ndarray
    pool: np.ndarray
    block_ids: np.ndarray
    num_valid: np.ndarray
    query_mask: np.ndarray | None = None

    def run(self, implementation, dtype, scale):
        arrays = (floats(self.q, dtype), stored(self.pool, dtype), self.block_ids, self.num_valid, self.query_mask)
        return call(implementation, "decode_attention", *arrays, scale=scale)

    def expected(self, scale):
        return oracle.decode_attention(self.q, self.pool, self.block_ids, self.num_valid, self.query_mask, scale)


def decode_case(shape, dtype, seed, kinds, masked=False):
    """A pool that is NaN but for the tokens that count; every head has its own blocks, in any order.

    Args:
        kinds: for each sequence, how much there is: "nothing" (padding: its query is NaN), "one token", "some tokens"
            of each block, some blocks left out, or "everything".
    """
    rng = np.random.default_rng(seed)
    seqs, heads, size, width = shape.num_seqs, shape.num_kv_heads, shape.block_size, shape.num_selected
    num_valid = np.zeros((seqs, heads, width), int)
    for seq, kind in enumerate(kinds[:seqs]):
        if kind == "one token":
            num_valid[seq, :, rng.integers(width)] = 1
        elif kind == "some tokens":
            num_valid[seq] = rng.integers(0, size + 1, (heads, width)) * rng.integers(0, 2, (heads, width))
        elif kind == "everything":
            num_valid[seq] = size
    ids = np.stack([1 + rng.permutation(seqs * width).reshape(seqs, width) for _ in range(heads)], axis=1)
    pool = np.full((seqs * width + 1, heads, 2, size, shape.head_dim), np.nan)
    for (seq, head, index), count in np.ndenumerate(num_valid):
        content = rng.normal(size=(2, count, shape.head_dim))
        pool[ids[seq, head, index], head, :, :count] = exact(content, dtype)
    ids[(num_valid == 0) & (rng.random(num_valid.shape) < 0.5)] = 0
    q = exact(rng.normal(size=(seqs, heads * shape.group, shape.head_dim)), dtype)
    q[num_valid.sum((1, 2)) == 0] = np.nan
    mask = rng.random((seqs, heads, shape.group, width)) < 0.6 if masked else None
    return DecodeCase(q, pool, ids, num_valid, mask)


sequence_kinds = st.lists(
    st.sampled_from(["nothing", "one token", "some tokens", "everything"]), min_size=3, max_size=3
)


@all_implementations
@all_dtypes
@pytest.mark.parametrize(
    ("shape", "masked"),
    [*((shape, False) for shape in SHAPES), (SHAPES[1], True), (SHAPES[2], True)],
    ids=lambda value: str(value) if isinstance(value, Shape) else "query_mask" if value else "",
)
@few_examples
@given(seed=seeds, kinds=sequence_kinds)
@example(seed=0, kinds=["nothing"] * 3)
@example(seed=1, kinds=["some tokens", "nothing", "one token"])
def test_decode_attention(implementation, dtype, shape, masked, seed, kinds):
    case = decode_case(shape, dtype, seed, kinds, masked)
    out, expected = case.run(implementation, dtype, shape.scale), case.expected(shape.scale)
    assert_close(out, expected, dtype, "attention")
    assert not out[np.isnan(case.q).any((1, 2))].any()


@all_implementations
@all_dtypes
def test_decode_attention_comparison_has_teeth(implementation, dtype):
    shape = SHAPES[1]
    case = decode_case(shape, dtype, 0, ["everything"] * 3)
    case.q *= 2  # sharper weights
    expected = case.expected(shape.scale)
    assert_close(case.run(implementation, dtype, shape.scale), expected, dtype, "attention")
    swapped = dataclasses.replace(case, pool=case.pool[:, :, ::-1])
    assert_not_close(swapped.run(implementation, dtype, shape.scale), expected, dtype, "attention")
    assert_not_close(case.run(implementation, dtype, shape.scale * 1.1), expected, dtype, "attention")
    one_less = dataclasses.replace(case, num_valid=case.num_valid - 1)
    assert_not_close(one_less.run(implementation, dtype, shape.scale), expected, dtype, "attention")


@all_implementations
@all_dtypes
def test_decode_attention_does_not_care_where_blocks_lie(implementation, dtype):
    shape = SHAPES[1]
    case = decode_case(shape, dtype, 5, ["everything", "some tokens", "some tokens"])
    moved_to = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(len(case.pool) - 1)])
    moved = dataclasses.replace(case, pool=case.pool[np.argsort(moved_to)], block_ids=moved_to[case.block_ids])
    assert not np.array_equal(moved.block_ids, case.block_ids)
    out = case.run(implementation, dtype, shape.scale)
    np.testing.assert_array_equal(moved.run(implementation, dtype, shape.scale), out)
    order = np.random.default_rng(1).permutation(shape.num_selected)
    reordered = dataclasses.replace(case, block_ids=case.block_ids[..., order], num_valid=case.num_valid[..., order])
    assert_close(reordered.run(implementation, dtype, shape.scale), out, dtype, "attention")


@all_implementations
@all_dtypes
@pytest.mark.parametrize(("num_blocks", "masked"), [(65, False), (150, True)])
def test_decode_attention_over_many_blocks(implementation, dtype, num_blocks, masked):
    """More blocks than one chunk of the loop, some sequences short; then a few blocks spread far apart."""
    shape = Shape(3, 2, 3, 16, 32, num_selected=num_blocks)
    case = decode_case(shape, dtype, num_blocks, ["everything", "some tokens", "one token"], masked)
    assert_close(case.run(implementation, dtype, shape.scale), case.expected(shape.scale), dtype, "attention")

    few = decode_case(dataclasses.replace(shape, num_selected=4), dtype, 1, ["everything"] * 3, masked)
    places = [3, 62, 63, num_blocks - 1]

    def spread(array):
        out = np.zeros((*array.shape[:-1], num_blocks), array.dtype)
        out[..., places] = array
        return out

    arrays = {name: spread(getattr(few, name)) for name in ("block_ids", "num_valid", *(["query_mask"] * masked))}
    out = dataclasses.replace(few, **arrays).run(implementation, dtype, shape.scale)
    assert_close(out, few.expected(shape.scale), dtype, "attention")  # as if they lay side by side


# --- prefill attention -----------------------------------------------------------------------------------------------

PREFILL_SHAPES = (
    Shape(3, 1, 3, 16, 32),
    Shape(3, 2, 4, 32, 64),
    Shape(3, 1, 7, 64, 128),
    Shape(3, 2, 8, 16, 32),
    Shape(3, 8, 1, 32, 32),
)
MAX_START = 1024


@dataclasses.dataclass
class PrefillCase:
    q: np.ndarray
    pool: np.ndarray
    block_tables: np.ndarray
    prompts: list[tuple[int, int, int, int]]
    num_tiles: int
    tile_mask: np.ndarray | None = None

    def arrays(self, dtype):
        tile_prompt, tile_start, tile_tokens = np.zeros((3, self.num_tiles), int)
        for row, table, start, count in self.prompts:
            for offset in range(0, count, PREFILL_TILE):
                tile = (row + offset) // PREFILL_TILE
                tile_prompt[tile], tile_start[tile] = table, start + offset
                tile_tokens[tile] = min(PREFILL_TILE, count - offset)
        tiles = (tile_prompt, tile_start, tile_tokens, self.tile_mask)
        return (floats(self.q, dtype), stored(self.pool, dtype), self.block_tables, *tiles)

    def run(self, implementation, dtype, scale, merge_tiles=1):
        return call(implementation, "prefill_attention", *self.arrays(dtype), scale=scale, merge_tiles=merge_tiles)

    def expected(self, scale):
        where = (self.block_tables, self.prompts, scale, self.tile_mask, PREFILL_TILE)
        return oracle.prefill_attention(self.q, self.pool, *where)


def prefill_case(shape, dtype, seed, chunks, num_tiles=4, max_start=MAX_START):
    """Packs prompts given as (start, tokens), one after the other, each from a tile on; NaN wherever no token is."""
    rng = np.random.default_rng(seed)
    size = shape.block_size
    max_blocks = (max_start + num_tiles * PREFILL_TILE) // size + 1
    tables = np.zeros((shape.num_seqs, max_blocks), int)
    pool = np.full((shape.num_seqs * max_blocks + 1, shape.num_kv_heads, 2, size, shape.head_dim), np.nan)
    ids = 1 + rng.permutation(len(pool) - 1)
    q = np.full((num_tiles * PREFILL_TILE, shape.num_kv_heads * shape.group, shape.head_dim), np.nan)
    prompts, row = [], 0
    for table, (start, count) in enumerate(chunks):
        num_blocks = -(-(start + count) // size)
        tables[table, :num_blocks], ids = ids[:num_blocks], ids[num_blocks:]
        for block in range(num_blocks):
            filled = min(size, start + count - block * size)
            content = rng.normal(size=(shape.num_kv_heads, 2, filled, shape.head_dim))
            pool[tables[table, block], :, :, :filled] = exact(content, dtype)
        q[row : row + count] = exact(rng.normal(size=(count, *q.shape[1:])), dtype)
        prompts.append((row, table, start, count))
        row += -(-count // PREFILL_TILE) * PREFILL_TILE
    assert row <= len(q)
    return PrefillCase(q, pool, tables, prompts, num_tiles)


chunks_of_four_tiles = st.sampled_from([(1,), (4,), (1, 1, 1), (2, 1), (1, 3)]).flatmap(
    lambda tiles: st.tuples(*(
        st.tuples(
            st.sampled_from([0, 64, 512, 576, MAX_START]), st.integers((n - 1) * PREFILL_TILE + 1, n * PREFILL_TILE)
        )
        for n in tiles
    ))
)  # fmt: skip


@all_implementations
@all_dtypes
@pytest.mark.parametrize("shape", PREFILL_SHAPES, ids=str)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(seed=seeds, chunks=chunks_of_four_tiles)
@example(seed=0, chunks=((0, 1),))
@example(seed=1, chunks=((576, 130), (0, 128), (512, 1)))
def test_prefill_attention(implementation, dtype, shape, seed, chunks):
    case = prefill_case(shape, dtype, seed, chunks)
    out = case.run(implementation, dtype, shape.scale)
    assert_close(out, case.expected(shape.scale), dtype, "attention")


@all_implementations
@all_dtypes
def test_prefill_attention_of_padding_alone_is_zero(implementation, dtype):
    out = prefill_case(PREFILL_SHAPES[0], dtype, 0, ()).run(implementation, dtype, PREFILL_SHAPES[0].scale)
    assert not out.any()


@all_implementations
@all_dtypes
@pytest.mark.parametrize("chunk", [(0, 450), (576, 300), (MAX_START, 200), (0, 512)])
def test_merged_tiles_agree(implementation, dtype, chunk):
    shape = PREFILL_SHAPES[0]
    case = prefill_case(shape, dtype, 7, (chunk,))
    expected = case.expected(shape.scale)
    for merge_tiles in (1, 2, 4):
        assert_close(case.run(implementation, dtype, shape.scale, merge_tiles), expected, dtype, "attention")


@all_implementations
@all_dtypes
def test_prefill_attention_comparison_has_teeth(implementation, dtype):
    shape = PREFILL_SHAPES[0]
    case = prefill_case(shape, dtype, 3, ((0, 100), (64, 128)))
    expected = case.expected(shape.scale)
    swapped = dataclasses.replace(case, pool=case.pool[:, :, ::-1])
    assert_not_close(swapped.run(implementation, dtype, shape.scale), expected, dtype, "attention")
    assert_not_close(case.run(implementation, dtype, shape.scale * 1.1), expected, dtype, "attention")
    early = dataclasses.replace(case, prompts=[(row, table, max(0, s - 1), n) for row, table, s, n in case.prompts])
    assert_not_close(early.run(implementation, dtype, shape.scale), expected, dtype, "attention")

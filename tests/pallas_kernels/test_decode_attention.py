"""The decode attention kernel, interpreted, against the oracle; how it splits long rows; what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import decode_attention as kernel
from pallas_kernels import reference
from tests.pallas_kernels import oracle
from tests.pallas_kernels.test_conformance import (
    INTERPRET,
    SHAPES,
    TOLERANCES,
    Shape,
    all_dtypes,
    assert_close,
    assert_not_close,
    decode_case,
    few_examples,
    floats,
    seeds,
    sequence_kinds,
    stored,
)

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}  # compiling is what takes the time here


def jit(function, **fixed):
    return jax.jit(functools.partial(function, **fixed), compiler_options=COMPILER_OPTIONS)


@functools.cache
def jitted(scale, splits, scan):
    """Compiled anew wherever the number of splits or of entries scanned together is forced."""
    return jit(kernel.decode_attention, scale=scale, interpret=INTERPRET)


def run(case, dtype, scale, splits=None, scan=None):
    q, pool = floats(case.q, dtype), stored(case.pool, dtype)
    ids, num_valid = case.block_ids.astype(np.int32), case.num_valid.astype(np.int32)
    return np.asarray(jitted(scale, splits, scan)(q, pool, ids, num_valid, case.query_mask))


@pytest.fixture
def forced(monkeypatch):
    """Runs a case with this many splits, and a scan for the last block in steps of 8 entries."""

    def run_forced(case, dtype, scale, splits):
        monkeypatch.setattr(kernel, "num_splits", lambda **_: splits)
        monkeypatch.setattr(kernel, "SCAN", 8)
        return run(case, dtype, scale, splits, 8)

    return run_forced


# --- what it computes ------------------------------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize(
    ("shape", "masked"),
    [*((shape, False) for shape in SHAPES), (SHAPES[1], True), (SHAPES[4], True)],
    ids=lambda value: str(value) if isinstance(value, Shape) else "query_mask" if value else "",
)
@few_examples
@given(seed=seeds, kinds=sequence_kinds)
@example(seed=0, kinds=["nothing"] * 3)
@example(seed=1, kinds=["some tokens", "nothing", "one token"])
@example(seed=2, kinds=["one token", "everything", "some tokens"])
def test_conformance(dtype, shape, masked, seed, kinds):
    case = decode_case(shape, dtype, seed, kinds, masked)
    out = run(case, dtype, shape.scale)
    assert_close(out, case.expected(shape.scale), dtype, "attention")
    assert not out[np.isnan(case.q).any((1, 2))].any()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", Shape(2, 32, 1, 16, 32, num_selected=2)),
        ("float32", Shape(3, 1, 20, 16, 32)),  # padded to 32 rows
        ("bfloat16", Shape(3, 1, 4, 64, 256)),  # two steps a block
        ("float32", Shape(3, 2, 1, 32, 256, num_selected=3)),  # four
    ],
    ids=str,
)
def test_conformance_at_the_edges(dtype, shape):
    case = decode_case(shape, dtype, 0, ["everything", "some tokens", "one token"])
    assert_close(run(case, dtype, shape.scale), case.expected(shape.scale), dtype, "attention")


@all_dtypes
def test_the_comparison_has_teeth(dtype):
    shape = SHAPES[1]
    case = decode_case(shape, dtype, 0, ["everything"] * 3)
    case.q *= 2  # sharper weights
    expected = case.expected(shape.scale)
    assert_close(run(case, dtype, shape.scale), expected, dtype, "attention")
    swapped = dataclasses.replace(case, pool=case.pool[:, :, ::-1])
    assert_not_close(run(swapped, dtype, shape.scale), expected, dtype, "attention")
    one_less = dataclasses.replace(case, num_valid=case.num_valid - 1)
    assert_not_close(run(one_less, dtype, shape.scale), expected, dtype, "attention")
    if dtype == "float32":
        assert_not_close(run(case, dtype, shape.scale * 1.1), expected, dtype, "attention")


def test_heads_that_no_block_is_for_give_zeros():
    shape = SHAPES[1]
    case = decode_case(shape, "float32", 0, ["everything", "some tokens", "one token"], masked=True)
    case.query_mask[:, :, 1] = False
    out = run(case, "float32", shape.scale).reshape(shape.num_seqs, shape.num_kv_heads, shape.group, -1)
    assert not out[:, :, 1].any()
    assert_close(out.reshape(case.q.shape), case.expected(shape.scale), "float32", "attention")


@pytest.mark.parametrize(
    ("dtype", "splits", "masked"), [("float32", 2, False), ("float32", 7, True), ("bfloat16", 5, False)]
)
def test_splits(forced, dtype, splits, masked):
    """Rows end early, late, or right away, so that some splits see nothing; blocks lie far apart, too."""
    shape = Shape(3, 2, 3, 16, 32, num_selected=37)
    for kinds in (["everything", "some tokens", "one token"], ["nothing", "one token", "some tokens"]):
        case = decode_case(shape, dtype, 3, kinds, masked)
        case.num_valid[0, 0, 2:-1] = 0
        case.num_valid[0, 1, 20:] = 0
        assert_close(forced(case, dtype, shape.scale, splits), case.expected(shape.scale), dtype, "attention")


def test_splits_of_blocks_larger_than_a_step(forced):
    shape = Shape(3, 1, 1, 32, 256, num_selected=5)
    case = decode_case(shape, "float32", 3, ["everything", "some tokens", "one token"])
    assert_close(forced(case, "float32", shape.scale, 2), case.expected(shape.scale), "float32", "attention")


def test_many_blocks_are_split_without_being_asked():
    shape = Shape(3, 2, 3, 16, 32, num_selected=70)
    assert splits_of(shape, "float32") > 1
    case = decode_case(shape, "float32", 70, ["everything", "some tokens", "one token"])
    assert_close(run(case, "float32", shape.scale), case.expected(shape.scale), "float32", "attention")


# --- int8 ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Int8Case:
    """Values of a magnitude of 1. What does not count is the largest integer, and its scale is NaN."""

    q: np.ndarray
    pool: np.ndarray
    scales: np.ndarray
    block_ids: np.ndarray
    num_valid: np.ndarray
    query_mask: np.ndarray | None

    @classmethod
    def make(cls, shape, seed, kinds, masked=False):
        case = decode_case(shape, "bfloat16", seed, kinds, masked)
        rng = np.random.default_rng(seed)
        pool = np.where(np.isnan(case.pool), 127, rng.integers(-127, 128, case.pool.shape))
        scales = np.full(pool.shape[:3], np.nan)
        for (seq, head, index), count in np.ndenumerate(case.num_valid):
            if count:
                scales[case.block_ids[seq, head, index], head] = rng.uniform(0.005, 0.02, 2).astype(np.float32)
        return cls(case.q, pool, scales, case.block_ids, case.num_valid, case.query_mask)

    def run(self, function):
        arrays = (
            floats(self.q, "bfloat16"), self.pool.astype(np.int8),
            self.block_ids.astype(np.int32), self.num_valid.astype(np.int32), self.query_mask,
        )  # fmt: skip
        return np.asarray(function(*arrays, kv_scales=self.scales.astype(np.float32)))

    def expected(self, scale):
        pool = self.pool.astype(np.float64) * self.scales[..., None, None]
        return oracle.decode_attention(self.q, pool, self.block_ids, self.num_valid, self.query_mask, scale)


@pytest.mark.parametrize("implementation", ["kernel", "reference"])
@pytest.mark.parametrize(("shape", "masked"), [(SHAPES[2], False), (SHAPES[4], True)], ids=str)
def test_int8(implementation, shape, masked):
    function = kernel.decode_attention if implementation == "kernel" else reference.decode_attention
    fixed = {"interpret": INTERPRET} if implementation == "kernel" else {}
    function = jit(function, scale=shape.scale, **fixed)
    for seed, kinds in enumerate((["everything"] * 3, ["some tokens", "one token", "nothing"])):
        case = Int8Case.make(shape, seed, kinds, masked)
        out = case.run(function)
        assert_close(out, case.expected(shape.scale), "bfloat16", "attention")
        assert not out[np.isnan(case.q).any((1, 2))].any()
    case = Int8Case.make(shape, 0, ["everything"] * 3, masked)
    expected = case.expected(shape.scale)
    swapped = dataclasses.replace(case, scales=case.scales[..., ::-1])
    assert_not_close(swapped.run(function), expected, "bfloat16", "attention")


@pytest.mark.parametrize(("dtype", "scaled"), [("int8", False), ("bfloat16", True)])
def test_scales_belong_to_int8_pools_alone(dtype, scaled):
    with pytest.raises(AssertionError, match="int8 pools, and only these, have scales"):
        trace(SHAPES[0], dtype, num_blocks=9, scaled=scaled)


# --- splits ----------------------------------------------------------------------------------------------------------


def splits_of(shape, dtype):
    sizes = {field: getattr(shape, field) for field in ("num_seqs", "num_kv_heads", "group", "num_selected")}
    return kernel.num_splits(**sizes, block_size=shape.block_size, head_dim=shape.head_dim, dtype=jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("num_seqs", "group", "num_selected", "expected"),
    [
        (1, 4, 64, 8),  # partial results: 8 x 4 heads x 130 floats, twice, are 3.2 % of 1 MiB of blocks
        (1, 8, 64, 4),
        (1, 1, 64, 16),  # of 32 steps, 16 programs take two each: as fast as 27
        (4, 4, 64, 6),  # 4 sequences x 8 heads x 6 = 192 programs, of 216 that run at once
        (16, 4, 64, 1),
        (64, 4, 64, 1),
        (1, 4, 1, 1),
        (1, 4, 32_768, 27),  # a dense layer at 1M tokens
        (64, 4, 32_768, 4),  # the sequences of a batch differ in length
        (64, 4, 512, 2),
    ],
)
def test_number_of_splits(num_seqs, group, num_selected, expected):
    assert splits_of(Shape(num_seqs, 8, group, 32, 128, num_selected), "bfloat16") == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(st.integers(1, 64), st.sampled_from([1, 2, 8, 32]), st.sampled_from([1, 3, 4, 7, 8, 64])),
    block_size=st.sampled_from([16, 32, 64]),
    head_dim=st.sampled_from([16, 64, 128, 256]),
    num_selected=st.integers(1, 40_000),
    dtype=st.sampled_from([*TOLERANCES, "int8"]),
)
def test_splits_fill_the_device_and_cost_little(sizes, block_size, head_dim, num_selected, dtype):
    shape = Shape(*sizes, block_size, head_dim, num_selected)
    splits = splits_of(shape, dtype)
    assert 1 <= splits <= num_selected
    if splits > 1:
        assert splits <= 4 or splits * shape.num_seqs * shape.num_kv_heads <= 2 * 108
        block_bytes = num_selected * 2 * block_size * head_dim * jnp.dtype(dtype).itemsize
        assert splits * shape.group * (head_dim + 2) * 4 * 2 <= 0.04 * block_bytes


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "dtype", "message"),
    [
        ({"head_dim": 48}, "bfloat16", "head_dim 48; supported: 16, 32, 64, 128, 256"),
        ({"block_size": 8}, "bfloat16", "block_size 8; supported: 16, 32, 64"),
        ({"group": 65}, "bfloat16", "query heads for each KV head 65; supported: 1 to 64"),
        ({}, "float16", "dtype float16; supported: bfloat16, float32, int8"),
    ],
    ids=["head_dim", "block_size", "group", "dtype"],
)
def test_what_it_was_not_built_for_is_refused(changes, dtype, message):
    shape = dataclasses.replace(SHAPES[1], **changes)
    with pytest.raises(NotImplementedError, match=f"decode_attention: no Pallas kernel for {message}"):
        trace(shape, dtype, num_blocks=9)


@pytest.mark.parametrize("num_blocks", [2**14, 2**14 + 1, 2**15, 2**15 + 1])
def test_int8_pools_that_pallas_would_address_wrongly_are_refused(num_blocks):
    shape = Shape(1, 8, 4, 64, 128)  # 128 KiB a block
    if 2**14 < num_blocks <= 2**15:
        with pytest.raises(NotImplementedError, match=r"an int8 pool of .* bytes; supported: up to 2147483648 or more"):
            trace(shape, "int8", num_blocks)
    else:
        assert trace(shape, "int8", num_blocks).shape == (1, 32, 128)


def trace(shape, dtype, num_blocks, scaled=None):
    """The result's shape: traced, not run."""
    struct = jax.ShapeDtypeStruct
    table = struct((shape.num_seqs, shape.num_kv_heads, shape.num_selected), jnp.int32)
    arrays = (
        struct((shape.num_seqs, shape.num_kv_heads * shape.group, shape.head_dim), jnp.float32),
        struct((num_blocks, shape.num_kv_heads, 2, shape.block_size, shape.head_dim), dtype),
        table,
        table,
    )
    scaled = dtype == "int8" if scaled is None else scaled
    scales = struct((num_blocks, shape.num_kv_heads, 2), jnp.float32) if scaled else None
    return jax.eval_shape(
        lambda *arrays: kernel.decode_attention(*arrays[:4], None, scale=1.0, kv_scales=arrays[4], interpret=True),
        *arrays,
        scales,
    )

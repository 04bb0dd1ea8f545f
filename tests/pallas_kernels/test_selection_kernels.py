"""The scoring, selection and slot matching kernels, interpreted: what sizes beyond the conformance suite's ask of them.

Tables of many tiles, rows of many chunks, many slots. Loops that real sizes would run too long for here are made to run
by shrinking the kernels' own sizes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels import match_slots as matching
from pallas_kernels import score_blocks as scoring
from pallas_kernels import select_blocks as selection
from pallas_kernels.triton import kernel_call
from tests.pallas_kernels import oracle
from tests.pallas_kernels.test_conformance import (
    INTERPRET,
    Shape,
    all_dtypes,
    assert_close,
    assert_not_close,
    floats,
    score_case,
    seeds,
    stored,
)

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}  # compiling is what takes the time here
FORCED = {"num_sink_blocks": 1, "num_newest_blocks": 2}
by_head = pytest.mark.parametrize("per_query_head", [False, True], ids=["kv_head", "query_head"])


def jit(function, **fixed):
    return jax.jit(functools.partial(function, interpret=INTERPRET, **fixed), compiler_options=COMPILER_OPTIONS)


def ints(*arrays):
    return [np.asarray(array, np.int32) for array in arrays]


# --- scores ----------------------------------------------------------------------------------------------------------


def score(case, dtype, **fixed):
    function = jit(scoring.score_blocks, **fixed)
    table, counts = ints(case.block_table, case.num_blocks)
    return np.asarray(function(floats(case.q, dtype), stored(case.digests, dtype), table, counts))


@all_dtypes
@by_head
def test_tables_of_several_tiles_and_short_sequences(dtype, per_query_head):
    """Ends within the first, the second and the last tile, and at the edges of tiles."""
    shape = Shape(5, 1, 2, 32, 16)
    fixed = {"scale": shape.scale, "per_query_head": per_query_head, **FORCED}
    case = score_case(shape, dtype, 0, [300, 130, 129, 128, 3], width=300)
    assert scoring.MAX_TILE == 128
    assert_close(score(case, dtype, **fixed), case.expected(**fixed), dtype, "scores")


@pytest.fixture
def small(monkeypatch):
    """Sizes so small that every loop of the second kernel runs more than once."""
    for name, value in {"MIN_TILE": 16, "MAX_TILE": 16, "MERGE_TILE": 32, "MERGE_HEADS": 2, "MERGE_STATS": 2}.items():
        monkeypatch.setattr(scoring, name, value)


@all_dtypes
@pytest.mark.parametrize(
    ("shape", "width"), [(Shape(3, 2, 5, 32, 16), 100), (Shape(3, 1, 20, 32, 16), 40)], ids=["5 heads", "20 heads"]
)
def test_many_tiles_and_query_heads_at_a_time(small, dtype, shape, width):
    """Statistics of tiles that do not exist are NaN (the interpreter's empty memory), so a read of them shows."""
    fixed = {"scale": shape.scale, "per_query_head": False, **FORCED}
    case = score_case(shape, dtype, 1, [width, 36, 0], width=width)
    assert_close(score(case, dtype, **fixed), case.expected(**fixed), dtype, "scores")


def test_float32_groups_of_several_programs():
    shape = Shape(2, 2, scoring.FLOAT32_ROWS + 3, 32, 16)
    fixed = {"scale": shape.scale, "per_query_head": True, **FORCED}
    case = score_case(shape, "float32", 2, [9, 4], width=9)
    out = score(case, "float32", **fixed)
    assert_close(out, case.expected(**fixed), "float32", "scores")
    swapped_heads = out.reshape(2, 2, -1, 9)[:, ::-1].reshape(out.shape)
    assert_not_close(swapped_heads, case.expected(**fixed), "float32", "scores")


def test_huge_scores_still_share_one_whole(small):
    """The second tile's maximum is far above the first's: the merge must not overflow, nor lose what is small."""
    shape = Shape(1, 1, 2, 32, 16)
    case = score_case(shape, "float32", 3, [64], width=64)
    case.digests[case.block_table[0, 16:32]] *= 1000
    out = score(case, "float32", scale=1.0, per_query_head=False, num_sink_blocks=0, num_newest_blocks=1)
    assert np.isfinite(out[..., :-1]).all() and out[..., -1] == np.inf
    np.testing.assert_allclose(out[..., :-1].sum(), 1.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "named"),
    [(4, 48, jnp.float32, "head_dim 48"), (4, 32, jnp.float16, "dtype float16"), (65, 32, jnp.float32, "KV head 65")],
)
def test_scoring_refuses_what_no_kernel_was_built_for(heads, head_dim, dtype, named):
    arrays = jnp.zeros((1, heads, head_dim)), jnp.zeros((2, 1, 2, head_dim), dtype), *ints([[1]], [1])
    with pytest.raises(NotImplementedError, match=named):
        jax.eval_shape(functools.partial(_score_something, interpret=True), *arrays)


def _score_something(*arrays, interpret):
    return scoring.score_blocks(*arrays, scale=1.0, per_query_head=False, interpret=interpret, **FORCED)


# --- selection -------------------------------------------------------------------------------------------------------


@functools.cache
def select_jitted(num_selected, chunk):
    """Compiled anew wherever the chunk is shrunk."""
    return jit(selection.select_blocks, num_selected=num_selected)


def select(ranks, num_selected):
    ranks = np.asarray(ranks, np.float32)
    return np.asarray(select_jitted(num_selected, selection.CHUNK)(ranks))


def random_ranks(seed, width, num_levels):
    """Few levels make ties; some are +inf, some are not there; zeros of both signs; one row of nothing."""
    rng = np.random.default_rng(seed)
    ranks = rng.integers(-num_levels, num_levels + 1, size=(2, 2, width)) / 7
    ranks *= rng.choice([-1.0, 1.0], size=ranks.shape)
    ranks[rng.random(ranks.shape) < 0.03] = np.inf
    ranks[rng.random(ranks.shape) < 0.1] = -np.inf
    ranks[0, 1, rng.integers(width + 1) :] = -np.inf
    ranks[1, 1] = -np.inf
    return ranks.astype(np.float32)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=seeds,
    sizes=st.sampled_from([(1, 1), (5, 9), (64, 64), (100, 17), (1000, 64)]),
    num_levels=st.sampled_from([0, 1, 5, 10**6]),
)
def test_selection_within_one_chunk(seed, sizes, num_levels):
    width, num_selected = sizes
    ranks = random_ranks(seed, width, num_levels)
    np.testing.assert_array_equal(select(ranks, num_selected), oracle.select_blocks(ranks, num_selected))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=seeds, sizes=st.sampled_from([(70, 9), (300, 16), (300, 1)]), num_levels=st.sampled_from([0, 2, 10**6]))
def test_selection_in_several_passes(seed, sizes, num_levels):
    width, num_selected = sizes
    ranks = random_ranks(seed, width, num_levels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "CHUNK", 32)
        chosen = select(ranks, num_selected)
    np.testing.assert_array_equal(chosen, oracle.select_blocks(ranks, num_selected))


@pytest.mark.parametrize(("width", "num_selected", "num_levels"), [(9000, 64, 10**6), (4097, 300, 20)])
def test_selection_of_thousands(width, num_selected, num_levels):
    ranks = random_ranks(4, width, num_levels)
    expected = oracle.select_blocks(ranks, num_selected)
    np.testing.assert_array_equal(select(ranks, num_selected), expected)
    swapped = ranks.copy()
    best, worst = np.argmax(ranks[0, 0] < np.inf), np.argmin(ranks[0, 0])
    swapped[0, 0, [best, worst]] = -np.inf, np.inf  # teeth: another block is the best
    assert (select(swapped, num_selected)[0, 0] != expected[0, 0]).any()


def test_keys_keep_the_order_of_floats():
    values = np.array([-np.inf, -3.4e38, -2.0, -1.5, -1e-37, 0.0, 1e-37, 1.0, 1.0000001, 3.4e38, np.inf], np.float32)
    keys = np.asarray(selection._ordered_keys(jnp.asarray(values)))
    assert (np.diff(keys.astype(np.int64)) > 0).all()
    assert keys[0] == selection.NEVER
    assert selection._ordered_keys(jnp.float32([-0.0])) == selection._ordered_keys(jnp.float32([0.0]))


def test_selection_refuses_more_than_a_pass_can_narrow():
    ranks = jnp.zeros((1, 1, selection.CHUNK + 1))
    with pytest.raises(NotImplementedError, match="select_blocks: no Pallas kernel for 3000 of 4097 blocks"):
        selection.select_blocks(ranks, num_selected=3000, interpret=True)


# --- slots -----------------------------------------------------------------------------------------------------------

match = jit(matching.match_slots)


def slots_case(seed, num_selected, num_columns, max_blocks, num_slots, share_wanted, share_filled):
    """Two heads; `num_slots` of the columns are granted, the rest holds ids that must not be used; ages have ties."""
    rng = np.random.default_rng(seed)
    rows = len(num_slots)
    selected = np.full((rows, 2, num_selected), -1)
    resident = rng.integers(0, max_blocks, (rows, 2, num_columns))
    last_selected = rng.integers(-5, 30, (rows, 2, max_blocks))
    last_selected[rng.random(last_selected.shape) < 0.2] = -(2**30)
    for row, head in np.ndindex(rows, 2):
        granted = num_slots[row]
        wanted = rng.permutation(max_blocks)[: round(share_wanted * min(granted, num_selected, max_blocks))]
        selected[row, head, : len(wanted)] = wanted  # in any order
        held = rng.permutation(max_blocks)[: round(share_filled * min(granted, max_blocks))]
        content = np.full(granted, -1)
        content[: len(held)] = held
        resident[row, head, :granted] = rng.permutation(content)
    return selected, resident, last_selected, np.array(num_slots)


def assert_matches(case, actual):
    selected, *_ = case
    slots, missed, after = actual
    expected_slots, expected_missed, expected_after = oracle.match_slots(*case)
    np.testing.assert_array_equal(np.where(selected >= 0, slots, -1), expected_slots)
    np.testing.assert_array_equal(missed, expected_missed)
    np.testing.assert_array_equal(after, expected_after)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    seed=seeds,
    sizes=st.sampled_from([(64, 300, 700), (100, 128, 150), (16, 33, 4000)]),
    share_wanted=st.sampled_from([0.1, 0.6, 1.0]),
    share_filled=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
@example(seed=0, sizes=(100, 128, 150), share_wanted=1.0, share_filled=1.0)
def test_matching_many_slots(seed, sizes, share_wanted, share_filled):
    num_selected, num_columns, _ = sizes
    num_slots = (num_columns, max(num_selected, num_columns // 2), 0)
    case = slots_case(seed, *sizes, num_slots, share_wanted, share_filled)
    assert_matches(case, match(*ints(*case)))


def test_matching_comparison_has_teeth():
    case = slots_case(1, 64, 300, 700, (300, 300), 1.0, 1.0)
    selected, resident, last_selected, num_slots = case
    for wrong in (
        (selected, resident, -last_selected, num_slots),
        (selected, resident[..., ::-1], last_selected, num_slots),
        (selected[..., ::-1], resident, last_selected, num_slots),
    ):
        with pytest.raises(AssertionError):
            assert_matches(case, match(*ints(*wrong)))


@pytest.mark.parametrize("garbage", [0, 3, 1000, -7])
def test_what_lies_in_the_lookup_table_before_does_not_matter(garbage):
    """The table by block id is never cleared; here it claims that every block is the selected one at `garbage`."""
    case = slots_case(2, 8, 20, 50, (20, 9), 1.0, 0.8)
    selected, resident, last_selected, num_slots = map(jnp.asarray, ints(*case))
    table = jnp.full_like(last_selected, garbage)

    def kernel(*refs):
        inputs, outputs = refs[:4], refs[5:]  # refs[4] is the table that goes in
        matching._match(*inputs, *outputs, interpret=True)

    shapes = [selected, selected.astype(bool), resident, table, *[selected] * 3]
    out = kernel_call(
        kernel, selected, resident, last_selected, num_slots, table,
        name="match_slots", grid=(2, 2), in_specs=[matching.IN_PLACE] * 5, out_specs=[matching.IN_PLACE] * len(shapes),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes], num_warps=1, aliases={4: 3}, interpret=True,
    )  # fmt: skip
    assert_matches(case, out[:3])


@pytest.mark.parametrize(("num_selected", "num_columns", "named"), [(64, 5000, "5000 slots"), (2000, 64, "2000 sel")])
def test_matching_refuses_more_than_fits_in_registers(num_selected, num_columns, named):
    shapes = [(1, 1, num_selected), (1, 1, num_columns), (1, 1, 10), (1,)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    with pytest.raises(NotImplementedError, match=named):
        jax.eval_shape(functools.partial(matching.match_slots, interpret=True), *arrays)

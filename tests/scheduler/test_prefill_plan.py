"""Chunks, packs, layer order and chunk order, and the injection budget."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.reference import PREFILL_TILE
from sparseserve_jax.scheduler.prefill_plan import TILE, PrefillPlanner, call_size, num_packable, split_chunks
from tests.scheduler.layouts import make_config, make_layout, make_request


def planner(*prompts, num_layers=4, **settings):
    """A planner with prompts a, b, c, ... in this order of arrival."""
    p = PrefillPlanner(make_config(**settings), make_layout(num_layers=num_layers))
    for index, prompt in enumerate(prompts):
        p.add(make_request("abcdefghijkl"[index], prompt, arrival_s=float(index)))
    return p


def words(segments):
    """`a0:256 L0-2` = tokens [0, 256) of a through layers 0 and 1."""
    return [
        " ".join(f"{i.request_id}{i.start}:{i.end}" for i in s.items) + f" L{s.layer_start}-{s.layer_end}"
        for s in segments
    ]


def run(p):
    plans = []
    while True:
        segments, completed = p.plan()
        if not segments:
            return plans
        plans.append((words(segments), completed))


def test_tile_is_the_kernels_tile():
    assert TILE == PREFILL_TILE


@pytest.mark.parametrize(
    ("num_tokens", "max_chunk", "sizes"),
    [
        (1, 2048, [1]),
        (128, 2048, [128]),
        (129, 2048, [128, 1]),  # 50 % of a 256 call would be padding
        (192, 2048, [192]),  # just a quarter
        (191, 2048, [128, 63]),
        (2048, 2048, [2048]),
        (4200, 2048, [2048, 2048, 104]),
        (2048 + 1600, 2048, [2048, 1600]),
        (1500, 2048, [1024, 476]),
        (1324, 2048, [1024, 256, 44]),
        (700, 256, [256, 256, 128, 60]),
        (300, 128, [128, 128, 44]),
    ],
)
def test_split_chunks(num_tokens, max_chunk, sizes):
    assert [end - start for start, end in split_chunks(num_tokens, max_chunk)] == sizes


@given(st.integers(1, 20_000), st.sampled_from([128, 256, 512, 1024, 2048, 4096]))
def test_chunks_cover_the_prompt_with_little_padding(num_tokens, max_chunk):
    chunks = split_chunks(num_tokens, max_chunk)
    assert chunks[0][0] == 0 and chunks[-1][1] == num_tokens
    assert all(end == start for (_, end), (start, _) in itertools.pairwise(chunks))
    assert all(start % TILE == 0 for start, _ in chunks)
    sizes = [call_size(end - start) for start, end in chunks]
    assert max(sizes) <= max_chunk and sizes == sorted(sizes, reverse=True)
    assert sum(sizes) - num_tokens <= max(TILE - 1, num_tokens // 3)


@pytest.mark.parametrize("max_chunk", [64, 0, 384])
def test_chunk_sizes_are_powers_of_two_from_one_tile_on(max_chunk):
    with pytest.raises(ValueError, match=f"max_chunk={max_chunk}"):
        split_chunks(10, max_chunk)


@pytest.mark.parametrize(
    ("lengths", "max_chunk", "count"),
    [
        ([10], 1024, 1),
        ([10, 20], 1024, 2),
        ([10, 20, 30], 1024, 3),  # 384 of 512: a quarter is padding
        ([10] * 5, 1024, 4),  # a fifth would make it 640 of 1024
        ([10] * 6, 1024, 6),
        ([10] * 12, 2048, 8),  # never more than eight
        ([1000, 10], 2048, 1),  # 1152 of 2048
        ([1000, 500], 2048, 2),
        ([10, 500, 10], 512, 1),  # strictly in order
        ([10, 300, 10], 1024, 1),  # 300 is no single chunk
        ([256, 256, 256], 512, 2),
    ],
)
def test_num_packable(lengths, max_chunk, count):
    assert num_packable(lengths, max_chunk) == count


def test_layer_order_for_a_long_prompt():
    p = planner(500, num_layers=2, max_inject_tokens=500)
    assert run(p) == [
        (["a0:256 L0-1", "a256:500 L0-1"], []),
        (["a0:256 L1-2", "a256:500 L1-2"], ["a"]),
    ]


def test_layer_order_inside_a_layer():
    p = planner(500, num_layers=2, max_inject_tokens=260)
    assert [w for w, _ in run(p)] == [["a0:256 L0-1"], ["a256:500 L0-1"], ["a0:256 L1-2"], ["a256:500 L1-2"]]


def test_layers_of_a_single_chunk_are_one_segment():
    p = planner(200, num_layers=4, max_inject_tokens=650)
    assert run(p) == [(["a0:200 L0-3"], []), (["a0:200 L3-4"], ["a"])]


def test_chunk_order():
    p = planner(500, num_layers=2, prefill="chunked", max_inject_tokens=512)
    assert run(p) == [(["a0:256 L0-2"], []), (["a256:500 L0-2"], ["a"])]


def test_chunk_order_takes_several_chunks_if_they_fit():
    p = planner(500, num_layers=2, prefill="chunked", max_inject_tokens=1000)
    assert run(p) == [(["a0:256 L0-2", "a256:500 L0-2"], ["a"])]


@pytest.mark.parametrize(
    ("settings", "max_chunk"),
    [
        ({}, 256),
        ({"max_inject_tokens": 200}, 128),
        ({"max_inject_tokens": 1}, 128),
        ({"prefill": "chunked"}, 256),
        ({"prefill": "chunked", "max_inject_tokens": 4 * 255}, 128),
        ({"prefill": "chunked", "max_inject_tokens": 4 * 256}, 256),
        ({"max_num_batched_tokens": 1024, "max_inject_tokens": 600}, 512),
    ],
)
def test_the_budget_bounds_the_chunk(settings, max_chunk):
    assert planner(**settings).max_chunk == max_chunk


@pytest.mark.parametrize("prefill", ["layer", "chunked"])
def test_at_least_one_unit(prefill):
    p = planner(100, num_layers=2, prefill=prefill, max_inject_tokens=1)
    plans = run(p)
    assert len(plans) == (2 if prefill == "layer" else 1)
    assert plans[-1][1] == ["a"]


def test_default_budget_is_the_papers():
    assert planner(num_layers=4).max_inject_tokens == 2048 * 4


@pytest.mark.parametrize("prefill", ["layer", "chunked"])
def test_short_prompts_share_a_call(prefill):
    p = planner(100, 60, 100, num_layers=2, prefill=prefill)
    assert run(p) == [(["a0:100 b0:60 L0-2", "c0:100 L0-2"], ["a", "b", "c"])]


def test_deterministic_packs_nothing():
    p = planner(100, 60, num_layers=2, deterministic=True)
    assert run(p) == [(["a0:100 L0-2", "b0:60 L0-2"], ["a", "b"])]


def test_what_is_left_goes_to_the_next():
    p = planner(200, 195, num_layers=4, max_inject_tokens=1000)
    assert run(p) == [(["a0:200 L0-4", "b0:195 L0-1"], ["a"]), (["b0:195 L1-4"], ["b"])]


def test_a_prompt_that_does_not_fit_is_not_started_nor_any_behind_it():
    p = planner(200, 195, 30, num_layers=2, max_inject_tokens=580)
    assert run(p)[0] == (["a0:200 L0-2"], ["a"])


def test_an_open_group_that_does_not_fit_waits_while_later_ones_go_on():
    p = planner(250, num_layers=4, max_inject_tokens=256)
    assert run_once(p) == ["a0:250 L0-1"]
    p.add(make_request("z", 6, arrival_s=9.0))
    assert run_once(p) == ["a0:250 L1-2", "z0:6 L0-1"]
    assert run_once(p) == ["a0:250 L2-3", "z0:6 L1-2"]


def run_once(p):
    return words(p.plan()[0])


def test_urgent_prompts_go_first_also_past_a_started_one():
    p = planner(250, num_layers=4, max_inject_tokens=256)
    assert run_once(p) == ["a0:250 L0-1"]
    p.add(make_request("u", 200, priority=-1, arrival_s=5.0))
    urgent = [f"u0:200 L{i}-{i + 1}" for i in range(4)]
    rest = [f"a0:250 L{i}-{i + 1}" for i in range(1, 4)]
    assert [w for w, _ in run(p)] == [[word] for word in (*urgent, *rest)]


def test_an_aborted_prompt_leaves_the_pack():
    p = planner(100, 60, num_layers=4, max_inject_tokens=320)
    assert run_once(p) == ["a0:100 b0:60 L0-2"]
    p.drop("a")
    assert run(p) == [(["b0:60 L2-4"], ["b"])]


def test_an_aborted_pack_or_prompt_is_gone():
    p = planner(500, 100, 60, 70, num_layers=4, max_inject_tokens=300)
    assert run_once(p) == ["a0:256 L0-1"]
    p.drop("a")
    p.drop("d")
    p.drop("long done")
    assert run_once(p) == ["b0:100 c0:60 L0-1"]
    p.drop("b")
    p.drop("c")
    assert run(p) == []

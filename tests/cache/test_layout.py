"""Budgets hold to the byte, and what an error says to change is enough."""

import dataclasses
import re
from typing import Any

import jax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pallas_kernels.api import get_kernels
from sparseserve_jax.cache.layout import KVShape, choose_dense_layers, plan_layout
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.models.kv_state import allocate_kv_state

GIB = 1 << 30
SHAPE = KVShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=64)
BLOCK_BYTES = 2 * 2 * 32 * 64 * 2  # one layer of a block of 32 tokens: 2 heads, K and V, bfloat16
DIGEST_BYTES = 2 * 2 * 64 * 2


def make_config(**changes) -> EngineConfig:
    """Blocks of 32, selections of 8 blocks, one dense layer."""
    values: dict[str, Any] = {"sparse_budget_tokens": 256, "num_dense_layers": 1, "max_num_batched_tokens": 512}
    return EngineConfig(**(values | changes))


def plan(config, shape=SHAPE, *, model_max_len=4096, device=GIB, host=GIB):
    return plan_layout(
        config, shape, model_max_len=model_max_len, available_device_bytes=device, available_host_bytes=host
    )


def device_bytes(layout, dtype):
    """All KV arrays of the device with their null blocks: pools, digests, prefill staging."""
    vectors = 2 * layout.num_kv_heads  # K and V, or centre and radius
    if layout.tiered:
        pools = layout.num_dense_layers * (layout.num_dense_blocks + 1) + layout.num_sparse_layers * (
            layout.num_slots + 1
        )
        pools += layout.num_staging_blocks + 1
    else:
        pools = layout.num_layers * (layout.num_blocks + 1)
    digests = layout.num_sparse_layers * (layout.num_blocks + 1)
    return (pools * layout.block_size + digests) * vectors * layout.head_dim * {"bfloat16": 2, "float32": 4}[dtype]


@st.composite
def cases(draw):
    """A config, a model and what is available; budgets from far too small to plenty."""
    shape = KVShape(
        num_layers=draw(st.integers(1, 6)),
        num_kv_heads=(heads := draw(st.sampled_from([1, 2, 8]))),
        num_q_heads=heads * draw(st.sampled_from([1, 3, 4, 7])),
        head_dim=draw(st.sampled_from([32, 64, 128])),
    )
    block_size = draw(st.sampled_from([16, 32, 64]))
    num_bytes = st.integers(10, 32).flatmap(lambda k: st.integers(1 << k, 2 << k))
    budget = draw(st.none() | st.integers(4, 40))
    tiers = draw(st.sampled_from(["unified", "tiered"]))
    config = EngineConfig(
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        block_size=block_size,
        sparse_budget_tokens=None if budget is None else budget * block_size,
        selection_granularity=draw(st.sampled_from(["kv_head", "query_head"])),
        num_dense_layers=draw(st.integers(0, 7)),
        kv_tiers=tiers,
        device_kv_bytes=draw(st.none() | num_bytes),
        host_kv_bytes=draw(st.none() | num_bytes) if tiers == "tiered" else None,
        max_num_seqs=draw(st.integers(1, 20)),
        max_model_len=draw(st.none() | st.integers(1, 4000)),
        max_num_batched_tokens=draw(st.sampled_from([128, 512, 2048])),
        max_grant_factor=draw(st.integers(1, 5)),
    )
    model_max_len = max(config.max_model_len or 1, draw(st.integers(1, 10000)))
    return config, shape, {"model_max_len": model_max_len, "device": draw(num_bytes), "host": draw(num_bytes)}


def with_available_as_budget(config, room):
    """The same case with budgets spelled out, so that they can be changed."""
    changes = {"device_kv_bytes": config.device_kv_bytes or room["device"]}
    if config.kv_tiers == "tiered":
        changes["host_kv_bytes"] = config.host_kv_bytes or room["host"]
    return dataclasses.replace(config, **changes)


def remedy(error):
    """The setting to raise, and to what."""
    found = re.search(r"raise (device_kv_bytes|host_kv_bytes) to at least (\d+)", str(error))
    assert found, error
    return found[1], int(found[2])


def check(layout, config, shape, room):
    """What every layout promises."""
    assert layout.device_bytes == device_bytes(layout, config.dtype)
    assert layout.device_bytes <= (config.device_kv_bytes or room["device"])
    assert layout.host_bytes <= (config.host_kv_bytes or room["host"])
    assert 1 <= layout.max_model_len <= min(room["model_max_len"], config.max_model_len or room["model_max_len"])
    assert layout.max_blocks_per_seq == layout.blocks_for(layout.max_model_len) <= layout.num_blocks
    assert layout.num_blocks <= config.max_num_seqs * layout.max_blocks_per_seq
    assert layout.num_dense_layers + layout.num_sparse_layers == shape.num_layers
    assert layout.min_grant_slots == layout.selection_blocks <= layout.max_grant_slots <= layout.max_blocks_per_seq
    if layout.num_sparse_layers:
        group = shape.num_q_heads // shape.num_kv_heads if config.selection_granularity == "query_head" else 1
        assert layout.selection_blocks == min(config.sparse_budget_blocks * group, layout.max_blocks_per_seq)
        assert layout.max_grant_slots == min(
            config.max_grant_factor * layout.selection_blocks, layout.max_blocks_per_seq
        )
    else:
        assert layout.selection_blocks == layout.num_slots == 0
    if not layout.tiered:
        assert layout.num_slots == layout.num_dense_blocks == layout.num_staging_blocks == layout.host_bytes == 0
        return
    piece = 2 * config.block_size * shape.head_dim * (2 if config.dtype == "bfloat16" else 4)
    assert layout.piece_bytes == piece
    assert layout.host_bytes == (layout.num_blocks + 1) * shape.num_layers * shape.num_kv_heads * piece
    assert layout.min_grant_slots <= layout.num_slots <= config.max_num_seqs * layout.max_grant_slots
    most_dense = config.max_num_seqs * layout.max_blocks_per_seq
    if layout.num_dense_layers:
        assert layout.max_blocks_per_seq <= layout.num_dense_blocks <= most_dense
    else:
        assert layout.num_dense_blocks == 0
    assert layout.num_staging_blocks >= layout.max_blocks_per_seq
    assert layout.num_staging_blocks * layout.block_size >= config.max_num_batched_tokens


@settings(max_examples=150, deadline=None)
@given(cases())
def test_budgets_hold_and_a_full_length_sequence_always_fits(case):
    config, shape, room = case
    try:
        layout = plan(config, shape, **room)
    except ValueError:
        assume(False)
    else:
        check(layout, config, shape, room)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_what_an_error_names_is_enough_and_no_more_than_that(case):
    config, shape, room = case
    config = with_available_as_budget(config, room)
    raised = []
    while True:
        try:
            layout = plan(config, shape, **room)
            break
        except ValueError as error:
            name, number = remedy(error)
            assert f"{name}={getattr(config, name)} " in str(error)
            assert number > getattr(config, name)
            assert name not in raised, "raising it once is enough"
            raised.append(name)
            config = dataclasses.replace(config, **{name: number})
    check(layout, config, shape, room)
    if config.max_model_len is not None:
        for name in raised:
            with pytest.raises(ValueError, match=name):
                plan(dataclasses.replace(config, **{name: getattr(config, name) - 1}), shape, **room)


def test_more_than_the_model_can_do_is_refused():
    with pytest.raises(
        ValueError, match=r"max_model_len=4097 exceeds the model's limit of 4096 positions; lower max_mo"
    ):
        plan(make_config(max_model_len=4097))
    assert plan(make_config(max_model_len=4096)).max_model_len == 4096


def test_sizes_of_a_unified_layout():
    layout = plan(make_config(max_num_seqs=3, max_model_len=1000))
    assert (layout.max_blocks_per_seq, layout.num_blocks) == (32, 96)
    assert layout.device_bytes == 97 * (4 * BLOCK_BYTES + 3 * DIGEST_BYTES)
    assert layout.selection_blocks == 8


@pytest.mark.parametrize(
    "changes",
    [{"kv_tiers": "unified"}, {"kv_tiers": "tiered"}, {"kv_dtype": "int8"}, {"kv_dtype": "int8", "dtype": "float32"}],
    ids=str,
)
def test_the_state_of_an_engine_takes_the_bytes_planned(changes):
    config = make_config(max_num_seqs=2, **changes)
    layout = plan(config)

    def arrays():
        state = allocate_kv_state(layout, config, get_kernels("reference", "cpu"), "cpu")
        return *state.pools, *state.scales, *state.digests

    staging = (layout.num_staging_blocks + 1) * BLOCK_BYTES if layout.tiered else 0
    held = sum(array.size * array.dtype.itemsize for array in jax.eval_shape(arrays))
    assert held + staging == layout.device_bytes


def test_int8_blocks_and_their_scales_take_half_the_bytes():
    bfloat16, int8 = (plan(make_config(kv_dtype=kv_dtype, max_num_seqs=2)) for kv_dtype in (None, "int8"))
    assert int8.piece_bytes == bfloat16.piece_bytes // 2 + 8
    per_block = 4 * 2 * int8.piece_bytes + 3 * DIGEST_BYTES
    assert int8.device_bytes == (int8.num_blocks + 1) * per_block
    budget = 100 * (4 * BLOCK_BYTES + 3 * DIGEST_BYTES)
    few, many = (
        plan(make_config(kv_dtype=kv_dtype, device_kv_bytes=budget, max_model_len=1024)).num_blocks
        for kv_dtype in (None, "int8")
    )
    assert (few, many) == (99, budget // per_block - 1)
    assert many > 1.9 * few


def test_unified_shortens_sequences_that_nobody_asked_for():
    per_block = 4 * BLOCK_BYTES + 3 * DIGEST_BYTES
    layout = plan(make_config(device_kv_bytes=41 * per_block + 5))
    assert (layout.num_blocks, layout.max_blocks_per_seq, layout.max_model_len) == (40, 40, 40 * 32)
    with pytest.raises(
        ValueError, match=r"holds 40 KV blocks of 32 tokens.*max_model_len=4096 needs 128; raise device"
    ):
        plan(make_config(device_kv_bytes=41 * per_block + 5, max_model_len=4096))
    with pytest.raises(ValueError, match="holds 0 KV blocks"):
        plan(make_config(device_kv_bytes=2 * per_block - 1))


def test_a_selection_shrinks_with_the_sequences():
    per_block = 4 * BLOCK_BYTES + 3 * DIGEST_BYTES
    layout = plan(make_config(device_kv_bytes=6 * per_block))
    assert layout.selection_blocks == layout.min_grant_slots == layout.max_grant_slots == 5


def test_tiered_shortens_sequences_to_the_host_but_not_to_the_device():
    layout = plan(make_config(kv_tiers="tiered", host_kv_bytes=41 * 4 * BLOCK_BYTES))
    assert (layout.num_blocks, layout.max_model_len) == (40, 40 * 32)
    with pytest.raises(ValueError, match=r"host_kv_bytes=\d+ holds 40 KV blocks .*lower max_model_len"):
        plan(make_config(kv_tiers="tiered", host_kv_bytes=41 * 4 * BLOCK_BYTES, max_model_len=4096))
    with pytest.raises(ValueError, match=r"smaller than one working set.*max_model_len=4096"):
        plan(make_config(kv_tiers="tiered", device_kv_bytes=100 * BLOCK_BYTES))


def test_the_tiered_split_follows_what_sequences_use():
    """One dense layer of 128 blocks and three sparse layers of up to 32 slots: dense gets 4 blocks for every slot."""
    plenty = plan(make_config(kv_tiers="tiered", max_num_seqs=8))
    assert (plenty.num_slots, plenty.num_dense_blocks) == (8 * 32, 8 * 128)
    fixed = plenty.device_bytes - (3 * plenty.num_slots + plenty.num_dense_blocks) * BLOCK_BYTES
    half = plan(make_config(kv_tiers="tiered", max_num_seqs=8, device_kv_bytes=(plenty.device_bytes + fixed) // 2))
    assert (half.num_slots, half.num_dense_blocks) == (4 * 32, 4 * 128)
    least = fixed + (3 * 8 + 128) * BLOCK_BYTES
    tight = plan(make_config(kv_tiers="tiered", max_num_seqs=8, device_kv_bytes=least))
    assert (tight.num_slots, tight.num_dense_blocks, tight.device_bytes) == (8, 128, least)
    with pytest.raises(ValueError, match=rf"device_kv_bytes={least - 1} is smaller than one working set.*{least}"):
        plan(make_config(kv_tiers="tiered", max_num_seqs=8, device_kv_bytes=least - 1))


@pytest.mark.parametrize("kv_tiers", ["unified", "tiered"])
def test_a_selection_per_query_head_holds_the_union_of_its_group(kv_tiers):
    by_kv_head = plan(make_config(kv_tiers=kv_tiers))
    by_query_head = plan(make_config(kv_tiers=kv_tiers, selection_granularity="query_head"))
    assert (by_kv_head.selection_blocks, by_query_head.selection_blocks) == (8, 4 * 8)
    assert by_query_head.max_grant_slots == by_query_head.max_blocks_per_seq == 128
    short = plan(make_config(kv_tiers=kv_tiers, selection_granularity="query_head", max_model_len=640))
    assert short.selection_blocks == 20


@pytest.mark.parametrize("kv_tiers", ["unified", "tiered"])
@pytest.mark.parametrize("changes", [{"sparse_budget_tokens": None}, {"num_dense_layers": 4}, {"num_dense_layers": 9}])
def test_without_a_sparse_layer_nothing_is_selected(kv_tiers, changes):
    """No digests and no slots, and no request needs any."""
    layout = plan(make_config(kv_tiers=kv_tiers, max_num_seqs=2, **changes))
    assert (layout.num_dense_layers, layout.num_sparse_layers) == (4, 0)
    assert layout.selection_blocks == layout.min_grant_slots == layout.max_grant_slots == layout.num_slots == 0
    blocks = 257 * 4 if kv_tiers == "unified" else 257 * 4 + (128 + 1)
    assert layout.device_bytes == blocks * BLOCK_BYTES


def test_without_a_dense_layer_no_dense_blocks():
    layout = plan(make_config(kv_tiers="tiered", num_dense_layers=0, max_num_seqs=2))
    assert (layout.num_dense_blocks, layout.num_slots) == (0, 2 * 32)


def test_which_layers_are_dense():
    """Those that the config names or counts, else those that are known of the model, else the first two."""
    shape = KVShape(num_layers=4, num_q_heads=8, num_kv_heads=2, head_dim=128)
    known = dataclasses.replace(shape, retrieval_layers=(2,))
    assert choose_dense_layers(EngineConfig(), shape) == (0, 1)
    assert choose_dense_layers(EngineConfig(), known) == (2,)
    assert choose_dense_layers(EngineConfig(num_dense_layers=1), known) == (0,)
    assert choose_dense_layers(EngineConfig(num_dense_layers=9), known) == (0, 1, 2, 3)
    assert choose_dense_layers(EngineConfig(dense_layers=(3, 1)), known) == (1, 3)
    assert choose_dense_layers(EngineConfig(dense_layers=()), known) == ()
    with pytest.raises(ValueError, match="names layer 4, but the model has layers 0 to 3"):
        choose_dense_layers(EngineConfig(dense_layers=(4,)), shape)
    layout = plan(make_config(num_dense_layers=None, dense_layers=(1, 3)))
    assert (layout.dense_layers, layout.sparse_layers) == ((1, 3), (0, 2))


def test_digests_of_a_large_host_tier_are_part_of_the_device_error():
    """Digests of all host blocks lie on the device, so a smaller host tier is a remedy too."""
    config = make_config(
        kv_tiers="tiered", max_num_seqs=4000, host_kv_bytes=64 * GIB, device_kv_bytes=1024 * BLOCK_BYTES
    )
    with pytest.raises(ValueError, match=r"lower .*host_kv_bytes$"):
        plan(config)
    assert plan(dataclasses.replace(config, host_kv_bytes=GIB // 4)).num_slots >= 8

"""Seconds against sums done by hand."""

import pytest

from sparseserve_jax.plan import PrefillItem, PrefillSegment
from sparseserve_jax.simulator.cost_model import CostModel
from tests.scheduler.layouts import make_layout

MODEL = CostModel(
    num_layers=4, num_q_heads=2, head_dim=64, num_params=4e6, weight_bytes=8e6, flops_per_s=1e12, hbm_bytes_per_s=1e9,
    load_bytes_per_s=1e8, compute_share=0.5, bandwidth_share=0.5, step_overhead_s=0.0,
)  # fmt: skip


def segment(*ranges, layers=(0, 4)):
    items = tuple(PrefillItem(request_id=str(i), start=s, end=e) for i, (s, e) in enumerate(ranges))
    return PrefillSegment(items=items, layer_start=layers[0], layer_end=layers[1])


def test_a_long_call_is_bound_by_compute():
    linear, attention = 2 * 1e6 * 100_000, 4 * 2 * 64 * 100_000**2 / 2
    assert MODEL.prefill_s([segment((0, 100_000))]) == pytest.approx(4 * (linear + attention) / 0.5e12)


def test_a_short_call_is_bound_by_the_weights():
    assert MODEL.prefill_s([segment((0, 10))]) == pytest.approx(8e6 / 0.5e9)
    assert MODEL.prefill_s([segment((0, 10), layers=(1, 2))]) == pytest.approx(2e6 / 0.5e9)


def test_chunks_cost_what_the_whole_prompt_costs_where_compute_bounds():
    whole = MODEL.prefill_s([segment((0, 64_000))])
    assert MODEL.prefill_s([segment((0, 32_000)), segment((32_000, 64_000))]) == pytest.approx(whole)


def test_decode_reads_weights_selection_digests_and_dense_layers():
    layout = make_layout()  # 3 sparse layers, 1 dense; pieces of 8192 bytes for 2 heads; selections of 4
    per_block = 2 * 8192
    expected = 8e6 + 3 * (4 * per_block + 10 * per_block / 32) + 10 * per_block
    assert MODEL.decode_s(layout, [10]) == pytest.approx(expected / 0.5e9)
    assert MODEL.decode_s(layout, []) == 0.0
    assert MODEL.decode_s(layout, [2]) < MODEL.decode_s(layout, [10])


def test_loads():
    assert MODEL.load_s(1e8) == pytest.approx(1.0)


def test_named_machines():
    llama, lwm = CostModel.a100_llama3_8b(), CostModel.a100_lwm_7b()
    assert llama.hbm_bytes_per_s == lwm.hbm_bytes_per_s == 1555e9
    assert llama.weight_bytes == pytest.approx(16.06e9) and lwm.weight_bytes == pytest.approx(13.48e9)

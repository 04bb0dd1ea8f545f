"""The production scheduler in simulated time."""

import dataclasses

import pytest

from sparseserve_jax.simulator.cost_model import CostModel
from sparseserve_jax.simulator.simulate import TraceRequest, simulate
from tests.scheduler.layouts import make_config, make_layout

COST = dataclasses.replace(
    CostModel.a100_llama3_8b(), num_layers=4, num_params=1e9, weight_bytes=2e9, load_bytes_per_s=1e9
)


def trace(count=12, every_s=0.02, prompt=600, new=40):
    return [
        TraceRequest(arrival_s=1.0 + i * every_s, prompt_tokens=prompt - 40 * (i % 3), new_tokens=new)
        for i in range(count)
    ]


def run(requests, *, layout=None, **settings):
    layout = layout or make_layout(tiered=settings.get("kv_tiers") == "tiered")
    return simulate(requests, make_config(**settings), layout, COST)


def test_one_request_by_hand():
    report = run([TraceRequest(arrival_s=5.0, prompt_tokens=64, new_tokens=3)])
    weights_s = 2e9 / (1555e9 * 0.8)
    assert (report.num_requests, report.num_steps, report.queue_mean_s) == (1, 3, 0.0)
    assert report.ttft_mean_s == pytest.approx(0.002 + weights_s)
    assert report.tbt_mean_s == pytest.approx(0.002 + weights_s, rel=1e-3)
    assert report.duration_s == pytest.approx(3 * (0.002 + weights_s), rel=1e-3)
    assert report.tokens_per_s == pytest.approx(3 / report.duration_s)
    assert (report.hit_rate, report.loads_per_step_mean, report.num_parks) == (1.0, 0.0, 0)


def test_time_jumps_over_idle_gaps():
    requests = [TraceRequest(arrival_s=t, prompt_tokens=64, new_tokens=2) for t in (0.0, 1000.0)]
    report = run(requests)
    assert report.num_steps == 4 and report.duration_s == pytest.approx(1000.0, abs=0.1)


@pytest.mark.parametrize("kv_tiers", ["unified", "tiered"])
def test_all_tokens_come_and_the_same_arguments_give_the_same_report(kv_tiers):
    report = run(trace(), kv_tiers=kv_tiers)
    assert report == run(trace(), kv_tiers=kv_tiers)
    assert report.tokens_per_s * report.duration_s == pytest.approx(12 * 40)
    assert report.ttft_mean_s <= report.ttft_p99_s and report.tbt_mean_s <= report.tbt_p99_s


def test_control_loads_less_than_none():
    layout = make_layout(tiered=True, num_slots=16)
    control = run(trace(), layout=layout, kv_tiers="tiered")
    none = run(trace(), layout=layout, kv_tiers="tiered", batch_control="none")
    assert control.decode_batch_mean < none.decode_batch_mean
    assert control.hit_rate > none.hit_rate


def test_chunked_prefill_fetches_earlier_chunks_again():
    layered = run(trace(count=1), kv_tiers="tiered")
    chunked = run(trace(count=1), kv_tiers="tiered", prefill="chunked")
    assert layered.prefill_loaded_bytes == 0
    # 600 tokens are chunks of 256, 256, 88: before the second 8 blocks, before the third 16, in each of 4 layers
    assert chunked.prefill_loaded_bytes == 4 * (8 + 16) * 2 * 8192


def test_an_empty_trace_and_an_impossible_request_are_errors():
    with pytest.raises(ValueError, match="0 requests"):
        run([])
    with pytest.raises(ValueError, match="max_model_len=1024"):
        run([TraceRequest(arrival_s=0.0, prompt_tokens=5000, new_tokens=1)])

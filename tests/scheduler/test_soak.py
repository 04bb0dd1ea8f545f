"""Steps under random load in every mode (100,000 with the slow tests): all end, nothing leaks, nobody starves."""

import random

import pytest

from tests.scheduler.harness import Harness
from tests.scheduler.layouts import make_config, make_layout, make_request

MODES = [
    ("unified", "layer", "working-set"),
    ("unified", "chunked", "working-set"),
    ("tiered", "layer", "working-set"),
    ("tiered", "layer", "none"),
    ("tiered", "chunked", "working-set"),
    ("tiered", "chunked", "none"),
]


@pytest.mark.parametrize("num_steps", [5_000, pytest.param(100_000 // len(MODES) + 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kv_tiers", "prefill", "batch_control"), MODES)
def test_soak(kv_tiers, prefill, batch_control, num_steps):
    rng = random.Random(f"{kv_tiers} {prefill} {batch_control}")
    config = make_config(
        kv_tiers=kv_tiers, prefill=prefill, batch_control=batch_control, max_inject_tokens=1200, working_set_margin=0.1
    )
    layout = make_layout(tiered=kv_tiers == "tiered", num_slots=32 if kv_tiers == "tiered" else 0)
    h = Harness(config, layout, slots_of=lambda _: rng.randint(3, 20), ends=lambda _: rng.random() < 0.01)
    queue_steps = []
    added = 0
    while h.num_steps < num_steps:
        while len(h.requests) < 12 and rng.random() < 0.2:
            prompt = rng.randint(1, 120) if rng.random() < 0.5 else rng.randint(1, 960)
            h.add(make_request(f"r{added}", prompt, rng.randint(1, 60), arrival_s=float(h.num_steps)))
            added += 1
        victim = rng.choice(list(h.requests)) if h.requests and rng.random() < 0.005 else None
        h.step(between=lambda victim=victim: h.abort(victim) if victim in h.requests else None)
        if h.num_steps % 64 == 0:
            h.check_usage()
    h.run()

    assert len(h.finished) == added > num_steps // 100
    first_come = [int(r[1:]) for r in h.runner.admission_order]
    assert first_come == sorted(first_come), "somebody was passed in the queue"
    queue_steps = [r.prefill_start_s - r.arrival_s for r in h.finished.values() if r.prefill_start_s is not None]
    # Twelve requests at most are ahead, each of a few prefill steps and up to 60 decode steps that overlap.
    assert max(queue_steps) < 12 * 80
    assert h.worst_skip_share <= 1.0, "skipped more often than earlier requests have tokens"
    if kv_tiers == "tiered":
        assert h.runner.num_parks > 0 and h.worst_skip_share > 0, "the load never filled the device"

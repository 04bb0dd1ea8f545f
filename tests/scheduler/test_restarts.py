"""Requests that follow one another on the same prompt: one reservation, one prefill, a restart for each."""

from __future__ import annotations

import random

import pytest

from sparseserve_jax.plan import Restart
from sparseserve_jax.scheduler.request_state import SchedulerRequest
from tests.scheduler.harness import Harness
from tests.scheduler.layouts import make_config, make_layout, make_request


def chain(name: str, prompt: int, news: list[int], **fields) -> SchedulerRequest:
    """`name.0`, followed by `name.1` and so on."""
    first = None
    for index, new in reversed(list(enumerate(news))):
        request = make_request(f"{name}.{index}", prompt, new, **fields)
        request.successor, first = first, request
    assert first is not None
    return first


def test_each_begins_when_the_one_before_has_ended():
    harness = Harness(make_config(), make_layout())
    harness.add(chain("a", 300, [3, 1, 2]))
    plans = harness.run()
    restarts = [(plan.step, restart) for plan in plans for restart in plan.restarts]
    assert [restart for _, restart in restarts] == [
        Restart(request_id="a.1", after="a.0"), Restart(request_id="a.2", after="a.1")
    ]  # fmt: skip
    assert [name for plan in plans for name in plan.decode] == ["a.0", "a.0", "a.2"]
    assert sum(len(plan.admissions) for plan in plans) == 1
    assert {plan.finished for plan in plans if plan.restarts} == {("a.0",), ("a.1",)}
    assert len(harness.finished) == 3


def test_blocks_are_reserved_for_the_longest():
    harness = Harness(make_config(), make_layout())
    request = chain("a", 100, [2, 90, 5])
    assert request.max_tokens == 190
    harness.add(request)
    harness.step()
    assert harness.scheduler.pool_usage()["blocks"].used == 6
    too_long = chain("b", 1000, [2, 30])
    with pytest.raises(ValueError, match="exceed max_model_len=1024"):
        harness.scheduler.check(too_long)


def test_a_request_that_finishes_early_is_followed_an_aborted_one_is_not():
    harness = Harness(make_config(), make_layout())
    for name in ("a", "b"):
        harness.add(chain(name, 100, [9, 9, 9]))
    for _ in range(3):
        harness.step()
    scheduler = harness.scheduler
    assert scheduler.finish("a.0") and not scheduler.finish("a.0")
    harness._end("a.0")
    harness.abort("b.0")
    plan = harness.step()
    assert plan.restarts == (Restart(request_id="a.1", after="a.0"),)
    assert set(plan.finished) == {"a.0", "b.0", "b.1", "b.2"}
    # aborted between the end of the one before and its own restart
    assert scheduler.finish("a.1")
    harness._end("a.1")
    harness.abort("a.2")
    plan = harness.step()
    assert not plan.restarts and set(plan.finished) == {"a.1", "a.2"}
    harness.check_empty()


@pytest.mark.parametrize("is_tiered", [False, True], ids=["unified", "tiered"])
@pytest.mark.parametrize("seed", range(12))
def test_random_histories_keep_the_contract(is_tiered, seed):
    """The fake runner checks each plan: rows, blocks and room have one owner, also across restarts and aborts."""
    rng = random.Random(seed)
    config = make_config(kv_tiers="tiered" if is_tiered else "unified", deterministic=seed % 2 == 0)
    layout = make_layout(tiered=is_tiered, num_blocks=160, **({"num_slots": rng.choice([4, 20])} if is_tiered else {}))
    harness = Harness(config, layout, slots_of=lambda _: rng.randint(1, 24), ends=lambda _: rng.random() < 0.05)
    num_added = num_restarts = 0
    while num_added < 40 or harness.scheduler.has_unfinished():
        if num_added < 40 and rng.random() < 0.4:
            news = [rng.randint(1, 20) for _ in range(rng.randint(1, 5))]
            harness.add(chain(f"r{num_added}", rng.randint(1, 700), news, arrival_s=float(num_added)))
            num_added += 1

        def abort_some() -> None:
            live = list(harness.scheduler._live)
            if live and rng.random() < 0.05:
                harness.abort(rng.choice(live))

        plan = harness.step(between=abort_some)
        num_restarts += len(plan.restarts)
    assert num_restarts > 30
    harness.check_empty()

"""Plans of the whole scheduler: admission, decode batches, parks, ends and errors."""

import pytest

from sparseserve_jax.plan import StepPlan, StepResult
from sparseserve_jax.scheduler.request_state import RequestState
from sparseserve_jax.scheduler.scheduler import PoolUsage, Scheduler
from tests.scheduler.harness import Harness
from tests.scheduler.layouts import make_config, make_layout, make_request


def unified(config=None, **layout):
    return Harness(make_config(**(config or {})), make_layout(**layout))


def tiered(slots_of=lambda request_id: 6, config=None, **layout):
    settings = {"kv_tiers": "tiered"} | (config or {})
    return Harness(make_config(**settings), make_layout(tiered=True, **layout), slots_of)


# --- one request ---------------------------------------------------------------------------------------------------


def test_a_request_from_arrival_to_end_without_tiers():
    h = unified()
    request = make_request("a", prompt=100, new=3)
    h.add(request)
    assert (h.scheduler.num_waiting, request.state) == (1, RequestState.WAITING)

    plan = h.step()
    assert [a.request_id for a in plan.admissions] == ["a"]
    assert (plan.admissions[0].row, plan.admissions[0].block_ids) == (0, (1, 2, 3, 4))
    assert (plan.completes_prefill, plan.decode, plan.grants) == (("a",), (), ())
    assert request.prefill_start_s == 0.0

    assert h.step().decode == ("a",)
    assert (request.num_generated, request.state, h.scheduler.num_running) == (2, RequestState.RUNNING, 1)
    assert h.step().decode == ("a",)
    assert request.state is RequestState.FINISHED
    assert h.scheduler.pool_usage()["blocks"] == PoolUsage(used=0, total=96)
    assert h.scheduler.has_unfinished(), "the runner does not know of the end yet"

    plan = h.step()
    assert plan == StepPlan(step=3, finished=("a",))
    assert not h.scheduler.has_unfinished()
    assert h.step().is_empty


def test_a_request_of_one_token_ends_with_its_prefill():
    h = unified()
    h.add(make_request("a", new=1))
    assert [p.completes_prefill for p in h.run()] == [("a",), ()]


def test_an_early_end_comes_from_the_result():
    h = Harness(make_config(), make_layout(), ends=lambda request_id: h.requests["a"].num_generated == 1)
    h.add(make_request("a", new=50))
    assert sum(len(p.decode) for p in h.run()) == 1


def test_tiered_decode_has_a_grant_first():
    h = tiered()
    h.add(make_request("a", prompt=200, new=40))
    h.step()
    assert h.scheduler.num_parked == 1
    grant = h.step().grants[0]
    assert len(grant.slot_ids) == 8, "two selections before anything is measured"
    assert len(grant.dense_block_ids) == 7
    assert h.scheduler.num_running == 1
    plans = h.run()
    assert [len(p.grants) for p in plans if p.decode].count(1) == 1, "granted again only when a dense block is added"
    assert all(len(g.slot_ids) == 8 for p in plans for g in p.grants), "a surplus stays"


def test_a_grant_grows_with_the_working_set():
    sizes = {"a": 6}
    h = tiered(lambda request_id: sizes[request_id])
    h.add(make_request("a", prompt=500, new=40))
    h.step()
    h.step()
    assert not h.step().grants
    sizes["a"] = 13
    h.step()
    assert len(h.step().grants[0].slot_ids) == 13


def test_all_layers_dense_tiered():
    h = tiered(config={"sparse_budget_tokens": None}, num_dense_layers=4, selection_blocks=0, num_slots=0,
               min_grant_slots=0, max_grant_slots=0)  # fmt: skip
    for name in "abc":
        h.add(make_request(name, prompt=900, new=60))
    plans = h.run()
    assert {g.slot_ids for p in plans for g in p.grants} == {()}
    assert max(len(p.decode) for p in plans) == 2, "64 dense blocks hold two of 30"


# --- admission -----------------------------------------------------------------------------------------------------


def test_admission_is_in_order_of_priority_then_arrival():
    h = unified(max_num_seqs=1)
    h.add(make_request("c", new=1, arrival_s=2.0))
    h.add(make_request("b", new=1, arrival_s=1.0))
    h.add(make_request("urgent", new=1, arrival_s=3.0, priority=-1))
    h.add(make_request("b2", new=1, arrival_s=1.0))
    h.run()
    assert h.runner.admission_order == ["urgent", "b", "b2", "c"]


def test_nobody_passes_the_first_that_does_not_fit():
    h = unified(num_blocks=40)
    h.add(make_request("a", prompt=640, new=10))
    h.add(make_request("big", prompt=800, new=10))
    h.add(make_request("small", prompt=10, new=10))
    assert [a.request_id for a in h.step().admissions] == ["a"]
    h.run()
    assert h.runner.admission_order == ["a", "big", "small"]


def test_rows_bound_the_requests_in_flight_and_are_reused():
    h = unified(max_num_seqs=2)
    for index in range(5):
        h.add(make_request(f"r{index}", new=2))
    plans = h.run()
    assert {a.row for p in plans for a in p.admissions} == {0, 1}
    assert max(len(p.decode) for p in plans) == 2


def test_blocks_are_reused_in_the_plan_that_reports_the_end():
    h = unified(num_blocks=32)
    h.add(make_request("a", prompt=1000, new=1))
    h.add(make_request("b", prompt=1000, new=1))
    h.step()
    plan = h.step()
    assert (plan.finished, [a.request_id for a in plan.admissions]) == (("a",), ["b"])
    h.run()


@pytest.mark.parametrize(
    ("layout", "sizes", "message"),
    [
        ({}, (1000, 25), "exceed max_model_len=1024; shorten the prompt, lower max_tokens or raise max_model_len"),
        ({"num_blocks": 20}, (600, 41), "need 21 KV blocks, but the pool has 20; raise device_kv_bytes"),
        ({"num_blocks": 20, "tiered": True}, (600, 41), "but the pool has 20; raise host_kv_bytes or lower max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_and_harms_nobody(layout, sizes, message):
    h = Harness(make_config(), make_layout(**layout))
    h.add(make_request("good", prompt=100, new=10))
    with pytest.raises(ValueError, match=message):
        h.add(make_request("bad", *sizes))
    h.run()
    assert set(h.finished) == {"good"}


def test_the_longest_request_that_fits_is_served():
    h = unified(num_blocks=20)
    h.add(make_request("a", 600, 40))
    h.run()


def test_ids_are_unique_among_live_requests_and_until_the_end_was_told():
    h = unified()
    h.add(make_request("a", new=1))
    with pytest.raises(ValueError, match="request_id='a' is in use by a live request"):
        h.scheduler.add_request(make_request("a"))
    h.step()
    with pytest.raises(ValueError, match="request_id='a' has just ended"):
        h.scheduler.add_request(make_request("a"))
    h.step()
    h.add(make_request("a", new=1))
    h.run()


def test_a_request_object_serves_once():
    h = unified()
    request = make_request("a", new=1)
    h.add(request)
    h.run()
    with pytest.raises(ValueError, match="was added before"):
        h.scheduler.add_request(request)


# --- decode batches ------------------------------------------------------------------------------------------------


def prefilled(h, *names, prompt=500, new=200):
    """Adds requests and steps until all have their first token."""
    for name in names:
        h.add(make_request(name, prompt, new))
    while h.scheduler.num_waiting or h.scheduler.num_prefilling:
        h.step()


def test_without_tiers_everybody_decodes():
    h = unified()
    prefilled(h, "a", "b", "c", prompt=300, new=20)
    assert h.step().decode == ("a", "b", "c")


def test_a_working_set_that_does_not_fit_is_skipped_not_the_end_of_the_batch():
    sizes = {"a": 8, "b": 8, "c": 8}
    h = tiered(lambda request_id: sizes[request_id], num_slots=24)
    prefilled(h, "a", "b", "c", prompt=500)
    h.step()
    sizes.update(a=10, b=16, c=9)
    h.step()
    plan = h.step()
    assert plan.decode == ("a", "c")
    assert plan.parks == ("b",)
    assert h.scheduler.num_parked == 1 and h.requests["b"].state is RequestState.PARKED
    assert h.requests["b"].num_parks == 1


def test_who_was_parked_resumes_with_a_new_grant_as_soon_as_it_fits():
    sizes = {"a": 8, "b": 8}
    h = tiered(lambda request_id: sizes[request_id], num_slots=16)
    prefilled(h, "a", "b")
    h.step()
    sizes["a"] = 12
    h.step()
    assert h.step().parks == ("b",)
    assert h.step().decode == ("a",)
    sizes["a"] = 7
    h.step()
    plan = h.step()
    assert plan.decode == ("a", "b") and not plan.parks
    assert [(g.request_id, len(g.slot_ids)) for g in plan.grants] == [("a", 8), ("b", 8)], "a gives up its surplus"


def test_who_is_skipped_keeps_its_slots_while_nobody_needs_them():
    sizes = {"a": 4, "b": 8}
    h = tiered(lambda request_id: sizes[request_id], num_slots=16, num_dense_blocks=64)
    prefilled(h, "a", "b")
    h.step()
    sizes.update(a=8, b=9)
    h.step()
    plan = h.step()
    assert (plan.decode, plan.parks, plan.grants) == (("a",), (), ())
    assert h.scheduler.num_running == 2


def test_dense_blocks_bound_the_batch_too():
    h = tiered(num_dense_blocks=40)
    prefilled(h, "a", "b", "c", prompt=600, new=40)
    assert h.step().decode == ("a", "b")
    prefilled(h, "short", prompt=10, new=5)
    assert "c" not in h.step().decode


def test_without_control_everybody_decodes_in_what_there_is():
    h = tiered(lambda request_id: 16, config={"batch_control": "none"}, num_slots=24)
    prefilled(h, "a", "b", "c", "d", prompt=490, new=20)
    h.step()
    plan = h.step()
    assert plan.decode == ("a", "b", "c", "d")
    held = {t.request.request_id: len(t.grant.slot_ids) for t in h.runner.known.values() if t.grant}
    assert held == {"a": 6, "b": 6, "c": 6, "d": 6}


def test_with_control_the_same_batch_is_smaller_and_its_grants_whole():
    h = tiered(lambda request_id: 16, num_slots=24)
    prefilled(h, "a", "b", "c", "d", prompt=490, new=20)
    for _ in range(3):
        plan = h.step()
    assert plan.decode == ("a",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 3}, "num_slots=3 is less than one selection of 4 blocks; raise device_kv_bytes"),
        ({"num_dense_blocks": 31}, "num_dense_blocks=31 holds less than one sequence of 32 blocks"),
    ],
)
def test_a_layout_in_which_a_request_could_starve_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(make_config(), make_layout(tiered=True, **changes))


def test_one_working_set_of_room_is_enough():
    h = tiered(lambda request_id: 16, num_slots=4, num_dense_blocks=32)
    for name in "abc":
        h.add(make_request(name, 900, 30))
    h.run()
    assert len(h.finished) == 3


# --- aborts --------------------------------------------------------------------------------------------------------


def test_abort_in_every_state():
    sizes = {"run": 12, "park": 8}
    h = tiered(lambda request_id: sizes[request_id], num_slots=16, max_num_seqs=3, config={"max_inject_tokens": 128})
    prefilled(h, "run", "park")
    h.step()
    h.step()
    h.add(make_request("prefill", 600))
    h.add(make_request("wait", 600))
    h.step()
    states = {name: request.state for name, request in h.requests.items()}
    assert states == {
        "run": RequestState.RUNNING, "park": RequestState.PARKED,
        "prefill": RequestState.PREFILL, "wait": RequestState.WAITING,
    }  # fmt: skip
    for name in states:
        h.abort(name)
    h.check_usage()
    assert set(h.step().finished) == set(states)
    h.check_empty()


def test_abort_of_who_is_not_live_is_no_error():
    h = unified()
    h.add(make_request("a", new=1))
    h.abort("a")
    assert not h.scheduler.abort("a")
    assert not h.scheduler.abort("never seen")


def test_abort_while_its_first_plan_is_on_its_way():
    h = tiered()
    h.add(make_request("a", new=1))
    h.add(make_request("b", new=3))
    h.step(between=lambda: h.abort("a"))
    assert h.step().finished == ("a",)
    h.run()
    assert h.finished["a"].num_generated == 0


def test_abort_while_its_decode_is_on_its_way_frees_room_for_the_next_plan():
    h = tiered(num_slots=8)
    prefilled(h, "a", "b")
    assert h.step(between=lambda: h.abort("a")).decode == ("a",)
    plan = h.step()
    assert (plan.finished, plan.decode, plan.parks) == (("a",), ("b",), ())


def test_abort_of_one_in_a_pack_lets_the_others_go_on():
    h = unified(config={"max_inject_tokens": 256})
    h.add(make_request("a", 100))
    h.add(make_request("b", 60))
    assert [i.request_id for i in h.step().prefill[0].items] == ["a", "b"]
    h.abort("a")
    segment = h.step().prefill[0]
    assert [i.request_id for i in segment.items] == ["b"] and segment.layer_start == 1
    h.run()


# --- the calls -----------------------------------------------------------------------------------------------------


def test_schedule_and_update_alternate():
    s = Scheduler(make_config(), make_layout())
    s.add_request(make_request("a", new=1))
    plan = s.schedule(0.0)
    with pytest.raises(RuntimeError, match=r"schedule\(\) before update\(\) of plan 0"):
        s.schedule(1.0)
    with pytest.raises(ValueError, match="result of step 7 for plan 0"):
        s.update(plan, StepResult(step=7, sampled=("a",)))
    with pytest.raises(ValueError, match=r"no token for \['a'\]"):
        s.update(plan, StepResult(step=0, sampled=()))
    s.update(plan, StepResult(step=0, sampled=("a",), finished=("a",)))
    with pytest.raises(ValueError, match="the plan without a result is none"):
        s.update(plan, StepResult(step=0, sampled=("a",)))


def test_the_maximum_ends_a_request_whatever_the_result_says():
    s = Scheduler(make_config(), make_layout())
    s.add_request(make_request("a", new=1))
    plan = s.schedule(0.0)
    s.update(plan, StepResult(step=0, sampled=("a",)))
    assert s.schedule(1.0).finished == ("a",)


def test_a_failed_step_ends_with_aborts():
    s = Scheduler(make_config(), make_layout())
    s.add_request(make_request("a"))
    plan = s.schedule(0.0)
    s.abort("a")
    s.update(plan, StepResult(step=0, sampled=()))
    assert s.schedule(1.0).finished == ("a",)


def test_an_empty_plan_needs_no_result():
    s = Scheduler(make_config(), make_layout())
    assert s.schedule(0.0).is_empty
    plan = s.schedule(1.0)
    s.update(plan, StepResult(step=plan.step, sampled=()))


def test_same_inputs_same_plans():
    def plans():
        h = tiered(lambda request_id: 4 + len(request_id) * 3, num_slots=20)
        for index, name in enumerate(("a", "bb", "ccc", "dddd", "e", "ff")):
            h.add(make_request(name, 50 + 150 * index, 30, priority=index % 2))
        return h.run()

    assert plans() == plans()

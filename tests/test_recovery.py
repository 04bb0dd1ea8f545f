"""Who breaks steps: trials of suspects, and an engine that goes on after a failed step."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest

from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams, Variant
from sparseserve_jax.recovery import TOKENS_TO_CLEAR, Quarantine
from tests.tiny_model import random_prompt, write_sharp_model


def run_trials(names: list[str], breaks_at: dict[str, int], last: int = 12) -> tuple[dict[str, int], list[str], int]:
    """An engine of counters: a step fails when one of its members is at the token that it breaks at.

    Returns tokens of those who got to the end, the guilty in order, and how many steps failed.
    """
    tokens = dict.fromkeys(names, 0)
    running, held = list(names), list[str]()
    quarantine, guilty, num_failed = Quarantine(), list[str](), 0
    finished: dict[str, int] = {}
    for _ in range(10_000):
        if not tokens:
            return finished, guilty, num_failed
        if held:
            released = quarantine.release(tokens)
            if released is None and not quarantine.is_active:
                released = list(held)
            running += released or []
            held = [name for name in held if name not in (released or [])]
        assert running, "nobody runs, though some live"
        if any(tokens[name] == breaks_at.get(name) for name in running):
            num_failed += 1
            for name in quarantine.note_failure(running, tokens):
                guilty.append(name)
                del tokens[name]
            running, held = [], list(tokens)
            continue
        for name in list(running):
            tokens[name] += 1
            if tokens[name] == last:
                finished[name] = tokens.pop(name)
                running.remove(name)
    raise AssertionError("it does not come to an end")


@hypothesis.given(st.integers(1, 40), st.dictionaries(st.integers(0, 39), st.integers(0, 11), max_size=4))
@hypothesis.settings(max_examples=100, deadline=None)
def test_exactly_the_guilty_fail_and_all_others_finish(num_requests, breakers):
    names = [str(number) for number in range(num_requests)]
    breaks_at = {str(number): at for number, at in breakers.items() if number < num_requests}
    finished, guilty, _ = run_trials(names, breaks_at)
    assert set(guilty) == set(breaks_at) and len(guilty) == len(breaks_at)
    assert set(finished) == set(names) - set(guilty)


def test_the_number_of_failed_steps_grows_with_the_logarithm():
    _, guilty, num_failed = run_trials([str(number) for number in range(64)], {"37": 5})
    assert guilty == ["37"] and 7 <= num_failed <= 14  # at first, then of 32, 16, 8, 4, 2 and 1, beside others or alone


def test_a_failure_that_does_not_come_back_costs_nobody():
    quarantine, tokens = Quarantine(), {"a": 3, "b": 0, "c": 7}
    assert quarantine.note_failure(["a", "b"], tokens) == []
    assert quarantine.release(tokens) == ["a"] and quarantine.release(tokens) is None
    tokens["a"] += TOKENS_TO_CLEAR
    assert quarantine.release(tokens) == ["b"] and quarantine.is_active
    del tokens["b"]  # aborted
    assert quarantine.release(tokens) is None and not quarantine.is_active


CONFIG = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, max_num_batched_tokens=256,
    max_model_len=512, max_num_seqs=4, kv_tiers="tiered", device_kv_bytes=1_600_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(write_sharp_model(tmp_path_factory.mktemp("sharp")), CONFIG)


FEATURES = [
    {"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 1, "presence_penalty": 1.0, "min_tokens": 12}, {"temperature": 0.0, "logprobs": 2},
]  # fmt: skip


def requests() -> list[Request]:
    return [
        Request(prompt=random_prompt(20 + 20 * i, i), request_id=f"r{i}", sampling=SamplingParams(max_tokens=16, **f))
        for i, f in enumerate(FEATURES)
    ]


@pytest.mark.parametrize("where", ["begin", "run_prefill", "fetch"])
def test_one_request_fails_and_the_others_get_what_they_would_have_got(engine, monkeypatch, where):
    """Tokens equal those without a failure: draws, penalties and limits go on where they were.

    Contexts stay within the sparse budget, where prefill and decoding compute the same.
    """
    expected = {output.request_id: output.token_ids for output in engine.generate(requests())}
    for request in requests():
        engine.add_request(request)
    poisoned = next(child for child, p in engine._processors.items() if p.request_id == "r2")

    def is_poisoned(plan) -> bool:
        members = [item.request_id for segment in plan.prefill for item in segment.items]
        if where == "run_prefill":
            return poisoned in members
        return poisoned in plan.decode and len(engine._processors[poisoned].token_ids) >= 5

    if where == "fetch":
        real_begin = engine.runner.begin

        def begin(plan, *, sample):
            step = real_begin(plan, sample=sample)
            if is_poisoned(plan):
                step.pending.append(None)  # fetching it fails, as errors of the device do
            return step

        monkeypatch.setattr(engine.runner, "begin", begin)
    else:
        real = getattr(engine.runner, where)

        def fail(subject, *args, **kwargs):
            if is_poisoned(subject if where == "begin" else subject.plan):
                raise RuntimeError("a poisoned step")
            return real(subject, *args, **kwargs)

        monkeypatch.setattr(engine.runner, where, fail)
    last, text = {}, dict.fromkeys(expected, "")
    failed_before, num_failed = engine.num_failed_steps, 0
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except (RuntimeError, AttributeError):
            num_failed += 1
            engine.recover()
            continue
        for output in outputs:
            last[output.request_id] = output
            text[output.request_id] += output.delta
    assert 2 <= num_failed <= 5 and engine.num_failed_steps == failed_before + num_failed
    assert last["r2"].finish_reason == "error" and "two steps" in (last["r2"].error or "")
    for name in set(expected) - {"r2"}:
        assert last[name].token_ids == expected[name], name
        assert text[name] == last[name].text
    assert all(pool.used == 0 for pool in engine.scheduler.pool_usage().values())
    assert not engine._live and not engine._held and not engine.runner._sequences


def test_requests_may_come_and_go_during_trials(engine, monkeypatch):
    real, calls = engine.runner.begin, 0

    def fail_once(plan, *, sample):
        nonlocal calls
        calls += bool(plan.decode)
        if plan.decode and calls == 3:
            raise RuntimeError("once")
        return real(plan, sample=sample)

    monkeypatch.setattr(engine.runner, "begin", fail_once)
    for request in requests()[:3]:
        engine.add_request(request)
    ended, has_failed = {}, False
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except RuntimeError:
            engine.recover()
            has_failed = True
            assert engine.abort("r1")
            engine.add_request(Request(prompt=[1, 2, 3], request_id="new", sampling=SamplingParams(max_tokens=3)))
            continue
        ended.update({o.request_id: o.finish_reason for o in outputs if o.finish_reason})
    assert has_failed
    assert ended["r1"] == "abort" and set(ended) == {"r0", "r1", "r2", "new"} and "error" not in ended.values()
    assert all(pool.used == 0 for pool in engine.scheduler.pool_usage().values())


@pytest.mark.parametrize("fails_at", [2, 9, 14])
def test_variants_go_on_after_a_failed_step(engine, monkeypatch, fails_at):
    """Whichever of them is running; and log-probabilities of the prompt come once."""
    variants = tuple(
        Variant(sampling=SamplingParams(temperature=t, seed=3, max_tokens=6, prompt_logprobs=k))
        for t, k in ((0.0, 1), (1.0, None), (0.7, 2))
    )
    request = Request(prompt=random_prompt(50, 4), variants=variants)
    expected = engine.generate([request])
    real, num_decodes, has_failed = engine.runner.begin, 0, False

    def fail_once(plan, *, sample):
        nonlocal num_decodes, has_failed
        num_decodes += bool(plan.decode)
        if num_decodes == fails_at and not has_failed:
            has_failed = True
            raise RuntimeError("once")
        return real(plan, sample=sample)

    monkeypatch.setattr(engine.runner, "begin", fail_once)
    engine.add_request(request)
    ended = {}
    while engine.has_unfinished():
        try:
            outputs = engine.step()
        except RuntimeError:
            engine.recover()
            continue
        ended.update({output.index: output for output in outputs if output.finish_reason})
    assert has_failed
    for index, output in enumerate(expected):
        assert ended[index].token_ids == output.token_ids, index
        assert (ended[index].prompt_logprobs is None) == (variants[index].sampling.prompt_logprobs is None)
    assert ended[0].prompt_logprobs == expected[0].prompt_logprobs
    assert all(pool.used == 0 for pool in engine.scheduler.pool_usage().values())


def test_an_interrupted_engine_says_so_and_goes_on_after_recover(engine, monkeypatch):
    """Ctrl-C in the middle of a step is what the caller sees, not what it left behind."""
    request = Request(prompt=random_prompt(40, 3), sampling=SamplingParams(temperature=0, max_tokens=4))
    expected = engine.generate([request])[0].token_ids

    def interrupt(plan, *, sample):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([request])
    with pytest.raises(RuntimeError, match=r"interrupted.*recover\(\)"):
        engine.generate([request])
    engine.recover()
    assert engine.generate([request])[0].token_ids == expected

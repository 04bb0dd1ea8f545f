"""Several continuations of one prefilled prompt: each is that of a request of its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sparseserve_jax import Engine, EngineConfig, Request, RequestError, RequestOutput, SamplingParams, Variant
from tests.test_engine import assert_empty
from tests.tiny_model import SHAPE, random_prompt, write_sharp_model

CONFIG = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, record_selection=True,
    extra_decode_settings=((64, "quest"), (None, "mean")), max_num_batched_tokens=256, max_model_len=512,
    max_num_seqs=4, deterministic=True,
)  # fmt: skip
EOS = SHAPE["eos_token_id"]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
SHORT = dataclasses.replace(GREEDY, max_tokens=3)
DRAWN = SamplingParams(seed=5, max_tokens=18, ignore_eos=True, repetition_penalty=1.3, logprobs=0)
FORCED = dataclasses.replace(GREEDY, forced_token_ids=tuple(random_prompt(9, 1)), max_tokens=9)
STOPPED = SamplingParams(temperature=0, max_tokens=20, logit_bias={EOS: 100.0}, min_tokens=4, logprobs=1)
VARIANTS = (
    Variant(sampling=GREEDY),
    Variant(sampling=STOPPED, sparse_budget_tokens=64, selection="quest"),
    Variant(sampling=FORCED, sparse_budget_tokens=None),
    Variant(sampling=DRAWN, sparse_budget_tokens=64, selection="quest"),
    Variant(sampling=SHORT),
    Variant(sampling=GREEDY),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, CONFIG)


def batch(lengths=(300, 131, 96, 470, 12)) -> list[Request]:
    """Requests with different variants, more than there are rows; ends of prompts inside and at the end of a block."""
    return [
        Request(prompt=random_prompt(n, n), variants=VARIANTS[place % 2 :], request_id=f"r{n}")
        for place, n in enumerate(lengths)
    ]


def alone(request: Request) -> list[Request]:
    """The variants of a request as requests of their own."""
    return [
        Request(
            prompt=request.prompt, sampling=v.sampling, sparse_budget_tokens=v.sparse_budget_tokens,
            selection=v.selection,
        )
        for v in request.variants
    ]  # fmt: skip


def assert_same(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert one.logprobs == other.logprobs
        for ours, theirs in zip(one.metrics.selected_block_ids, other.metrics.selected_block_ids, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_variants_are_requests_of_their_own(engine):
    requests = batch()
    got = engine.generate(requests)
    assert [(output.request_id, output.index) for output in got] == [
        (request.request_id, index) for request in requests for index in range(len(request.variants))
    ]
    assert_same(got, engine.generate([single for request in requests for single in alone(request)]))
    ends = {output.finish_reason for output in got}
    assert ends == {"stop", "length"}
    assert any(output.finish_reason == "stop" and len(output.token_ids) < 20 for output in got)
    assert_empty(engine)


def test_times_count_from_the_start_of_each(model):
    ticks = iter(range(10**6))
    engine = Engine(model, CONFIG, clock=lambda: float(next(ticks)))
    first, second, third = engine.generate(
        [Request(prompt=random_prompt(300, 0), variants=(Variant(sampling=GREEDY),) * 3)]
    )
    assert first.metrics.ttft_s is not None and first.metrics.ttft_s > first.metrics.queue_s > 0
    for later in (second, third):
        assert later.metrics.queue_s == 0 and later.metrics.ttft_s is not None
        assert 0 < later.metrics.ttft_s < 8  # ticks of the clock: two steps, not the twenty of those before
        assert len(later.metrics.tbt_s) == 19


def test_the_prompt_is_prefilled_once_and_its_blocks_reserved_once(model, monkeypatch):
    engine = Engine(model, dataclasses.replace(CONFIG, max_num_seqs=2))
    calls = []
    original = engine.runner._prefill
    monkeypatch.setattr(
        engine.runner, "_prefill", lambda segment, scored: calls.append(segment) or original(segment, scored)
    )
    engine.add_request(Request(prompt=random_prompt(200, 0), variants=VARIANTS))
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, engine.scheduler.pool_usage()["blocks"].used)
    assert sum(s.num_tokens * (s.layer_end - s.layer_start) for s in calls) == 200 * engine.layout.num_layers
    assert most == engine.layout.blocks_for(200 + 20)


@pytest.mark.parametrize("num_steps", range(1, 60, 4))
def test_aborts_at_any_moment_leave_nothing(engine, num_steps):
    requests = batch((40, 96, 300))
    names = [engine.add_request(request) for request in requests]
    outputs = [output for _ in range(num_steps) for output in engine.step()]
    engine.abort(names[1])
    while engine.has_unfinished():
        outputs += engine.step()
    ended = [(o.request_id, o.index) for o in outputs if o.finish_reason is not None]
    assert sorted(ended) == sorted((r.request_id, i) for r in requests for i in range(len(r.variants)))
    assert all(o.finish_reason != "abort" for o in outputs if o.request_id != names[1])
    assert_empty(engine)


def test_tiered(model):
    """Rooms for about one request: parked, resumed and restarted in any order."""
    extra = dataclasses.replace(CONFIG, extra_decode_settings=((64, "quest"),))
    variants = tuple(v for v in VARIANTS if v.sparse_budget_tokens is not None)
    requests = [dataclasses.replace(request, variants=variants[place:]) for place, request in enumerate(batch()[:4])]
    expected = Engine(model, extra).generate(requests)
    tiered = Engine(model, dataclasses.replace(extra, kv_tiers="tiered", device_kv_bytes=1_700_000))
    got = tiered.generate(requests)
    assert_same(got, expected)
    assert sum(output.metrics.num_parks for output in got) > 0
    assert sum(output.metrics.blocks_loaded for output in got) > 0
    assert_empty(tiered)


@pytest.mark.slow
def test_int8_blocks_are_put_back(model):
    """A partial block whose scale later tokens raised is what it was when the next variant begins."""
    engine = Engine(model, dataclasses.replace(CONFIG, kv_dtype="int8", implementation="reference"))
    requests = batch((300, 131, 96))
    got = engine.generate(requests)
    assert_same(got, engine.generate([single for request in requests for single in alone(request)]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=[1], variants=(Variant(sampling=GREEDY),), sampling=GREEDY), "belong to each of the variants"),
        (Request(prompt=[1], variants=(Variant(sampling=GREEDY),), selection="quest"), "belong to each"),
        (Request(prompt=[1], variants=(Variant(sampling=dataclasses.replace(GREEDY, n=2)),)), "variant 0 has n=2"),
        (Request(prompt=[1], variants=(Variant(sampling=GREEDY),) * 257), "257 variants; at most 256"),
        (Request(prompt=[1], variants=(GREEDY,)), "variants must be a tuple of Variant"),  # type: ignore[arg-type]
        (Request(prompt=[1], variants=(Variant(sampling=None),)), "sampling is a NoneType"),  # type: ignore[arg-type]
        (Request(prompt=[1], variants=(Variant(sampling=GREEDY, sparse_budget_tokens=96),)), "not among the decode"),
        (Request(prompt=random_prompt(500, 0), variants=(Variant(sampling=SHORT), Variant(sampling=GREEDY))),
         "500 tokens and max_tokens=20"),
    ],
)  # fmt: skip
def test_bad_variants_are_refused(engine, request_, message):
    with pytest.raises(RequestError, match=message):
        engine.add_request(request_)
    assert_empty(engine)

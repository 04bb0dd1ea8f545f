"""The engine as a whole, on a small model: compilations, aborts, memory, errors, streams."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import jax
import pytest

from sparseserve_jax import Engine, EngineConfig, Request, RequestError, SamplingParams, serve
from tests.tiny_model import VOCAB_SIZE, random_prompt, write_sharp_model

TIERED = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, max_num_batched_tokens=256,
    max_model_len=512, max_num_seqs=8, kv_tiers="tiered", device_kv_bytes=1_600_000,
)  # fmt: skip
UNIFIED = dataclasses.replace(TIERED, kv_tiers="unified", device_kv_bytes=None)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine(model, TIERED)
    for _ in engine.warm_up():
        pass
    return engine


def assert_empty(engine: Engine) -> None:
    assert all(pool.used == 0 for pool in engine.scheduler.pool_usage().values())
    assert not engine.has_unfinished() and not engine.scheduler.has_unfinished()
    assert not engine.runner._sequences and not engine.runner._calls
    assert not engine.runner._tables.blocks.any() and not engine.runner._tables.slots.any()


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Names of the compilations that happen meanwhile."""
    seen: list[str] = []

    def note(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(kwargs))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


SPARSE_PREFILL = dataclasses.replace(UNIFIED, prefill_sparsity=0.9)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(UNIFIED, id="unified"), pytest.param(TIERED, id="tiered"),
        pytest.param(SPARSE_PREFILL, id="sparse prefill", marks=pytest.mark.slow),
        pytest.param(
            dataclasses.replace(SPARSE_PREFILL, sparse_budget_tokens=None), id="sparse prefill, dense decode",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_nothing_compiles_after_warm_up(model, engine, compilations, config):
    warm = engine
    if config is not TIERED:
        warm = Engine(model, config)
        for _ in warm.warm_up():
            pass
    assert compilations or config is TIERED, "the listener hears nothing"
    compilations.clear()
    features = [
        {"temperature": 0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}, {"logprobs": 3},
        {"presence_penalty": 1.0, "repetition_penalty": 1.2}, {"logit_bias": {5: 2.0}, "min_tokens": 3},
    ]  # fmt: skip
    lengths = [1, 5, 100, 128, 129, 200, 256, 257, 400, 490, 33, 17]
    requests = [
        Request(prompt=random_prompt(n, i), sampling=SamplingParams(max_tokens=20, **features[i % len(features)]))
        for i, n in enumerate(lengths)
    ]
    for at_once in (1, 3, 12):
        for start in range(0, len(requests), at_once):
            warm.generate(requests[start : start + at_once])
    assert compilations == []


@pytest.mark.parametrize("num_requests", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_requests_with_random_aborts_leave_nothing(engine, num_requests):
    soak(engine, num_requests)


@pytest.mark.slow
def test_a_thousand_requests_on_the_embedded_model():
    """About ten minutes on two cores."""
    config = EngineConfig(
        max_model_len=512, sparse_budget_tokens=128, max_num_seqs=8, kv_tiers="tiered", device_kv_bytes=16 * 2**20,
        max_num_batched_tokens=512, deterministic=True,
    )  # fmt: skip
    soak(Engine(config=config), 1000)


def soak(engine: Engine, num_requests: int) -> None:
    """Many requests, some aborted at any moment: each ends once, nothing is left, and later answers are right."""
    rng = random.Random(0)
    waiting = [
        Request(
            prompt=random_prompt(min(rng.randint(1, 40) if rng.random() < 0.9 else rng.randint(100, 480), 480), i),
            sampling=SamplingParams(temperature=0, max_tokens=rng.randint(1, 16), n=2 if rng.random() < 0.1 else 1),
            priority=rng.randint(0, 1),
        )
        for i in range(num_requests)
    ]
    live: list[str] = []
    ended: dict[tuple[str, int], str] = {}
    expected = sum(request.sampling.n for request in waiting if request.sampling)
    while waiting or engine.has_unfinished():
        for _ in range(rng.randint(0, 4)):
            if waiting and len(live) < 40:
                live.append(engine.add_request(waiting.pop()))
        if live and rng.random() < 0.15:
            assert engine.abort(rng.choice(live)) in (True, False)
        for output in engine.step():
            if output.finish_reason is not None:
                assert (output.request_id, output.index) not in ended, "ended twice"
                ended[output.request_id, output.index] = output.finish_reason
        live = [request_id for request_id in live if request_id in engine._children]
    assert len(ended) == expected
    reasons = set(ended.values())
    assert {"abort", "length"} <= reasons <= {"abort", "length", "stop"}
    assert list(ended.values()).count("abort") > num_requests // 20
    assert_empty(engine)
    again = engine.generate([Request(prompt=random_prompt(300, 1), sampling=GREEDY)])[0]
    fresh = engine.generate([Request(prompt=random_prompt(300, 1), sampling=GREEDY)])[0]
    assert again.token_ids == fresh.token_ids and len(again.token_ids) == 8


def test_bytes_in_use_stay_within_the_budgets(model):
    """Counted over every live array of KV's shape in either memory, also those that nobody planned."""
    before = {id(array): array for array in jax.live_arrays()}  # held, so that no id is used again
    config = dataclasses.replace(TIERED, host_kv_bytes=3_000_000)
    engine = Engine(model, config)
    runner, layout = engine.runner, engine.layout
    engine.add_request(Request(prompt=random_prompt(480, 0), sampling=GREEDY))
    assert config.device_kv_bytes is not None and config.host_kv_bytes is not None
    while engine.has_unfinished():
        engine.step()
        new = [array for array in jax.live_arrays() if id(array) not in before]
        kv = [array for array in new if array.ndim == 5 or (array.ndim == 4 and array.shape[2] == 2)]
        on_host = sum(array.nbytes for array in kv if array.sharding.memory_kind == "pinned_host")
        on_device = sum(array.nbytes for array in kv if array.sharding.memory_kind != "pinned_host")
        assert runner.device_kv_bytes() == on_device <= config.device_kv_bytes
        assert runner.host_kv_bytes() == on_host <= config.host_kv_bytes
        assert on_device and on_host
    # prefill passes through the staging buffer: one layer of the longest prompt, whatever the model's depth
    assert runner._staging is not None
    one_layer = (layout.max_blocks_per_seq + 1) * layout.num_kv_heads * layout.piece_bytes
    assert runner._staging.nbytes == one_layer


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt has no tokens"),
        ([VOCAB_SIZE], {}, rf"prompt token 0 is {VOCAB_SIZE}.*\[0, {VOCAB_SIZE}\)"),
        ([-1], {}, r"prompt token 0 is -1"),
        (random_prompt(500, 0), {"max_tokens": 13}, "500 tokens and max_tokens=13.*max_model_len=512.*at most 12"),
        (random_prompt(512, 0), {"max_tokens": 1}, "512 tokens.*max_model_len=512.*at most 511"),
        ([1], {"stop_token_ids": (10**6,)}, "stop_token_ids.*1000000"),
        ([{"role": "user"}], {}, "content"),
    ],
)
def test_bad_requests_are_refused_by_name(engine, prompt, params, message):
    with pytest.raises(RequestError, match=message):
        engine.add_request(Request(prompt=prompt, sampling=SamplingParams(**params)))
    assert_empty(engine)


def test_a_request_that_just_fits(engine):
    def filling(n: int) -> Request:
        params = SamplingParams(temperature=0, max_tokens=512 - n, ignore_eos=True)
        return Request(prompt=random_prompt(n, n), sampling=params)

    outputs = engine.generate([filling(511), filling(500)])
    assert [len(output.token_ids) for output in outputs] == [1, 12]
    unlimited = Request(prompt=random_prompt(500, 0), sampling=SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(engine.generate([unlimited])[0].token_ids) == 12


def test_one_bad_request_stops_the_whole_call_before_it_begins(engine):
    with pytest.raises(RequestError, match="request 1: the prompt has no tokens"):
        engine.generate([Request(prompt=[1, 2]), Request(prompt=[])])
    with pytest.raises(RequestError, match="'a' is in use by another request"):
        engine.generate([Request(prompt=[1], request_id="a"), Request(prompt=[1], request_id="a")])
    assert_empty(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_kv_bytes": 1000}, "device_kv_bytes=1000 is smaller than one working set.*raise device_kv_bytes to"),
        ({"host_kv_bytes": 1000}, "host_kv_bytes=1000 holds 0 KV blocks.*raise host_kv_bytes to at least"),
        ({"max_model_len": 4096}, "max_model_len=4096 exceeds the model's limit of 2048"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(model, changes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, dataclasses.replace(TIERED, **changes))


def test_a_prompt_over_the_host_budget_is_refused(model):
    """The host budget is smaller than max_model_len would need: the limit shrinks and says so."""
    config = dataclasses.replace(TIERED, max_model_len=None, host_kv_bytes=700_000, device_kv_bytes=None)
    engine = Engine(model, config)
    limit = engine.layout.max_model_len
    assert limit < 2048 and f"max_model_len {limit} tokens" in "\n".join(engine.info.lines())
    with pytest.raises(RequestError, match=f"max_model_len={limit}"):
        engine.add_request(Request(prompt=random_prompt(limit, 0)))


@pytest.mark.parametrize("field", [{"priority": "x"}, {"priority": 1.5}, {"request_id": 5}, {"sampling": {"n": 1}}])
def test_fields_of_the_wrong_type_do_not_harm_the_engine(engine, field):
    with pytest.raises(RequestError, match=next(iter(field))):
        engine.add_request(Request(prompt=[1, 2], **field))
    with pytest.raises(RequestError, match="request 0 is a str"):
        engine.add_request("hi")
    with pytest.raises(RequestError, match="lone surrogate"):
        engine.add_request(Request(prompt="\ud800"))
    assert_empty(engine)
    assert len(engine.generate([Request(prompt=[1, 2], sampling=GREEDY)])) == 1


@pytest.mark.parametrize("requests", [{"role": "user", "content": "x"}, 5, None, b"abc"])
def test_what_is_no_prompt_is_refused(model, requests):
    with pytest.raises(ValueError, match="give text, token ids"):
        serve(requests, GREEDY, model=model, config=UNIFIED)


def test_names_made_by_the_engine_avoid_those_of_callers(model):
    engine = Engine(model, UNIFIED)
    mine = Request(prompt=[1, 2], request_id="request-1", sampling=GREEDY)
    outputs = engine.generate([mine, Request(prompt=[3, 4], sampling=GREEDY), Request(prompt=[5], sampling=GREEDY)])
    assert len({output.request_id for output in outputs}) == 3


def test_outputs_of_others_are_kept_for_them(engine):
    prompts = [random_prompt(20 + i, i) for i in range(4)]
    expected = [engine.generate([Request(prompt=p, sampling=GREEDY)])[0].token_ids for p in prompts]
    one = engine.stream([Request(prompt=prompts[0], sampling=GREEDY)])
    two = engine.stream([Request(prompt=prompts[1], sampling=GREEDY)])
    queued = engine.add_request(Request(prompt=prompts[2], sampling=GREEDY))
    between = engine.generate([Request(prompt=prompts[3], sampling=GREEDY)])
    got = [list(one)[-1], list(two)[-1], *between]
    rest = []
    while engine.has_unfinished():
        rest += [output for output in engine.step() if output.request_id == queued]
    assert [o.token_ids for o in (got[0], got[1], rest[-1], got[2])] == expected
    assert_empty(engine)


def test_streams_are_the_text_in_pieces(engine):
    requests = [
        Request(prompt=random_prompt(n, n), sampling=SamplingParams(seed=n, max_tokens=30)) for n in (5, 90, 300)
    ]
    whole = engine.generate(requests)
    pieces: dict[str, str] = {}
    for output in engine.stream([dataclasses.replace(r, request_id=str(i)) for i, r in enumerate(requests)]):
        pieces[output.request_id] = pieces.get(output.request_id, "") + output.delta
    assert [pieces[str(i)] for i in range(3)] == [output.text for output in whole]


def test_closing_a_stream_aborts_what_is_left(engine):
    stream = engine.stream([Request(prompt=random_prompt(300, i), sampling=GREEDY) for i in range(3)])
    for _ in itertools.islice(stream, 2):
        pass
    stream.close()
    assert_empty(engine)


def test_serve_takes_every_kind_of_prompt(model):
    config = dataclasses.replace(UNIFIED, deterministic=True)
    outputs = serve(
        ["abc", [97, 98], [{"role": "user", "content": "hi"}], Request(prompt="abc", sampling=GREEDY)],
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        model=model,
        config=config,
    )
    assert [len(output.token_ids) for output in outputs[:3]] == [4, 4, 4]
    assert outputs[1].prompt_token_ids == [97, 98]
    assert outputs[0].prompt == "abc" and outputs[0].token_ids == outputs[3].token_ids[:4]
    assert outputs[2].prompt is not None and "[user]hi" in outputs[2].prompt
    one = serve([97, 98], SamplingParams(temperature=0, max_tokens=4, n=2), model=model, config=config, stream=True)
    assert {output.index for output in one} == {0, 1}
    with pytest.raises(ValueError, match="1 sampling_params for 2 requests"):
        serve(["a", "b"], [GREEDY], model=model)


def test_metrics_add_up(model):
    output = Engine(model, TIERED).generate([Request(prompt=random_prompt(300, 0), sampling=GREEDY)])[0]
    m = output.metrics
    assert m.blocks_selected == m.blocks_hit + m.blocks_loaded
    assert m.blocks_selected == 7 * 3 * 2 * 8  # decode steps x sparse layers x KV heads x blocks of the budget
    piece = 2 * 16 * 32 * 4
    dense = 19 * 1 * 2  # blocks x dense layers x heads, loaded when decoding begins
    assert m.bytes_loaded == (m.blocks_loaded + dense) * piece
    assert m.bytes_saved == (19 * 4 * 2 + 4 * 2) * piece  # the prompt's blocks, and the one that filled while decoding
    assert m.ttft_s is not None and m.ttft_s >= m.queue_s >= 0 and len(m.tbt_s) == len(output.token_ids) - 1
    assert 0 < m.working_set_slots <= 19 and m.working_set_blocks <= m.working_set_slots * 3 * 2


def test_a_step_that_fails_on_the_device_says_why_and_the_engine_says_so_later(model, monkeypatch):
    """Its KV was donated to the step that failed: going on would serve garbage."""
    engine = Engine(model, UNIFIED)

    def fail(plan: object, *, sample: bool) -> None:
        raise MemoryError("out of device memory")

    monkeypatch.setattr(engine.runner, "begin", fail)
    with pytest.raises(MemoryError, match="out of device memory"):
        engine.generate([Request(prompt=[1, 2, 3], sampling=GREEDY)])
    with pytest.raises(RuntimeError, match=r"an earlier step failed.*make a new Engine") as error:
        engine.generate([Request(prompt=[1, 2, 3], sampling=GREEDY)])
    assert isinstance(error.value.__cause__, MemoryError)

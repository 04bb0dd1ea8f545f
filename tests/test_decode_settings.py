"""Budget and selection method by request: each request is served as by an engine of that setting alone."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from sparseserve_jax import Engine, EngineConfig, Request, RequestError, RequestOutput, SamplingParams, Variant
from sparseserve_jax.cli import parse_decode_settings
from tests.tiny_model import random_prompt, write_sharp_model

CONFIG = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, record_selection=True,
    max_num_batched_tokens=256, max_model_len=512, max_num_seqs=8, deterministic=True,
)  # fmt: skip
EXTRA = ((64, "quest"), (256, "cuboid-mean"), (None, "mean"))
SAMPLING = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
LENGTHS = (300, 40, 470, 131)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, dataclasses.replace(CONFIG, extra_decode_settings=EXTRA))


def requests_of(budget, selection) -> list[Request]:
    return [
        Request(prompt=random_prompt(n, n), sampling=SAMPLING, sparse_budget_tokens=budget, selection=selection)
        for n in LENGTHS
    ]


def assert_same(got: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs
        for ours, theirs in zip(one.metrics.selected_block_ids, other.metrics.selected_block_ids, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_each_setting_is_that_of_an_engine_of_its_own(model, engine):
    """All settings in one batch, against engines that have but one."""
    settings = [("default", None), *EXTRA]
    together = engine.generate([request for setting in settings for request in requests_of(*setting)])
    answers = []
    for place, (budget, selection) in enumerate(settings):
        got = together[place * len(LENGTHS) : (place + 1) * len(LENGTHS)]
        answers.append([output.token_ids for output in got])
        if budget is None:  # every layer dense: nothing is selected there
            dense = Engine(model, dataclasses.replace(CONFIG, sparse_budget_tokens=None))
            expected = dense.generate(requests_of("default", None))
            assert [output.token_ids for output in got] == [output.token_ids for output in expected]
            continue
        own = {} if budget == "default" else {"sparse_budget_tokens": budget, "selection": selection}
        assert_same(got, Engine(model, dataclasses.replace(CONFIG, **own)).generate(requests_of("default", None)))
    assert all(one != other for i, one in enumerate(answers) for other in answers[:i]), "a setting has no effect"


def test_one_group_decodes_and_the_others_wait(model, engine):
    """The same answers in fewer and fuller batches, whoever comes meanwhile."""
    settings = [("default", None), *EXTRA]
    requests = [
        Request(
            prompt=random_prompt(n, n),
            variants=tuple(
                Variant(
                    sampling=dataclasses.replace(SAMPLING, max_tokens=2 + (n + 5 * place) % 13),
                    sparse_budget_tokens=budget, selection=selection,
                )
                for place, (budget, selection) in enumerate(settings)
            ),
        )
        for n in (*LENGTHS, 222, 90, 401, 260, 77, 350)
    ]  # fmt: skip
    config = dataclasses.replace(engine.config, decode_groups="one")
    grouped = Engine(model, config)
    assert_same(grouped.generate(requests), engine.generate(requests))

    def batches(which: Engine) -> list[int]:
        sizes, decode = [], which.runner._decode

        def counted(sequences):
            decoded = decode(sequences)
            sizes.extend(len(members) for members, _ in decoded)
            return decoded

        which.runner._decode = counted  # type: ignore[method-assign]
        which.generate(requests)
        which.runner._decode = decode  # type: ignore[method-assign]
        return sizes

    few, many = batches(grouped), batches(engine)
    assert sum(few) == sum(many) and len(few) < 0.8 * len(many), (len(few), len(many))


def test_groups_need_one_pool():
    with pytest.raises(ValueError, match="decode_groups='one' needs kv_tiers='unified'"):
        EngineConfig(decode_groups="one", kv_tiers="tiered")


@pytest.mark.slow
def test_tiered(model):
    """Less than one engine's room for all, so that requests of every setting park and resume."""
    extra = ((64, "cuboid-mean"), (64, "mean"))
    config = dataclasses.replace(CONFIG, extra_decode_settings=extra)
    tiered = Engine(model, dataclasses.replace(config, kv_tiers="tiered", device_kv_bytes=2_000_000))
    requests = [request for setting in (("default", None), *extra) for request in requests_of(*setting)]
    got = tiered.generate(requests)
    assert sum(output.metrics.num_parks for output in got) > 0
    assert_same(got, Engine(model, config).generate(requests))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"kv_dtype": "int8"}, {"selection_granularity": "query_head"}], ids=str)
def test_other_engines(model, changes):
    config = dataclasses.replace(CONFIG, implementation="reference", **changes)
    mixed = Engine(model, dataclasses.replace(config, extra_decode_settings=((64, "quest"),)))
    got = mixed.generate([*requests_of("default", None)[:2], *requests_of(64, "quest")[:2]])
    alone = Engine(model, config).generate(requests_of("default", None)[:2])
    quest = Engine(model, dataclasses.replace(config, sparse_budget_tokens=64, selection="quest"))
    assert_same(got, [*alone, *quest.generate(requests_of("default", None)[:2])])


def test_nothing_compiles_after_warm_up(model):
    seen: list[str] = []

    def note(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(str(kwargs))

    config = dataclasses.replace(CONFIG, extra_decode_settings=((64, "quest"), (None, "mean")), max_model_len=256)
    warm = Engine(model, config)
    named = [step for step in warm.warm_up() if step.startswith("decode")]
    assert [step.rpartition(", ")[2] for step in named] == ["128:cuboid-mean", "64:quest", "dense"]
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        quest = [dataclasses.replace(request, prompt=request.prompt[:90]) for request in requests_of(64, "quest")]
        params = dataclasses.replace(SAMPLING, prompt_logprobs=1, forced_token_ids=(5, 6))
        variants = (Variant(sampling=params), Variant(sampling=SAMPLING, sparse_budget_tokens=None))
        warm.generate([*quest, requests_of(None, None)[1], Request(prompt=random_prompt(200, 0), variants=variants)])
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert seen == []


def test_digests_are_planned_for(model, engine):
    state, layout = engine.runner._state, engine.layout
    assert len(state.digests) == 2 * layout.num_sparse_layers
    assert engine.runner.device_kv_bytes() == layout.device_bytes


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice",
    [{"sparse_budget_tokens": 96}, {"sparse_budget_tokens": 64, "selection": "mean"}, {"selection": "quest"},
     {"sparse_budget_tokens": 128.0}, {"sparse_budget_tokens": True}, {"sparse_budget_tokens": "dense"},
     {"sparse_budget_tokens": None, "selection": "best"}, {"selection": 5}],
    ids=str,
)  # fmt: skip
def test_what_was_not_declared_is_refused_with_what_there_is(engine, choice):
    with pytest.raises(
        RequestError, match=r"not among .* it has 128:cuboid-mean, 64:quest, 256:cuboid-mean, dense \(the"
    ):
        engine.add_request(Request(prompt=[1, 2], **choice))
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra_decode_settings": ((100, "quest"),)}, "extra_decode_settings=100 must be a multiple of block_size=16"),
        ({"extra_decode_settings": ((32, "quest"),)}, "extra_decode_settings=32 must be .* at least 64"),
        ({"extra_decode_settings": ((64, "best"),)}, "selection of extra_decode_settings='best'"),
        ({"extra_decode_settings": (64, "quest")}, "must be a tuple of"),
        ({"extra_decode_settings": "64:quest"}, "must be a tuple of"),
        ({"extra_decode_settings": (("64", "quest"),)}, "budget of extra_decode_settings='64' must be an integer"),
        ({"extra_decode_settings": ((64, "quest"),), "sparse_budget_tokens": None}, "keeps no digests"),
        ({"extra_decode_settings": ((256, "quest"),), "kv_tiers": "tiered"}, "a budget of 256 tokens, but"),
        ({"extra_decode_settings": ((None, "quest"),), "kv_tiers": "tiered"}, "has dense attention, but"),
    ],
)
def test_settings_that_cannot_work(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_command_line_form():
    assert parse_decode_settings("512:cuboid-mean, dense:mean") == ((512, "cuboid-mean"), (None, "mean"))
    assert parse_decode_settings("") == ()
    for text in ("512", "x:quest", "-1:quest"):
        with pytest.raises(ValueError, match="is not BUDGET:METHOD"):
            parse_decode_settings(text)

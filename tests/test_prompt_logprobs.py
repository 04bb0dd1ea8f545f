"""Log-probabilities of prompt tokens: those of the same tokens forced one by one, however the prompt is prefilled."""

from __future__ import annotations

import dataclasses

import pytest

from sparseserve_jax import Engine, EngineConfig, Request, RequestOutput, SamplingParams, Variant
from sparseserve_jax.runner.prompt_logprobs import MOST_ROWS, possible_slices, slice_sizes
from tests.test_engine import assert_empty
from tests.tiny_model import random_prompt, write_sharp_model

CONFIG = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=None, max_num_batched_tokens=256, max_model_len=512,
    max_num_seqs=8, deterministic=True,
)  # fmt: skip
LENGTHS = (300, 1, 40, 257, 2)
SAMPLING = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, CONFIG)


def requests() -> list[Request]:
    """Some ask, some do not."""
    plain = dataclasses.replace(SAMPLING, prompt_logprobs=None)
    asking = [Request(prompt=random_prompt(n, n), sampling=SAMPLING) for n in LENGTHS]
    return [asking[0], Request(prompt=random_prompt(90, 0), sampling=plain), *asking[1:]]


def entries(output: RequestOutput) -> list[list[tuple[int, float, int]]]:
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    return [[(c.token_id, c.logprob, c.rank) for c in entry or ()] for entry in output.prompt_logprobs[1:]]


def assert_close(got: RequestOutput, expected: RequestOutput) -> None:
    for ours, theirs in zip(entries(got), entries(expected), strict=True):
        assert [c[0] for c in ours] == [c[0] for c in theirs]
        assert [c[1] for c in ours] == pytest.approx([c[1] for c in theirs], abs=2e-3)


@pytest.fixture(scope="module")
def expected(engine):
    outputs = engine.generate(requests())
    assert outputs[1].prompt_logprobs is None
    return outputs


def test_they_are_those_of_forced_tokens(engine, expected):
    for output in (expected[0], expected[3]):
        prompt = output.prompt_token_ids
        params = SamplingParams(
            temperature=0, max_tokens=len(prompt) - 1, forced_token_ids=tuple(prompt[1:]), logprobs=4
        )
        (forced,) = engine.generate([Request(prompt=prompt[:1], sampling=params)])
        assert forced.logprobs is not None
        for ours, theirs in zip(entries(output), forced.logprobs, strict=True):
            assert ours[0][0] == theirs[0].token_id and ours[0][1] == pytest.approx(theirs[0].logprob, abs=2e-3)
            assert len(ours) in (4, 5) and [c[2] for c in ours[1:]] == sorted(c[2] for c in ours[1:])
            assert {c[0] for c in ours if c[2] <= 3} <= {c.token_id for c in theirs if c.rank <= 4}


def test_every_snapshot_has_all_of_them_and_tokens_are_the_same(engine, expected):
    (request,) = requests()[:1]
    snapshots = list(engine.stream([request]))
    assert len(snapshots) == 3 and all(snapshot.prompt_logprobs for snapshot in snapshots)
    assert_close(snapshots[0], expected[0])
    plain = dataclasses.replace(request, sampling=dataclasses.replace(SAMPLING, prompt_logprobs=None))
    assert engine.generate([plain])[0].token_ids == expected[0].token_ids


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"prefill": "chunked", "max_inject_tokens": 4 * 128}, id="chunked"),
        pytest.param({"max_num_batched_tokens": 512, "deterministic": False, "max_inject_tokens": 900}, id="packed"),
        pytest.param({"max_inject_tokens": 300, "sparse_budget_tokens": 128, "kv_tiers": "tiered"}, id="tiered"),
    ],
)
def test_prefill_order_does_not_show(model, expected, changes):
    engine = Engine(model, dataclasses.replace(CONFIG, **changes))
    for got, wanted in zip(engine.generate(requests()), expected, strict=True):
        if wanted.prompt_logprobs is None:
            assert got.prompt_logprobs is None
        else:
            assert_close(got, wanted)


def test_siblings_and_variants(engine, expected):
    prompt = random_prompt(40, 40)
    drawn = SamplingParams(n=2, seed=1, max_tokens=2, prompt_logprobs=4)
    for output in engine.generate([Request(prompt=prompt, sampling=drawn)]):
        assert_close(output, expected[3])
    params = [dataclasses.replace(SAMPLING, prompt_logprobs=k) for k in (None, 1, 4)]
    none, one, four = engine.generate([Request(prompt=prompt, variants=tuple(Variant(sampling=p) for p in params))])
    assert none.prompt_logprobs is None
    assert_close(four, expected[3])
    assert entries(one) == [[c for i, c in enumerate(entry) if i == 0 or c[2] <= 1] for entry in entries(four)]


def test_aborted_before_the_prompt_is_done(model):
    engine = Engine(model, dataclasses.replace(CONFIG, max_inject_tokens=300))
    name = engine.add_request(Request(prompt=random_prompt(300, 0), sampling=SAMPLING))
    engine.step()
    assert engine.abort(name)
    (output,) = [output for output in engine.step() if output.finish_reason == "abort"]
    assert output.prompt_logprobs is None
    while engine.has_unfinished():
        engine.step()
    assert_empty(engine)


@pytest.mark.parametrize("num_tokens", [128, 256, 512, 4096])
def test_slices_cover_all_rows_and_are_small(num_tokens):
    for num_rows in {1, 127, 128, 129, num_tokens // 2 + 1, num_tokens}:
        sizes = list(slice_sizes(num_rows, num_tokens))
        assert sum(sizes) >= num_rows > sum(sizes[:-1])
        assert set(sizes) <= set(possible_slices(num_tokens)) and max(sizes) <= MOST_ROWS

"""Teacher forcing: given tokens in place of sampled ones, with the model's own log-probabilities of them."""

from __future__ import annotations

import dataclasses

import pytest

from sparseserve_jax import Engine, EngineConfig, Request, RequestError, RequestOutput, SamplingParams
from tests.tiny_model import SHAPE, VOCAB_SIZE, random_prompt, write_sharp_model

CONFIG = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, max_num_batched_tokens=256,
    max_model_len=512, max_num_seqs=8, deterministic=True,
)  # fmt: skip
FREE = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return Engine(write_sharp_model(tmp_path_factory.mktemp("sharp")), CONFIG)


def logprobs_of(output: RequestOutput) -> list[list[tuple[int, float, int]]]:
    assert output.logprobs is not None
    return [[(c.token_id, c.logprob, c.rank) for c in candidates] for candidates in output.logprobs]


def test_forcing_what_would_be_sampled_changes_nothing(engine):
    prompt = random_prompt(300, 0)
    (free,) = engine.generate([Request(prompt=prompt, sampling=FREE)])
    for count in (1, 7, 12):
        forced = dataclasses.replace(FREE, forced_token_ids=tuple(free.token_ids[:count]))
        (output,) = engine.generate([Request(prompt=prompt, sampling=forced)])
        assert output.token_ids == free.token_ids
        assert logprobs_of(output) == logprobs_of(free)
        assert output.text == free.text and output.finish_reason == "length"


def test_forced_tokens_are_what_the_next_step_takes_in(engine):
    """Other tokens than the best; those after them are those after a prompt that ends with them."""
    prompt, given = random_prompt(90, 1), tuple(random_prompt(6, 2))
    params = dataclasses.replace(FREE, forced_token_ids=given)
    (forced,) = engine.generate([Request(prompt=prompt, sampling=params)])
    assert forced.token_ids[:6] == list(given)
    longer = Request(prompt=[*prompt, *given], sampling=dataclasses.replace(FREE, max_tokens=6))
    (expected,) = engine.generate([longer])
    assert forced.token_ids[6:] == expected.token_ids
    for got, wanted in zip(logprobs_of(forced)[6:], logprobs_of(expected), strict=True):
        assert [c[0] for c in got] == [c[0] for c in wanted]
        assert [c[1] for c in got] == pytest.approx([c[1] for c in wanted], abs=2e-4)
    for given_token, candidates in zip(given, logprobs_of(forced), strict=False):
        token, value, rank = candidates[0]
        ahead = [c for c in candidates[1:] if c[1] > value]
        assert token == given_token and rank > len(ahead)
        assert rank <= 5 or len(candidates) == 6  # the five best besides


def test_batch_mates_and_siblings_are_untouched(engine):
    mates = [Request(prompt=random_prompt(n, n), sampling=FREE) for n in (40, 200, 310)]
    alone = [engine.generate([mate])[0] for mate in mates]
    drawn = SamplingParams(max_tokens=10, seed=3, n=2, ignore_eos=True, logprobs=0)
    forced = Request(
        prompt=random_prompt(50, 9), sampling=dataclasses.replace(drawn, forced_token_ids=tuple(random_prompt(4, 4)))
    )
    outputs = engine.generate([mates[0], forced, *mates[1:]])
    for mate, expected in zip([outputs[0], *outputs[3:]], alone, strict=True):
        assert mate.token_ids == expected.token_ids and logprobs_of(mate) == logprobs_of(expected)
    one, two = outputs[1:3]
    assert one.token_ids[:4] == two.token_ids[:4] == random_prompt(4, 4)
    assert one.token_ids[4:] != two.token_ids[4:]


def test_nothing_ends_it_within_forced_tokens(engine):
    eos = SHAPE["eos_token_id"]
    given = (65, eos, 66, 67)
    params = SamplingParams(
        temperature=0, max_tokens=4, forced_token_ids=given, stop=("b",), stop_token_ids=(66,), logprobs=1
    )
    (output,) = engine.generate([Request(prompt=random_prompt(20, 0), sampling=params)])
    assert output.token_ids == list(given) and output.finish_reason == "length"
    assert output.text == "bcd"
    # the token after them may end it
    after = dataclasses.replace(params, max_tokens=8, logit_bias={eos: 100.0}, stop=())
    (output,) = engine.generate([Request(prompt=random_prompt(20, 0), sampling=after)])
    assert output.token_ids == [*given, eos] and output.finish_reason == "stop"


def test_penalties_count_forced_tokens(engine):
    """A token that was forced is banned by the strongest repetition penalty; unforced it would be repeated."""
    prompt = random_prompt(30, 5)
    biased = SamplingParams(temperature=0, max_tokens=3, logit_bias={99: 50.0}, frequency_penalty=2.0, logprobs=20)
    forced = dataclasses.replace(biased, forced_token_ids=(99, 99))
    (output,) = engine.generate([Request(prompt=prompt, sampling=forced)])
    (free,) = engine.generate([Request(prompt=prompt, sampling=biased)])
    assert free.token_ids[:2] == output.token_ids[:2] and logprobs_of(free) == logprobs_of(output)


def test_errors_name_the_bound(engine):
    with pytest.raises(ValueError, match="forced_token_ids has 20 entries, but max_tokens=16"):
        SamplingParams(forced_token_ids=tuple(range(20)))
    with pytest.raises(ValueError, match="forced_token_ids=-1 must be an integer"):
        SamplingParams(forced_token_ids=(-1,))
    with pytest.raises(RequestError, match=f"forced_token_ids names token id {VOCAB_SIZE}"):
        engine.add_request(Request(prompt=[1], sampling=SamplingParams(forced_token_ids=(VOCAB_SIZE,))))
    many = SamplingParams(forced_token_ids=(5,) * 20, max_tokens=None)
    with pytest.raises(RequestError, match=r"forced_token_ids of 20 tokens with a prompt of 500.*at most 12"):
        engine.add_request(Request(prompt=random_prompt(500, 0), sampling=many))

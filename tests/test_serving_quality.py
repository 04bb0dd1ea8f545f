"""The quality script: its likelihoods are the engine's own, of LongBench's prompts."""

import pytest

from scripts.serving_quality import Answered, answer_nll, answered_prompts
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from tests.evaluation.data import row, write_longbench
from tests.tiny_model import random_prompt, write_sharp_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = EngineConfig(
        dtype="float32", block_size=16, sparse_budget_tokens=None, max_num_batched_tokens=256,
        max_model_len=512, max_num_seqs=1, deterministic=True,
    )  # fmt: skip
    return Engine(write_sharp_model(tmp_path_factory.mktemp("sharp")), config)


def test_likelihoods_are_those_of_the_engine(engine):
    prompt = random_prompt(300, 0)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
    output = engine.generate([Request(prompt=prompt, sampling=params)])[0]
    assert output.logprobs is not None
    expected = -sum(candidates[0].logprob for candidates in output.logprobs) / 6
    assert answer_nll(engine, Answered("task", prompt, output.token_ids)) == pytest.approx(expected, abs=1e-4)
    other = [token + 1 for token in output.token_ids]
    assert answer_nll(engine, Answered("task", prompt, other)) > expected + 1
    assert not engine.runner._sequences


def test_prompts_are_cut_in_the_middle(engine, tmp_path):
    write_longbench(tmp_path, {"qasper": [row("1", ["because"], context="abcdefghij" * 20)]})
    (whole,) = answered_prompts(tmp_path, ["qasper"], 3, engine.tokenizer, 1000)
    (cut,) = answered_prompts(tmp_path, ["qasper"], 3, engine.tokenizer, 50)
    assert len(cut.prompt) == 50 and cut.prompt == whole.prompt[:25] + whole.prompt[-25:]
    assert engine.tokenizer.decode(cut.answer).strip() == "because"

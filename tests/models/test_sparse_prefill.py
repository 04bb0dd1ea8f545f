"""Sparse prefill in the engine: threshold 1 is dense, a low one shows, and how prompts are cut does not."""

import dataclasses

import pytest

from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from tests.tiny_model import random_prompt, write_sharp_model

BASE = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, max_num_batched_tokens=512,
    max_model_len=1024, max_num_seqs=4, deterministic=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def requests():
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [Request(prompt=random_prompt(n, n), sampling=params) for n in (900, 300, 60)]


def tokens_of(model, requests, **changes):
    engine = Engine(model, dataclasses.replace(BASE, **changes))
    ids = [engine.add_request(request) for request in requests]
    last = {}
    while engine.has_unfinished():
        last |= {output.request_id: output.token_ids for output in engine.step()}
    return [last[request_id] for request_id in ids]


MODES = {
    "layer": {},
    "chunked": {"prefill": "chunked", "max_inject_tokens": 4 * 256},
    "packed": {"deterministic": False},
    "tiered": {"kv_tiers": "tiered"},
    "dense decode": {"sparse_budget_tokens": None},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_threshold_one_gives_the_tokens_of_dense_prefill(model, requests, mode):
    dense = tokens_of(model, requests, **mode)
    assert tokens_of(model, requests, prefill_sparsity=1.0, **mode) == dense


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_low_threshold_shows(model, requests, mode):
    """Only in prompts that are longer than what is dense anyway."""
    dense = tokens_of(model, requests, **mode)
    sparse = tokens_of(model, requests, prefill_sparsity=0.02, **mode)
    assert sparse[0] != dense[0]
    assert sparse[2] == dense[2]


def test_how_the_prompt_is_cut_does_not_show(model, requests):
    """Chunks of whole tiles select what the whole prompt selects."""
    whole = tokens_of(model, requests, prefill_sparsity=0.3)
    for name in ("chunked", "tiered"):
        assert tokens_of(model, requests, prefill_sparsity=0.3, **MODES[name]) == whole


def test_it_is_printed(model):
    lines = Engine(model, dataclasses.replace(BASE, prefill_sparsity=0.9)).info.lines()
    assert any("attention to 0.9 of its estimated mass, dense in layers 0 and up to 128 tokens" in x for x in lines)

"""Engines with `kv_dtype="int8"`: what they hold, that nothing but the budget decides who waits, and what it costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cpu_kernels import loader
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from tests.real_text import real_text
from tests.test_exactness import assert_same, run
from tests.tiny_model import random_prompt, write_sharp_model

NO_LIBRARY = pytest.mark.skipif(not loader.is_there(), reason="no native kernels were built for this CPU")
IMPLEMENTATIONS = (pytest.param("reference", marks=pytest.mark.slow), pytest.param("cpu", marks=NO_LIBRARY))
BASE = EngineConfig(
    kv_dtype="int8", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, record_selection=True,
    max_num_batched_tokens=256, max_model_len=512, max_num_seqs=4, deterministic=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_engine_repeats_itself_and_holds_what_was_planned(model, implementation):
    """Twice in batches of four and once one by one: the same tokens, selections and bytes of blocks and scales."""
    engine = Engine(model, dataclasses.replace(BASE, implementation=implementation))
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [Request(prompt=random_prompt(n, n), sampling=sampling) for n in (300, 40, 131, 470)]
    first = run(engine, requests, 4)
    assert_same(run(engine, requests, 4), first)
    assert_same(run(engine, requests, 1), first)
    assert first.num_parks == first.num_loads == 0
    state, layout = engine.runner._state, engine.layout
    assert {pool.dtype.name for pool in state.pools} == {"int8"}
    assert [scales.shape for scales in state.scales] == [(layout.num_blocks + 1, 2, 2)] * layout.num_layers
    held = sum(array.nbytes for array in (*state.pools, *state.scales, *state.digests))
    assert held == engine.info.device_kv_bytes == layout.device_bytes
    line = next(line for line in engine.info.lines() if line.startswith("device KV"))
    assert line.endswith(", int8 and a scale for K and V of each block and head")


def test_checksums_see_scales(model):
    engine = Engine(model, dataclasses.replace(BASE, implementation="reference"))
    engine.add_request(Request(prompt=random_prompt(40, 0), sampling=SamplingParams(temperature=0, max_tokens=2)))
    engine.step()
    (name,) = engine.runner._sequences
    before = engine.runner.block_checksums(name)
    state = engine.runner._state
    engine.runner._state = dataclasses.replace(state, scales=(state.scales[0] * 3, *state.scales[1:]))
    after = engine.runner.block_checksums(name)
    different = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert len(different) == 2 * engine.layout.num_layers
    assert different.index(True) == engine.layout.num_layers
    assert sum(different) == 1


def test_pallas_refuses_before_anything_is_loaded(model):
    with pytest.raises(
        NotImplementedError, match=r"implementation='pallas' does not append .*'cpu' or 'reference', or"
    ):
        Engine(model, dataclasses.replace(BASE, implementation="pallas"))


# --- quality ---------------------------------------------------------------------------------------------------------

PROMPT_TOKENS, NEW_TOKENS = 2000, 48
MOST_ERROR, MEAN_ERROR = 2.0, 0.2
"""Of log-probabilities of the 20 best tokens, which span 10 and more; measured: see the output of the test."""


@pytest.mark.slow
@NO_LIBRARY
@pytest.mark.parametrize("sparse_budget_tokens", [None, 512], ids=["dense", "sparse"])
def test_the_embedded_model_hardly_notices(sparse_budget_tokens):
    """Decode steps after 2,000 tokens of real text, all engines given the tokens of the bfloat16 one."""
    config = EngineConfig(
        sparse_budget_tokens=sparse_budget_tokens, max_num_seqs=1, max_model_len=2048, max_num_batched_tokens=2048
    )
    engine = Engine(config=config)
    prompt = engine.tokenizer.encode(real_text())[5000 : 5000 + PROMPT_TOKENS]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=20)
    (expected,) = engine.generate([Request(prompt=prompt, sampling=sampling)])
    forced = dataclasses.replace(sampling, forced_token_ids=tuple(expected.token_ids))
    (got,) = Engine(config=dataclasses.replace(config, kv_dtype="int8")).generate(
        [Request(prompt=prompt, sampling=forced)]
    )
    assert expected.logprobs and got.logprobs and got.token_ids == expected.token_ids
    errors, same, spreads = [], [], []
    for ours, theirs in zip(got.logprobs, expected.logprobs, strict=True):
        known = {candidate.token_id: candidate.logprob for candidate in theirs}
        errors += [abs(c.logprob - known[c.token_id]) for c in ours if c.token_id in known]
        spreads.append(theirs[0].logprob - theirs[-1].logprob)
        same.append(ours[0].rank == 1)  # the forced token, the best of the bfloat16 engine
    error = np.array(errors)
    print(
        f"log-probabilities span {np.mean(spreads):.1f}; int8 differs by {error.mean():.3f}, at most "
        f"{error.max():.2f}; same best {np.mean(same):.0%}"
    )
    assert error.mean() < MEAN_ERROR
    assert error.max() < MOST_ERROR
    assert np.mean(same) >= 0.9

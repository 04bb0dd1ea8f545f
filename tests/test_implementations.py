"""Whichever kernels serve, the same tokens come out, from the same blocks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cpu_kernels import loader
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams, serve
from tests.tiny_model import random_prompt, write_sharp_model

BASE = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=64, num_dense_layers=1, max_model_len=192, max_num_seqs=2,
    max_num_batched_tokens=256, record_selection=True, compilation_cache_dir="",
)  # fmt: skip
TIERED = {"kv_tiers": "tiered", "device_kv_bytes": 1_900_000, "host_kv_bytes": 8 << 20}
SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


def run(model, **changes):
    requests = [Request(prompt=random_prompt(n, n), sampling=SAMPLING) for n in (170, 125)]
    return serve(requests, model=model, config=dataclasses.replace(BASE, **changes))


@pytest.fixture(scope="module")
def expected(model):
    return run(model, implementation="reference")


@pytest.mark.skipif(not loader.is_there(), reason="no native kernels were built for this CPU")
@pytest.mark.parametrize("changes", [{}, TIERED], ids=["unified", "tiered"])
def test_native_kernels_serve_the_same_tokens(model, expected, changes):
    outputs = run(model, implementation="cpu", **changes)
    assert [output.token_ids for output in outputs] == [other.token_ids for other in expected]
    if changes:
        assert sum(output.metrics.blocks_loaded for output in outputs) > 0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="unified", marks=pytest.mark.slow),
        pytest.param(TIERED, id="tiered", marks=pytest.mark.slow),
        pytest.param(
            TIERED | {"selection_granularity": "query_head", "device_kv_bytes": 3_000_000}, id="tiered, per query head"
        ),
    ],
)
def test_interpreted_kernels_serve_the_same_tokens_from_the_same_blocks(model, expected, changes):
    if "selection_granularity" in changes:
        expected = run(model, implementation="reference", selection_granularity="query_head")
    outputs = run(model, implementation="pallas", **changes)
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids
        chosen = output.metrics.selected_block_ids
        assert len(chosen) == SAMPLING.max_tokens - 1
        for ours, theirs in zip(chosen, other.metrics.selected_block_ids, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    if changes:
        assert sum(output.metrics.blocks_loaded for output in outputs) > 0  # through FlashH2D
        assert all(output.metrics.bytes_saved > 0 for output in outputs)


def test_what_is_in_force_is_said(model):
    engine = Engine(model, dataclasses.replace(BASE, implementation="pallas"))
    assert any("kernels: pallas, interpreted" in line for line in engine.info.lines())
    engine = Engine(model, dataclasses.replace(BASE, implementation="reference"))
    assert any(line.endswith("kernels: reference") for line in engine.info.lines())
    expected = f"kernels: cpu ({loader.describe()})" if loader.is_there() else "kernels: reference"
    assert any(line.endswith(expected) for line in Engine(model, BASE).info.lines())


def test_a_shape_without_a_kernel_is_refused_before_anything_is_loaded(tmp_path):
    from tests.checkpoint.tiny_checkpoints import write_checkpoint

    write_checkpoint(tmp_path, dtype=np.float32, head_dim=24, hidden_size=48, num_attention_heads=2)
    config = dataclasses.replace(BASE, implementation="pallas")
    with pytest.raises(NotImplementedError, match=r"head_dim 24; supported: 16, 32, .*implementation='reference'"):
        Engine(tmp_path, config)
    Engine(tmp_path, dataclasses.replace(BASE, max_model_len=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_tiers": "tiered", "sparse_budget_tokens": 16 * 1025},
            r"1025 selected blocks; supported: up to 1024\. Lower",
        ),
        (
            {"kv_tiers": "tiered", "sparse_budget_tokens": 16 * 1024, "max_grant_factor": 5},
            r"5120 slots of a grant; .*max_gr",
        ),
        (
            {"sparse_budget_tokens": 16 * 2049},
            r"2049 blocks chosen of 6250; supported: up to 2048\. Lower max_model_len",
        ),
    ],
)
def test_sizes_without_a_kernel_are_refused_before_anything_is_loaded(tmp_path, changes, message):
    from tests.checkpoint.tiny_checkpoints import write_checkpoint

    write_checkpoint(
        tmp_path, dtype=np.float32, head_dim=16, hidden_size=16, num_attention_heads=1, num_key_value_heads=1,
        num_hidden_layers=1, max_position_embeddings=131072,
    )  # fmt: skip
    config = dataclasses.replace(BASE, num_dense_layers=0, max_model_len=100_000, implementation="pallas", **changes)
    with pytest.raises(NotImplementedError, match=message):
        Engine(tmp_path, config)

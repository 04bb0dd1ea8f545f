"""Rotary scaling through the engine against `transformers` (L09): tiny models, below and above the original length."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from scripts.prompt_logits import prompt_logits
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from tests.checkpoint.tiny_checkpoints import write_json
from tests.tiny_model import random_prompt, write_sharp_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ORIGINAL, PROMPT_TOKENS, NEW_TOKENS = 64, 200, 12
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL}
YARN = {"factor": 4.0, "original_max_position_embeddings": ORIGINAL}
VARIANTS: dict[str, tuple[dict[str, Any] | None, float]] = {
    "none": (None, 10000.0),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 500000.0),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 10000.0),
    "llama3_8": ({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, 500000.0),
    "llama3_32": ({"rope_type": "llama3", "factor": 32.0, **LLAMA3}, 500000.0),
    "yarn": ({"rope_type": "yarn", **YARN}, 10000.0),
    "yarn_old_key": ({"type": "yarn", **YARN}, 10000.0),
}
"""By name: `rope_scaling` of config.json and `rope_theta`."""
CONFIG = EngineConfig(
    dtype="float32", sparse_budget_tokens=None, max_num_batched_tokens=128, max_num_seqs=2, max_model_len=256,
    deterministic=True, implementation="reference",
)  # fmt: skip


def write_model(directory, scaling: dict[str, Any] | None, theta: float):
    """One layer; `dynamic` states its original length as the limit, the others the extended one."""
    limit = ORIGINAL if scaling and scaling.get("rope_type") == "dynamic" else 256
    return write_sharp_model(
        directory,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=limit,
        rope_theta=theta,
        rope_scaling=scaling,
    )


def reference_logits(directory, token_ids: list[int]) -> np.ndarray:
    """Of a fresh model: transformers' `dynamic` remembers the longest sequence that it has seen."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def all_logits(engine: Engine, token_ids: list[int]) -> np.ndarray:
    return np.concatenate(list(prompt_logits(engine, token_ids)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_position(tmp_path, variant):
    directory = write_model(tmp_path / "model", *VARIANTS[variant])
    token_ids = random_prompt(PROMPT_TOKENS, 1)
    ours = all_logits(Engine(directory, CONFIG), token_ids)
    assert np.abs(ours - reference_logits(directory, token_ids)).max() <= 1e-4
    if variant != "none":
        write_model(tmp_path / "model", None, VARIANTS[variant][1])
        assert np.abs(ours - reference_logits(directory, token_ids)).max() > 1e-3, "the scaling has no effect"


def test_dynamic_does_not_depend_on_batch_mates(tmp_path):
    """One base a sequence, that of its own last position: as transformers without a cache, whoever else is served."""
    directory = write_model(tmp_path / "model", *VARIANTS["dynamic"])
    engine = Engine(directory, CONFIG)
    assert engine.layout.max_model_len == 256
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1)
    requests = [Request(prompt=random_prompt(n, n), sampling=params) for n in (40, 60, 100, 200)]
    together = engine.generate(requests)
    for request, output in zip(requests, together, strict=True):
        assert isinstance(request.prompt, list) and output.logprobs is not None
        logits = reference_logits(directory, request.prompt + output.token_ids[:-1])[len(request.prompt) - 1 :]
        assert output.token_ids == logits.argmax(-1).tolist()
        expected = torch.log_softmax(torch.from_numpy(logits), -1).max(-1).values.numpy()
        np.testing.assert_allclose([row[0].logprob for row in output.logprobs], expected, atol=1e-4)
        alone = engine.generate([request])[0]
        assert (alone.token_ids, alone.logprobs) == (output.token_ids, output.logprobs)


def test_replaced_scaling_is_that_of_the_checkpoint(tmp_path):
    """`EngineConfig.rope_scaling` on a short model gives what a checkpoint with the scaling in it gives."""
    directory = write_model(tmp_path / "model", None, 10000.0)
    raw = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    short = write_sharp_model(
        tmp_path / "short", num_hidden_layers=1, num_attention_heads=4, max_position_embeddings=128
    )
    config = dataclasses.replace(CONFIG, max_model_len=None, rope_scaling={"rope_type": "yarn", "factor": 2})
    engine = Engine(short, config)
    assert engine.layout.max_model_len == 256
    assert any(line.endswith(", rotary scaling yarn 2 (as configured)") for line in engine.info.lines())
    token_ids = random_prompt(PROMPT_TOKENS, 2)
    content = json.loads((directory / "config.json").read_text())
    write_json(directory / "config.json", content | {"rope_scaling": raw})
    assert np.abs(all_logits(engine, token_ids) - reference_logits(directory, token_ids)).max() <= 1e-4

"""The embedded model in float32 against `transformers`, the independent implementation: logits and greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.prompt_logits import prompt_logits
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from sparseserve_jax.checkpoint.convert import convert
from sparseserve_jax.checkpoint.open import open_checkpoint
from tests.real_text import real_text

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT_TOKENS = 4096
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reference") / "model"
    convert(open_checkpoint(None), directory, format="huggingface", dtype="float32")
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine():
    # deterministic: one decode shape to compile
    config = EngineConfig(
        dtype="float32", sparse_budget_tokens=None, max_model_len=PROMPT_TOKENS + 64, max_num_seqs=8, deterministic=True
    )
    return Engine(config=config)


@pytest.mark.parametrize("num_tokens", [2176, pytest.param(PROMPT_TOKENS, marks=SLOW)])  # both take two prefill calls
def test_dense_logits_at_every_position(reference, engine, num_tokens):
    token_ids = np.asarray(engine.tokenizer.encode(real_text())[:num_tokens], np.int32)
    assert len(token_ids) == num_tokens
    with torch.no_grad():
        expected = reference.model(torch.tensor(token_ids[None].astype(np.int64))).last_hidden_state[0]
    worst, start = 0.0, 0
    for ours in prompt_logits(engine, token_ids.tolist()):
        with torch.no_grad():
            theirs = reference.lm_head(expected[start : start + len(ours)]).numpy()
        worst = max(worst, float(np.abs(ours - theirs).max()))
        start += len(ours)
    assert start == num_tokens
    print(f"largest difference of logits over {num_tokens} positions: {worst:.2e}")
    assert worst <= 1e-3


@pytest.mark.parametrize("num_prompts", [4, pytest.param(20, marks=SLOW)])
def test_greedy_tokens(reference, engine, num_prompts):
    """64 greedy tokens of each of some prompts of real text."""
    token_ids = engine.tokenizer.encode(real_text())
    prompts = [
        token_ids[start : start + 60 + 9 * index] for index, start in enumerate(range(0, num_prompts * 700, 700))
    ]
    assert all(len(prompt) >= 60 for prompt in prompts)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = engine.generate([Request(prompt=prompt, sampling=params) for prompt in prompts])
    for prompt, output in zip(prompts, outputs, strict=True):
        # If the reference's best token after each of our tokens is our next one, its greedy tokens are ours.
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        assert len(output.token_ids) == 64
        assert output.token_ids == logits.argmax(-1).tolist()

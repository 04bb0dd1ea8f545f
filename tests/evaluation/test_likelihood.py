from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseserve_jax import Engine, EngineConfig
from sparseserve_jax.evaluation.likelihood import continuation_likelihoods, rolling_windows
from tests.tiny_model import random_prompt, write_sharp_model

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"), num_attention_heads=4)


@pytest.fixture(scope="module")
def engine(directory):
    return Engine(directory, EngineConfig(
        dtype="float32", sparse_budget_tokens=None, max_model_len=MAX_MODEL_LEN, max_num_seqs=4, deterministic=True,
        implementation="reference",
    ))  # fmt: skip


def test_likelihoods_are_those_of_transformers(directory, engine):
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    contexts = [random_prompt(length, length) for length in (1, 30, 240, 300)]
    pairs = [(context, random_prompt(length, 9)) for context, length in zip(contexts, (5, 1, 10, 12), strict=True)]
    with torch.no_grad():
        best = model(torch.tensor([contexts[1]])).logits[0, -1].argmax()
    pairs += [(contexts[1], [int(best)]), (contexts[1], [])]
    found = continuation_likelihoods(engine, pairs)
    for (context, continuation), one in zip(pairs[:-1], found, strict=False):
        kept = context[-(MAX_MODEL_LEN - len(continuation)) :]
        with torch.no_grad():
            logprobs = model(torch.tensor([kept + continuation])).logits[0, len(kept) - 1 : -1].log_softmax(-1)
        expected = logprobs[range(len(continuation)), continuation].sum()
        assert one.logprob == pytest.approx(float(expected), abs=2e-3)
        assert one.is_greedy == (logprobs.argmax(-1).tolist() == continuation)
    assert [one.is_greedy for one in found] == [False] * 4 + [True] * 2
    assert found[-1].logprob == 0.0


@pytest.mark.parametrize(
    ("pair", "message"),
    [(([], [1]), "context of at least 1 token"), (([1], [1] * 256), "256 tokens leaves no room .* max_model_len=256")],
)
def test_what_cannot_be_scored(engine, pair, message):
    with pytest.raises(ValueError, match=message):
        continuation_likelihoods(engine, [pair])


@given(st.integers(0, 100), st.integers(2, 40))
def test_windows_score_each_token_once_in_its_own_context(num_tokens, length):
    tokens = np.arange(1, num_tokens + 1).tolist()
    windows = list(rolling_windows(tokens, 0, length))
    assert [token for _, continuation in windows for token in continuation] == tokens
    text = [0, *tokens]
    for context, continuation in windows:
        assert len(context) >= 1 and len(context) + len(continuation) <= length
        both = context + continuation
        assert both == text[text.index(both[0]) : text.index(both[-1]) + 1]
    for context, continuation in windows[1:]:
        assert len(context) >= length - len(continuation) - 1 >= length // 2 - 1

"""Layers that suffer from a budget: all tokens of an answer at once give what decoding them one by one gives."""

from __future__ import annotations

import math

import pytest

from tests.tiny_model import random_prompt, write_sharp_model

pytest.importorskip("torch")
from scripts.find_dense_layers import Answerer, all_heads, measure
from scripts.torch_oracle import Selection, SparseLlama

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"), num_hidden_layers=NUM_LAYERS)


def rule(dense_layers: tuple[int, ...] = ()) -> Selection:
    return Selection(block_size=16, budget=8, method="cuboid-mean", dense_layers=dense_layers)


def loss_by_decoding(model, selection: Selection | None, prompt: list[int], answer: list[int]) -> float:
    oracle = SparseLlama(model, selection)
    oracle.prefill(prompt[:-1])
    losses = []
    for token, following in zip([prompt[-1], *answer], answer, strict=False):
        losses.append(-float(oracle.decode(token)[0].log_softmax(-1)[following]))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("dense_layers", [(), (1,)])
def test_loss(model, dense_layers):
    prompt, answer = random_prompt(333, 0), random_prompt(40, 1)  # blocks end within the answer
    answerer = Answerer(model, rule())
    sparse = all_heads(answerer, [layer for layer in range(NUM_LAYERS) if layer not in dense_layers])
    (losses,) = measure(answerer, [(prompt, answer)], {"": sparse}).values()
    assert losses.dense == pytest.approx([loss_by_decoding(model, None, prompt, answer)], rel=1e-4)
    assert losses.sparse == pytest.approx([loss_by_decoding(model, rule(dense_layers), prompt, answer)], rel=1e-4)
    assert not math.isclose(losses.sparse[0], losses.dense[0], rel_tol=1e-3), "the budget has no effect"
    assert losses.worst == pytest.approx(losses.rise)


def test_a_head_alone(model):
    """Heads that are not named see everything; prompts leave nothing behind."""
    prompts = [(random_prompt(300, seed), random_prompt(10, seed + 9)) for seed in (0, 1, 0)]
    answerer = Answerer(model, rule())
    losses = measure(answerer, prompts, {"none": (), "one": ((1, 0),), "other": ((1, 1),)})
    assert losses["none"].sparse == losses["none"].dense
    assert losses["one"].sparse != losses["other"].sparse
    assert losses["one"].sparse[0] == losses["one"].sparse[2] != losses["one"].sparse[1]

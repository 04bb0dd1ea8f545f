"""Selected blocks and greedy tokens against a plain PyTorch model that selects and attends on its own (float32)."""

from __future__ import annotations

from typing import Any

import pytest

from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from sparseserve_jax.checkpoint.convert import convert
from sparseserve_jax.checkpoint.open import open_checkpoint
from tests.real_text import real_text
from tests.tiny_model import random_prompt, write_sharp_model

torch = pytest.importorskip("torch")

from scripts import torch_oracle as oracle  # noqa: E402  (needs torch)

NUM_LAYERS = 3
TIE_NATS = 1e-4
"""Ranks closer than this are a tie for float32: two orders of summation differ by as much."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"), num_hidden_layers=NUM_LAYERS)


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


@pytest.mark.parametrize(
    ("method", "per_query_head", "changes"),
    [
        ("cuboid-mean", False, {}),
        ("quest", False, {"num_sink_blocks": 0, "num_newest_blocks": 1, "num_dense_layers": 0}),
        pytest.param("mean", False, {"num_sink_blocks": 2, "num_newest_blocks": 3}, marks=pytest.mark.slow),
        ("cuboid-mean", True, {"num_dense_layers": None, "dense_layers": (1,)}),
    ],
)
def test_selected_blocks(model, method, per_query_head, changes: dict[str, Any]):
    """Prompts over and within the budget, one that outgrows it while it decodes, one that ends on a block's border."""
    config = EngineConfig(
        dtype="float32", block_size=16, sparse_budget_tokens=128, record_selection=True, max_num_batched_tokens=512,
        max_model_len=512, max_num_seqs=4, deterministic=True, selection=method,
        selection_granularity="query_head" if per_query_head else "kv_head", **{"num_dense_layers": 1} | changes,
    )  # fmt: skip
    prompts = [random_prompt(length, length) for length in (470, 336, 120, 60)]
    engine = Engine(model, config)
    outputs = engine.generate([Request(prompt=prompt, sampling=greedy(24)) for prompt in prompts])
    rule = oracle.Selection(
        block_size=16, budget=8, method=method, per_query_head=per_query_head, num_sink=config.num_sink_blocks,
        num_newest=config.num_newest_blocks, dense_layers=engine.layout.dense_layers,
    )  # fmt: skip
    for prompt, output in zip(prompts, outputs, strict=True):
        steps = oracle.block_lists(output.metrics.selected_block_ids)
        assert len(steps) == len(output.token_ids) - 1 == 23
        found = oracle.compare_selections(oracle.SparseLlama(model, rule), prompt, output.token_ids, steps)
        assert found.equal_tokens == found.tokens == 24
        grows = {470: 23, 336: 23, 120: 15, 60: 0}[len(prompt)]  # steps with more than 8 blocks
        assert found.selections == grows * 2 * engine.layout.num_sparse_layers
        assert found.equal == found.selections or max(found.tie_gaps) <= TIE_NATS, found


def test_the_oracle_tells_methods_apart(model):
    """What the comparison would say if the engine selected by another digest."""
    prompt = random_prompt(400, 1)
    rules = [
        oracle.Selection(block_size=16, budget=8, method=method, dense_layers=(0,))
        for method in ("cuboid-mean", "quest")
    ]
    other = oracle.SparseLlama(model, rules[1])
    other.prefill(prompt)
    _, choices = other.decode(7)
    found = oracle.compare_selections(
        oracle.SparseLlama(model, rules[0]), prompt, [7, 8], [[choice.blocks for choice in choices]]
    )
    assert found.equal < found.selections == 2 * (NUM_LAYERS - 1)
    assert max(found.tie_gaps) > 100 * TIE_NATS


def test_dense_oracle_is_transformers(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    directory = write_sharp_model(tmp_path / "model", num_attention_heads=4)
    token_ids = random_prompt(100, 3)
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0, -2:]
    dense = oracle.SparseLlama(directory, None)
    first = dense.prefill(token_ids[:-1], chunk=40)
    second, choices = dense.decode(token_ids[-1])
    assert choices == []
    torch.testing.assert_close(torch.stack([first, second]), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cuboid-mean", "quest", "mean"])
def test_selected_blocks_of_the_embedded_model(tmp_path, method):
    """Real text of 2,000 and 4,000 tokens at a budget of 1,024."""
    directory = tmp_path / "model"
    convert(open_checkpoint(None), directory, format="huggingface", dtype="float32")
    config = EngineConfig(
        dtype="float32", sparse_budget_tokens=1024, record_selection=True, max_model_len=4096, max_num_seqs=2,
        deterministic=True, selection=method,
    )  # fmt: skip
    engine = Engine(directory, config)
    token_ids = engine.tokenizer.encode(real_text())
    prompts = [token_ids[:2000], token_ids[10000:14000]]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = engine.generate([Request(prompt=prompt, sampling=params) for prompt in prompts])
    rule = oracle.Selection(block_size=32, budget=32, method=method)
    for prompt, output in zip(prompts, outputs, strict=True):
        found = oracle.compare_selections(
            oracle.SparseLlama(directory, rule),
            prompt,
            output.token_ids,
            oracle.block_lists(output.metrics.selected_block_ids),
        )
        print(method, len(prompt), found)
        assert found.selections == 15 * 28 * 3
        assert found.equal_tokens == 16
        assert found.equal == found.selections or max(found.tie_gaps) <= TIE_NATS, found

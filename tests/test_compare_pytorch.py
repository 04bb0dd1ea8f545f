"""scripts/compare_pytorch.py on a tiny model."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tests.tiny_model import random_prompt, write_sharp_model

pytest.importorskip("torch")
pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.mark.slow
def test_dense_and_sparse_rows(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = runpy.run_path(str(SCRIPTS / "compare_pytorch.py"))
    directory = write_sharp_model(tmp_path / "model", num_attention_heads=4)
    prompts = [random_prompt(300, 1), random_prompt(700, 2)]
    for prompt, row in zip(prompts, script["compare_dense"](directory, prompts, 5), strict=True):
        assert row["prompt_tokens"] == len(prompt)
        assert row["max_logit_difference"] < 1e-2 and row["max_nll_difference"] < 1e-2
        assert row["nll"] == pytest.approx(row["nll_transformers"], abs=1e-4) and row["nll"] > 1
        assert row["greedy_tokens_equal"] == row["greedy_tokens"] == 5
    row = script["compare_sparse"](directory, prompts, 5, "quest", 256)
    assert row["selections"] == 2 * 4 * 2 * 2  # prompts, steps, layers, KV heads
    assert row["selections_equal"] + row["ties"] == row["selections"] and row["equal_up_to_ties"]
    assert row["greedy_tokens_equal"] == row["greedy_tokens"] == 10
    assert row["max_logprob_difference"] < 1e-2

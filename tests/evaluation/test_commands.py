"""The commands hand over what was asked for; mistakes are one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sparseserve_jax import cli
from sparseserve_jax.evaluation import commands
from sparseserve_jax.evaluation.run import Evaluation
from tests.evaluation.data import write_longbench
from tests.evaluation.test_babilong import write as write_babilong


@pytest.fixture
def asked(monkeypatch) -> list[Evaluation]:
    """Evaluations that would be run."""
    found: list[Evaluation] = []

    def run(evaluation: Evaluation, encoder: object) -> dict[str, Any]:
        found.append(evaluation)
        evaluation.out.mkdir(exist_ok=True)
        (evaluation.out / "table.md").write_text("| the table |")
        return {"predictions_made": 3, "predictions_found": 1, "seconds": 2.0}

    monkeypatch.setattr(commands, "run_evaluation", run)
    return found


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments)])


def test_longbench(asked, tmp_path):
    result = call(
        "longbench", "--data-dir", write_longbench(tmp_path), "--tasks", "qasper, samsum", "--limit", "2",
        "--budgets", "dense,2048", "--methods", "cuboid-mean,quest:1024", "--kv-dtype", "default,int8",
        "--max-prompt-tokens", "1000", "--max-num-seqs", "3", "--out", tmp_path / "out", "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "| the table |" in result.stdout and "3 predictions made in 2 s, 1 found" in result.stderr
    (evaluation,) = asked
    assert [example.row_id for example in evaluation.examples] == ["q1", "q2", "s1"]
    assert [setting.name for setting in evaluation.settings[:3]] == ["dense", "cuboid-mean 2048", "quest 1024"]
    assert len(evaluation.settings) == 6
    assert evaluation.config.max_num_seqs == 3 and evaluation.max_prompt_tokens == 1000
    assert evaluation.sources["limit"] == 2 and set(evaluation.sources["data_sha256"]) == {"qasper", "samsum"}
    assert (evaluation.out, evaluation.json_file) == (tmp_path / "out", tmp_path / "r.json")


def test_needles(asked, tmp_path):
    result = call(
        "needles", "--tasks", "single,multi_value", "--lengths", "512,1024", "--depths", "2", "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    (evaluation,) = asked
    assert [(e.task.name, e.length, e.depth) for e in evaluation.examples] == [
        ("single", 512, 0.25), ("single", 512, 0.75), ("single", 1024, 0.25), ("single", 1024, 0.75),
        ("multi_value", 512, None), ("multi_value", 512, None),
        ("multi_value", 1024, None), ("multi_value", 1024, None),
    ]  # fmt: skip
    assert evaluation.max_prompt_tokens == 8192
    assert {"data_seed", "haystack_sha256", "lengths"} <= evaluation.sources.keys()


def test_babilong(asked, tmp_path):
    write_babilong(tmp_path, 2, ["kitchen", "garden"])
    assert call("babilong", "--data-dir", tmp_path, "--limit", "1", "--out", tmp_path).exit_code == 0
    assert [example.row_id for example in asked[0].examples] == ["2k-1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["longbench", "--data-dir", "/nowhere"], "/nowhere holds no <task>.jsonl of LongBench"),
        (["needles", "--budgets", "few"], "budgets: 'few' is neither a number of tokens nor 'dense'"),
        (["needles", "--lengths", "1k"], "--lengths: '1k' is not a list of whole numbers"),
        (["needles", "--lengths", "512,8193"], "--lengths: 8193 tokens exceed max_model_len=8192; leave that out"),
        (
            ["needles", "--lengths", "1024", "--max-model-len", "1000"],
            "--lengths: 1024 tokens exceed max_model_len=1000",
        ),
        (["needles", "--depths", "0"], "--depths 0 and --samples 1 must be at least 1"),
        (["needles", "--tasks", "double"], "'double' is no task"),
        (["needles", "--model", "/nowhere/m.gguf"], "/nowhere/m.gguf does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(asked, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2 and not asked
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_what_settings_decide_is_no_option():
    result = call("needles", "--sparse-budget-tokens", "512")
    assert result.exit_code == 2 and "No such option" in result.stderr

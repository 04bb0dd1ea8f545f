from __future__ import annotations

import json

import pytest

from sparseserve_jax.evaluation import metrics
from sparseserve_jax.evaluation.babilong import load_babilong


def write(folder, length: int, targets: list[str]) -> None:
    rows = [{"input": f"Mary went to the {t}.", "question": "Where is Mary? ", "target": t} for t in targets]
    (folder / f"{length}k_qa1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows(tmp_path):
    write(tmp_path, 16, ["office"])
    write(tmp_path, 2, ["kitchen", "garden", "kitchen"])
    examples, hashes = load_babilong(tmp_path)
    assert [(e.row_id, e.length) for e in examples] == [
        ("2k-1", 2000),
        ("2k-2", 2000),
        ("2k-3", 2000),
        ("16k-1", 16000),
    ]
    assert examples[0].classes == ("garden", "kitchen") and list(hashes) == ["2k_qa1.jsonl", "16k_qa1.jsonl"]
    assert "Mary went to the kitchen." in examples[0].prompt
    assert examples[0].prompt.endswith("Where is Mary?\nAnswer with one word: garden, kitchen.")
    assert metrics.score(examples[0], "In the Kitchen.").value == 1.0
    assert metrics.score(examples[0], "garden, kitchen").value == 0.0
    assert [e.row_id for e in load_babilong(tmp_path, [2], 1)[0]] == ["2k-1"]


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no <N>k_qa1.jsonl of BABILong"):
        load_babilong(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no 8k_qa1.jsonl"):
        load_babilong(tmp_path, [8])
    (tmp_path / "4k_qa1.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(ValueError, match=r"4k_qa1.jsonl, row 1: KeyError: 'question'"):
        load_babilong(tmp_path)

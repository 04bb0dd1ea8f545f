from __future__ import annotations

import hashlib
import json

import pytest

from sparseserve_jax.evaluation.longbench import LONGEST_ANSWER_TOKENS, TASKS, load_longbench
from tests.evaluation.data import ROWS, TEMPLATES, row, write_longbench


def test_the_tasks_are_those_of_the_first_version():
    assert len(TASKS) == 21
    plain = {name for name, task in TASKS.items() if not task.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, task in TASKS.items() if task.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert {name for name, task in TASKS.items() if task.stops_at_newline} == {"samsum"}
    assert LONGEST_ANSWER_TOKENS == 512
    assert {name for name, task in TASKS.items() if task.max_tokens == 512} == {
        "gov_report", "qmsum", "multi_news", "vcsum"
    }  # fmt: skip


def test_rows_become_prompts(tmp_path):
    data = load_longbench(write_longbench(tmp_path))
    assert [(e.task.name, e.row_id) for e in data.examples] == [
        ("qasper", "q1"), ("qasper", "q2"), ("qasper", "q3"), ("trec", "t1"), ("samsum", "s1")
    ]  # fmt: skip
    first, second = data.examples[:2]
    assert first.prompt == "Article: text q1 {x}\nQuestion: why?\nAnswer:"
    assert second.answers == ("no", "never") and second.reference == "no"
    assert data.examples[3].classes == ("Date", "Food")
    assert data.template_sha256["qasper"] == hashlib.sha256(TEMPLATES["qasper"].encode()).hexdigest()
    assert data.data_sha256["qasper"] == hashlib.sha256((tmp_path / "qasper.jsonl").read_bytes()).hexdigest()
    assert set(data.data_sha256) == set(ROWS)


def test_tasks_and_limit(tmp_path):
    data = load_longbench(write_longbench(tmp_path), ["samsum", "qasper"], 2)
    assert [e.row_id for e in data.examples] == ["s1", "q1", "q2"]


def test_lengths_of_the_folder_win(tmp_path):
    write_longbench(tmp_path)
    (tmp_path / "dataset2maxlen.json").write_text(json.dumps({"qasper": 7}))
    lengths = {e.task.name: e.task.max_tokens for e in load_longbench(tmp_path).examples}
    assert lengths == {"qasper": 7, "trec": 64, "samsum": 128}


def test_templates_from_elsewhere(tmp_path):
    write_longbench(tmp_path)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"qasper": "{input}"}))
    assert load_longbench(tmp_path, ["qasper"], templates=other).examples[0].prompt == "why?"


@pytest.mark.parametrize(
    ("tasks", "limit", "error", "message"),
    [
        (["nothing"], None, ValueError, "'nothing' is no task of LongBench; there are narrativeqa, qasper"),
        (["musique"], None, ValueError, "the templates have none of 'musique'"),
        (["lcc"], None, FileNotFoundError, "lcc.jsonl"),
        (["qasper"], 0, ValueError, "limit=0"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, tasks, limit, error, message):
    with pytest.raises(error, match=message):
        load_longbench(write_longbench(tmp_path), tasks, limit)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "row 2: JSONDecodeError"),
        (json.dumps({"context": "", "answers": ["x"]}), "row 2: KeyError: 'input'"),
        (json.dumps(row("x", [])), "row 2: no reference answer"),
        ("[]", "row 2: "),
    ],
)
def test_a_bad_row_is_named(tmp_path, line, message):
    write_longbench(tmp_path)
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row("a", ["x"])) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"qasper.jsonl, {message}"):
        load_longbench(tmp_path, ["qasper"])


def test_an_empty_folder_and_missing_templates(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no <task>.jsonl"):
        load_longbench(tmp_path)
    (tmp_path / "qasper.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match=r"dataset2prompt.json does not exist; it is LongBench/config"):
        load_longbench(tmp_path)

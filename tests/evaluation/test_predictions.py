"""Rows are written in order, whatever order they come in; a killed run goes on and ends with the same files."""

from __future__ import annotations

import json
import random

import pytest

from sparseserve_jax.evaluation.longbench import load_longbench
from sparseserve_jax.evaluation.predictions import PredictionStore
from sparseserve_jax.evaluation.settings import Setting
from tests.evaluation.data import prediction, write_longbench

DENSE, SPARSE = Setting(), Setting(budget_tokens=512, method="quest")
RUN = {"model": "m", "tasks": ["qasper"], "hashes": {"qasper": "abc"}}


@pytest.fixture
def examples(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return load_longbench(write_longbench(folder)).examples


def store(tmp_path, examples, run=RUN) -> PredictionStore:
    return PredictionStore(tmp_path / "out", run, examples, [DENSE, SPARSE])


def made(examples, index, setting):
    return prediction(examples[index].task.name, examples[index].row_id, index / 10, text=f"{index} {setting.name}")


def finish(kept: PredictionStore, examples, *, seed: int, count: int | None = None) -> None:
    """Adds `count` of the missing predictions in some order."""
    missing = [(i, s) for i in range(len(examples)) for s in kept.missing(i, [DENSE, SPARSE])]
    random.Random(seed).shuffle(missing)
    for index, setting in missing[:count]:
        kept.add(index, setting, made(examples, index, setting))


def content(tmp_path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_rows_are_written_in_order(tmp_path, examples):
    kept = store(tmp_path, examples)
    kept.add(1, DENSE, made(examples, 1, DENSE))
    assert not (tmp_path / "out/dense.jsonl").exists() or not (tmp_path / "out/dense.jsonl").read_text()
    assert kept.missing(1, [DENSE, SPARSE]) == [SPARSE] and kept.missing(0, [DENSE]) == [DENSE]
    kept.add(0, DENSE, made(examples, 0, DENSE))
    lines = (tmp_path / "out/dense.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["row_id"] for line in lines] == ["q1", "q2"]
    assert "北京" not in lines[0] and "0 dense" in lines[0]
    assert not kept.is_complete()


@pytest.mark.parametrize("torn", [0, 1, 20])
def test_a_killed_run_ends_with_the_same_files(tmp_path, examples, torn):
    finish(store(tmp_path, examples), examples, seed=0)
    expected = content(tmp_path)
    for name in expected:
        (tmp_path / "out" / name).unlink()
    finish(store(tmp_path, examples), examples, seed=1, count=6)
    for path in (tmp_path / "out").glob("*.jsonl"):
        if torn and path.stat().st_size > torn:  # the last line is half written
            path.write_bytes(path.read_bytes()[:-torn])
    again = store(tmp_path, examples)
    before = {s: list(again.rows(s)) for s in (DENSE, SPARSE)}
    finish(again, examples, seed=2)
    assert again.is_complete()
    for setting, rows in before.items():
        assert again.rows(setting)[: len(rows)] == rows
    assert content(tmp_path) == expected


def test_a_complete_run_misses_nothing(tmp_path, examples):
    finish(store(tmp_path, examples), examples, seed=0)
    again = store(tmp_path, examples)
    assert again.is_complete()
    assert not any(again.missing(index, [DENSE, SPARSE]) for index in range(len(examples)))


def test_a_folder_of_another_run_is_refused(tmp_path, examples):
    store(tmp_path, examples)
    with pytest.raises(ValueError, match="holds another run: model was 'm' and is 'n'"):
        store(tmp_path, examples, RUN | {"model": "n"})
    with pytest.raises(ValueError, match="holds another run: limit was None and is 3"):
        store(tmp_path, examples, RUN | {"limit": 3})


def test_rows_of_other_examples_are_refused(tmp_path, examples):
    store(tmp_path, examples).add(0, DENSE, made(examples, 0, DENSE))
    with pytest.raises(ValueError, match=r"dense.jsonl holds rows of other examples"):
        store(tmp_path, examples[1:])


def test_a_broken_line_in_the_middle_is_named(tmp_path, examples):
    finish(store(tmp_path, examples), examples, seed=0)
    path = tmp_path / "out/dense.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b"{", *lines[2:]]))
    with pytest.raises(ValueError, match=r"dense.jsonl, line 2: .*delete the file"):
        store(tmp_path, examples)

"""Predictions on disk: one JSONL file for each setting, rows in order, so that a killed run goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparseserve_jax.evaluation.example import Example
from sparseserve_jax.evaluation.settings import Setting

RUN_FILE = "run.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one setting made of one example; a line of its file.

    Attributes:
        num_prompt_tokens / num_cut_tokens: of the prompt as served, and what its middle lost before.
        text / token_ids / finish_reason: the greedy answer.
        score: in [0, 1].
        failed: the metric has no value for the text, or the engine had an error; then `score` is 0.
        nll: mean negative log-likelihood of the reference's tokens, nats; None if it has none, or on an error.
        greedy_token_ids: at each token of the reference the one that greedy decoding would have taken.
        length / depth: those of the example.
    """

    task: str
    row_id: str
    num_prompt_tokens: int
    num_cut_tokens: int
    text: str
    token_ids: list[int]
    finish_reason: str
    score: float
    failed: bool
    nll: float | None
    greedy_token_ids: list[int]
    length: int | None = None
    depth: float | None = None


class PredictionStore:
    """The predictions of a run in a folder: `run.json` says what is run, `<setting>.jsonl` holds the rows.

    Rows may come in any order and are written in that of the examples, each as soon as those before it are there.

    Args:
        directory: made if it is not there.
        run: plain data that decides the predictions; a folder of another run is refused.

    Raises:
        ValueError: the folder holds another run, or a file in it is not what a run leaves behind.
    """

    def __init__(
        self, directory: Path, run: dict[str, Any], examples: Sequence[Example], settings: Sequence[Setting]
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        _check_run(directory / RUN_FILE, run)
        self._examples = examples
        self._paths = {setting: directory / f"{setting.file_stem}.jsonl" for setting in settings}
        self._rows = {setting: self._read(path) for setting, path in self._paths.items()}
        self._early: dict[Setting, dict[int, Prediction]] = {setting: {} for setting in settings}

    def missing(self, index: int, settings: Sequence[Setting]) -> list[Setting]:
        """Those of `settings` that have no prediction of example `index` yet."""
        return [s for s in settings if len(self._rows[s]) <= index and index not in self._early[s]]

    def add(self, index: int, setting: Setting, prediction: Prediction) -> None:
        """Takes one prediction and writes all rows whose turn has come."""
        early, rows = self._early[setting], self._rows[setting]
        early[index] = prediction
        with self._paths[setting].open("a", encoding="utf-8") as file:
            while len(rows) in early:
                rows.append(early.pop(len(rows)))
                file.write(_line(rows[-1]))

    def rows(self, setting: Setting) -> list[Prediction]:
        """The predictions of a setting, in the order of the examples."""
        return self._rows[setting]

    def is_complete(self) -> bool:
        """Whether every setting has all rows."""
        return all(len(rows) == len(self._examples) for rows in self._rows.values())

    def _read(self, path: Path) -> list[Prediction]:
        """The rows of a file, without what a kill left of its last line."""
        if not path.exists():
            return []
        whole, _, torn = path.read_bytes().rpartition(b"\n")
        if torn:
            os.truncate(path, path.stat().st_size - len(torn))
        rows = []
        for number, line in enumerate(whole.split(b"\n") if whole else [], start=1):
            try:
                rows.append(Prediction(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}; delete the file to have it made anew") from error
        expected = [(example.task.name, example.row_id) for example in self._examples]
        if [(row.task, row.row_id) for row in rows] != expected[: len(rows)]:
            raise ValueError(f"{path} holds rows of other examples; choose another folder, or delete it")
        return rows


def _line(prediction: Prediction) -> str:
    return json.dumps(dataclasses.asdict(prediction), ensure_ascii=False) + "\n"


def _check_run(path: Path, run: dict[str, Any]) -> None:
    """Writes what is run, or compares it with what is there."""
    if not path.exists():
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(run, indent=1, ensure_ascii=False), encoding="utf-8")
        partial.replace(path)
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(run))
    differing = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if differing:
        name = differing[0]
        raise ValueError(
            f"{path.parent} holds another run: {name} was {_short(before.get(name))} and is {_short(now.get(name))}; "
            "choose another folder, or delete it"
        )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

"""A small LongBench folder, and predictions out of thin air."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparseserve_jax.evaluation.predictions import Prediction

TEMPLATES = {
    "qasper": "Article: {context}\nQuestion: {input}\nAnswer:",
    "samsum": "{context}\n{input}",
    "lcc": "{context}Next line of code:\n",
    "trec": "{context}\n{input}",
}


def row(row_id: str, answers: list[str], **changed: Any) -> dict[str, Any]:
    return {"_id": row_id, "context": f"text {row_id} {{x}}", "input": "why?", "answers": answers} | changed


ROWS = {
    "qasper": [row("q1", ["because"]), row("q2", ["no", "never"]), row("q3", ["yes"])],
    "samsum": [row("s1", ["They meet. They talk."])],
    "trec": [row("t1", ["Date"], all_classes=["Date", "Food"])],
}


def write_longbench(folder: Path, rows: dict[str, list[dict[str, Any]]] = ROWS) -> Path:
    (folder / "dataset2prompt.json").write_text(json.dumps(TEMPLATES), encoding="utf-8")
    for task, lines in rows.items():
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def prediction(task: str, row_id: str, score: float, **changed: Any) -> Prediction:
    values: dict[str, Any] = {
        "task": task, "row_id": row_id, "num_prompt_tokens": 100, "num_cut_tokens": 0, "text": "北京 yes",
        "token_ids": [1, 2], "finish_reason": "stop", "score": score, "failed": False, "nll": 1.0,
        "greedy_token_ids": [5, 6],
    }  # fmt: skip
    return Prediction(**values | changed)

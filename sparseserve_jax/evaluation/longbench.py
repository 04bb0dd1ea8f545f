"""LongBench v1: the 21 tasks, their rows, templates and answer lengths (Bai et al., arXiv 2308.14508).

Templates are data of THUDM/LongBench (MIT) and are read from `dataset2prompt.json`, not kept here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparseserve_jax.evaluation.example import Example, Task

TEMPLATES_FILE = "dataset2prompt.json"
LENGTHS_FILE = "dataset2maxlen.json"

_FEW_SHOT = {"chat": False, "first_line": True}
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="narrativeqa", metric="qa_f1", max_tokens=128),
        Task(name="qasper", metric="qa_f1", max_tokens=128),
        Task(name="multifieldqa_en", metric="qa_f1", max_tokens=64),
        Task(name="multifieldqa_zh", metric="qa_f1_zh", max_tokens=64),
        Task(name="hotpotqa", metric="qa_f1", max_tokens=32),
        Task(name="2wikimqa", metric="qa_f1", max_tokens=32),
        Task(name="musique", metric="qa_f1", max_tokens=32),
        Task(name="dureader", metric="rouge_l_zh", max_tokens=128),
        Task(name="gov_report", metric="rouge_l", max_tokens=512),
        Task(name="qmsum", metric="rouge_l", max_tokens=512),
        Task(name="multi_news", metric="rouge_l", max_tokens=512),
        Task(name="vcsum", metric="rouge_l_zh", max_tokens=512),
        Task(name="trec", metric="classification", max_tokens=64, **_FEW_SHOT),
        Task(name="triviaqa", metric="qa_f1", max_tokens=32, **_FEW_SHOT),
        Task(name="samsum", metric="rouge_l", max_tokens=128, stops_at_newline=True, **_FEW_SHOT),
        Task(name="lsht", metric="classification", max_tokens=64, **_FEW_SHOT),
        Task(name="passage_count", metric="count", max_tokens=32),
        Task(name="passage_retrieval_en", metric="retrieval", max_tokens=32),
        Task(name="passage_retrieval_zh", metric="retrieval", max_tokens=32),
        Task(name="lcc", metric="code_similarity", max_tokens=64, chat=False),
        Task(name="repobench-p", metric="code_similarity", max_tokens=64, chat=False),
    )
}
"""By name, in the order of the data set's own table."""
LONGEST_ANSWER_TOKENS = max(task.max_tokens for task in TASKS.values())


@dataclasses.dataclass(frozen=True)
class LongBench:
    """Examples of the asked tasks, and the hashes of what they were made from.

    Attributes:
        examples: task by task, rows in the order of their file.
        template_sha256: by task, of the template's UTF-8.
        data_sha256: by task, of the file with its rows.
    """

    examples: list[Example]
    template_sha256: dict[str, str]
    data_sha256: dict[str, str]


def load_longbench(
    data_dir: Path, tasks: Sequence[str] | None = None, limit: int | None = None, *, templates: Path | None = None
) -> LongBench:
    """Reads `<task>.jsonl` and the templates.

    Args:
        data_dir: LongBench's layout: a file for each task, `dataset2prompt.json` and, if there, `dataset2maxlen.json`,
            whose lengths then replace the built-in ones.
        tasks: in which order; None = all whose file is there.
        limit: rows of a task, from the start; None = all.
        templates: `dataset2prompt.json` elsewhere.

    Raises:
        ValueError: an unknown task, a task without a template, or a row that cannot be read; it is named.
        FileNotFoundError: no templates, or no rows of an asked task.
    """
    wanted = [name for name in TASKS if (data_dir / f"{name}.jsonl").exists()] if tasks is None else list(tasks)
    unknown = [name for name in wanted if name not in TASKS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no task of LongBench; there are {', '.join(TASKS)}")
    if not wanted:
        raise FileNotFoundError(f"{data_dir} holds no <task>.jsonl of LongBench")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} rows of a task; give at least 1")
    texts = read_templates(data_dir / TEMPLATES_FILE if templates is None else templates)
    lengths_file = data_dir / LENGTHS_FILE
    lengths = json.loads(lengths_file.read_text(encoding="utf-8")) if lengths_file.exists() else {}
    result = LongBench([], {}, {})
    for name in wanted:
        if name not in texts:
            raise ValueError(f"the templates have none of {name!r}")
        task = dataclasses.replace(TASKS[name], max_tokens=lengths.get(name, TASKS[name].max_tokens))
        content = (data_dir / f"{name}.jsonl").read_bytes()
        result.examples.extend(_examples(task, content, texts[name], limit))
        result.template_sha256[name] = hashlib.sha256(texts[name].encode()).hexdigest()
        result.data_sha256[name] = hashlib.sha256(content).hexdigest()
    return result


def read_templates(path: Path) -> Mapping[str, str]:
    """Task -> template with `{context}` and `{input}`.

    Raises:
        FileNotFoundError: no such file; says where it comes from.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; it is LongBench/config/{TEMPLATES_FILE} of github.com/THUDM/LongBench"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _examples(task: Task, content: bytes, template: str, limit: int | None) -> list[Example]:
    lines = [line for line in content.decode("utf-8").split("\n") if line.strip()]
    found = []
    for number, line in enumerate(lines[:limit], start=1):
        try:
            row: dict[str, Any] = json.loads(line)
            found.append(
                Example(
                    task=task,
                    prompt=template.format(context=row["context"], input=row["input"]),
                    row_id=str(row.get("_id", number)),
                    answers=tuple(row["answers"]),
                    classes=tuple(row.get("all_classes") or ()),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{task.name}.jsonl, row {number}: {type(error).__name__}: {error}") from error
        if not found[-1].answers:
            raise ValueError(f"{task.name}.jsonl, row {number}: no reference answer")
    return found

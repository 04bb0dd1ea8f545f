"""BABILong: a fact about who is where, hidden in books (Kuratov et al., arXiv 2406.10149). Rows are read from a folder.

The prompt is our own; figures compare settings with each other, not with the paper's leaderboard.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from sparseserve_jax.evaluation.example import Example, Task

TASK = Task(name="babilong_qa1", metric="label", max_tokens=16)
FILE_NAME = re.compile(r"(\d+)k_qa1\.jsonl")
PROMPT = (
    "The text below mentions where some people went. The newest place of a person is where the person is now.\n\n"
    "{input}\n\n"
    "{question}\nAnswer with one word: {classes}."
)


def load_babilong(
    data_dir: Path, lengths: Sequence[int] | None = None, limit: int | None = None
) -> tuple[list[Example], dict[str, str]]:
    """Examples of `<N>k_qa1.jsonl`, shortest first, and the hash of every file.

    Args:
        lengths: in thousands of tokens; None = all that are there.
        limit: rows of a file, from the start; None = all.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row that cannot be read; it is named.
    """
    there = {int(match[1]): path for path in data_dir.iterdir() if (match := FILE_NAME.fullmatch(path.name))}
    wanted = sorted(there) if lengths is None else list(lengths)
    missing = [length for length in wanted if length not in there]
    if missing or not wanted:
        name = f"{missing[0]}k_qa1.jsonl" if missing else "<N>k_qa1.jsonl"
        raise FileNotFoundError(f"{data_dir} holds no {name} of BABILong")
    examples, hashes = [], {}
    for length in wanted:
        content = there[length].read_bytes()
        hashes[there[length].name] = hashlib.sha256(content).hexdigest()
        examples += _examples(there[length].name, content.decode("utf-8"), length, limit)
    return examples, hashes


def _examples(name: str, content: str, length: int, limit: int | None) -> list[Example]:
    rows = []
    for number, line in enumerate((line for line in content.split("\n") if line.strip()), start=1):
        try:
            row = json.loads(line)
            rows.append((row["input"], row["question"].strip(), row["target"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name}, row {number}: {type(error).__name__}: {error}") from error
    classes = tuple(sorted({target for _, _, target in rows}))
    return [
        Example(
            task=TASK,
            row_id=f"{length}k-{number}",
            prompt=PROMPT.format(input=text, question=question, classes=", ".join(classes)),
            answers=(target,),
            classes=classes,
            length=1000 * length,
        )
        for number, (text, question, target) in enumerate(rows[:limit], start=1)
    ]

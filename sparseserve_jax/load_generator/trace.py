"""Recorded traces: one JSON object a line, in the form that Mooncake publishes its traces in.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

Each hash stands for `BLOCK_TOKENS` tokens of the prompt (the last one for what is left): two requests that begin with
the same hashes begin with the same text.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sparseserve_jax.load_generator.json_lines import json_object, positive_integer

BLOCK_TOKENS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """The first `limit` requests of a trace, by their time; the first comes at 0.

    Raises:
        ValueError: a line that is no request of a trace, with its number; or a file without any.
        OSError: the file cannot be read.
    """
    rows: list[TraceRow] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if len(rows) == limit:
                break
            if line.strip():
                rows.append(_row(line, f"{path}, line {number}"))
    if not rows:
        raise ValueError(f"{path} has no requests")
    first_s = min(row.arrival_s for row in rows)
    rows = [dataclasses.replace(row, arrival_s=row.arrival_s - first_s) for row in rows]
    return sorted(rows, key=lambda row: row.arrival_s)


def _row(line: str, where: str) -> TraceRow:
    content = json_object(line, where)
    timestamp = content.get("timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < float("inf"):
        raise ValueError(f"{where}: timestamp={timestamp!r} must be milliseconds, at least 0")
    hashes = content.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(item, int) for item in hashes):
        raise ValueError(f"{where}: hash_ids must be a list of integers")
    return TraceRow(
        arrival_s=timestamp / 1e3, input_tokens=positive_integer(content, "input_length", where),
        output_tokens=positive_integer(content, "output_length", where), hash_ids=tuple(hashes),
    )  # fmt: skip

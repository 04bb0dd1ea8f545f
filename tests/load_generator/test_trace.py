from __future__ import annotations

from pathlib import Path

import pytest

from sparseserve_jax.load_generator.trace import TraceRow, read_trace

ROW = '{"timestamp": %s, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


def test_reads_the_first_rows_by_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(ROW % 3000 + "\n" + ROW % 1500 + ROW % 0)
    assert read_trace(path, 2) == [
        TraceRow(arrival_s=at, input_tokens=600, output_tokens=5, hash_ids=(1, 2)) for at in (0.0, 1.5)
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        (ROW % -1, "line 2: timestamp=-1 must be"),
        (ROW % '"now"', "line 2: timestamp='now' must be"),
        ((ROW % 0).replace("600", "0"), "line 2: input_length=0 must be"),
        ((ROW % 0).replace("5,", "5.5,"), "line 2: output_length=5.5 must be"),
        ((ROW % 0).replace("[1, 2]", '["a"]'), "line 2: hash_ids must be"),
    ],
)
def test_a_bad_line_has_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(ROW % 0 + line)
    with pytest.raises(ValueError, match=message):
        read_trace(path, 9)


def test_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no requests"):
        read_trace(path, 9)

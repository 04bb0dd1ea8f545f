"""scripts/working_set.py and the simulator's script on a recording."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from sparseserve_jax.selection_record import RecordedRequest, SelectionRecord

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def recorded(tmp_path):
    """Two tasks of 40 steps: one selects the same blocks always, the other every second block in turns."""
    steady = np.broadcast_to(np.arange(8, dtype=np.int16), (40, 2, 1, 8))
    turns = np.stack([np.arange(8, dtype=np.int16) * 2 + step % 2 for step in range(40)])[:, None, None]
    turns = np.broadcast_to(turns, (40, 2, 1, 8))
    requests = (
        RecordedRequest(name="steady", prompt_tokens=500, selected=steady),
        RecordedRequest(name="turns", prompt_tokens=700, selected=turns),
    )
    path = tmp_path / "selected.npz"
    SelectionRecord(block_size=32, layers=(0, 1), requests=requests).save(path)
    return path


@pytest.fixture
def working_set(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return runpy.run_path(str(SCRIPTS / "working_set.py"))


def test_figures_of_a_recording(working_set, recorded, tmp_path, capsys):
    options = {name: None for name in ("data_dir", "model", "record_file")}
    files = {"json_file": tmp_path / "figures.json", "png_file": tmp_path / "figures.png"}
    working_set["main"](
        recorded=recorded, tasks="", rows=1, max_tokens=1, min_tokens=1, new_tokens=1, budget=1024,
        selection="quest", **options, **files,
    )  # fmt: skip
    figures = json.loads(files["json_file"].read_text())
    assert figures["steps_counted"] == 16
    assert figures["overlap_by_window"]["1"] == pytest.approx(0.5)  # all of one task, nothing of the other
    assert figures["overlap_by_window"]["2"] == figures["overlap_by_window"]["32"] == pytest.approx(1.0)
    assert [row["ours"] for row in figures["increments_points"]] == pytest.approx([50.0, 0.0])
    assert figures["tasks"]["steady"]["working_set_selections"] == pytest.approx(1.0)
    assert figures["tasks"]["turns"]["working_set_blocks"] == pytest.approx(16.0)
    hits = figures["hit_rate_by_grant"]
    assert hits["1.0"] == pytest.approx(0.5) and hits["2.0"] == pytest.approx(1.0)
    assert "window 1 -> 12: +50.00 points (paper: +10.68)" in capsys.readouterr().out
    assert files["png_file"].read_bytes().startswith(b"\x89PNG")


def test_the_simulator_reads_a_recording(monkeypatch, recorded, tmp_path, capsys):
    file = tmp_path / "simulation.json"
    arguments = ["--requests", "3", "--rate", "1", "--recorded", str(recorded), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["simulate.py", *arguments])
    runpy.run_path(str(SCRIPTS / "simulate.py"), run_name="__main__")
    residency = json.loads(file.read_text())["residency"]
    assert residency == pytest.approx({"step_overlap": 0.5, "window_gain": 0.5, "working_set_selections": 1.5})
    assert "simulated" in capsys.readouterr().out

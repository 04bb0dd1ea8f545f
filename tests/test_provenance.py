from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparseserve_jax.provenance import git_commit, provenance


def test_says_what_a_figure_depends_on() -> None:
    found = provenance()
    assert {"commit", "date", "version", "python", "machine", "cpu", "cpus"} == set(found)
    assert found["cpu"] and found["cpus"] >= 1
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert found["commit"] == (head.stdout.strip() or None)


def test_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert git_commit() is None

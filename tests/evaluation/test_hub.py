"""What is made of a download; the hub and the repository are replaced."""

from __future__ import annotations

import io
import json
import zipfile

import huggingface_hub
import pytest

from sparseserve_jax.evaluation import hub
from sparseserve_jax.evaluation.longbench import load_longbench
from tests.evaluation.data import TEMPLATES, row


@pytest.fixture
def online(tmp_path, monkeypatch):
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("data/qasper.jsonl", json.dumps(row("q1", ["yes"])) + "\n")
        content.writestr("data/readme.txt", "no rows")
    asked = []

    def download(repo, name, repo_type):
        asked.append((repo, name, repo_type))
        return str(archive)

    def fetch(url, timeout):
        asked.append(url)
        return io.BytesIO(json.dumps(TEMPLATES).encode())

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(hub.urllib.request, "urlopen", fetch)
    return asked


def test_rows_and_templates(online):
    folder, templates = hub.download_longbench()
    assert online == [("THUDM/LongBench", "data.zip", "dataset"), hub.TEMPLATES_URL]
    assert [path.name for path in folder.glob("*.jsonl")] == ["qasper.jsonl"]
    assert load_longbench(folder, templates=templates).examples[0].row_id == "q1"
    hub.download_longbench()
    assert len(online) == 3  # templates are kept


def test_templates_at_hand_are_taken(online, tmp_path):
    assert hub.download_longbench(tmp_path / "mine.json")[1] == tmp_path / "mine.json"
    assert len(online) == 1


def test_no_connection_says_what_to_give(monkeypatch, online):
    def refuse(*arguments, **named):
        raise OSError("offline")

    monkeypatch.setattr(hub.urllib.request, "urlopen", refuse)
    with pytest.raises(OSError, match="offline; give --templates with that file"):
        hub.download_longbench()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(OSError, match=r"THUDM/LongBench could not be downloaded \(offline\); give --data-dir"):
        hub.download_longbench()

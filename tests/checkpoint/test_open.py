"""What `open_checkpoint` refuses, and that it never goes to the network."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from sparseserve_jax.checkpoint.open import open_checkpoint
from tests.checkpoint.tiny_checkpoints import write_checkpoint


def test_paths_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"meta-llama/Llama-3\.1-8B does not exist"):
        open_checkpoint("meta-llama/Llama-3.1-8B")
    with pytest.raises(ValueError, match="empty directory"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ValueError, match=r"a\.gguf is empty"):
        open_checkpoint(tmp_path / "a.gguf")
    with pytest.raises(FileNotFoundError, match=r"give its path.*a\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(ValueError, match=r"not a \.gguf file"):
        open_checkpoint(tmp_path / "a.bin")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").touch()
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        open_checkpoint(tmp_path / "sub")


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    source = open_checkpoint(str(write_checkpoint(tmp_path / "tiny")))
    assert source.tensor("model.norm.weight").shape == (32,)

"""Orbax directories: damage is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparseserve_jax.checkpoint.convert import convert
from sparseserve_jax.checkpoint.open import open_checkpoint
from tests.checkpoint.tiny_checkpoints import write_checkpoint, write_json


@pytest.fixture
def written(tmp_path: Path) -> Path:
    source = open_checkpoint(write_checkpoint(tmp_path / "in"))
    return convert(source, tmp_path / "out", format="orbax", dtype="bfloat16")


def test_describes_itself(written: Path) -> None:
    source = open_checkpoint(written)
    assert "Orbax bfloat16" in source.describe()
    with pytest.raises(ValueError, match="nothing"):
        source.tensor("nothing")


def test_incomplete_checkpoint_is_refused_though_safetensors_lie_beside_it(written: Path, tmp_path: Path) -> None:
    shutil.copy(tmp_path / "in" / "model.safetensors", written)
    (written / "orbax" / "_METADATA").unlink()
    with pytest.raises(ValueError, match="not a complete Orbax checkpoint"):
        open_checkpoint(written)


def test_config_of_another_model_is_refused(written: Path) -> None:
    raw = open_checkpoint(written).config
    write_json(written / "config.json", {"model_type": "llama", "vocab_size": raw.vocab_size, "hidden_size": 16,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4})  # fmt: skip
    with pytest.raises(ValueError, match="the config calls for"):
        open_checkpoint(written)


def test_damaged_values_are_refused_when_they_are_read(written: Path) -> None:
    source = open_checkpoint(written)
    for path in (written / "orbax").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(ValueError, match=r"orbax: tensor .*cannot be read"):
        source.tensor("model.norm.weight")


def test_directory_of_arrays_alone_names_the_one_above(written: Path) -> None:
    with pytest.raises(FileNotFoundError, match="give the directory above"):
        open_checkpoint(written / "orbax")

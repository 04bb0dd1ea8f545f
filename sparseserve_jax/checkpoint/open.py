"""`open_checkpoint`: from what the user names to a `CheckpointSource`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sparseserve_jax.checkpoint.embedded import EMBEDDED_NAME, RETRIEVAL_LAYERS, find_embedded
from sparseserve_jax.checkpoint.gguf_source import open_gguf
from sparseserve_jax.checkpoint.huggingface_source import INDEX_FILE, SINGLE_FILE, open_huggingface
from sparseserve_jax.checkpoint.orbax_source import ORBAX_DIR, has_orbax, open_orbax
from sparseserve_jax.checkpoint.source import CheckpointSource


def open_checkpoint(path: str | Path | None = None) -> CheckpointSource:
    """Opens a checkpoint and checks it, without reading tensor values and without any network access.

    Args:
        path: None = the default model from its package; a `.gguf` file; an Orbax directory that `convert` wrote; a
            Hugging Face directory. A directory with both Orbax and safetensors weights is opened as Orbax.

    Raises:
        FileNotFoundError: the path or a file in it is missing.
        ValueError: empty, truncated, another architecture or format; names the file and the reason.
    """
    if path is None:
        source = open_gguf(find_embedded(), name=EMBEDDED_NAME)
        config = dataclasses.replace(source.config, retrieval_layers=RETRIEVAL_LAYERS)
        return dataclasses.replace(source, config=config)
    path = Path(path).expanduser().absolute()
    if path.is_file():
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty; give a complete .gguf file")
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path} is not a .gguf file; give a .gguf file or the directory of a checkpoint")
        return open_gguf(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} does not exist; give a .gguf file or the directory of a checkpoint (models are not downloaded)"
        )
    if not any(path.iterdir()):
        raise ValueError(f"{path} is an empty directory; give the directory of a checkpoint")
    if has_orbax(path):
        return open_orbax(path)
    if not (path / "config.json").exists():
        raise FileNotFoundError(f"{path} is no checkpoint: {_what_is_there(path)}")
    return open_huggingface(path)


def _what_is_there(path: Path) -> str:
    if (path / "_METADATA").exists() or (path / "_CHECKPOINT_METADATA").exists():
        return (
            f"it holds only the arrays of an Orbax checkpoint; give the directory above, which has {ORBAX_DIR}/ in it"
        )
    found = sorted(path.glob("*.gguf"))
    if found:
        return f"it has no config.json; to open the GGUF file in it give its path, {found[0]}"
    return f"it has no config.json beside {ORBAX_DIR}/, {SINGLE_FILE} or {INDEX_FILE}"

"""`convert`: any checkpoint to an Orbax or a Hugging Face directory."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import ml_dtypes  # noqa: F401 (makes numpy know bfloat16)
import numpy as np
from safetensors.numpy import save_file

from sparseserve_jax.checkpoint.huggingface_source import INDEX_FILE, SINGLE_FILE
from sparseserve_jax.checkpoint.orbax_source import write_orbax
from sparseserve_jax.checkpoint.sidecars import write_json, write_sidecars
from sparseserve_jax.checkpoint.source import CheckpointSource, expected_shapes

Format = Literal["orbax", "huggingface"]
MAX_SHARD_BYTES = 4 * 2**30


def convert(
    source: CheckpointSource, out_dir: str | Path, *, format: Format, dtype: Literal["bfloat16", "float32"]
) -> Path:
    """Writes `source` to `out_dir`, whole or not at all (a temporary directory beside it is renamed at the end).

    A Hugging Face directory also opens in transformers; its files hold at most 4 GiB each, and one file's tensors are
    in memory at a time. Orbax needs all tensors in memory at once.

    Returns:
        The absolute path of the written directory.

    Raises:
        ValueError: unknown format or dtype, or `out_dir` exists and is not an empty directory.
        OSError: too little room on the disk.
    """
    if format not in ("orbax", "huggingface"):
        raise ValueError(f"format={format!r} is not supported; choose 'orbax' or 'huggingface'")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dtype={dtype!r} is not supported; choose 'bfloat16' or 'float32'")
    out = Path(out_dir).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty directory; name a new one (nothing is overwritten)")
    out.parent.mkdir(parents=True, exist_ok=True)
    _check_room(out.parent, source, dtype)
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        (write_orbax if format == "orbax" else write_huggingface)(source, temporary, dtype)
        os.rename(temporary, out)  # replaces an empty directory
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return out


def write_huggingface(source: CheckpointSource, directory: Path, dtype: str) -> None:
    """Writes a Hugging Face checkpoint into an existing empty directory."""
    write_sidecars(source, directory, dtype)
    shards = list(_shards(source, np.dtype(dtype).itemsize))
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file_name = SINGLE_FILE if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: np.ascontiguousarray(source.tensor(name).astype(np.dtype(dtype))) for name in names}
        save_file(tensors, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        index_content = {"metadata": {"total_size": _num_bytes(source, dtype)}, "weight_map": weight_map}
        write_json(directory / INDEX_FILE, index_content)


def _shards(source: CheckpointSource, itemsize: int) -> Iterator[list[str]]:
    """Tensor names in order, cut so that no file exceeds `MAX_SHARD_BYTES` (unless one tensor does)."""
    names: list[str] = []
    size_bytes = 0
    for name, shape in expected_shapes(source.config).items():
        tensor_bytes = int(np.prod(shape)) * itemsize
        if names and size_bytes + tensor_bytes > MAX_SHARD_BYTES:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += tensor_bytes
    yield names


def _num_bytes(source: CheckpointSource, dtype: str) -> int:
    return sum(int(np.prod(shape)) for shape in expected_shapes(source.config).values()) * np.dtype(dtype).itemsize


def _check_room(directory: Path, source: CheckpointSource, dtype: str) -> None:
    needed, free = _num_bytes(source, dtype), shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(
            f"{directory} has {free} bytes free, the checkpoint needs {needed}; name a directory with more room"
        )

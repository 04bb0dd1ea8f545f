"""Hugging Face directories with safetensors. Local files only; nothing here opens a connection."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import ml_dtypes  # noqa: F401 (makes numpy know bfloat16, which safetensors asks it for)
import numpy as np
from safetensors import SafetensorError, safe_open

from sparseserve_jax.checkpoint.sidecars import DirectorySource, read_json, read_sidecars
from sparseserve_jax.checkpoint.source import check_shapes, describe_source

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
# Older exporters stored this table; it follows from the config.
_DERIVED_SUFFIX = ".rotary_emb.inv_freq"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(DirectorySource):
    """A `CheckpointSource` over `config.json`, `tokenizer.json` and one or several safetensors files.

    Opened by `open_huggingface`. The files stay mapped as long as the source lives.
    """

    files: Mapping[str, Any] = dataclasses.field(repr=False)
    """Tensor name -> opened safetensors file."""
    kind: str

    def tensor(self, name: str) -> np.ndarray:
        """See `CheckpointSource`."""
        if name not in self.files:
            raise ValueError(f"{self.path} has no tensor {name!r}")
        return _read(self.path, self.files, name)

    def describe(self) -> str:
        """See `CheckpointSource`."""
        return describe_source(self.config, self.kind, self.path)


def open_huggingface(directory: Path) -> HuggingFaceSource:
    """Opens a directory and checks every tensor's name, shape and dtype against `config.json`.

    `tie_word_embeddings` decides about the output head: if true, an `lm_head.weight` in the files is ignored, with a
    warning when it differs from the embedding.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is truncated or of another architecture, or a tensor is missing or has another shape.
    """
    sidecars = read_sidecars(directory)
    files = _open_files(directory)
    shapes: dict[str, list[int]] = {}
    dtypes: set[str] = set()
    for name, file in files.items():
        if name.endswith(_DERIVED_SUFFIX):
            continue
        header = file.get_slice(name)
        shapes[name] = header.get_shape()
        dtypes.add(header.get_dtype())
        if header.get_dtype() not in _DTYPES:
            raise ValueError(
                f"{directory}: tensor {name!r} has dtype {header.get_dtype()}; supported are {', '.join(_DTYPES)}"
            )
    if sidecars.config.tie_word_embeddings and "lm_head.weight" in shapes:
        _warn_if_head_differs(directory, files, shapes)
        del shapes["lm_head.weight"]
    check_shapes(directory, sidecars.config, shapes)
    kind = f"Hugging Face safetensors {'/'.join(sorted(dtypes))}"
    return HuggingFaceSource(path=directory, sidecars=sidecars, files={name: files[name] for name in shapes}, kind=kind)


def has_safetensors(directory: Path) -> bool:
    """Whether the weights of `open_huggingface` are there."""
    return (directory / SINGLE_FILE).exists() or (directory / INDEX_FILE).exists()


def _open_files(directory: Path) -> dict[str, Any]:
    """Tensor name -> opened file."""
    if (directory / SINGLE_FILE).exists():
        file = _open_file(directory / SINGLE_FILE)
        return dict.fromkeys(file.keys(), file)
    if not (directory / INDEX_FILE).exists():
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
        hint = f"; it has {others[0]}, which is not supported: save the model with safetensors" if others else ""
        raise FileNotFoundError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}{hint}")
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / INDEX_FILE} has no weight_map; it is not an index of safetensors files")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or PurePosixPath(file_name).name != file_name or "\\" in file_name:
            raise ValueError(
                f"{directory / INDEX_FILE} names the file {file_name!r}; it must lie in the same directory"
            )
    opened = {file_name: _open_file(directory / file_name) for file_name in sorted(set(weight_map.values()))}
    names = {file_name: set(file.keys()) for file_name, file in opened.items()}
    for name, file_name in weight_map.items():
        if name not in names[file_name]:
            raise ValueError(f"{directory / file_name}: tensor {name!r} is missing, which {INDEX_FILE} says it holds")
    return {name: opened[file_name] for name, file_name in weight_map.items()}


def _open_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the checkpoint is incomplete")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; the checkpoint is incomplete")
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error


def _read(directory: Path, files: Mapping[str, Any], name: str) -> np.ndarray:
    try:
        return files[name].get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{directory}: tensor {name!r} cannot be read: {error}") from error


def _warn_if_head_differs(directory: Path, files: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    embedding = "model.embed_tokens.weight"
    if shapes.get(embedding) == shapes["lm_head.weight"] and np.array_equal(
        _read(directory, files, embedding), _read(directory, files, "lm_head.weight")
    ):
        return
    warnings.warn(
        f"{directory}: tie_word_embeddings is true, so lm_head.weight, which differs from {embedding}, is ignored",
        stacklevel=3,
    )

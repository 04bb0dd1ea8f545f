"""Orbax checkpoints of our layout: the sidecar files of Hugging Face and, in `orbax/`, one array per tensor.

The arrays form a flat tree under their Hugging Face names, of which Orbax's partial restore reads any subset. A restore
costs about 15 ms whatever its size (it parses the metadata of the whole tree), so a layer's tensors are read together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from sparseserve_jax.checkpoint.sidecars import DirectorySource, read_sidecars, write_sidecars
from sparseserve_jax.checkpoint.source import (
    CheckpointSource,
    check_shapes,
    describe_source,
    expected_shapes,
)

ORBAX_DIR = "orbax"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrbaxSource(DirectorySource):
    """A `CheckpointSource` over a directory that `write_orbax` wrote. Opened by `open_orbax`."""

    dtypes: tuple[str, ...]
    checkpointer: ocp.Checkpointer = dataclasses.field(default_factory=ocp.PyTreeCheckpointer, repr=False)
    read_ahead: dict[str, np.ndarray] = dataclasses.field(default_factory=dict, repr=False)
    """Tensors of the last layer read that were not asked for yet."""

    def tensor(self, name: str) -> np.ndarray:
        """See `CheckpointSource`. Cheap when a layer's tensors are asked for one after another."""
        value = self.read_ahead.pop(name, None)
        if value is not None:
            return value
        names = [other for other in expected_shapes(self.config) if _layer_of(other) == _layer_of(name)]
        if name not in names:
            raise ValueError(f"{self.path} has no tensor {name!r}")
        restore = ocp.args.PyTreeRestore(
            item=dict.fromkeys(names, 0),
            restore_args={other: ocp.RestoreArgs(restore_type=np.ndarray) for other in names},
            partial_restore=True,
        )
        self.read_ahead.clear()
        try:
            self.read_ahead.update(self.checkpointer.restore(_weights_dir(self.path), args=restore))
            return self.read_ahead.pop(name)
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise ValueError(
                f"{_weights_dir(self.path)}: tensor {name!r} cannot be read (damaged or truncated?): {error}"
            ) from error

    def describe(self) -> str:
        """See `CheckpointSource`."""
        return describe_source(self.config, f"Orbax {'/'.join(self.dtypes)}", self.path)


def has_orbax(directory: Path) -> bool:
    """Whether the directory holds a checkpoint of our layout."""
    return (directory / ORBAX_DIR).exists()


def open_orbax(directory: Path) -> OrbaxSource:
    """Opens a directory and checks every array's name and shape against `config.json`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the checkpoint is incomplete or damaged, or an array is missing or has another shape.
    """
    sidecars = read_sidecars(directory)
    arrays = _array_metadata(_weights_dir(directory))
    check_shapes(_weights_dir(directory), sidecars.config, {name: array.shape for name, array in arrays.items()})
    dtypes = tuple(sorted({str(np.dtype(array.dtype)) for array in arrays.values()}))
    return OrbaxSource(path=directory, sidecars=sidecars, dtypes=dtypes)


def write_orbax(source: CheckpointSource, directory: Path, dtype: str) -> None:
    """Writes a checkpoint of our layout into an existing empty directory.

    Orbax takes the tree at once, so all tensors are in memory in `dtype` meanwhile.
    """
    write_sidecars(source, directory, dtype)
    tree = {name: source.tensor(name).astype(np.dtype(dtype)) for name in source.tensor_names()}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(_weights_dir(directory), tree)


def _layer_of(name: str) -> str:
    """`model.layers.7` for the tensors of a layer, the name itself for the others."""
    parts = name.split(".")
    return ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else name


def _weights_dir(directory: Path) -> Path:
    return directory.absolute() / ORBAX_DIR


def _array_metadata(weights: Path) -> Mapping[str, Any]:
    """Name -> Orbax's metadata (shape, dtype) of every array."""
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            found = checkpointer.metadata(weights)
        arrays = found.item_metadata.tree  # type: ignore[union-attr]
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise ValueError(f"{weights} is not a complete Orbax checkpoint: {error}") from error
    if not isinstance(arrays, Mapping) or not all(hasattr(array, "shape") for array in arrays.values()):
        raise ValueError(f"{weights} is not an Orbax checkpoint of one flat tree of arrays; write it with `convert`")
    return arrays

"""Selected block ids of many requests in one file, for studies of working sets and for the simulator. No JAX here.

The file is a compressed NumPy archive (`.npz`):

| array | type | content |
|---|---|---|
| `format` | int | 2 |
| `block_size` | int | tokens of a block |
| `layers` | int32 `[sparse layers]` | the recorded layers |
| `prompt_tokens` | int32 `[requests]` | length of each prompt |
| `names` | text `[requests]` | what a request is, e.g. its task |
| `selected_0`, `selected_1`, ... | int16 (int32 from 32,768 blocks on) | one for each request, see `RecordedRequest` |
"""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparseserve_jax.request import RequestOutput

FORMAT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRequest:
    """One continuation.

    Attributes:
        name: what it is.
        prompt_tokens: its prompt's length; decode step i takes in the token at position `prompt_tokens + i`.
        selected: logical block ids `[steps, sparse layers, KV heads, selection]`, ascending, then -1.
    """

    name: str
    prompt_tokens: int
    selected: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionRecord:
    """What one engine selected in its sparse layers, which `layers` names."""

    block_size: int
    layers: tuple[int, ...]
    requests: tuple[RecordedRequest, ...]

    @classmethod
    def of_outputs(
        cls, outputs: Sequence[RequestOutput], *, block_size: int, layers: Sequence[int], names: Sequence[str] = ()
    ) -> SelectionRecord:
        """The selections on outputs of an engine with `record_selection`; names default to the request ids.

        Raises:
            ValueError: no output has a selection: nothing was recorded, or every layer is dense.
        """
        requests = []
        for output, name in zip(outputs, names or [output.request_id for output in outputs], strict=True):
            steps = [np.asarray(ids) for ids in output.metrics.selected_block_ids]
            if not steps:
                continue
            width = max(ids.shape[-1] for ids in steps)  # contexts within the budget give narrower tables
            padded = [np.pad(ids, ((0, 0), (0, 0), (0, width - ids.shape[-1])), constant_values=-1) for ids in steps]
            requests.append(
                RecordedRequest(
                    name=name, prompt_tokens=len(output.prompt_token_ids), selected=_compact(np.stack(padded))
                )
            )
        if not requests:
            raise ValueError(
                f"none of {len(outputs)} outputs has a selection; use record_selection=True, a sparse_budget_tokens, "
                "a layer that is not dense, and more than one new token"
            )
        return cls(block_size=block_size, layers=tuple(layers), requests=tuple(requests))

    def save(self, path: str | Path) -> None:
        """Writes the file described above."""
        arrays: dict[str, Any] = {f"selected_{index}": request.selected for index, request in enumerate(self.requests)}
        with Path(path).open("wb") as file:
            np.savez_compressed(
                file, format=FORMAT, block_size=self.block_size, layers=np.array(self.layers, np.int32),
                prompt_tokens=np.array([request.prompt_tokens for request in self.requests], np.int32),
                names=np.array([request.name for request in self.requests], str), **arrays,
            )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> SelectionRecord:
        """Reads a file of `save`.

        Raises:
            ValueError: it is something else.
            FileNotFoundError: there is none.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                version = int(arrays["format"])
                if version != FORMAT:
                    raise ValueError(f"format {version}, this version reads {FORMAT}")
                lengths, names = arrays["prompt_tokens"].tolist(), arrays["names"].tolist()
                requests = tuple(
                    RecordedRequest(name=name, prompt_tokens=length, selected=arrays[f"selected_{index}"])
                    for index, (name, length) in enumerate(zip(names, lengths, strict=True))
                )
                block_size, layers = int(arrays["block_size"]), tuple(arrays["layers"].tolist())
        except (KeyError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no record of selections: {error}") from error
        return cls(requests=requests, block_size=block_size, layers=layers)


def _compact(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.int16 if ids.max(initial=0) <= np.iinfo(np.int16).max else np.int32)

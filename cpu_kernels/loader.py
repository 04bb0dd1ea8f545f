"""Finds the native library for this CPU, loads it and registers its operations with XLA.

setup.py compiles the sources into one shared library for each instruction set, beside this file. The best one that the
CPU can run is taken; SPARSESERVE_CPU_KERNELS forces one by name, or "off".
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from pathlib import Path

import jax

VARIANTS = ("avx512bf16", "avx512", "avx2", "plain")
"""The best first."""
SANITIZED = "sanitized"
"""The plain sources with sanitizers built in (`make sanitize`); only by name."""
VARIABLE = "SPARSESERVE_CPU_KERNELS"

# To add an operation, put its handler into src/*.cc with SPARSESERVE_FFI_HANDLER(Symbol, ...), name it here, and call
# `jax.ffi.ffi_call(target("name"), ...)` in its wrapper.
TARGETS = (
    ("decode_attention", "SparseServeDecodeAttention"),
    ("append_tokens", "SparseServeAppendTokens"),
    ("append_blocks", "SparseServeAppendBlocks"),
    ("score_blocks", "SparseServeScoreBlocks"),
    ("select_blocks", "SparseServeSelectBlocks"),
    ("union_over_group", "SparseServeUnionOverGroup"),
    ("match_slots", "SparseServeMatchSlots"),
    ("prefill_attention", "SparseServePrefillAttention"),
    ("select_key_tiles", "SparseServeSelectKeyTiles"),
    ("flash_h2d", "SparseServeFlashH2D"),
    ("copy_blocks", "SparseServeCopyBlocks"),
    ("save_pieces", "SparseServeSavePieces"),
    ("zeros", "SparseServeZeros"),
    ("rms_norm", "SparseServeRmsNorm"),
    ("split_and_rotate", "SparseServeSplitAndRotate"),
    ("make_blocks", "SparseServeMakeBlocks"),
    ("linear", "SparseServeLinear"),
)


@dataclasses.dataclass(frozen=True)
class Library:
    """A loaded library; its operations are registered with XLA under names of its own."""

    variant: str
    has_amx: bool = False
    """AMX is used where it helps: in this library, on this CPU, and allowed by the operating system."""

    def target(self, name: str) -> str:
        """XLA's name for the operation `name` of this library."""
        return f"sparseserve_{name}_{self.variant}"


def available() -> tuple[str, ...]:
    """Variants that were built and that this CPU can run, the best first."""
    return tuple(variant for variant in VARIANTS if _path(variant).exists() and _can_run(_open(variant)))


@functools.cache
def load(variant: str) -> Library:
    """Loads one library and registers its operations, once.

    Raises:
        NotImplementedError: it was not built, or this CPU cannot run it.
    """
    if not _path(variant).exists():
        raise NotImplementedError(f"{_path(variant)} was not built; {_REMEDY}")
    shared = _open(variant)
    if not _can_run(shared):
        raise NotImplementedError(f"this CPU lacks instructions that the variant {variant!r} uses; unset {VARIABLE}")
    library = Library(variant, has_amx=bool(shared.sparseserve_has_amx()))
    for name, symbol in TARGETS:
        handler = jax.ffi.pycapsule(getattr(shared, symbol))
        jax.ffi.register_ffi_target(library.target(name), handler, platform="cpu")
    return library


@functools.cache
def in_force() -> Library:
    """The library that serves here.

    Raises:
        NotImplementedError: there is none; says why and what to do.
        ValueError: SPARSESERVE_CPU_KERNELS names no variant.
    """
    forced = os.environ.get(VARIABLE, "")
    if forced == "off":
        raise NotImplementedError(f"native CPU kernels are switched off by {VARIABLE}=off; unset it")
    if forced and forced not in (*VARIANTS, SANITIZED):
        raise ValueError(f"{VARIABLE}={forced!r} must be one of {', '.join(VARIANTS)}, off")
    if forced:
        return load(forced)
    found = available()
    if not found:
        raise NotImplementedError(f"no native CPU kernels in {_path('plain').parent}; {_REMEDY}")
    return load(found[0])


def target(name: str) -> str:
    """XLA's name for the operation `name` of the library in force."""
    return in_force().target(name)


def is_there() -> bool:
    """Whether native kernels serve here."""
    return not _why_not()


def describe() -> str:
    """The variant in force, or why there is none."""
    return f"none: {_why_not()}" if _why_not() else in_force().variant


def _why_not() -> str:
    try:
        in_force()
    except NotImplementedError as error:
        return str(error)
    return ""


_REMEDY = (
    "install a C++17 compiler and run `pip install .` or `pip install -e .` again, or use implementation='reference'"
)


def _path(variant: str) -> Path:
    return Path(__file__).parent / f"libsparseserve_{variant}.so"


@functools.cache
def _open(variant: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(_path(variant)))


def _can_run(shared: ctypes.CDLL) -> bool:
    return bool(shared.sparseserve_can_run())

"""Compiled programs persist between runs, so that only the first start of a machine waits for the compiler."""

from __future__ import annotations

import os
from pathlib import Path

import jax


def use_compilation_cache(directory: str | None) -> Path | None:
    """Points JAX's persistent cache at `directory`; None = the user's cache folder, "" = leave JAX as it is.

    A cache that JAX already has (`JAX_COMPILATION_CACHE_DIR`) is kept. Returns the folder in force.
    """
    if directory == "":
        return None
    current = jax.config.values["jax_compilation_cache_dir"]
    if directory is None and current:
        return Path(current)
    path = Path(directory) if directory else _user_cache() / "sparseserve-jax" / "xla"
    path.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")

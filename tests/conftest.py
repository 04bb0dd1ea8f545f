"""The CPU backend, shapes checked at run time, and a compilation cache of the session's own, for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before anything imports jax

CHECKED_PACKAGES = (
    "pallas_kernels", "cpu_kernels", "host_offload", "sparseserve_jax.models", "sparseserve_jax.runner",
    "sparseserve_jax.sampling",
)  # fmt: skip
"""Where arrays are handled. Elsewhere there is nothing but plain Python, which pyright checks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-jaxtyping", action="store_true", help="do not check shapes and types of our functions at run time"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--no-jaxtyping"):
        from jaxtyping import install_import_hook

        install_import_hook(CHECKED_PACKAGES, "beartype.beartype")


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Engines keep a cache that JAX already has, so nothing lands in the user's own; xdist workers share it."""
    import jax

    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    directory = Path(base) / "xla"
    directory.mkdir(exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

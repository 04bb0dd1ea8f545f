"""What a figure depends on: commit, versions, machine, date. Every benchmark writes it beside its results."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def provenance() -> dict[str, Any]:
    """Facts of this process and machine as plain data; `commit` is None outside of a checkout."""
    return {
        "commit": git_commit(), "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": package_version(), "python": platform.python_version(), "machine": platform.machine(),
        "cpu": cpu_name(), "cpus": os.cpu_count(),
    }  # fmt: skip


def git_commit() -> str | None:
    """The commit of the checkout that this package is imported from."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # no git on this machine
        return None
    return found.stdout.strip() or None


def package_version() -> str | None:
    """Our installed version; None where the package runs from its sources."""
    return installed_version("sparseserve-jax")


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The CPU's model as Linux tells it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")

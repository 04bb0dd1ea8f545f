"""Two thirds of the shapes that only repeat a costly check on another shape belong to the slow tests."""

from __future__ import annotations

import collections
import zlib

import pytest

COSTLY = ("test_a100.py", "test_conformance.py", "test_linear.py", "test_prefill_attention.py")
KEPT = 4
"""A check with no more shapes than this keeps them all."""


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    shapes: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        if item.path.name in COSTLY and isinstance(item, pytest.Function) and "gpu" not in item.keywords:
            shapes[f"{item.path}::{item.originalname}"].append(item)
    for group in shapes.values():
        if len(group) > KEPT:
            for item in group:
                if zlib.crc32(item.name.encode()) % 3:  # the same third everywhere, and of every implementation
                    item.add_marker(pytest.mark.slow)

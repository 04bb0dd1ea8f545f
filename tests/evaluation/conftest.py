from __future__ import annotations

import pytest

from sparseserve_jax.evaluation.prompts import PromptEncoder


@pytest.fixture(scope="session")
def encoder() -> PromptEncoder:
    """Of the embedded model."""
    return PromptEncoder(None)

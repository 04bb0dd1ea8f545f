"""The scripts run: small settings, figures in range."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import get_kernels
from sparseserve_jax.models.config import ModelConfig

SCRIPTS = Path(__file__).parent.parent / "scripts"
SHAPE = ModelConfig(
    name="tiny", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_q_heads=6, num_kv_heads=2,
    head_dim=32, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip


@pytest.fixture
def quality(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["selection_quality.py"])
    return runpy.run_path(str(SCRIPTS / "selection_quality.py"))["_quality"]


def test_selection_quality_measures_what_it_says(quality):
    """With a few hot blocks the digests find them; the newest blocks alone do not; a covering budget keeps all."""
    rng = np.random.default_rng(0)
    num_blocks, block_size = 64, 16
    q = rng.standard_normal((4, 6, 32)).astype(np.float32)
    pool = rng.standard_normal((num_blocks + 1, 2, 2, block_size, 32)).astype(np.float32)
    for head in range(2):
        for block in (7, 20, 33):
            pool[block + 1, head, 0] += 2.0 * q[:, head * 3 : head * 3 + 3].mean((0, 1))
    positions = jnp.asarray(num_blocks * block_size - 4 + np.arange(4))
    result = quality(
        SHAPE, get_kernels("reference", "cpu"), jnp.asarray(q), jnp.asarray(pool), positions, (128, 1024), 32**-0.5
    )
    values = {key: np.asarray(value) for key, value in result.items()}
    assert values[128, "cuboid-mean"][0] > values[128, "newest"][0] + 0.05
    assert values[128, "oracle"][0] >= values[128, "cuboid-mean"][0] - 1e-6
    assert values[128, "cuboid-mean, per query head"][0] >= values[128, "cuboid-mean"][0] - 0.01
    for method in ("cuboid-mean", "quest", "mean", "newest", "oracle"):
        np.testing.assert_allclose(values[1024, method], [1.0, 0.0], atol=1e-5)

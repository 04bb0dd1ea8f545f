"""Norm, rotary embedding and KV blocks, every implementation against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.api import get_kernels
from tests.pallas_kernels.test_conformance import NO_LIBRARY

IMPLEMENTATIONS = ("reference", pytest.param("cpu", marks=NO_LIBRARY))
all_implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
all_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def kernels(implementation):
    return get_kernels(implementation, "cpu")


def assert_rounded(actual, expected, dtype):
    """Within half a unit of the last place (bfloat16: 2^-9) and a little for the arithmetic in float32."""
    tolerance = 2**-8 if dtype == "bfloat16" else 1e-6
    assert actual.dtype == jnp.dtype(dtype)
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=1e-6)


@all_implementations
@all_dtypes
@pytest.mark.parametrize("shape", [(1, 576), (3, 7), (130, 96)])
def test_rms_norm(implementation, dtype, shape):
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape[1]).astype(np.float32)
    x[-1, 0] = np.nan  # stays in its row
    actual = kernels(implementation).rms_norm(jnp.asarray(x), jnp.asarray(scale), eps=1e-5, dtype=jnp.dtype(dtype))
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
    assert_rounded(actual[:-1], expected[:-1], dtype)
    assert np.isnan(np.asarray(actual[-1], np.float32)).all()


@all_implementations
@all_dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 128), (2, 2, 6)])
def test_split_and_rotate(implementation, dtype, heads, kv_heads, head_dim):
    rng = np.random.default_rng(1)
    num_tokens = 37
    qkv = rng.normal(size=(num_tokens, (heads + 2 * kv_heads) * head_dim)).astype(np.float32)
    angles = np.tile(rng.uniform(0, 100, (num_tokens, head_dim // 2)), 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    actual = kernels(implementation).split_and_rotate(
        jnp.asarray(qkv), jnp.asarray(cos), jnp.asarray(sin),
        num_q_heads=heads, num_kv_heads=kv_heads, dtype=jnp.dtype(dtype),
    )  # fmt: skip
    x = qkv.reshape(num_tokens, -1, head_dim).astype(np.float64)
    half = head_dim // 2
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    rotated = x * cos[:, None] + turned * sin[:, None]
    expected = (rotated[:, :heads], rotated[:, heads : heads + kv_heads], x[:, heads + kv_heads :])
    for one, other in zip(actual, expected, strict=True):
        tolerance = 2**-8 if dtype == "bfloat16" else 2e-6
        assert one.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=tolerance, atol=tolerance)


@all_implementations
@all_dtypes
def test_make_blocks(implementation, dtype):
    rng = np.random.default_rng(2)
    k, v = (jnp.asarray(rng.normal(size=(64, 3, 32)), jnp.dtype(dtype)) for _ in range(2))
    block_tokens = np.array([16, 5, 0, 16], np.int32)
    blocks = np.asarray(kernels(implementation).make_blocks(k, v, jnp.asarray(block_tokens), block_size=16))
    assert blocks.shape == (4, 3, 2, 16, 32) and blocks.dtype == k.dtype
    for block, head, half, token in np.ndindex(4, 3, 2, 16):
        source = np.asarray((k, v)[half])[block * 16 + token, head]
        expected = source if token < block_tokens[block] else np.zeros_like(source)
        np.testing.assert_array_equal(blocks[block, head, half, token], expected)


@all_implementations
def test_memory_for_pools_is_zero(implementation):
    for shape in ((3, 2, 2, 16, 32), (4099, 3, 2, 32, 64)):
        pool = kernels(implementation).zeros(shape, jnp.uint16)
        assert pool.shape == shape and pool.dtype == jnp.uint16 and not np.asarray(pool).any()


@NO_LIBRARY
def test_weights_stay_what_they_are_in_huge_pages():
    weights = [jnp.asarray(np.random.default_rng(i).normal(size=(1500, 700)), jnp.float32) for i in range(6)]
    before = jax.tree.map(lambda x: np.array(x), weights)
    moved = kernels("cpu").prepare_weights(weights)
    assert 0 <= moved <= sum(w.nbytes for w in weights) + 2 * 2**20
    for one, other in zip(weights, before, strict=True):
        np.testing.assert_array_equal(one, other)

"""Symmetric int8 of keys and values, in plain XLA.

K and V of each (block, KV head) have a scale of their own, float32: the largest magnitude of the block's tokens / 127.
A value is its integer times the scale. An int8 pool goes with an array of scales `[num_blocks, num_kv_heads, 2]`.
Native code (cpu_kernels/src/quantise.h) takes the same steps and gives the same integers and scales.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Num

MOST = 127
"""The largest integer; -128 is not used, so that both signs have the same range."""


def scales_of(values: Float[Array, "*batch tokens head_dim"]) -> Float32[Array, "*batch"]:
    """The scale of the values of each piece; values that do not count are zero. Denormal scales are zero, too."""
    scales = jnp.abs(values.astype(jnp.float32)).max(axis=(-2, -1)) * np.float32(1 / MOST)
    return jnp.where(scales < jnp.finfo(jnp.float32).tiny, 0, scales)


def quantise(
    values: Float[Array, "*batch tokens head_dim"], scales: Float32[Array, "*batch"]
) -> Int8[Array, "*batch tokens head_dim"]:
    """Values as integers of the given scales, rounded to nearest even; a scale of zero gives zeros."""
    return _rounded(values.astype(jnp.float32), _quotient(jnp.float32(1), scales))


def requantise(
    values: Int8[Array, "*batch tokens head_dim"], older: Float32[Array, "*batch"], newer: Float32[Array, "*batch"]
) -> Int8[Array, "*batch tokens head_dim"]:
    """Integers of one scale as those of another; where they are equal nothing changes."""
    return _rounded(values.astype(jnp.float32), _quotient(older, newer))


def _quotient(dividends: Array, scales: Array) -> Array:
    return jnp.where(scales == 0, 0, dividends / jnp.where(scales == 0, 1, scales))


def _rounded(values: Array, factors: Array) -> Array:
    # One product of each value: XLA rearranges longer expressions, and half an integer must round alike everywhere.
    return jnp.clip(jnp.round(values * factors[..., None, None]), -MOST, MOST).astype(jnp.int8)


def dequantise(
    values: Num[Array, "*batch tokens head_dim"], scales: Float32[Array, "*batch"]
) -> Float32[Array, "*batch tokens head_dim"]:
    """Integers (or means of integers) back as values."""
    return values.astype(jnp.float32) * scales[..., None, None]

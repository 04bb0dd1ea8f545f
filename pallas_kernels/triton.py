"""The only door to Pallas' Triton backend: every kernel is called, loads, stores and multiplies through here.

The backend is deprecated since jax 0.11 but is the one that compiles for Ampere (docs/kernels.md says what a Mosaic
GPU port needs); a change of backend begins and ends in this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.experimental.pallas import triton as _backend

IN_PLACE = pl.BlockSpec(memory_space=pl.ANY)
"""A whole array, wherever it lies (device or pinned host memory): the kernel loads what it indexes."""


def kernel_call(
    kernel: Callable[..., None],
    *arrays: Array,
    name: str,
    grid: tuple[int, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Any,
    out_shape: Any,
    num_warps: int,
    num_stages: int = 1,
    aliases: dict[int, int] | None = None,
    interpret: bool,
) -> Any:
    """Runs a kernel over a grid.

    Args:
        name: of the compiled function, as profiles and the compile report show it.
        num_warps: warps (32 threads) of one program.
        num_stages: depth of the software pipeline of loads in the kernel's loop.
        aliases: input index -> output index of arrays updated in place.
        interpret: run as XLA operations on any platform. Costs a copy of every array a program: for tests.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        params = _backend.CompilerParams(num_warps=num_warps, num_stages=num_stages)
        call = pl.pallas_call(
            kernel, grid=grid, in_specs=list(in_specs), out_specs=out_specs, out_shape=out_shape, name=name,
            input_output_aliases=aliases or {}, compiler_params=params, interpret=interpret,
        )  # fmt: skip
        return call(*arrays)


def load(ref: Any, *, mask: Array | None = None, other: Any = None, eviction_policy: str | None = None) -> Array:
    """Loads what `ref.at[...]` names; where `mask` is False nothing is read and the value is `other`."""
    return _backend.load(ref, mask=mask, other=other, eviction_policy=eviction_policy)


def store(ref: Any, value: Array, *, mask: Array | None = None) -> None:
    """Stores to what `ref.at[...]` names, where `mask` is True."""
    _backend.store(ref, value, mask=mask)


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """Matrix product in float32. float32 operands are multiplied as such (Triton's default would round them to TF32)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return _backend.dot(a, b, trans_b=trans_b, precision=precision)

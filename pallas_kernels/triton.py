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
    """Matrix product in float32; float32 operands are not rounded to TF32, as Triton would by default."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return _backend.dot(a, b, trans_b=trans_b, precision=precision)


def exp2_scaled(x: Array, scale: float, minus: Array, *, interpret: bool) -> Array:
    """`2 ** (x * scale - minus)` of float32 in two instructions; results below 2^-126 become 0.

    Pallas' own exp2 is four, for the sake of those, and its Triton does not fuse the product with the difference: in
    flash attention that is a quarter of a loop's instructions.
    """
    if interpret:
        return jnp.exp2(x * scale - minus)
    assembly = "{ .reg .f32 t; fma.rn.f32 t, $1, $2, $3; ex2.approx.ftz.f32 $0, t; }"
    args = [x, jnp.full(x.shape, scale, jnp.float32), jnp.broadcast_to(-minus, x.shape)]
    (result,) = _backend.elementwise_inline_asm(
        assembly, args=args, constraints="=f,f,f,f", pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )  # fmt: skip
    return result


def barrier(*, interpret: bool) -> None:
    """Waits for all threads of the program; from here on they see what the others have stored."""
    if not interpret:  # the interpreter has no threads, and no rule for it
        _backend.debug_barrier()

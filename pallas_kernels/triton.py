"""The only door to Pallas' Triton backend: every kernel is called, loads, stores and multiplies through here.

The backend is deprecated since jax 0.11 but is the one that compiles for Ampere (docs/kernels.md says what a Mosaic
GPU port needs); a change of backend begins and ends in this module.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as _backend
from jaxtyping import Array

IN_PLACE = pl.BlockSpec(memory_space=pl.ANY)
"""A whole array, wherever it lies (device or pinned host memory): the kernel loads what it indexes."""

_COUNTS: contextvars.ContextVar[Any] = contextvars.ContextVar("counts", default=None)
_LOADED, _STORED, _FLOPS = range(3)


@dataclasses.dataclass
class Traffic:
    """What the programs of one kernel call did, summed up.

    Attributes:
        loaded_bytes / stored_bytes: that loads and stores asked for, without what their masks left out.
        flops: of matrix products, 2 a multiply-add, padding included.
    """

    name: str
    grid: tuple[int, ...]
    loaded_bytes: int
    stored_bytes: int
    flops: int

    def scaled(self, times: int) -> Traffic:
        """Of as many calls side by side."""
        return Traffic(self.name, self.grid, self.loaded_bytes * times, self.stored_bytes * times, self.flops * times)


class TrafficMeter:
    """Notes the traffic of all kernels interpreted inside its `with` block, outside of any jit, in `calls`."""

    def __init__(self) -> None:
        self.calls: list[Traffic] = []

    def __enter__(self) -> TrafficMeter:
        self._token = _METER.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _METER.reset(self._token)

    def note(self, name: str, grid: tuple[int, ...], counts: Array) -> None:
        """Adds one call; `counts` is `[*grid, 3]`."""
        totals = np.asarray(counts).reshape(-1, 3).astype(np.int64).sum(axis=0)
        self.calls.append(Traffic(name, grid, *totals.tolist()))


_METER: contextvars.ContextVar[TrafficMeter | None] = contextvars.ContextVar("meter", default=None)


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
    meter = _METER.get() if interpret else None
    if meter is not None:
        kernel, out_specs, out_shape = _counted(kernel, grid, out_specs, out_shape)
    call = pl.pallas_call(
        kernel, grid=grid, in_specs=list(in_specs), out_specs=out_specs, out_shape=out_shape, name=name,
        input_output_aliases=aliases or {}, interpret=interpret,
        compiler_params=_backend.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    )  # fmt: skip
    out = call(*arrays)
    if meter is not None:
        *out, counts = out
        meter.note(name, grid, counts)
        return out if isinstance(out_specs, _Many) else out[0]
    return out


class _Many(list):
    """Output specs of a counted kernel that gives a sequence and not one array."""


def _counted(kernel: Callable[..., None], grid: tuple[int, ...], specs: Any, shapes: Any) -> tuple[Any, Any, Any]:
    """The same kernel with one more output: what each program loads, stores and multiplies."""
    many = isinstance(shapes, list | tuple)

    def counting(*refs: Any) -> None:
        *ours, counts = refs
        counts[...] = jnp.zeros(counts.shape, counts.dtype)
        token = _COUNTS.set(counts)
        kernel(*ours)
        _COUNTS.reset(token)

    spec = pl.BlockSpec((*(None for _ in grid), 3), lambda *program: (*program, 0))
    counts = jax.ShapeDtypeStruct((*grid, 3), jnp.int32)
    if many:
        return counting, _Many([*specs, spec]), [*shapes, counts]
    return counting, [specs, spec], [shapes, counts]


def _count(column: int, value: Array, mask: Array | None, repeats: int = 1) -> None:
    counts = _COUNTS.get()
    if counts is not None:
        elements = value.size if mask is None else jnp.broadcast_to(mask, value.shape).sum(dtype=jnp.int32)
        counts[column] += jnp.asarray(elements * value.dtype.itemsize // repeats, jnp.int32)


def load(
    ref: Any, *, mask: Array | None = None, other: Any = None, eviction_policy: str | None = None, repeats: int = 1
) -> Array:
    """Loads what `ref.at[...]` names; where `mask` is False nothing is read and the value is `other`.

    Args:
        repeats: how often the same address is loaded, by neighbours or by programs that run together, and comes from
            cache but once (for the traffic meter).
    """
    value = _backend.load(ref, mask=mask, other=other, eviction_policy=eviction_policy)
    _count(_LOADED, value, mask, repeats)
    return value


def read(ref: Any) -> Array:
    """The whole block that the grid gives this program."""
    value = ref[...]
    _count(_LOADED, value, None)
    return value


def store(ref: Any, value: Array, *, mask: Array | None = None) -> None:
    """Stores to what `ref.at[...]` names, where `mask` is True."""
    _count(_STORED, value, mask)
    _backend.store(ref, value, mask=mask)


def dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """Matrix product in float32; float32 operands are not rounded to TF32, as Triton would by default."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    counts = _COUNTS.get()
    if counts is not None:
        counts[_FLOPS] += 2 * a.size * b.shape[0 if trans_b else 1]
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

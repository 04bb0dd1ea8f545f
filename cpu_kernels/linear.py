"""The linear operation as a native call; signature and meaning of `pallas_kernels.linear.linear`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from cpu_kernels.loader import in_force, target
from pallas_kernels import linear as reference

MAX_ROWS_WITHOUT_AMX = {"bfloat16": 4, "int8": 16}
"""By dtype of the weight; more rows go to XLA. Microseconds for 30 weights [960, 576] in turn, native / XLA, on two
AVX-512 CPUs of an Emerald Rapids: bfloat16 with 2 rows 209 / 237, with 4 265 / 255, with 8 352 / 278; int8 with 16 rows
233 / 307, with 32 395 / 334. One row takes XLA ten times longer than two."""


def linear(
    x: Float[Array, "rows in_features"],
    weight: Num[Array, "out_features in_features"],
    *,
    scales: Float[Array, "out_features"] | None = None,
    bias: Float[Array, "out_features"] | None = None,
    residual: Float[Array, "rows out_features"] | None = None,
    gated: bool = False,
    allow_amx: bool = True,
) -> Float[Array, "rows features"]:
    """residual + (x @ weight.T) * scales + bias, with float32 sums; see `pallas_kernels.linear.linear`.

    Where XLA is as fast or faster its product is taken: for float32 weights (whose sums then are the
    reference's to the bit), and without AMX for more than `MAX_ROWS_WITHOUT_AMX` rows.

    Args:
        allow_amx: use AMX where the CPU has it.
    """
    reference.check_arguments(weight, scales=scales, residual=residual, gated=gated)
    dtype = reference.activation_dtype(weight.dtype)
    amx = allow_amx and in_force().has_amx
    if dtype == jnp.float32 or (not amx and x.shape[0] > MAX_ROWS_WITHOUT_AMX[weight.dtype.name]):
        return reference.linear(x, weight, scales=scales, bias=bias, residual=residual, gated=gated)
    shape = (x.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
    none = jnp.zeros((0,), jnp.float32)
    optional = (none if a is None else a.astype(jnp.float32) for a in (scales, bias, residual))
    out = jax.ShapeDtypeStruct(shape, dtype if gated else jnp.float32)
    return jax.ffi.ffi_call(target("linear"), out)(x.astype(dtype), weight, *optional, gated=gated, allow_amx=amx)

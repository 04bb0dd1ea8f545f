"""What the kernels support: checked when a kernel is traced, so that the refusal is ours and not the compiler's."""

from __future__ import annotations

import jax.numpy as jnp

HEAD_DIMS = (16, 32, 64, 128, 256)
BLOCK_SIZES = (16, 32, 64)
MAX_GROUP = 64
"""Query heads of one KV head."""
DTYPES = ("bfloat16", "float32")
DIGEST_METHODS = ("cuboid-mean", "quest", "mean")
"""In the order of `DigestMethod` in cpu_kernels/src/digest.h."""


def check_digest_method(method: str) -> None:
    """Refuses a block digest that no implementation has; see `reference.block_digests` for those there are.

    Raises:
        NotImplementedError: names the value and what is supported.
    """
    if method not in DIGEST_METHODS:
        raise NotImplementedError(f"block digest {method!r}; supported: {', '.join(DIGEST_METHODS)}")


def check_supported(operation: str, *, head_dim: int, block_size: int, dtype: jnp.dtype, group: int = 1) -> None:
    """Refuses what no kernel was built for.

    Args:
        dtype: of keys and values; uint16 is bfloat16 as the CPU stores it, int8 is a quantised pool.

    Raises:
        NotImplementedError: names the value, what is supported and the remedy.
    """
    name = {"uint16": "bfloat16"}.get(jnp.dtype(dtype).name, jnp.dtype(dtype).name)
    allowed = (*DTYPES, "int8") if operation == "decode_attention" else DTYPES
    for what, value, supported in (
        ("head_dim", head_dim, HEAD_DIMS),
        ("block_size", block_size, BLOCK_SIZES),
        ("dtype", name, allowed),
        ("query heads for each KV head", group, range(1, MAX_GROUP + 1)),
    ):
        if value not in supported:
            bound = f"1 to {MAX_GROUP}" if isinstance(supported, range) else ", ".join(map(str, supported))
            raise NotImplementedError(
                f"{operation}: no Pallas kernel for {what} {value}; supported: {bound}. "
                "implementation='reference' runs every shape"
            )

"""Rotary position embedding: the inverse frequencies of every supported scaling type, and their application.

Follows Hugging Face's `modeling_rope_utils.py` (transformers 5): the same formulas in the same order, frequencies in
float32 computed as float32(float64 power), which agrees with torch to the last bit in all but a few entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sparseserve_jax.models.config import ModelConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_type(config: ModelConfig) -> str:
    """One of `ROPE_TYPES`, from the key `rope_type` or, in older checkpoints, `type`; "default" without scaling.

    Raises:
        ValueError: another type.
    """
    scaling = config.rope_scaling_dict or {}
    found = scaling.get("rope_type", scaling.get("type")) or "default"
    if found == "none":
        return "default"
    if found not in ROPE_TYPES:
        raise ValueError(
            f"rope type {found!r} of model {config.name!r} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    return str(found)


def max_supported_len(config: ModelConfig) -> int:
    """The longest sequence in tokens: `max_position_embeddings`, for every type.

    Yarn and llama3 checkpoints state the extended length there, so their factor is not applied a second time. For
    `dynamic` it is the original length: beyond it the base would depend on the length of the sequence, and keys that
    are already in the cache would have been rotated with another base.
    """
    return config.max_position_embeddings


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 `[head_dim / 2]` and the factor on cos and sin (1.0 except for yarn).

    Raises:
        ValueError: unknown type, missing or invalid scaling parameter, odd `head_dim`.
    """
    kind = rope_type(config)
    scaling = config.rope_scaling_dict or {}
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} must be even for rotary embedding")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={scaling['partial_rotary_factor']!r} is not supported; it must be 1.0")
    wavelengths = _wavelengths(config)
    plain = np.float32(1) / wavelengths
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return plain / np.float32(_positive(scaling, "factor")), 1.0
    if kind == "llama3":
        return _llama3(config, scaling, plain), 1.0
    return _yarn(config, scaling, wavelengths)


def rope_cos_sin(
    positions: Int[Array, " num_tokens"], inv_freq: Float[np.ndarray, " half_head_dim"], attention_factor: float
) -> tuple[Float[Array, "num_tokens head_dim"], Float[Array, "num_tokens head_dim"]]:
    """Cosines and sines in float32; the second half of `head_dim` repeats the first ("rotate half" convention)."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)[None, :]
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def _wavelengths(config: ModelConfig) -> np.ndarray:
    """theta ** (2i / head_dim), float32 `[head_dim / 2]`."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    return (np.float64(config.rope_theta) ** exponents.astype(np.float64)).astype(np.float32)


def _llama3(config: ModelConfig, scaling: Mapping[str, object], plain: np.ndarray) -> np.ndarray:
    """Llama 3.1: long wavelengths are scaled, short ones kept, those between interpolated."""
    factor = np.float32(_positive(scaling, "factor"))
    low, high = _positive(scaling, "low_freq_factor"), _positive(scaling, "high_freq_factor")
    if high <= low:
        raise ValueError(f"rope scaling high_freq_factor={high} must exceed low_freq_factor={low}")
    original = _original_length(config, scaling)
    wavelength = np.float32(2 * math.pi) / plain
    scaled = np.where(wavelength > original / low, plain / factor, plain)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return np.where(medium, between, scaled).astype(np.float32)


def _yarn(config: ModelConfig, scaling: Mapping[str, object], wavelengths: np.ndarray) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071), with DeepSeek's `mscale` keys."""
    original = _original_length(config, scaling)
    if scaling.get("factor") is None:
        factor = config.max_position_embeddings / original
    else:
        factor = _positive(scaling, "factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        attention_factor = _positive(scaling, "attention_factor")
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = mscale(_positive(scaling, "mscale")) / mscale(_positive(scaling, "mscale_all_dim"))
    else:
        attention_factor = mscale(1.0)

    def dimension(rotations: float) -> float:
        return config.head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = dimension(_positive(scaling, "beta_fast") if scaling.get("beta_fast") else 32.0)
    high = dimension(_positive(scaling, "beta_slow") if scaling.get("beta_slow") else 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = np.clip((np.arange(config.head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    keep = np.float32(1) - ramp
    interpolated = np.float32(1) / (np.float32(factor) * wavelengths)
    extrapolated = np.float32(1) / wavelengths
    inv_freq = interpolated * (1 - keep) + extrapolated * keep
    return inv_freq.astype(np.float32), float(attention_factor)


def _original_length(config: ModelConfig, scaling: Mapping[str, object]) -> float:
    if scaling.get("original_max_position_embeddings") is None:
        return float(config.max_position_embeddings)
    return _positive(scaling, "original_max_position_embeddings")


def _positive(scaling: Mapping[str, object], key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"rope scaling needs a positive number {key!r}, got {value!r} in {dict(scaling)}")
    return float(value)

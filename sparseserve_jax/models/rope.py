"""Rotary position embedding: the inverse frequencies of every supported scaling type, and their application.

Follows Hugging Face's `modeling_rope_utils.py` (transformers 5): the same formulas in the same order, frequencies in
float32 computed as float32(float64 power), which agrees with torch to the last bit in all but a few entries.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sparseserve_jax.models.config import ModelConfig

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_OVERRIDE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
}  # fmt: skip


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
    """The longest sequence in tokens: `max_position_embeddings`, and for `dynamic` that times the factor.

    Other checkpoints state the extended length there, so their factor is not applied a second time; the formula of
    `dynamic` takes it for the original length.
    """
    if rope_type(config) == "dynamic":
        return int(config.max_position_embeddings * _positive(config.rope_scaling_dict or {}, "factor"))
    return config.max_position_embeddings


def with_rope_scaling(config: ModelConfig, scaling: Mapping[str, object]) -> ModelConfig:
    """The model with another rotary scaling in place of its own, and as many positions as that is for.

    Args:
        scaling: a `rope_scaling` mapping as in a Hugging Face `config.json`, with `factor`. The new limit is `factor`
            times `original_max_position_embeddings`, which defaults to what the model itself says. For type "default",
            which scales nothing, `factor` (1 if absent) only moves the limit. `rope_theta` replaces the base.

    Raises:
        ValueError: an unknown type or key, a missing or impossible number.
    """
    unknown = sorted(set(scaling) - _OVERRIDE_KEYS)
    if unknown:
        raise ValueError(f"rope scaling key {unknown[0]!r} is not known; known are {', '.join(sorted(_OVERRIDE_KEYS))}")
    kept = {key: value for key, value in scaling.items() if key not in ("type", "rope_theta")}
    kept["rope_type"] = scaling.get("rope_type", scaling.get("type"))
    original = _original_length(config, {**(config.rope_scaling_dict or {}), **kept})
    theta = _positive(scaling, "rope_theta") if "rope_theta" in scaling else config.rope_theta
    changed = dataclasses.replace(config, rope_theta=theta, rope_scaling=tuple(sorted(kept.items())))
    kind = rope_type(changed)
    factor = 1.0 if kind == "default" and "factor" not in scaling else _positive(scaling, "factor")
    if kind in ("llama3", "yarn"):
        kept["original_max_position_embeddings"] = int(original)
    changed = dataclasses.replace(
        changed,
        rope_scaling=None if kind == "default" else tuple(sorted(kept.items())),
        max_position_embeddings=int(original if kind == "dynamic" else original * factor),
    )
    rope_frequencies(changed)
    return changed


def rope_frequencies(config: ModelConfig, num_positions: int = 0) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 `[head_dim / 2]` and the factor on cos and sin (1.0 except for yarn).

    Args:
        num_positions: of the whole sequence, those that it may still generate included. Only `dynamic` depends on it,
            where it exceeds `max_position_embeddings`.

    Raises:
        ValueError: unknown type, missing or invalid scaling parameter, odd `head_dim`.
    """
    kind = rope_type(config)
    scaling = config.rope_scaling_dict or {}
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} must be even for rotary embedding")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={scaling['partial_rotary_factor']!r} is not supported; it must be 1.0")
    wavelengths = _wavelengths(config, config.rope_theta)
    plain = np.float32(1) / wavelengths
    if kind == "default":
        return plain, 1.0
    if kind == "dynamic":
        return _dynamic(config, scaling, num_positions), 1.0
    if kind == "linear":
        return plain / np.float32(_positive(scaling, "factor")), 1.0
    if kind == "llama3":
        return _llama3(config, scaling, plain), 1.0
    return _yarn(config, scaling, wavelengths)


def rope_factor(config: ModelConfig) -> float:
    """The factor on cos and sin."""
    return rope_frequencies(config)[1]


def rope_cos_sin(
    positions: Int[Array, " num_tokens"],
    inv_freq: Float[np.ndarray | Array, "*rows half_head_dim"],
    attention_factor: float,
) -> tuple[Float[Array, "num_tokens head_dim"], Float[Array, "num_tokens head_dim"]]:
    """Cosines and sines in float32; the second half of `head_dim` repeats the first ("rotate half" convention).

    Args:
        inv_freq: for all tokens, or a row for each.
    """
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)
    angles = jnp.concatenate([angles, angles], axis=-1)
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def _wavelengths(config: ModelConfig, theta: float) -> np.ndarray:
    """theta ** (2i / head_dim), float32 `[head_dim / 2]`."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    return (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)


def _dynamic(config: ModelConfig, scaling: Mapping[str, object], num_positions: int) -> np.ndarray:
    """NTK-aware scaling with the least base that `num_positions` need: one base for the whole life of a sequence.

    transformers raises the base as the sequence grows and leaves the keys in its cache as they were, so queries and
    keys no longer turn by one angle for each position. Here the base is that of the length which the sequence may
    reach, from its first token on: logits are those of transformers for the whole sequence without a cache.
    """
    factor, limit = _positive(scaling, "factor"), config.max_position_embeddings
    stretch = np.float32(factor * max(num_positions, limit)) / np.float32(limit) - np.float32(factor - 1)
    power = np.float32(np.float64(stretch) ** (config.head_dim / (config.head_dim - 2)))
    return np.float32(1) / _wavelengths(config, float(np.float32(config.rope_theta) * power))


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

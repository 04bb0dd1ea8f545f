"""`ModelConfig` from and to the content of a Hugging Face `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.rope import rope_frequencies

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


def parse_config(raw: Mapping[str, Any], *, name: str, where: object) -> ModelConfig:
    """The config of a Llama model, or of a Mistral model without a sliding window, which is the same.

    RoPE is read from `rope_theta` and `rope_scaling` or, as transformers 5 writes it, from `rope_parameters`.
    Missing optional entries have the defaults of transformers' LlamaConfig. `retrieval_layers` is an entry of ours: the
    layers that stay dense unless the engine is told others (docs/accuracy.md).

    Raises:
        ValueError: another architecture, a feature that is not supported, a missing or impossible number.
    """
    kind = raw.get("model_type")
    if kind not in _ARCHITECTURES or raw.get("architectures") not in (None, [], [_ARCHITECTURES[kind]]):
        raise ValueError(
            f"{where}: model_type {kind!r} with architectures {raw.get('architectures')!r} is not supported; "
            f"supported are {', '.join(f'{a} ({b})' for a, b in _ARCHITECTURES.items())}"
        )
    _refuse_unsupported(raw, where)

    def number(key: str, default: int | None = None) -> int:
        value = default if raw.get(key) is None else raw[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{where}: {key}={value!r} must be an integer of at least 1")
        return value

    rope = _rope_entries(raw, where)
    theta = rope.pop("rope_theta", 10000.0)
    num_q_heads = number("num_attention_heads")
    hidden_size = number("hidden_size")
    if raw.get("head_dim") is None and hidden_size % num_q_heads:
        raise ValueError(
            f"{where}: hidden_size={hidden_size} is no multiple of num_attention_heads={num_q_heads}, and there is no "
            "head_dim"
        )
    try:
        config = ModelConfig(
            name=name,
            vocab_size=number("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=number("intermediate_size"),
            num_layers=number("num_hidden_layers"),
            num_q_heads=num_q_heads,
            num_kv_heads=number("num_key_value_heads", num_q_heads),
            head_dim=number("head_dim", hidden_size // num_q_heads),
            max_position_embeddings=number("max_position_embeddings", 2048),
            rms_norm_eps=_positive(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope_theta=_positive(theta, "rope_theta"),
            rope_scaling=_rope_items(rope),
            tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
            attention_bias=_flag(raw, "attention_bias"),
            mlp_bias=_flag(raw, "mlp_bias"),
            bos_token_id=(token_ids(raw.get("bos_token_id"), "bos_token_id") or (None,))[0],
            eos_token_ids=token_ids(raw.get("eos_token_id"), "eos_token_id"),
            retrieval_layers=_layers(raw.get("retrieval_layers"), number("num_hidden_layers")),
        )
        rope_frequencies(config)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return config


def config_to_dict(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The content of a `config.json` that every version of transformers and `parse_config` read."""
    ours = {"retrieval_layers": list(config.retrieval_layers)} if config.retrieval_layers else {}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_q_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": one_or_list(config.eos_token_ids),
        "torch_dtype": dtype,
        **ours,
    }


def token_ids(value: object, key: str) -> tuple[int, ...]:
    """An id, a list of ids or None as a tuple.

    Raises:
        ValueError: anything else, or a negative id.
    """
    listed: tuple[Any, ...] = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for token_id in listed:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ValueError(f"{key}={value!r} must be a token id, a list of token ids, or null")
    return listed


def one_or_list(ids: tuple[int, ...]) -> int | list[int] | None:
    """The inverse of `token_ids`."""
    return None if not ids else ids[0] if len(ids) == 1 else list(ids)


def _refuse_unsupported(raw: Mapping[str, Any], where: object) -> None:
    allowed = {
        "hidden_act": (None, "silu", "swish"),
        "sliding_window": (None,),
        "quantization_config": (None,),
        "partial_rotary_factor": (None, 1, 1.0),
    }
    for key, values in allowed.items():
        if raw.get(key) not in values:
            choices = " or ".join(sorted(set(map(repr, values))))
            raise ValueError(f"{where}: {key}={raw[key]!r} is not supported; it must be {choices}")


def _rope_entries(raw: Mapping[str, Any], where: object) -> dict[str, object]:
    """`rope_scaling` and `rope_parameters` in one, with `rope_theta` and, as in transformers, the original length."""
    rope: dict[str, object] = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    for key in ("rope_scaling", "rope_parameters"):
        entries = {} if raw.get(key) is None else raw[key]
        if not isinstance(entries, Mapping):
            raise ValueError(f"{where}: {key}={entries!r} must be an object")
        rope |= {name: value for name, value in entries.items() if value is not None}
    original = raw.get("original_max_position_embeddings")
    if original is not None and rope.get("rope_type", rope.get("type")) in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = original
    return rope


def _rope_items(rope: Mapping[str, object]) -> tuple[tuple[str, object], ...] | None:
    """None when nothing is scaled, so that equal models have equal configs."""
    if rope.get("rope_type", rope.get("type")) in (None, "default") and not set(rope) - {"rope_type", "type"}:
        return None
    for key, value in rope.items():
        if not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"rope scaling {key}={value!r} is not supported; it must be a number, text or boolean")
    return tuple(sorted(rope.items()))


def _layers(value: object, num_layers: int) -> tuple[int, ...]:
    listed = () if value is None else value
    if not isinstance(listed, (list, tuple)) or not all(
        isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < num_layers for layer in listed
    ):
        raise ValueError(f"retrieval_layers={value!r} must be a list of layers from 0 to {num_layers - 1}")
    return tuple(sorted(set(listed)))


def _positive(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key}={value!r} must be a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value not in (None, True, False):
        raise ValueError(f"{key}={value!r} must be true or false")
    return bool(value)

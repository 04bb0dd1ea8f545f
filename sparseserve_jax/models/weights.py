"""From a checkpoint's tensors to the parameters of `models.llama`, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from sparseserve_jax.models.config import ModelConfig


def load_params(config: ModelConfig, tensor: Callable[[str], np.ndarray], dtype: str) -> Any:
    """Parameters as a pytree: `embed_tokens`, `layers` (a list, one dict a layer), `norm`, `lm_head` unless tied.

    Args:
        tensor: reads one tensor by its Hugging Face name, e.g. `model.layers.0.mlp.up_proj.weight` `[out, in]`.
        dtype: of matrices; norms and biases are float32.
    """
    params = {
        "embed_tokens": _matrix(tensor("model.embed_tokens.weight"), dtype),
        "layers": [_layer(config, tensor, index, dtype) for index in range(config.num_layers)],
        "norm": {"scale": _vector(tensor("model.norm.weight"))},
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = _matrix(tensor("lm_head.weight"), dtype)
    return params


def _layer(config: ModelConfig, tensor: Callable[[str], np.ndarray], index: int, dtype: str) -> dict[str, Any]:
    prefix = f"model.layers.{index}"

    def projection(*names: str, bias: bool) -> dict[str, Any]:
        weight = np.concatenate([np.asarray(tensor(f"{prefix}.{name}.weight"), np.float32) for name in names])
        out = {"weight": _matrix(weight, dtype)}
        if bias:
            out["bias"] = _vector(
                np.concatenate([np.asarray(tensor(f"{prefix}.{name}.bias"), np.float32) for name in names])
            )
        return out

    attention = [f"self_attn.{name}_proj" for name in "qkv"]
    return {
        "input_layernorm": {"scale": _vector(tensor(f"{prefix}.input_layernorm.weight"))},
        "qkv_proj": projection(*attention, bias=config.attention_bias),
        "o_proj": projection("self_attn.o_proj", bias=config.attention_bias),
        "post_attention_layernorm": {"scale": _vector(tensor(f"{prefix}.post_attention_layernorm.weight"))},
        "gate_up_proj": projection("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias),
        "down_proj": projection("mlp.down_proj", bias=config.mlp_bias),
    }


def _matrix(values: np.ndarray, dtype: str) -> Any:
    return jnp.array(values, jnp.dtype(dtype))


def _vector(values: np.ndarray) -> Any:
    return jnp.array(np.asarray(values, np.float32))

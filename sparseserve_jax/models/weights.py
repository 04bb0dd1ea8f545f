"""From a checkpoint's tensors to the parameters of `models.llama`, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.linear import quantize_rows
from sparseserve_jax.models.config import ModelConfig


def load_params(
    config: ModelConfig, tensor: Callable[[str], np.ndarray], dtype: str, weight_dtype: str | None = None
) -> Any:
    """Parameters as a pytree: `embed_tokens`, `layers` (a list, one dict a layer), `norm`, `lm_head` unless tied.

    Args:
        tensor: reads one tensor by its Hugging Face name, e.g. `model.layers.0.mlp.up_proj.weight` `[out, in]`.
        dtype: of matrices; norms and biases are float32.
        weight_dtype: "int8" = matrices are int8 with a float32 scale for each row (`{"weight", "scale"}`), symmetric.
    """
    quantized = weight_dtype == "int8"

    def embedding(name: str) -> Any:
        matrix = _matrix(tensor(name), dtype, quantized=quantized)
        return matrix if quantized else matrix["weight"]

    params = {
        "embed_tokens": embedding("model.embed_tokens.weight"),
        "layers": [_layer(config, tensor, index, dtype, quantized=quantized) for index in range(config.num_layers)],
        "norm": {"scale": _vector(tensor("model.norm.weight"))},
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = embedding("lm_head.weight")
    return params


def _layer(
    config: ModelConfig, tensor: Callable[[str], np.ndarray], index: int, dtype: str, *, quantized: bool
) -> dict[str, Any]:
    prefix = f"model.layers.{index}"

    def projection(*names: str, bias: bool) -> dict[str, Any]:
        weight = np.concatenate([np.asarray(tensor(f"{prefix}.{name}.weight"), np.float32) for name in names])
        out = _matrix(weight, dtype, quantized=quantized)
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


def _matrix(values: np.ndarray, dtype: str, *, quantized: bool) -> dict[str, Any]:
    if not quantized:
        return {"weight": jnp.array(values, jnp.dtype(dtype))}
    weight, scales = quantize_rows(jnp.array(values, jnp.float32))
    return {"weight": weight, "scale": scales}


def _vector(values: np.ndarray) -> Any:
    return jnp.array(np.asarray(values, np.float32))

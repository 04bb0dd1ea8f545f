"""The Llama architecture as Flax modules, one decoder layer at a time.

Attention itself is a function handed in (`attend`): prefill and decode differ only there. Weights are stored in the
compute dtype, or as int8 with a scale for each row; residual and sums are float32. Parameter names follow Hugging Face;
q/k/v and gate/up are fused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.api import Kernels, get_kernels
from pallas_kernels.linear import activation_dtype
from sparseserve_jax.models.config import ModelConfig

MLP_TOKENS = 4096
"""Tokens that go through the MLP at a time: its activations are the largest temporary of a prefill call (3.8 GB for
32,768 tokens of Llama-3-8B), and this many keep every matrix product at full speed."""
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(q, k, v), each `[num_tokens, heads, head_dim]` -> (output `[num_tokens, num_q_heads, head_dim]`, anything)."""


class RMSNorm(nn.Module):
    """Root-mean-square layer norm (arXiv 1910.07467), in float32, rounded to `dtype`."""

    eps: float
    dtype: jnp.dtype
    kernels: Kernels

    @nn.compact
    def __call__(self, x: Float[Array, "num_tokens hidden"]) -> Float[Array, "num_tokens hidden"]:
        """Normalised x."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return self.kernels.rms_norm(x, scale, eps=self.eps, dtype=self.dtype)


class Projection(nn.Module):
    """A linear map with a weight `[out, in]` and, if that is int8, a scale for each of its rows."""

    features: int
    use_bias: bool
    weight_dtype: jnp.dtype
    kernels: Kernels

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "num_tokens in_features"],
        residual: Float[Array, "num_tokens out_features"] | None = None,
        gated: bool = False,
    ) -> Float[Array, "num_tokens features"]:
        """residual + x @ weight.T + bias in float32; if `gated`, silu of its first half times the second."""
        quantized = self.weight_dtype == jnp.int8
        init = nn.initializers.zeros if quantized else nn.initializers.lecun_normal(in_axis=1, out_axis=0)
        weight = self.param("weight", init, (self.features, x.shape[-1]), self.weight_dtype)
        scales = self.param("scale", nn.initializers.ones, (self.features,), jnp.float32) if quantized else None
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32) if self.use_bias else None
        return self.kernels.linear(x, weight, scales=scales, bias=bias, residual=residual, gated=gated)


class DecoderLayer(nn.Module):
    """Attention and gated MLP with pre-norms."""

    config: ModelConfig
    dtype: jnp.dtype
    weight_dtype: jnp.dtype
    kernels: Kernels

    @nn.compact
    def __call__(
        self,
        hidden: Float[Array, "num_tokens hidden"],
        cos: Float[Array, "num_tokens head_dim"],
        sin: Float[Array, "num_tokens head_dim"],
        attend: Attend,
    ) -> tuple[Float[Array, "num_tokens hidden"], Any]:
        """The layer's output (float32) and whatever `attend` returned besides."""
        c = self.config
        project = functools.partial(Projection, weight_dtype=self.weight_dtype, kernels=self.kernels)
        norm = functools.partial(RMSNorm, c.rms_norm_eps, self.dtype, self.kernels)
        num_tokens = hidden.shape[0]
        x = norm(name="input_layernorm")(hidden)
        width = (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim
        qkv = project(width, c.attention_bias, name="qkv_proj")(x)
        q, k, v = self.kernels.split_and_rotate(
            qkv, cos, sin, num_q_heads=c.num_q_heads, num_kv_heads=c.num_kv_heads, dtype=self.dtype
        )
        out, extra = attend(q, k, v)
        out = out.reshape(num_tokens, c.num_q_heads * c.head_dim)
        hidden = project(c.hidden_size, c.attention_bias, name="o_proj")(out, residual=hidden)
        x = norm(name="post_attention_layernorm")(hidden)
        gate_up = project(2 * c.intermediate_size, c.mlp_bias, name="gate_up_proj")
        down = project(c.hidden_size, c.mlp_bias, name="down_proj")

        if num_tokens <= MLP_TOKENS:
            return down(gate_up(x, gated=True), residual=hidden), extra
        parts = [x[start : start + MLP_TOKENS] for start in range(0, num_tokens, MLP_TOKENS)]
        return hidden + jnp.concatenate([down(gate_up(part, gated=True)) for part in parts]), extra


def run_layer(
    config: ModelConfig,
    dtype: str,
    layer_params: Any,
    hidden: Float[Array, "num_tokens hidden"],
    cos: Float[Array, "num_tokens head_dim"],
    sin: Float[Array, "num_tokens head_dim"],
    attend: Attend,
    *,
    kernels: Kernels,
) -> tuple[Float[Array, "num_tokens hidden"], Any]:
    """One `DecoderLayer` with explicit parameters: its output and whatever `attend` returned besides."""
    layer = DecoderLayer(config, jnp.dtype(dtype), layer_params["qkv_proj"]["weight"].dtype, kernels)
    return cast(tuple[Array, Any], layer.apply({"params": layer_params}, hidden, cos, sin, attend))


def embed(params: Any, token_ids: Int[Array, "num_tokens"]) -> Float[Array, "num_tokens hidden"]:
    """Token embeddings in float32 (the residual's dtype)."""
    weight, scales = _matrix(params["embed_tokens"])
    rows = jnp.take(weight, token_ids, axis=0, mode="clip").astype(jnp.float32)
    return rows if scales is None else rows * jnp.take(scales, token_ids, mode="clip")[:, None]


def unembed(
    config: ModelConfig, params: Any, hidden: Float[Array, "num_tokens hidden"], *, kernels: Kernels
) -> Float[Array, "num_tokens vocab"]:
    """Final norm and logits in float32."""
    weight, scales = _matrix(params["embed_tokens" if config.tie_word_embeddings else "lm_head"])
    norm = RMSNorm(config.rms_norm_eps, activation_dtype(weight.dtype), kernels)
    x = cast(Array, norm.apply({"params": params["norm"]}, hidden))
    return kernels.linear(x, weight, scales=scales)


def _matrix(param: Any) -> tuple[Array, Array | None]:
    """A matrix and the scales of its rows: int8 ones are a pair, others an array."""
    return (param["weight"], param["scale"]) if isinstance(param, Mapping) else (param, None)


def abstract_params(config: ModelConfig, dtype: str, weight_dtype: str | None = None) -> Any:
    """Shapes and dtypes of a model's parameters, as `weights.load_params` would load them; allocates nothing."""
    tokens = jax.ShapeDtypeStruct((1, config.hidden_size), jnp.float32)
    angles = jax.ShapeDtypeStruct((1, config.head_dim), jnp.float32)
    stored = jnp.dtype(weight_dtype or dtype)
    layer = DecoderLayer(config, jnp.dtype(dtype), stored, get_kernels("reference", "cpu"))

    def init(hidden: Array, cos: Array, sin: Array) -> Any:
        return layer.init(jax.random.key(0), hidden, cos, sin, lambda q, k, v: (q, None))["params"]

    layer_params = jax.eval_shape(init, tokens, angles, angles)
    matrix: Any = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), stored)
    if stored == jnp.int8:
        matrix = {"weight": matrix, "scale": jax.ShapeDtypeStruct((config.vocab_size,), jnp.float32)}
    params = {
        "embed_tokens": matrix,
        "layers": [layer_params] * config.num_layers,
        "norm": {"scale": jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)},
    }
    return params if config.tie_word_embeddings else params | {"lm_head": matrix}

"""The Llama architecture as Flax modules, one decoder layer at a time.

Attention itself is a function handed in (`attend`): prefill and decode differ only there. Weights are stored in the
compute dtype, residual and sums are float32. Parameter names follow Hugging Face; q/k/v and gate/up are fused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.rope import apply_rope

MLP_TOKENS = 4096
"""Tokens that go through the MLP at a time: its activations are the largest temporary of a prefill call (3.8 GB for
32,768 tokens of Llama-3-8B), and this many keep every matrix product at full speed."""
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(q, k, v), each `[num_tokens, heads, head_dim]` -> (output `[num_tokens, num_q_heads, head_dim]`, anything)."""


def matmul(x: Float[Array, "*rows in_features"], weight: Float[Array, "out_features in_features"]) -> Array:
    """x @ weight.T in the weight's dtype with float32 sums; float32 weights at full precision.

    `[out, in]`, as checkpoints have it: XLA's CPU backend runs small batches 1.6x faster this way round.
    """
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(weight.dtype), weight, dims, precision=precision, preferred_element_type=jnp.float32
    )


class RMSNorm(nn.Module):
    """Root-mean-square layer norm (arXiv 1910.07467), in float32."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        """Normalised x in float32."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps) * scale.astype(jnp.float32)


class Projection(nn.Module):
    """A linear map with a weight `[out, in]`, computed in the weight's dtype with float32 sums."""

    features: int
    use_bias: bool
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: Float[Array, "*rows in_features"]) -> Float[Array, "*rows out_features"]:
        """x @ weight.T + bias in float32."""
        shape = (self.features, x.shape[-1])
        out = matmul(x, self.param("weight", nn.initializers.lecun_normal(in_axis=1, out_axis=0), shape, self.dtype))
        if self.use_bias:
            out = out + self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return out


class DecoderLayer(nn.Module):
    """Attention and gated MLP with pre-norms."""

    config: ModelConfig
    dtype: jnp.dtype

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
        num_tokens = hidden.shape[0]
        x = RMSNorm(c.rms_norm_eps, name="input_layernorm")(hidden)
        width = (c.num_q_heads + 2 * c.num_kv_heads) * c.head_dim
        qkv = Projection(width, c.attention_bias, self.dtype, name="qkv_proj")(x)
        qkv = qkv.reshape(num_tokens, -1, c.head_dim)
        q, k, v = jnp.split(qkv, (c.num_q_heads, c.num_q_heads + c.num_kv_heads), axis=1)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out, extra = attend(q.astype(self.dtype), k.astype(self.dtype), v.astype(self.dtype))
        out = out.reshape(num_tokens, c.num_q_heads * c.head_dim)
        hidden = hidden + Projection(c.hidden_size, c.attention_bias, self.dtype, name="o_proj")(out)
        x = RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(hidden)
        gate_up = Projection(2 * c.intermediate_size, c.mlp_bias, self.dtype, name="gate_up_proj")
        down = Projection(c.hidden_size, c.mlp_bias, self.dtype, name="down_proj")

        def mlp(x: Array) -> Array:
            gate, up = jnp.split(gate_up(x), 2, axis=-1)
            return down(jax.nn.silu(gate) * up)

        parts = [mlp(x[start : start + MLP_TOKENS]) for start in range(0, num_tokens, MLP_TOKENS)]
        return hidden + (parts[0] if len(parts) == 1 else jnp.concatenate(parts)), extra


def run_layer(
    config: ModelConfig,
    dtype: str,
    layer_params: Any,
    hidden: Float[Array, "num_tokens hidden"],
    cos: Float[Array, "num_tokens head_dim"],
    sin: Float[Array, "num_tokens head_dim"],
    attend: Attend,
) -> tuple[Float[Array, "num_tokens hidden"], Any]:
    """One `DecoderLayer` with explicit parameters: its output and whatever `attend` returned besides."""
    layer = DecoderLayer(config, jnp.dtype(dtype))
    return cast(tuple[Array, Any], layer.apply({"params": layer_params}, hidden, cos, sin, attend))


def embed(params: Any, token_ids: Int[Array, "num_tokens"]) -> Float[Array, "num_tokens hidden"]:
    """Token embeddings in float32 (the residual's dtype)."""
    return jnp.take(params["embed_tokens"], token_ids, axis=0, mode="clip").astype(jnp.float32)


def unembed(
    config: ModelConfig, params: Any, hidden: Float[Array, "num_tokens hidden"]
) -> Float[Array, "num_tokens vocab"]:
    """Final norm and logits in float32."""
    x = cast(Array, RMSNorm(config.rms_norm_eps).apply({"params": params["norm"]}, hidden))
    return matmul(x, params["embed_tokens"] if config.tie_word_embeddings else params["lm_head"])


def abstract_params(config: ModelConfig, dtype: str) -> Any:
    """Shapes and dtypes of a model's parameters, as `weights.load_params` would load them; allocates nothing."""
    tokens = jax.ShapeDtypeStruct((1, config.hidden_size), jnp.float32)
    angles = jax.ShapeDtypeStruct((1, config.head_dim), jnp.float32)
    layer = DecoderLayer(config, jnp.dtype(dtype))

    def init(hidden: Array, cos: Array, sin: Array) -> Any:
        return layer.init(jax.random.key(0), hidden, cos, sin, lambda q, k, v: (q, None))["params"]

    layer_params = jax.eval_shape(init, tokens, angles, angles)
    matrix = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), jnp.dtype(dtype))
    params = {
        "embed_tokens": matrix,
        "layers": [layer_params] * config.num_layers,
        "norm": {"scale": jax.ShapeDtypeStruct((config.hidden_size,), jnp.float32)},
    }
    return params if config.tie_word_embeddings else params | {"lm_head": matrix}

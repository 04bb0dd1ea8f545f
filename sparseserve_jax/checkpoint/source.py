"""What every checkpoint format offers: `CheckpointSource`. Tensors are read one at a time, when asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from sparseserve_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The spellings a chat template sees as `bos_token` and `eos_token`; None = the model has none."""

    bos_token: str | None = None
    eos_token: str | None = None


class CheckpointSource(Protocol):
    """An opened checkpoint. Opening checks names and shapes of all tensors; values are read by `tensor`."""

    @property
    def path(self) -> Path:
        """The file or directory it was opened from."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's numbers; `eos_token_ids` is the union of what the checkpoint's files name."""
        ...

    @property
    def tokenizer_json(self) -> str:
        """The tokenizer as the content of a `tokenizer.json`."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source, or None."""
        ...

    @property
    def special(self) -> SpecialTokens:
        """BOS and EOS as text."""
        ...

    def tensor_names(self) -> tuple[str, ...]:
        """Hugging Face names of the model's tensors, exactly the keys of `expected_shapes(config)`."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """One tensor: bfloat16, float16 or float32 as stored; quantised ones as float32. The caller's to keep.

        Raises:
            ValueError: no such tensor, or its bytes cannot be read; names the file.
        """
        ...

    def describe(self) -> str:
        """One line for people: name, format, number of parameters, path."""
        ...


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of a Llama model, without `lm_head.weight` when it is tied."""
    hidden, width, inner = config.hidden_size, config.num_q_heads * config.head_dim, config.intermediate_size
    kv_width = config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (width, hidden), "self_attn.k_proj": (kv_width, hidden),
        "self_attn.v_proj": (kv_width, hidden), "self_attn.o_proj": (hidden, width),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_shapes(where: object, config: ModelConfig, found: Mapping[str, Sequence[int]]) -> None:
    """Compares the tensors of a checkpoint with what `config` calls for.

    Raises:
        ValueError: a tensor is missing, surplus, or of another shape; names it and `where` it should be.
    """
    expected = expected_shapes(config)
    missing = [name for name in expected if name not in found]
    if "lm_head.weight" in missing:
        raise ValueError(
            f"{where}: tensor 'lm_head.weight' is missing and tie_word_embeddings is false; the checkpoint is "
            "incomplete (set tie_word_embeddings to true in config.json only if the model was trained so)"
        )
    if missing:
        raise ValueError(f"{where}: tensor {missing[0]!r} is missing ({len(missing)} missing in all)")
    surplus = [name for name in found if name not in expected]
    if surplus:
        raise ValueError(
            f"{where}: tensor {surplus[0]!r} does not belong to a Llama model with this config "
            f"({len(surplus)} such tensors); the architecture is not supported"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"{where}: tensor {name!r} has shape {tuple(found[name])}, the config calls for {shape}")


def num_parameters(config: ModelConfig) -> int:
    """Parameters of the model; a tied embedding counts once."""
    return sum(int(np.prod(shape)) for shape in expected_shapes(config).values())


def describe_source(config: ModelConfig, kind: str, path: Path) -> str:
    """The line of `CheckpointSource.describe`."""
    return f"{config.name}: {kind}, {num_parameters(config) / 1e6:.1f} M parameters, {path}"

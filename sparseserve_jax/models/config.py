"""`ModelConfig`: the numbers of a Llama-architecture model, as in a Hugging Face `config.json`. No JAX here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sparseserve_jax.cache.layout import KVShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Field names follow Hugging Face's LlamaConfig where one exists (`num_q_heads` = `num_attention_heads`)."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, object], ...] | None = None
    """The `rope_scaling` mapping as sorted items (hashable), or None."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    retrieval_layers: tuple[int, ...] = ()
    """Layers that were found to copy text from afar, if that is known of the model."""

    def __post_init__(self) -> None:
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"num_q_heads={self.num_q_heads} must be a multiple of num_kv_heads={self.num_kv_heads} (query groups)"
            )

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def kv_shape(self) -> KVShape:
        """What the KV layout depends on."""
        return KVShape(
            num_layers=self.num_layers,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            retrieval_layers=self.retrieval_layers,
        )

    @property
    def rope_scaling_dict(self) -> Mapping[str, object] | None:
        """`rope_scaling` as a mapping."""
        return None if self.rope_scaling is None else dict(self.rope_scaling)

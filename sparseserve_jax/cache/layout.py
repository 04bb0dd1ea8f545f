"""How KV bytes become blocks: sizes of both tiers, their split, and the errors when a budget is too small. No JAX.

A *piece* is one block of one layer and one KV head, K and V together (16 KiB at block 32, head_dim 128, bf16).
A *block* id stands for the pieces of all layers and heads of the same tokens; a device *slot* id likewise for all
sparse layers (what a slot holds differs by layer and head).
"""

from __future__ import annotations

import dataclasses

from sparseserve_jax.config import EngineConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
MAX_PACKED_PROMPTS = 8
"""Prompts that share one prefill call at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVShape:
    """The numbers of the model that the KV layout depends on."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Sizes in force. All block counts exclude the null block 0 that every pool has besides.

    Attributes:
        num_dense_layers: layers that attend to everything (all of them when no budget is set).
        selection_blocks: blocks of one selection per KV head (budget; union over the query group for per-query-head).
        num_blocks: blocks of the tier that holds every sequence whole (host tier if tiered, else the only pool).
        num_slots: device slots of the sparse layers (tiered), else 0.
        num_dense_blocks: device blocks of the dense layers (tiered), else 0.
        num_staging_blocks: device blocks that hold one layer of a prompt during prefill (tiered), else 0.
        max_blocks_per_seq: blocks of a sequence of max_model_len tokens.
        min_grant_slots / max_grant_slots: bounds of one request's grant of slots.
        device_bytes: bytes of all device KV arrays (pools, digests, staging, null blocks).
        host_bytes: bytes of the host pools, null blocks included; 0 if unified.
    """

    block_size: int
    num_layers: int
    num_dense_layers: int
    num_kv_heads: int
    head_dim: int
    piece_bytes: int
    tiered: bool
    max_model_len: int
    max_num_seqs: int
    selection_blocks: int
    num_blocks: int
    num_slots: int
    num_dense_blocks: int
    num_staging_blocks: int
    max_blocks_per_seq: int
    min_grant_slots: int
    max_grant_slots: int
    device_bytes: int
    host_bytes: int

    @property
    def num_sparse_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

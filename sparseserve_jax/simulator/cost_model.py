"""Seconds of one iteration's parts, from FLOPs and bytes (roofline)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sparseserve_jax.cache.layout import KVLayout
from sparseserve_jax.plan import PrefillSegment


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """A machine and a model.

    Attributes:
        num_params: weights; each is read once per decode step and prefill call, and costs 2 FLOPs per token.
        weight_bytes: bytes of all weights.
        flops_per_s / hbm_bytes_per_s: peak.
        load_bytes_per_s: host to device in blocks (FlashH2D, figure 4: over 20 GB/s).
        compute_share / bandwidth_share: of peak that is reached; assumptions.
        step_overhead_s: launch and host work of an iteration; an assumption.
    """

    num_layers: int
    num_q_heads: int
    head_dim: int
    num_params: float
    weight_bytes: float
    flops_per_s: float
    hbm_bytes_per_s: float
    load_bytes_per_s: float
    compute_share: float = 0.55
    bandwidth_share: float = 0.8
    step_overhead_s: float = 0.002

    @classmethod
    def a100_llama3_8b(cls) -> CostModel:
        """Llama-3-8B in bf16 on an A100 40 GB with PCIe 4 x16 (the paper's machine)."""
        return cls._a100(num_params=8.03e9)

    @classmethod
    def a100_lwm_7b(cls) -> CostModel:
        """LWM-Text-7B (the shape of Llama-2-7B) in bf16 on an A100 40 GB with PCIe 4 x16."""
        return cls._a100(num_params=6.74e9)

    @classmethod
    def _a100(cls, num_params: float) -> CostModel:
        return cls(
            num_layers=32, num_q_heads=32, head_dim=128, num_params=num_params, weight_bytes=2 * num_params,
            flops_per_s=312e12, hbm_bytes_per_s=1555e9, load_bytes_per_s=20e9,
        )  # fmt: skip

    def prefill_s(self, segments: Sequence[PrefillSegment]) -> float:
        """Prefill calls: linear layers and causal attention to all earlier tokens; at least one read of the weights."""
        seconds = 0.0
        for segment in segments:
            pairs = sum((item.end**2 - item.start**2) / 2 for item in segment.items)
            linear = 2 * self.num_params / self.num_layers * segment.num_tokens
            attention = 4 * self.num_q_heads * self.head_dim * pairs
            compute = (linear + attention) / (self.flops_per_s * self.compute_share)
            num_layers = segment.layer_end - segment.layer_start
            seconds += num_layers * max(compute, self._read_s(self.weight_bytes / self.num_layers))
        return seconds

    def decode_s(self, layout: KVLayout, context_blocks: Sequence[int]) -> float:
        """One decode step: all weights, each sequence's digests, selected blocks and dense layers."""
        if not context_blocks:
            return 0.0
        piece = layout.piece_bytes * layout.num_kv_heads
        num_bytes = self.weight_bytes
        for blocks in context_blocks:
            attended = min(blocks, layout.selection_blocks)
            digests = blocks * piece / layout.block_size  # two vectors for every 2 x block_size of the block
            num_bytes += layout.num_sparse_layers * (attended * piece + digests)
            num_bytes += layout.num_dense_layers * blocks * piece
        return self._read_s(num_bytes)

    def load_s(self, num_bytes: float) -> float:
        """Blocks from the host; on the critical path (no prefetch)."""
        return num_bytes / self.load_bytes_per_s

    def _read_s(self, num_bytes: float) -> float:
        return num_bytes / (self.hbm_bytes_per_s * self.bandwidth_share)

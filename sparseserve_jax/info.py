"""What is in force: backend, dtypes, tiers in bytes and blocks, the budget in tokens and blocks. Nothing is silent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from sparseserve_jax.cache.layout import KVLayout, choose_dense_layers
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.rope import rope_type

if TYPE_CHECKING:
    from sparseserve_jax.runner.model_runner import ModelRunner


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Facts of a running engine, as data (`to_dict`) and as lines for people."""

    model: str
    model_config: ModelConfig
    config: EngineConfig
    layout: KVLayout
    platform: str
    device: str
    jax_version: str
    implementation: str
    compilation_cache: str | None
    device_kv_bytes: int
    host_kv_bytes: int
    table_bytes: int
    weight_bytes: int
    huge_page_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """One line a topic."""
        c, kv, m = self.config, self.layout, self.model_config
        return [
            f"model          {self.model}: {m.num_layers} layers, {m.num_q_heads} query / {m.num_kv_heads} KV heads, "
            f"head_dim {m.head_dim}, {self.weight_bytes / 2**20:.0f} MiB of weights in {c.weight_dtype or c.dtype}"
            f"{self._huge_pages()}",
            f"backend        {self.platform} ({self.device}), jax {self.jax_version}, kernels: {self.implementation}",
            f"limits         max_model_len {kv.max_model_len} tokens, max_num_seqs {kv.max_num_seqs}{self._rotary()}",
            f"attention      {self._attention()}",
            f"prefill        {self._prefill()}",
            f"device KV      {self.device_kv_bytes} bytes ({self.device_kv_bytes / 2**20:.1f} MiB): {self._device()}",
            f"host KV        {self._host()}",
            f"batch control  {self._batch_control()}",
            f"compile cache  {self.compilation_cache or 'off'}",
        ]

    def _huge_pages(self) -> str:
        return f", {self.huge_page_bytes / 2**20:.0f} MiB of them in huge pages" if self.huge_page_bytes else ""

    def _rotary(self) -> str:
        scaling = self.model_config.rope_scaling_dict
        if scaling is None:
            return ""
        whose = "the checkpoint's" if self.config.rope_scaling is None else "as configured"
        factor = f" {scaling['factor']:g}" if isinstance(scaling.get("factor"), (int, float)) else ""
        return f", rotary scaling {rope_type(self.model_config)}{factor} ({whose})"

    def _attention(self) -> str:
        c, kv = self.config, self.layout
        if c.sparse_budget_tokens is None:
            return "dense in every layer (sparse_budget_tokens=None)"
        return (
            f"budget {c.sparse_budget_tokens} tokens = {c.sparse_budget_blocks} blocks of {kv.block_size}, "
            f"{c.selection} per {c.selection_granularity.replace('_', ' ')}, {c.num_sink_blocks} sink + "
            f"{c.num_newest_blocks} newest; dense layers: {_listed(kv.dense_layers)} of {kv.num_layers}{self._extra()}"
        )

    def _extra(self) -> str:
        _, *others = self.config.decode_settings
        return f"; a request may choose {', '.join(map(str, others))}" if others else ""

    def _prefill(self) -> str:
        c = self.config
        inject = c.max_inject_tokens or 2048 * self.layout.num_layers
        how = "layer-segmented" if c.prefill == "layer" else "chunked"
        if c.prefill_sparsity is None:
            attention = "dense attention"
        else:
            attention = (
                f"attention to {c.prefill_sparsity:g} of its estimated mass, dense in layers "
                f"{_listed(choose_dense_layers(c, self.model_config.kv_shape))} and up to "
                f"{c.sparse_budget_tokens or 0} tokens"
            )
        return (
            f"{how}, {inject} token-layers beside a decode step, calls of up to {c.max_num_batched_tokens} tokens; "
            f"{attention}"
        )

    def _device(self) -> str:
        kv = self.layout
        if not kv.tiered:
            scaled = " and a scale for K and V of each block and head" if self.config.kv_dtype else ""
            stored = self.config.kv_dtype or self.config.dtype
            return f"one pool of {kv.num_blocks} blocks x {kv.num_layers} layers, {stored}{scaled}"
        return (
            f"{kv.num_slots} slots x {kv.num_sparse_layers} sparse layers, {kv.num_dense_blocks} blocks x "
            f"{kv.num_dense_layers} dense layers, digests of {kv.num_blocks} blocks, {kv.num_staging_blocks} staging "
            "blocks"
        )

    def _host(self) -> str:
        kv = self.layout
        if not kv.tiered:
            return "none (unified: device and host are one pool)"
        mib = self.host_kv_bytes / 2**20
        return f"{self.host_kv_bytes} bytes ({mib:.1f} MiB, pinned): {kv.num_blocks} blocks x {kv.num_layers} layers"

    def _batch_control(self) -> str:
        c, kv = self.config, self.layout
        if not kv.tiered:
            return "none needed (unified: every block is resident)"
        if c.batch_control == "none":
            return "none (first come, first served; the ablation)"
        return (
            f"working sets of the last {c.working_set_window} steps (Algorithm 1), grants of {kv.min_grant_slots} to "
            f"{kv.max_grant_slots} slots"
        )


def describe_engine(
    config: EngineConfig, model_name: str, model_config: ModelConfig, implementation: str, cache: str | None,
    device: jax.Device, runner: ModelRunner,
) -> EngineInfo:  # fmt: skip
    """Reads the facts off a built engine (bytes are those of the arrays, not of the plan)."""
    return EngineInfo(
        model=model_name,
        model_config=model_config,
        config=config,
        layout=runner.layout,
        platform=device.platform,
        device=device.device_kind,
        jax_version=jax.__version__,
        implementation=implementation,
        compilation_cache=cache,
        device_kv_bytes=runner.device_kv_bytes(),
        host_kv_bytes=runner.host_kv_bytes(),
        table_bytes=runner.table_bytes(),
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(runner.params)),
        huge_page_bytes=runner.huge_page_bytes,
    )


def _listed(layers: tuple[int, ...]) -> str:
    """`0-3, 7`; `none`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown) or "none"

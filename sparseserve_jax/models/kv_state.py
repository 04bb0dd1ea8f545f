"""`KVState`: every KV array of the device as one pytree (donated and rebound at each call), and `StepSpec`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Num

from pallas_kernels.api import Kernels
from pallas_kernels.storage import storage_dtype
from sparseserve_jax.cache.layout import KVLayout, choose_dense_layers
from sparseserve_jax.config import DecodeSetting, EngineConfig
from sparseserve_jax.models.config import ModelConfig

NEVER = -(2**30)
"""`last_selected` of a block that was never selected."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """What is fixed for the life of an engine: the static argument of every jitted step.

    A decode step has one for each `DecodeSetting`; prefill runs with that of the engine's own.
    """

    model: ModelConfig
    layout: KVLayout
    dtype: str
    selection: str
    digest_methods: tuple[str, ...]
    """Methods whose digests are kept; `selection` is one of them."""
    per_query_head: bool
    num_sink_blocks: int
    num_newest_blocks: int
    working_set_window: int
    record_selection: bool
    budget_blocks: int
    """Blocks that one selection head chooses; those of the longest sequence when that is everything."""
    kernels: Kernels
    prefill_sparsity: float | None = None
    """Share of attention that sparse prefill keeps; None = dense."""
    prefill_dense_layers: tuple[int, ...] = ()
    """Layers whose prefill is always dense."""
    prefill_dense_tokens: int = 0
    """Prompt tokens up to here attend to everything."""

    def prefills_sparsely(self, layer: int, longest_end: int) -> bool:
        """Whether a call whose tokens reach up to position `longest_end` attends to selected keys only in this layer.

        Where all of its tokens are dense anyway, choosing keys would cost a tenth of a short prompt's time for nothing.
        """
        if self.prefill_sparsity is None or layer in self.prefill_dense_layers:
            return False
        return longest_end > self.prefill_dense_tokens

    @property
    def selection_blocks(self) -> int:
        """Blocks of one selection per KV head: the budget, or the union over its query heads."""
        heads = self.model.group_size if self.per_query_head else 1
        return min(heads * self.budget_blocks, self.layout.max_blocks_per_seq)

    @property
    def first_digest(self) -> int:
        """Place in `KVState.digests` of the first sparse layer's digests by `selection`."""
        return self.digest_methods.index(self.selection) * self.layout.num_sparse_layers

    @property
    def scale(self) -> float:
        """Of attention scores: 1 / sqrt(head_dim)."""
        return self.model.head_dim**-0.5


def make_spec(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, kernels: Kernels, setting: DecodeSetting | None = None
) -> StepSpec:
    """The spec of an engine; `setting` = None: of its own decode setting."""
    setting = setting or config.decode_settings[0]
    budget_tokens = setting.sparse_budget_tokens
    max_blocks = layout.max_blocks_per_seq
    return StepSpec(
        model=model,
        layout=layout,
        dtype=config.dtype,
        selection=setting.selection,
        digest_methods=config.digest_methods,
        per_query_head=config.selection_granularity == "query_head",
        num_sink_blocks=config.num_sink_blocks,
        num_newest_blocks=config.num_newest_blocks,
        working_set_window=config.working_set_window,
        record_selection=config.record_selection,
        budget_blocks=max_blocks if budget_tokens is None else min(budget_tokens // config.block_size, max_blocks),
        kernels=kernels,
        prefill_sparsity=config.prefill_sparsity,
        prefill_dense_layers=choose_dense_layers(config, model.kv_shape),
        prefill_dense_tokens=config.sparse_budget_tokens or 0,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVState:
    """Device KV of all layers.

    Attributes:
        pools: per layer. Unified: `num_blocks + 1` blocks. Tiered: `num_dense_blocks + 1` (dense layers) or
            `num_slots + 1` (sparse layers).
        scales: per layer, int8 pools only: of K and V of each (block, head); see `pallas_kernels.quantise`.
        digests: (centre, radius) by block id of the tier that holds the whole sequence: of every sparse layer by the
            first of `StepSpec.digest_methods`, then of every sparse layer by the next.
        resident: per sparse layer, tiered only: logical block in each slot of a sequence's grant, -1 = empty.
        last_selected: per sparse layer: the position of the query that last selected a block; NEVER = not yet.
            Rows of both tables are the scheduler's; the last row is for padding.
    """

    pools: tuple[Num[Array, "_ num_kv_heads 2 block_size head_dim"], ...]
    scales: tuple[Float32[Array, "_ num_kv_heads 2"], ...]
    digests: tuple[Num[Array, "num_blocks num_kv_heads 2 head_dim"], ...]
    resident: tuple[Int[Array, "num_rows num_kv_heads max_slots"], ...]
    last_selected: tuple[Int[Array, "num_rows num_kv_heads max_blocks"], ...]


def pool_shape(layout: KVLayout, num_blocks: int) -> tuple[int, int, int, int, int]:
    """Shape of a pool of `num_blocks` blocks and the null block."""
    return (num_blocks + 1, layout.num_kv_heads, 2, layout.block_size, layout.head_dim)


def allocate_kv_state(layout: KVLayout, config: EngineConfig, kernels: Kernels, platform: str) -> KVState:
    """Zeroed pools and empty tables, all that the engine will ever allocate for KV on the device."""
    stored = storage_dtype(jnp.dtype(config.dtype), platform)
    pool_dtype = jnp.dtype(config.kv_dtype) if config.kv_dtype else stored
    sizes = [layout.num_blocks] * layout.num_layers
    if layout.tiered:
        sizes = [layout.num_slots] * layout.num_layers
        for layer in layout.dense_layers:
            sizes[layer] = layout.num_dense_blocks
    sparse = range(layout.num_sparse_layers)
    rows, heads = layout.max_num_seqs + 1, layout.num_kv_heads
    return KVState(
        pools=tuple(kernels.zeros(pool_shape(layout, size), pool_dtype) for size in sizes),
        scales=tuple(jnp.zeros((size + 1, heads, 2), jnp.float32) for size in sizes if config.kv_dtype),
        digests=tuple(
            kernels.zeros((layout.num_blocks + 1, heads, 2, layout.head_dim), stored)
            for _ in config.digest_methods
            for _ in sparse
        ),
        resident=tuple(jnp.full((rows, heads, layout.max_grant_slots), -1, jnp.int32) for _ in sparse if layout.tiered),
        last_selected=tuple(jnp.full((rows, heads, layout.max_blocks_per_seq), NEVER, jnp.int32) for _ in sparse),
    )

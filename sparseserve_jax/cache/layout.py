"""How KV bytes become blocks: sizes of both tiers, their split, and the errors when a budget is too small. No JAX.

A *piece* is one block of one layer and one KV head, K and V together (16 KiB at block 32, head_dim 128, bf16), with
its two scales if KV is int8.
A *block* id stands for the pieces of all layers and heads of the same tokens; a device *slot* id likewise for all
sparse layers (what a slot holds differs by layer and head).
"""

from __future__ import annotations

import dataclasses

from sparseserve_jax.config import EngineConfig

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
SCALE_BYTES = 4
"""Of K or V of an int8 piece."""
NUM_FIRST_DENSE_LAYERS = 2
"""Dense layers where nothing is known of a model and nothing is configured (Quest keeps the first two dense, too)."""
MAX_PACKED_PROMPTS = 8
"""Prompts that share one prefill call at most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVShape:
    """The numbers of the model that the KV layout depends on."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    retrieval_layers: tuple[int, ...] = ()
    """Layers that are known to copy text from afar, which a budget harms most."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVLayout:
    """Sizes in force. All block counts exclude the null block 0 that every pool has besides.

    Attributes:
        dense_layers: layers that attend to everything (all of them when no budget is set), ascending.
        selection_blocks: blocks of one selection per KV head (budget; union over the query group for per-query-head);
            0 without a sparse layer.
        num_blocks: blocks of the tier that holds every sequence whole (host tier if tiered, else the only pool).
        num_slots: device slots of the sparse layers (tiered), else 0.
        num_dense_blocks: device blocks of the dense layers (tiered), else 0.
        num_staging_blocks: device blocks that hold one layer of a prompt during prefill (tiered), else 0.
        max_blocks_per_seq: blocks of a sequence of max_model_len tokens.
        min_grant_slots / max_grant_slots: bounds of one request's grant of slots.
        device_bytes: bytes of all device KV arrays (pools, scales, digests, staging, null blocks).
        host_bytes: bytes of the host pools, null blocks included; 0 if unified.
    """

    block_size: int
    num_layers: int
    dense_layers: tuple[int, ...]
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
    def num_dense_layers(self) -> int:
        """Layers that attend to everything."""
        return len(self.dense_layers)

    @property
    def num_sparse_layers(self) -> int:
        """Layers that select blocks."""
        return self.num_layers - self.num_dense_layers

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers that select blocks, ascending: what per-sparse-layer arrays are indexed by."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.dense_layers)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def choose_dense_layers(config: EngineConfig, shape: KVShape) -> tuple[int, ...]:
    """The layers that attend to everything also when a budget is set, ascending.

    Raises:
        ValueError: the config names a layer that the model does not have.
    """
    if config.dense_layers is not None:
        if config.dense_layers and config.dense_layers[-1] >= shape.num_layers:
            raise ValueError(
                f"dense_layers names layer {config.dense_layers[-1]}, but the model has layers 0 to "
                f"{shape.num_layers - 1}; leave it out"
            )
        return config.dense_layers
    if config.num_dense_layers is None and shape.retrieval_layers:
        return shape.retrieval_layers
    first = NUM_FIRST_DENSE_LAYERS if config.num_dense_layers is None else config.num_dense_layers
    return tuple(range(min(first, shape.num_layers)))


def plan_layout(
    config: EngineConfig,
    shape: KVShape,
    *,
    model_max_len: int,
    available_device_bytes: int,
    available_host_bytes: int,
) -> KVLayout:
    """Turns budgets into block counts.

    Args:
        model_max_len: the longest sequence the model supports, tokens.
        available_device_bytes / available_host_bytes: bytes that may be used where the config names no budget.

    Raises:
        ValueError: a budget is too small for one sequence or one working set, or max_model_len is over the model's
            limit; the message names the value, the bound and what to change.
    """
    max_model_len = model_max_len if config.max_model_len is None else config.max_model_len
    if max_model_len > model_max_len:
        raise ValueError(
            f"max_model_len={max_model_len} exceeds the model's limit of {model_max_len} positions; lower max_model_len"
        )
    if config.kv_tiers == "unified":
        return _plan_unified(config, shape, max_model_len, available_device_bytes)
    return _plan_tiered(config, shape, max_model_len, available_device_bytes, available_host_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Byte sizes and counts that both modes share."""

    piece_bytes: int
    layer_block_bytes: int
    layer_digest_bytes: int
    dense_layers: tuple[int, ...]
    num_sparse_layers: int
    selection_blocks: int
    max_blocks: int

    @property
    def num_dense_layers(self) -> int:
        return len(self.dense_layers)


def _sizes(config: EngineConfig, shape: KVShape, max_model_len: int) -> _Sizes:
    values = 2 * config.block_size * shape.head_dim
    piece_bytes = values * DTYPE_BYTES[config.kv_dtype or config.dtype] + (2 * SCALE_BYTES if config.kv_dtype else 0)
    max_blocks = -(-max_model_len // config.block_size)
    budget = config.sparse_budget_blocks
    chosen = choose_dense_layers(config, shape)
    dense_layers = tuple(range(shape.num_layers)) if budget is None else chosen
    num_sparse_layers = shape.num_layers - len(dense_layers)
    group = shape.num_q_heads // shape.num_kv_heads if config.selection_granularity == "query_head" else 1
    return _Sizes(
        piece_bytes=piece_bytes,
        layer_block_bytes=shape.num_kv_heads * piece_bytes,
        layer_digest_bytes=len(config.digest_methods)
        * shape.num_kv_heads
        * 2
        * shape.head_dim
        * DTYPE_BYTES[config.dtype],
        dense_layers=dense_layers,
        num_sparse_layers=num_sparse_layers,
        selection_blocks=0 if budget is None or not num_sparse_layers else min(budget * group, max_blocks),
        max_blocks=max_blocks,
    )


def _plan_unified(config: EngineConfig, shape: KVShape, max_model_len: int, available: int) -> KVLayout:
    sizes = _sizes(config, shape, max_model_len)
    per_block = shape.num_layers * sizes.layer_block_bytes + sizes.num_sparse_layers * sizes.layer_digest_bytes
    budget = available if config.device_kv_bytes is None else config.device_kv_bytes
    num_blocks = min(budget // per_block - 1, config.max_num_seqs * sizes.max_blocks)
    if num_blocks < sizes.max_blocks:
        if config.max_model_len is not None or num_blocks < 1:
            raise ValueError(
                f"device_kv_bytes={budget} holds {max(0, num_blocks)} KV blocks of {config.block_size} tokens, but one "
                f"sequence of max_model_len={max_model_len} needs {sizes.max_blocks}; raise device_kv_bytes to at "
                f"least {(sizes.max_blocks + 1) * per_block} or lower max_model_len"
            )
        max_model_len = num_blocks * config.block_size
        sizes = _sizes(config, shape, max_model_len)
    return _layout(
        config, shape, sizes, max_model_len,
        num_blocks=num_blocks, num_slots=0, num_dense_blocks=0, num_staging_blocks=0,
        device_bytes=(num_blocks + 1) * per_block, host_bytes=0,
    )  # fmt: skip


def _plan_tiered(
    config: EngineConfig, shape: KVShape, max_model_len: int, available_device: int, available_host: int
) -> KVLayout:
    sizes = _sizes(config, shape, max_model_len)
    host_block_bytes = shape.num_layers * sizes.layer_block_bytes
    host_budget = available_host if config.host_kv_bytes is None else config.host_kv_bytes
    num_blocks = min(host_budget // host_block_bytes - 1, config.max_num_seqs * sizes.max_blocks)
    if num_blocks < 1 or (config.max_model_len is not None and num_blocks < sizes.max_blocks):
        raise ValueError(
            f"host_kv_bytes={host_budget} holds {max(0, num_blocks)} KV blocks of {config.block_size} tokens, but one "
            f"sequence of max_model_len={max_model_len} needs {sizes.max_blocks}; raise host_kv_bytes to at least "
            f"{(sizes.max_blocks + 1) * host_block_bytes} or lower max_model_len"
        )
    if num_blocks < sizes.max_blocks:
        max_model_len = num_blocks * config.block_size
        sizes = _sizes(config, shape, max_model_len)

    num_staging = max(sizes.max_blocks, config.max_num_batched_tokens // config.block_size)
    fixed = (
        (num_staging + 1) * sizes.layer_block_bytes
        + sizes.num_sparse_layers * (num_blocks + 1) * sizes.layer_digest_bytes
        + shape.num_layers * sizes.layer_block_bytes  # null blocks
    )
    max_grant = min(config.max_grant_factor * sizes.selection_blocks, sizes.max_blocks)
    smallest = sizes.num_sparse_layers * sizes.selection_blocks + sizes.num_dense_layers * sizes.max_blocks
    budget = available_device if config.device_kv_bytes is None else config.device_kv_bytes
    room = (budget - fixed) // sizes.layer_block_bytes  # (layer, block) units left for slots and dense blocks
    if room < smallest:
        raise ValueError(
            f"device_kv_bytes={budget} is smaller than one working set at max_model_len={max_model_len}: "
            f"{sizes.selection_blocks} slots x {sizes.num_sparse_layers} sparse layers, {sizes.max_blocks} blocks x "
            f"{sizes.num_dense_layers} dense layers, {fixed} bytes of digests (of {num_blocks} host blocks), prefill "
            f"staging and null blocks; raise device_kv_bytes to at least {fixed + smallest * sizes.layer_block_bytes}, "
            "or lower max_model_len, sparse_budget_tokens, the number of dense layers or host_kv_bytes"
        )
    num_slots, num_dense_blocks = _split_room(config, sizes, room, max_grant)
    used = sizes.num_sparse_layers * num_slots + sizes.num_dense_layers * num_dense_blocks
    return _layout(
        config, shape, sizes, max_model_len,
        num_blocks=num_blocks, num_slots=num_slots, num_dense_blocks=num_dense_blocks, num_staging_blocks=num_staging,
        device_bytes=fixed + used * sizes.layer_block_bytes, host_bytes=(num_blocks + 1) * host_block_bytes,
    )  # fmt: skip


def _split_room(config: EngineConfig, sizes: _Sizes, room: int, max_grant: int) -> tuple[int, int]:
    """Slots and dense blocks in the proportion in which one sequence of full length uses them."""
    per_seq = sizes.num_sparse_layers * max_grant + sizes.num_dense_layers * sizes.max_blocks
    num_seqs = min(room / per_seq, float(config.max_num_seqs)) if per_seq else 0.0
    num_dense = max(sizes.max_blocks, int(num_seqs * sizes.max_blocks)) if sizes.num_dense_layers else 0
    if not sizes.num_sparse_layers:
        return 0, num_dense
    slots = (room - sizes.num_dense_layers * num_dense) // sizes.num_sparse_layers
    return min(slots, config.max_num_seqs * max_grant), num_dense


def _layout(
    config: EngineConfig, shape: KVShape, sizes: _Sizes, max_model_len: int, *, num_blocks: int, num_slots: int,
    num_dense_blocks: int, num_staging_blocks: int, device_bytes: int, host_bytes: int,
) -> KVLayout:  # fmt: skip
    return KVLayout(
        block_size=config.block_size,
        num_layers=shape.num_layers,
        dense_layers=sizes.dense_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        piece_bytes=sizes.piece_bytes,
        tiered=config.kv_tiers == "tiered",
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        selection_blocks=sizes.selection_blocks,
        num_blocks=num_blocks,
        num_slots=num_slots,
        num_dense_blocks=num_dense_blocks,
        num_staging_blocks=num_staging_blocks,
        max_blocks_per_seq=sizes.max_blocks,
        min_grant_slots=sizes.selection_blocks,
        max_grant_slots=min(config.max_grant_factor * sizes.selection_blocks, sizes.max_blocks),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
    )

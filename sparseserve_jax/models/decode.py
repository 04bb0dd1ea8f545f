"""The decode step: all layers in one program, no host round trip (paper section 3.1 and 3.2).

A sparse layer: score digests -> select blocks -> find them in the device slots -> FlashH2D the misses into the least
recently selected slots -> append the new token -> attend. A dense layer: append -> attend to everything.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from sparseserve_jax.models.kv_state import KVState, StepSpec
from sparseserve_jax.models.llama import embed, run_layer, unembed
from sparseserve_jax.models.rope import rope_cos_sin, rope_factor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeInputs:
    """One row a sequence; padding rows have position -1, the tables' last row and null blocks.

    Attributes:
        newest_tokens: by row of the per-sequence tables the newest token, whose K and V are not in the cache yet.
        positions: its position.
        inv_freq: each sequence's inverse frequencies of the rotary embedding.
        rows: row in the per-sequence tables.
        block_tables: block ids of the tier that holds the whole sequence.
        slot_tables / num_slots: the grant's device slots (tiered; else zero-width).
        dense_tables: blocks in the dense layers' device pools (tiered; else zero-width).
    """

    newest_tokens: Int[Array, "num_rows"]
    positions: Int[Array, "num_seqs"]
    inv_freq: Float[Array, "num_seqs half_head_dim"]
    rows: Int[Array, "num_seqs"]
    block_tables: Int[Array, "num_seqs max_blocks"]
    slot_tables: Int[Array, "num_seqs max_slots"]
    num_slots: Int[Array, "num_seqs"]
    dense_tables: Int[Array, "num_seqs max_dense_blocks"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOutputs:
    """`stats` columns: pieces selected, hit, loaded, in the working set, and the working set in slots."""

    logits: Float[Array, "num_seqs vocab"]
    stats: Int[Array, "num_seqs 5"]
    selected: Int[Array, "num_sparse_layers num_seqs num_kv_heads num_selected"] | None


@dataclasses.dataclass
class _Layer:
    """The KV arrays of one layer while the step is traced."""

    pool: Array
    scales: Array | None = None
    digests: Array | None = None
    resident: Array | None = None
    last_selected: Array | None = None


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnames=("state",))
def decode_step(
    params: Any, state: KVState, host_pools: tuple[Array, ...], inputs: DecodeInputs, *, spec: StepSpec
) -> tuple[KVState, DecodeOutputs]:
    """One token for every sequence.

    Args:
        host_pools: per layer, pinned host memory (tiered); empty when unified. Read, never written.
    """
    config, layout = spec.model, spec.layout
    hidden = embed(params, inputs.newest_tokens[inputs.rows])
    cos, sin = rope_cos_sin(jnp.maximum(inputs.positions, 0), inputs.inv_freq, rope_factor(config))
    layers = _split(state, spec)
    stats = jnp.zeros((hidden.shape[0], 5), jnp.int32)
    recorded = []
    for index, layer in enumerate(layers):
        host_pool = host_pools[index] if layout.tiered else None
        if layer.digests is None:
            attend = functools.partial(_attend_dense, spec, inputs, layer)
        else:
            attend = functools.partial(_attend_sparse, spec, inputs, layer, host_pool)
        hidden, extra = run_layer(
            config, spec.dtype, params["layers"][index], hidden, cos, sin, attend, kernels=spec.kernels
        )
        if extra is not None:
            layer_stats, selected = extra
            sums = stats[:, :4] + layer_stats[:, :4]
            stats = jnp.concatenate([sums, jnp.maximum(stats[:, 4:], layer_stats[:, 4:])], axis=1)
            recorded.append(selected)
    logits = unembed(config, params, hidden, kernels=spec.kernels)
    selected = jnp.stack(recorded) if spec.record_selection and recorded else None
    return _join(layers, state, spec), DecodeOutputs(logits=logits, stats=stats, selected=selected)


def _attend_dense(
    spec: StepSpec, inputs: DecodeInputs, layer: _Layer, q: Array, k: Array, v: Array
) -> tuple[Array, None]:
    """Append, then attend to every block."""
    tables = inputs.dense_tables if spec.layout.tiered else inputs.block_tables
    newest, num_valid = _newest(inputs, spec.layout.block_size)
    blocks = jnp.broadcast_to(jnp.take_along_axis(tables, newest[:, None], axis=1), k.shape[:2])
    layer.pool, _, layer.scales = spec.kernels.append_tokens(
        layer.pool, None, k, v, blocks, num_valid, jnp.zeros_like(num_valid), layer.scales, method=spec.selection
    )
    logical = jnp.arange(tables.shape[1])[None, None, :]
    counts = _valid_tokens(jnp.broadcast_to(logical, (tables.shape[0], k.shape[1], tables.shape[1])), inputs, spec)
    ids = jnp.broadcast_to(tables[:, None, :], counts.shape)
    out = spec.kernels.decode_attention(q, layer.pool, ids, counts, None, scale=spec.scale, kv_scales=layer.scales)
    return out, None


def _attend_sparse(
    spec: StepSpec, inputs: DecodeInputs, layer: _Layer, host_pool: Array | None, q: Array, k: Array, v: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Select, fetch, append, attend; keeps the digests, residency and selection history up to date."""
    kernels, block_size = spec.kernels, spec.layout.block_size
    assert layer.digests is not None and layer.last_selected is not None
    newest, num_valid = _newest(inputs, block_size)
    selected, query_mask = _select(spec, inputs, layer.digests, q)
    block_ids = jnp.take_along_axis(inputs.block_tables[:, None, :], jnp.maximum(selected, 0), axis=2)
    history, layer.last_selected = _note_selection(layer.last_selected, inputs, selected)
    if host_pool is None:
        locations, missing = block_ids, jnp.zeros(selected.shape, bool)
    else:
        locations, missing = _make_resident(
            spec, inputs, layer, host_pool, selected, history, block_ids, newest, num_valid
        )
    is_newest = selected == newest[:, None, None]
    write_to = jnp.where(is_newest, locations, 0).sum(-1)  # one match a head
    newest_ids = jnp.take_along_axis(inputs.block_tables, newest[:, None], axis=1)[:, 0]
    layer.pool, layer.digests, layer.scales = kernels.append_tokens(
        layer.pool, layer.digests, k, v, write_to, num_valid, newest_ids, layer.scales, method=spec.selection
    )
    counts = jnp.where(selected >= 0, _valid_tokens(selected, inputs, spec), 0)
    out = kernels.decode_attention(
        q, layer.pool, locations, counts, query_mask, scale=spec.scale, kv_scales=layer.scales
    )
    return out, (_stats(spec, inputs, selected, missing, layer.last_selected), selected)


def _select(spec: StepSpec, inputs: DecodeInputs, digests: Array, q: Array) -> tuple[Array, Array | None]:
    """Logical block ids `[num_seqs, num_kv_heads, n]`, ascending, -1 = unused; and a mask by query head, or None."""
    num_blocks = -(-(inputs.positions + 1) // spec.layout.block_size)
    max_blocks = inputs.block_tables.shape[1]
    num_kv_heads = spec.layout.num_kv_heads
    if max_blocks <= spec.budget_blocks:  # everything fits: nothing to score
        ids = jnp.arange(max_blocks)[None, None, :]
        everything = jnp.where(ids < num_blocks[:, None, None], ids, -1)
        return jnp.broadcast_to(everything, (q.shape[0], num_kv_heads, max_blocks)), None
    ranks = spec.kernels.score_blocks(
        q, digests, inputs.block_tables, num_blocks, scale=spec.scale, per_query_head=spec.per_query_head,
        num_sink_blocks=spec.num_sink_blocks, num_newest_blocks=spec.num_newest_blocks,
    )  # fmt: skip
    selected = spec.kernels.select_blocks(ranks, num_selected=spec.budget_blocks)
    if not spec.per_query_head:
        return selected, None
    return spec.kernels.union_over_group(
        selected, num_kv_heads=num_kv_heads, max_blocks=max_blocks, num_union=spec.selection_blocks
    )


def _note_selection(last_selected: Array, inputs: DecodeInputs, selected: Array) -> tuple[Array, Array]:
    """Stamps the selected blocks with this step; returns the history before it (for LRU) and the whole table after."""
    before = last_selected[inputs.rows]
    num_seqs, num_kv_heads, max_blocks = before.shape
    lanes = (jnp.arange(num_seqs)[:, None, None], jnp.arange(num_kv_heads)[None, :, None])
    stamp = jnp.broadcast_to(inputs.positions[:, None, None], selected.shape)
    after = before.at[(*lanes, jnp.where(selected >= 0, selected, max_blocks))].set(stamp, mode="drop")
    return before, last_selected.at[inputs.rows].set(after)


def _make_resident(
    spec: StepSpec, inputs: DecodeInputs, layer: _Layer, host_pool: Array, selected: Array, history: Array,
    block_ids: Array, newest: Array, num_valid: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Slots of the selected blocks, after fetching those that were not on the device; and which were fetched."""
    assert layer.resident is not None
    slot_index, missed, resident = spec.kernels.match_slots(
        selected, layer.resident[inputs.rows], history, inputs.num_slots
    )
    layer.resident = layer.resident.at[inputs.rows].set(resident)
    slots = jnp.take_along_axis(inputs.slot_tables[:, None, :], slot_index, axis=2)
    slots = jnp.where(selected >= 0, slots, 0)
    begins = (selected == newest[:, None, None]) & (num_valid == 1)[:, None, None]  # a new block: nothing to fetch yet
    missing = missed & ~begins
    layer.pool = spec.kernels.flash_h2d(layer.pool, host_pool, slots, block_ids, missing)
    return slots, missing


def _stats(spec: StepSpec, inputs: DecodeInputs, selected: Array, missing: Array, last_selected: Array) -> Array:
    chosen = (selected >= 0).sum((1, 2))
    loaded = missing.sum((1, 2))
    since = (inputs.positions - spec.working_set_window)[:, None, None]
    in_window = (last_selected[inputs.rows] > since).sum(-1)  # [num_seqs, num_kv_heads]
    working_set = jnp.where(inputs.positions >= 0, in_window.T, 0)
    columns = [chosen, chosen - loaded, loaded, working_set.sum(0), working_set.max(0)]
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def _newest(inputs: DecodeInputs, block_size: int) -> tuple[Array, Array]:
    """Logical id of each sequence's newest block and how many tokens it has with the new one (padding: 0)."""
    newest = jnp.maximum(inputs.positions, 0) // block_size
    return newest, inputs.positions + 1 - newest * block_size


def _valid_tokens(logical: Array, inputs: DecodeInputs, spec: StepSpec) -> Array:
    """Tokens that exist in each logical block, the one being decoded included."""
    block_size = spec.layout.block_size
    return jnp.clip(inputs.positions[:, None, None] + 1 - logical * block_size, 0, block_size)


def _split(state: KVState, spec: StepSpec) -> list[_Layer]:
    scales = state.scales or (None,) * len(state.pools)
    layers = [_Layer(pool=pool, scales=scale) for pool, scale in zip(state.pools, scales, strict=True)]
    for index, place in enumerate(spec.layout.sparse_layers):
        layer = layers[place]
        layer.digests = state.digests[spec.first_digest + index]
        layer.last_selected = state.last_selected[index]
        layer.resident = state.resident[index] if state.resident else None
    return layers


def _join(layers: list[_Layer], state: KVState, spec: StepSpec) -> KVState:
    """The state with the arrays of all layers; digests by other methods stay what they are."""
    renewed = tuple(layer.digests for layer in layers if layer.digests is not None)
    first = spec.first_digest
    return KVState(
        pools=tuple(layer.pool for layer in layers),
        scales=tuple(layer.scales for layer in layers if layer.scales is not None),
        digests=(*state.digests[:first], *renewed, *state.digests[first + len(renewed) :]),
        resident=tuple(layer.resident for layer in layers if layer.resident is not None),
        last_selected=tuple(layer.last_selected for layer in layers if layer.last_selected is not None),
    )

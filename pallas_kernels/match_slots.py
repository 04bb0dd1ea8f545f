"""Matching selected blocks with the device slots of a grant, and choosing the slots that misses move into.

One program a (sequence, KV head), in time linear in selected blocks and slots:

1. Hits. Every selected block writes its index into a table by block id; every slot looks its block up there. The table
   is never cleared: what a slot reads counts only if the selected block at that index is the slot's own (the sparse set
   of Briggs and Torczon, 1993). Comparing all selected blocks with all slots would be num_selected times the work.
2. Victims. Keys order the slots: empty ones first, then those whose block was selected longest ago; slots that hold a
   selected block or lie past the grant are out. Bisection (`select_blocks.choose_largest`) finds as many as there are
   misses.
3. Order. The i-th miss takes the i-th victim: each victim counts those before it, a few at a time, so that a usual step
   (few misses) costs little.

Threads of a program hand each other lists through small arrays in device memory (they stay in cache), with a barrier
between writing and reading. Of the reference, XLA makes 7 kernels at 64 selected and 512 slots and 11 at 256 and 2,048,
one of them a sort of all slots; this is one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

from pallas_kernels.select_blocks import NEVER, choose_largest
from pallas_kernels.triton import IN_PLACE, barrier, kernel_call, load, store

MAX_SLOTS, MAX_SELECTED = 4096, 1024
"""What fits in registers (of a grant of 4,096 slots, 4 in each of 1,024 threads)."""
SLOTS_PER_WARP, SELECTED_PER_WARP = 128, 16
"""With 256 and 32, jax 0.12's Triton spills at 512 slots and 64 selected."""
MAX_WARPS = 32
VICTIMS_AT_ONCE = 16
"""Victims that all victims are compared with in one step: 32 compares to a thread or fewer."""


def match_slots(
    selected: Int[Array, "num_seqs num_kv_heads num_selected"],
    resident: Int[Array, "num_seqs num_kv_heads num_slots"],
    last_selected: Int[Array, "num_seqs num_kv_heads max_blocks"],
    num_slots: Int[Array, "num_seqs"],
    *,
    interpret: bool,
) -> tuple[
    Int[Array, "num_seqs num_kv_heads num_selected"],
    Bool[Array, "num_seqs num_kv_heads num_selected"],
    Int[Array, "num_seqs num_kv_heads num_slots"],
]:
    """Finds each selected block's slot, or the least recently selected slot for it to move into.

    Args:
        selected: logical block ids, each at most once, -1 = unused.
        resident: logical block in each slot of the sequence's grant, each at most once, -1 = empty.
        last_selected: the step at which a block was last selected; above the least int32.
        num_slots: slots of the grant, enough for all selected blocks; the rest of the row is not used.

    Returns:
        slot index of every selected block (0 where unused), whether it missed, and the residency after loading the
        misses.

    Raises:
        NotImplementedError: more than MAX_SLOTS or MAX_SELECTED.
    """
    num_seqs, num_heads, num_selected = selected.shape
    num_columns, max_blocks = resident.shape[2], last_selected.shape[2]
    for what, value, most in (("slots", num_columns, MAX_SLOTS), ("selected blocks", num_selected, MAX_SELECTED)):
        if value > most:
            raise NotImplementedError(
                f"match_slots: no Pallas kernel for {value} {what}; supported: up to {most}. "
                "implementation='reference' runs every shape"
            )
    num_warps = max(pl.cdiv(num_columns, SLOTS_PER_WARP), pl.cdiv(num_selected, SELECTED_PER_WARP))

    def array(width: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_seqs, num_heads, width), dtype)

    out_shape = [
        array(num_selected), array(num_selected, jnp.bool_), array(num_columns),
        array(max_blocks), *[array(num_selected)] * 3,
    ]  # fmt: skip
    slot_index, missed, after, *_ = kernel_call(
        functools.partial(_match, interpret=interpret), selected, resident, last_selected, num_slots,
        name="match_slots", grid=(num_heads, num_seqs), in_specs=[IN_PLACE] * 4, out_specs=[IN_PLACE] * len(out_shape),
        out_shape=out_shape, num_warps=min(pl.next_power_of_2(num_warps), MAX_WARPS), interpret=interpret,
    )  # fmt: skip
    return slot_index, missed, after


def _match(
    selected_ref: Any,  # [num_seqs, num_heads, num_selected]
    resident_ref: Any,  # [num_seqs, num_heads, num_columns]
    last_selected_ref: Any,  # [num_seqs, num_heads, max_blocks]
    num_slots_ref: Any,  # [num_seqs]
    slot_index_ref: Any,  # [num_seqs, num_heads, num_selected], and so:
    missed_ref: Any,
    after_ref: Any,  # [num_seqs, num_heads, num_columns]
    index_of_block_ref: Any,  # scratch [num_seqs, num_heads, max_blocks]
    victim_keys_ref: Any,  # scratch [num_seqs, num_heads, num_selected], by slot, and so:
    victim_slots_ref: Any,
    victims_ref: Any,  # scratch [num_seqs, num_heads, num_selected], in order
    *,
    interpret: bool,
) -> None:
    head, seq = pl.program_id(0), pl.program_id(1)
    num_selected, num_columns = selected_ref.shape[2], resident_ref.shape[2]

    def get(ref: Any, index: Array, mask: Array, other: int) -> Array:
        return load(ref.at[seq, head, index], mask=mask, other=other)

    def put(ref: Any, index: Array, value: Array, mask: Array) -> None:
        # Where masked out, an index past the end: the interpreter writes the old value back to it.
        store(ref.at[seq, head, jnp.where(mask, index, ref.shape[2])], value, mask=mask)

    # Hits: selected blocks note their index, then slots look theirs up.
    indices = jnp.arange(pl.next_power_of_2(num_selected))
    exists = indices < num_selected
    selected = get(selected_ref, indices, exists, -1)
    used = selected >= 0
    put(index_of_block_ref, selected, indices, used)
    put(slot_index_ref, indices, jnp.full_like(indices, -1), exists)
    barrier(interpret=bool(interpret))
    slots = jnp.arange(pl.next_power_of_2(num_columns))
    resident = get(resident_ref, slots, slots < num_columns, -1)
    granted = slots < load(num_slots_ref.at[seq])
    filled = granted & (resident >= 0)
    index = get(index_of_block_ref, resident, filled, -1)
    age = get(last_selected_ref, resident, filled, 0)
    maybe = (index >= 0) & (index < num_selected)
    held = maybe & (get(selected_ref, index, maybe, -1) == resident)
    put(slot_index_ref, index, slots, held)
    put(after_ref, slots, resident, slots < num_columns)
    barrier(interpret=bool(interpret))

    # Victims: as many slots as there are misses.
    slot_index = get(slot_index_ref, indices, exists, -1)
    missed = used & (slot_index < 0)
    miss_number = jnp.cumsum(missed.astype(jnp.int32)) - 1
    keys = jnp.where(filled & ~held, ~age, NEVER)
    keys = jnp.where(granted & ~filled, keys.max() + 1, keys)
    chosen, place, num_victims = choose_largest(keys, missed.astype(jnp.int32).sum())
    put(victim_keys_ref, place, keys, chosen)
    put(victim_slots_ref, place, slots, chosen)
    barrier(interpret=bool(interpret))

    # Order: how many victims come before each.
    is_victim = indices < num_victims
    key = get(victim_keys_ref, indices, is_victim, NEVER)[:, None]

    def count_before(step: Array, number: Array) -> Array:
        others = step * VICTIMS_AT_ONCE + jnp.arange(VICTIMS_AT_ONCE)
        other_keys = get(victim_keys_ref, others, others < num_victims, NEVER)[None, :]
        before = (other_keys > key) | ((other_keys == key) & (others[None, :] < indices[:, None]))
        return number + before.astype(jnp.int32).sum(axis=1)

    number = jax.lax.fori_loop(0, pl.cdiv(num_victims, VICTIMS_AT_ONCE), count_before, jnp.zeros_like(indices))
    put(victims_ref, number, get(victim_slots_ref, indices, is_victim, 0), is_victim)
    barrier(interpret=bool(interpret))

    moves = missed & (miss_number < num_victims)
    target = get(victims_ref, miss_number, moves, 0)
    put(slot_index_ref, indices, jnp.where(missed, target, jnp.maximum(slot_index, 0)), exists)
    put(missed_ref, indices, missed, exists)
    put(after_ref, target, selected, moves)

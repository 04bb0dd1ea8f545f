"""The one contract between scheduler and runner: `StepPlan` in, `StepResult` out. No JAX here."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """A request that enters: its row in the per-sequence tables and all its KV blocks.

    `block_ids` cover prompt + max_tokens (reserved whole, so that no running request can run dry). They are ids of the
    host tier in tiered mode, of the only pool in unified mode. Block 0, the null block, is never handed out.
    """

    request_id: str
    row: int
    block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restart:
    """A request that takes over the row, the blocks and the prefilled prompt of another, which is in `finished`.

    Tokens after the prompt are forgotten, as are device room and what was selected; its first token is sampled from the
    logits of the prompt.
    """

    request_id: str
    after: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillItem:
    """Prompt tokens [start, end) of one request."""

    request_id: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSegment:
    """Prompt tokens that go through layers [layer_start, layer_end) in one call a layer (several items = packed)."""

    items: tuple[PrefillItem, ...]
    layer_start: int
    layer_end: int

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all items."""
        return sum(item.end - item.start for item in self.items)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grant:
    """Device room of one decoding request, whole (not a difference to the last grant). Tiered mode only.

    `slot_ids` serve every sparse layer and KV head (what each holds differs: residency is per layer and head).
    `dense_block_ids[i]` holds logical block i in the pools of the dense layers.
    """

    request_id: str
    slot_ids: tuple[int, ...]
    dense_block_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One iteration. The runner carries it out in the order of the fields."""

    step: int
    restarts: tuple[Restart, ...] = ()
    """Requests that begin where others end. Each gets its first token in this step."""
    finished: tuple[str, ...] = ()
    """Requests that ended or were aborted since the last plan: forget them. Their rows and blocks, unless handed
    over, may be reused in this very plan."""
    parks: tuple[str, ...] = ()
    """Requests that lose their device room: save what only the device has (the newest, partial block)."""
    admissions: tuple[Admission, ...] = ()
    grants: tuple[Grant, ...] = ()
    """New or changed grants. A request that had none is resumed: its dense layers' blocks are loaded."""
    decode: tuple[str, ...] = ()
    """Requests that decode one token, in scheduling order."""
    prefill: tuple[PrefillSegment, ...] = ()
    """Prefill work, to be carried out in order, beside the decode step."""
    completes_prefill: tuple[str, ...] = ()
    """Requests whose last prompt token passes its last layer in `prefill`: their first token is sampled."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to carry out."""
        return not (
            self.restarts
            or self.finished
            or self.parks
            or self.admissions
            or self.grants
            or self.decode
            or self.prefill
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStats:
    """What one decode step did for one request; all counts are (layer, KV head, block) pieces of sparse layers."""

    blocks_selected: int
    blocks_hit: int
    blocks_loaded: int
    working_set_blocks: int
    """Distinct pieces selected within the window, summed over sparse layers and KV heads."""
    working_set_slots: int
    """The same, the largest over layers and KV heads: the slots that hold it everywhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the runner (or the simulator's cost model) reports of a plan."""

    step: int
    sampled: tuple[str, ...]
    """Requests that got a token in this step (decode and completed prefill), or will when the device is done."""
    finished: tuple[str, ...] = ()
    """Those of `sampled` known to end with this token for another reason than its number."""
    stats: dict[str, DecodeStats] = dataclasses.field(default_factory=dict)
    """By request id, of this step or (the engine plans a step ahead) of an earlier one; empty in dense mode."""

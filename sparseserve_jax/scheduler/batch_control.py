"""Who decodes in this iteration: Algorithm 1 of the paper, and the ablation that goes without it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A request that could decode.

    Attributes:
        need_slots: slots that hold its working set.
        min_slots: slots below which it cannot run at all.
        dense_blocks: device blocks of the dense layers, which need the whole context.
    """

    request_id: str
    need_slots: int
    min_slots: int
    dense_blocks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Device room for one admitted request."""

    request_id: str
    slots: int
    dense_blocks: int


def admit_working_sets(candidates: Sequence[Candidate], *, num_slots: int, num_dense_blocks: int) -> list[Share]:
    """Algorithm 1: the batch whose working sets fit together.

    Args:
        candidates: first come, first served.
        num_slots / num_dense_blocks: all there are, whoever holds them now.
    """
    used_slots = used_dense_blocks = 0
    batch = []
    for candidate in candidates:
        slots = used_slots + candidate.need_slots
        dense_blocks = used_dense_blocks + candidate.dense_blocks
        if slots > num_slots or dense_blocks > num_dense_blocks:
            continue  # back to the queue for this iteration only; a later, smaller working set may still fit
        used_slots, used_dense_blocks = slots, dense_blocks
        batch.append(
            Share(request_id=candidate.request_id, slots=candidate.need_slots, dense_blocks=candidate.dense_blocks)
        )
    return batch


def admit_without_control(candidates: Sequence[Candidate], *, num_slots: int, num_dense_blocks: int) -> list[Share]:
    """The ablation (figure 15): everybody who can run at all, first come, first served, with equal shares.

    Slots are shared as evenly as minimum and need allow, so a large batch has grants below its working sets and
    loads blocks that it has just evicted.
    """
    smallest = [dataclasses.replace(c, need_slots=c.min_slots) for c in candidates]
    admitted = {share.request_id for share in admit_working_sets(
        smallest, num_slots=num_slots, num_dense_blocks=num_dense_blocks
    )}  # fmt: skip
    batch = [c for c in candidates if c.request_id in admitted]
    level = _equal_level(batch, num_slots)
    return [
        Share(request_id=c.request_id, slots=_share(c, level), dense_blocks=c.dense_blocks) for c in batch
    ]  # fmt: skip


def _share(candidate: Candidate, level: int) -> int:
    return min(candidate.need_slots, max(candidate.min_slots, level))


def _equal_level(batch: Sequence[Candidate], num_slots: int) -> int:
    """The largest number of slots that all may have: `sum(_share)` just fits (it grows with the level)."""
    low, high = 0, max((c.need_slots for c in batch), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_share(c, middle) for c in batch) <= num_slots:
            low = middle
        else:
            high = middle - 1
    return low

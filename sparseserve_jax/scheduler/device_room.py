"""Which device slots and dense blocks an admitted request gets, and who makes room for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sparseserve_jax.cache.block_pool import BlockPool
from sparseserve_jax.plan import Grant
from sparseserve_jax.scheduler.batch_control import Share


@dataclasses.dataclass(frozen=True)
class _Holding:
    slot_ids: tuple[int, ...]
    dense_block_ids: tuple[int, ...]


_NOTHING = _Holding((), ())


class DeviceRoom:
    """Owns the ids of device slots and dense blocks. Tiered mode only; otherwise both pools are empty.

    Room moves as little as possible, because what a slot holds is lost when it changes hands: a holder keeps what it
    has while nobody else needs it, also through iterations in which it does not decode.
    """

    def __init__(self, num_slots: int, num_dense_blocks: int) -> None:
        self.slots = BlockPool(num_slots, "device slots")
        self.dense_blocks = BlockPool(num_dense_blocks, "dense device blocks")
        self._held: dict[str, _Holding] = {}

    def release(self, request_id: str) -> None:
        """Frees what a request holds, if anything."""
        holding = self._held.pop(request_id, _NOTHING)
        self.slots.free(holding.slot_ids)
        self.dense_blocks.free(holding.dense_block_ids)

    def place(self, shares: Sequence[Share], others: Sequence[str]) -> tuple[list[str], list[Grant]]:
        """Gives every share at least its room.

        A holder with more than its share keeps it, unless another needs it. Where room is short, surplus goes first
        (it lies outside the working set), then whole holdings of `others`, the last come first.

        Args:
            shares: the batch, first come, first served; fits the pools together.
            others: requests that are not in the batch, first come, first served.

        Returns:
            The requests that lost their room, and the grants that are new or changed, cuts first, so that at every
            point of the list no id has two owners.
        """
        growth = sum(max(0, s.slots - len(self._of(s).slot_ids)) for s in shares)
        dense_growth = sum(max(0, s.dense_blocks - len(self._of(s).dense_block_ids)) for s in shares)
        idle = [request_id for request_id in others if request_id in self._held]
        parks = []
        while dense_growth > self.dense_blocks.num_free:
            parks.append(self._release_last(idle))
        cuts = self._cut_surplus(shares, growth - self.slots.num_free)
        while growth > self.slots.num_free:
            parks.append(self._release_last(idle))
        grown = [s.request_id for s in shares if self._grow(s)]
        return parks, [self._grant(request_id) for request_id in dict.fromkeys((*cuts, *grown))]

    def _of(self, share: Share) -> _Holding:
        return self._held.get(share.request_id, _NOTHING)

    def _release_last(self, idle: list[str]) -> str:
        assert idle, "the batch does not fit the device, though every other request was parked"
        self.release(idle[-1])
        return idle.pop()

    def _cut_surplus(self, shares: Sequence[Share], missing: int) -> list[str]:
        """Takes up to `missing` slots from the tails of holdings above their share, the last come first."""
        cuts = []
        for share in reversed(shares):
            holding = self._of(share)
            count = min(missing, len(holding.slot_ids) - share.slots)
            if count <= 0:
                continue
            missing -= count
            self.slots.free(holding.slot_ids[-count:])
            self._held[share.request_id] = dataclasses.replace(holding, slot_ids=holding.slot_ids[:-count])
            cuts.append(share.request_id)
        return cuts

    def _grow(self, share: Share) -> bool:
        """Brings a holding up to its share; returns whether anything changed."""
        holding = self._of(share)
        slots = max(0, share.slots - len(holding.slot_ids))
        dense_blocks = max(0, share.dense_blocks - len(holding.dense_block_ids))
        if not (slots or dense_blocks) and share.request_id in self._held:
            return False
        self._held[share.request_id] = _Holding(
            holding.slot_ids + self.slots.allocate(slots),
            holding.dense_block_ids + self.dense_blocks.allocate(dense_blocks),
        )
        return True

    def _grant(self, request_id: str) -> Grant:
        holding = self._held[request_id]
        return Grant(request_id=request_id, slot_ids=holding.slot_ids, dense_block_ids=holding.dense_block_ids)

"""How many device slots a decoding request needs (paper section 3.2).

The working set is the union of the blocks selected in the last w = 12 decode steps; figure 8 shows that it holds most
of what the next step selects. The runner measures it exactly on the device; here it only becomes a number of slots.
"""

from __future__ import annotations

import math

from sparseserve_jax.cache.layout import KVLayout

FIRST_ESTIMATE_SELECTIONS = 2
"""Selections that a working set is taken to hold before a first decode step: a guess, replaced by the measurement."""


class WorkingSetEstimator:
    """Slots by request, from the working sets that the runner reports.

    Args:
        margin: share of slots beyond the measured working set.
    """

    def __init__(self, layout: KVLayout, margin: float) -> None:
        self._margin = margin
        self._selection = layout.selection_blocks
        self._min_slots = layout.min_grant_slots
        self._max_slots = min(layout.max_grant_slots, layout.num_slots)
        self._measured: dict[str, int] = {}

    def observe(self, request_id: str, working_set_slots: int) -> None:
        """Takes in what a decode step measured."""
        self._measured[request_id] = working_set_slots

    def forget(self, request_id: str) -> None:
        """Drops a request that ended."""
        self._measured.pop(request_id, None)

    def minimum(self, context_blocks: int) -> int:
        """Slots below which a step cannot run: one selection, or all of a context that is shorter."""
        return min(self._min_slots, context_blocks + 1)

    def need(self, request_id: str, context_blocks: int) -> int:
        """Slots for the working set and its margin; never more than the context has blocks, and one to grow."""
        measured = self._measured.get(request_id)
        if measured is None:
            slots = FIRST_ESTIMATE_SELECTIONS * self._selection
        else:
            slots = math.ceil(round(measured * (1.0 + self._margin), 6))  # 10 * 1.1 is 11, not 12
        most = min(self._max_slots, context_blocks + 1)
        return max(self.minimum(context_blocks), min(slots, most))

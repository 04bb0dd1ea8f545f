"""How much of a selection is on the device: an analytical stand-in for the LRU cache."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidencyModel:
    """Consecutive selections overlap; more slots keep more of the past.

    With room for the working set, what the window union misses is loaded. With room for one selection only, all that
    differs from the last selection is loaded. In between the share of misses is linear in the slots.

    Attributes:
        step_overlap: share of a selection that the last one contained; an assumption.
        window_gain: what the union of the last 12 selections adds to it (figure 8: 10.68 points).
        working_set_selections: working set of a long context in selections; an assumption.
    """

    step_overlap: float = 0.84
    window_gain: float = 0.1068
    working_set_selections: float = 2.0

    def working_set_slots(self, selection_blocks: int, context_blocks: int) -> int:
        """Slots of a working set; at most the whole context."""
        return min(context_blocks, round(self.working_set_selections * selection_blocks))

    def miss_share(self, *, slots: int, selection_blocks: int, context_blocks: int) -> float:
        """Share of the selected blocks that a warm request loads in a step."""
        if slots >= context_blocks:
            return 0.0
        working_set = self.working_set_slots(selection_blocks, context_blocks)
        spread = max(1, working_set - selection_blocks)
        kept = min(1.0, max(0, slots - selection_blocks) / spread)
        return 1.0 - self.step_overlap - kept * self.window_gain

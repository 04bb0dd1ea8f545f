"""How much of a selection is on the device: an analytical stand-in for the LRU cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from sparseserve_jax.simulator.selection_study import window_overlap, working_set_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidencyModel:
    """Consecutive selections overlap; more slots keep more of the past.

    With room for the working set, what the window union misses is loaded. With room for one selection only, all that
    differs from the last selection is loaded. In between the share of misses is linear in the slots.

    Attributes:
        step_overlap: share of a selection that the last one contained; an assumption, unless `measured`.
        window_gain: what the union of the last 12 selections adds to it (figure 8: 10.68 points).
        working_set_selections: working set of a long context in selections; an assumption, unless `measured`.
    """

    step_overlap: float = 0.84
    window_gain: float = 0.1068
    working_set_selections: float = 2.0

    @classmethod
    def measured(cls, selections: Sequence[np.ndarray], *, window: int = 12) -> ResidencyModel:
        """The model of recorded requests (`SelectionRecord`): means over them, from step `window` on.

        Args:
            selections: block ids `[steps, layers, heads, selection]` of each.

        Raises:
            ValueError: there are none, or one is too short.
        """
        if not selections:
            raise ValueError("selections is empty; give at least 1 recorded request")
        overlaps = np.mean([window_overlap(selected, (1, window), window) for selected in selections], axis=0)
        sizes = [
            working_set_blocks(selected, window, window) / (selected[window:] >= 0).sum(-1).mean()
            for selected in selections
        ]
        return cls(
            step_overlap=float(overlaps[0]),
            window_gain=float(overlaps[1] - overlaps[0]),
            working_set_selections=float(np.mean(sizes)),
        )

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

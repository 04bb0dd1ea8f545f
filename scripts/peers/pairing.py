"""Measurements in pairs: ours, theirs, ours, theirs. A ratio is of two neighbours in time, so drift of the machine
cancels; the result is the median of the pairs' ratios, and the spread says how far they lie apart."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, Literal

Better = Literal["lower", "higher"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs:
    """Neighbouring measurements of one work.

    Attributes:
        ours / theirs: one figure a pair, in `unit`.
        better: whether a lower figure wins (times) or a higher one (rates).
    """

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    unit: str
    better: Better = "lower"

    def ratios(self) -> list[float]:
        """Above 1 = ours is better, pair by pair."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [theirs / ours if self.better == "lower" else ours / theirs for ours, theirs in pairs]

    def result(self, work: str, peer: str, **more: Any) -> dict[str, Any]:
        """A row of the report: medians, the median ratio and the least and greatest ratio of a pair."""
        ratios = self.ratios()
        return {
            "work": work, "peer": peer, "ours": statistics.median(self.ours), "theirs": statistics.median(self.theirs),
            "ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)], "unit": self.unit,
            "better": self.better, "pairs": len(ratios), "all_ours": list(self.ours), "all_theirs": list(self.theirs),
            **more,
        }  # fmt: skip


def interleave(
    ours: Callable[[int], float],
    theirs: Callable[[int], float],
    *,
    pairs: int,
    unit: str,
    better: Better = "lower",
    may_go_on: Callable[[], bool] = lambda: True,
) -> Pairs:
    """Measures ours, theirs, ours, theirs ...; each is called with the number of the pair.

    Args:
        may_go_on: asked before every pair but the first; False ends the series early.
    """
    our_figures: list[float] = []
    their_figures: list[float] = []
    for number in range(pairs):
        if number and not may_go_on():
            break
        our_figures.append(ours(number))
        their_figures.append(theirs(number))
    return Pairs(ours=tuple(our_figures), theirs=tuple(their_figures), unit=unit, better=better)


def first_disagreements(ours: list[list[int]], theirs: list[list[int]]) -> list[int | None]:
    """Where greedy outputs of the same prompts part; None where they don't."""
    return [
        next((place for place, (a, b) in enumerate(zip(our_tokens, their_tokens, strict=True)) if a != b), None)
        for our_tokens, their_tokens in zip(ours, theirs, strict=True)
    ]


def agreement(ours: list[list[int]], first: list[int | None], gaps_nats: list[float]) -> dict[str, Any]:
    """How far greedy outputs agree.

    After the first different token two continuations have different contexts, so tokens count as equal only up to
    there. Whether a disagreement is more than a tie that bfloat16 broke the other way is for a float32 referee to say.

    Args:
        first: of `first_disagreements`.
        gaps_nats: for every disagreement, how far apart in log probability the referee sees the two tokens.
    """
    equal = sum(len(tokens) if place is None else place for tokens, place in zip(ours, first, strict=True))
    total = sum(map(len, ours))
    return {
        "prompts": len(first), "tokens": total, "equal_share": equal / total, "first_disagreement": first,
        "gaps_nats": gaps_nats, "max_gap_nats": max(gaps_nats, default=0.0),
    }  # fmt: skip

"""Percentiles as everyone's benchmarks report them, so that two figures of ours never differ by their definition."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, linear between neighbours (NumPy's default definition).

    Raises:
        ValueError: no values, or a share outside 0 to 1.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} must be from 0 to 1, e.g. 0.99")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])

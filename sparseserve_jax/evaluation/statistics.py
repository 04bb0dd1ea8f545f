"""Means over tasks and their bootstrap intervals. Rows are drawn anew within each task, the same for all settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

NUM_RESAMPLES = 2000
COVERAGE = 0.95

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Resampled:
    """The mean over tasks of the tasks' means: as measured, and once for each resample."""

    value: float
    samples: np.ndarray

    def interval(self) -> Interval:
        """The central 95 % of the resamples."""
        return _central(self.samples)

    def ratio(self, other: Resampled) -> tuple[float | None, Interval | None]:
        """`self / other` and its interval, from pairs of resamples; None where `other` is 0."""
        if other.value == 0.0:
            return None, None
        valid = other.samples != 0.0
        return self.value / other.value, _central(self.samples[valid] / other.samples[valid])


def resample(rows: Mapping[str, Sequence[float]], *, seed: int = 0) -> Resampled:
    """Bootstrap of the mean over tasks. Settings with equally many rows of a task get the same draws.

    Args:
        rows: task -> a value for each row; at least one task, and one row in each.
    """
    means = []
    for task, values in rows.items():
        rng = np.random.default_rng([seed, *task.encode()])
        drawn = rng.integers(0, len(values), (NUM_RESAMPLES, len(values)))
        means.append(np.asarray(values, np.float64)[drawn].mean(axis=1))
    value = float(np.mean([np.mean(values) for values in rows.values()]))
    return Resampled(value, np.mean(means, axis=0))


def _central(samples: np.ndarray) -> Interval:
    tail = (1 - COVERAGE) / 2
    low, high = np.quantile(samples, (tail, 1 - tail))
    return float(low), float(high)

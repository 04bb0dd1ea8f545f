"""When requests come. Endless, seeded streams of seconds since the start; the first request comes at 0."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

ArrivalPattern = Literal["poisson", "constant", "burst", "at-once"]


def arrivals(
    pattern: ArrivalPattern, rate_rps: float | None, *, burst_size: int = 1, rng: random.Random
) -> Iterator[float]:
    """The arrival times of a pattern.

    Args:
        pattern: how they come.
        rate_rps: requests a second on average; only "at-once" goes without.
        burst_size: requests that come together; "burst" only.
        rng: where Poisson gaps come from.

    Raises:
        ValueError: a rate or a size that the pattern cannot have.
    """
    if pattern == "at-once":
        return itertools.repeat(0.0)
    if rate_rps is None:
        raise ValueError(f"pattern={pattern!r} needs a rate; give --rate, or choose at-once")
    if pattern == "poisson":
        return poisson(rate_rps, rng)
    if pattern == "constant":
        return bursts(rate_rps, 1)
    if pattern == "burst":
        return bursts(rate_rps, burst_size)
    raise ValueError(f"pattern={pattern!r} is not known; choose poisson, constant, burst or at-once")


def poisson(rate_rps: float, rng: random.Random) -> Iterator[float]:
    """A Poisson process. Draws a gap only when the next time is asked for, so the caller may draw in between."""
    _check_rate(rate_rps)
    return _poisson(rate_rps, rng)


def _poisson(rate_rps: float, rng: random.Random) -> Iterator[float]:
    now_s = 0.0
    while True:
        yield now_s
        now_s += rng.expovariate(rate_rps)


def bursts(rate_rps: float, burst_size: int) -> Iterator[float]:
    """`burst_size` requests together every `burst_size / rate_rps` seconds; a size of 1 is a constant rate."""
    _check_rate(rate_rps)
    if burst_size < 1:
        raise ValueError(f"burst_size={burst_size} must be at least 1")
    return ((index // burst_size) * burst_size / rate_rps for index in itertools.count())


def _check_rate(rate_rps: float) -> None:
    if not 0 < rate_rps < float("inf"):
        raise ValueError(f"rate_rps={rate_rps} must be above 0 and finite; requests that come all at once are at-once")

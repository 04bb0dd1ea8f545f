from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest

from sparseserve_jax.load_generator.arrivals import arrivals, bursts, poisson


def first(times: Iterator[float], count: int) -> list[float]:
    return list(itertools.islice(times, count))


def test_poisson_gaps_are_exponential_and_seeded() -> None:
    times = first(poisson(4.0, random.Random(1)), 4001)
    assert times == first(poisson(4.0, random.Random(1)), 4001) != first(poisson(4.0, random.Random(2)), 4001)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0 and min(gaps) > 0
    assert mean == pytest.approx(0.25, rel=0.06)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.2)


def test_poisson_draws_only_what_is_asked_for() -> None:
    rng, other = random.Random(3), random.Random(3)
    times = poisson(1.0, rng)
    next(times)
    assert rng.random() == other.random()
    next(times)
    other.expovariate(1.0)
    assert rng.random() == other.random()


def test_bursts_and_constant() -> None:
    assert first(bursts(2.0, 3), 7) == [0, 0, 0, 1.5, 1.5, 1.5, 3.0]
    assert first(arrivals("constant", 4.0, burst_size=9, rng=random.Random()), 3) == [0, 0.25, 0.5]
    assert first(arrivals("burst", 4.0, burst_size=2, rng=random.Random()), 3) == [0, 0, 0.5]
    assert first(arrivals("at-once", None, rng=random.Random()), 3) == [0, 0, 0]


@pytest.mark.parametrize(
    ("pattern", "rate", "size", "message"),
    [
        ("poisson", 0.0, 1, "rate_rps=0.0 must be above 0"),
        ("constant", float("inf"), 1, "rate_rps=inf must be above 0 and finite"),
        ("burst", 1.0, 0, "burst_size=0 must be at least 1"),
        ("poisson", None, 1, "needs a rate"),
        ("often", 1.0, 1, "'often' is not known"),
    ],
)
def test_errors(pattern: Any, rate: float | None, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrivals(pattern, rate, burst_size=size, rng=random.Random())

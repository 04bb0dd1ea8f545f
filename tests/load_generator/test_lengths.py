from __future__ import annotations

import random
import statistics

import pytest

from sparseserve_jax.load_generator.lengths import parse_lengths


def samples(text: str, count: int = 4000) -> list[int]:
    rng, lengths = random.Random(0), parse_lengths(text)
    return [lengths.sample(rng) for _ in range(count)]


def test_fixed_and_uniform() -> None:
    assert set(samples("512")) == {512}
    drawn = samples("3-5")
    assert set(drawn) == {3, 4, 5}
    assert drawn == samples("3-5")


def test_lognormal_has_its_mean_and_spread() -> None:
    drawn = samples("lognormal:1000,0.5")
    assert statistics.fmean(drawn) == pytest.approx(1000, rel=0.04)
    assert statistics.median(drawn) == pytest.approx(1000 / 1.133, rel=0.04)  # exp(0.5^2 / 2) = 1.133
    assert min(samples("lognormal:1,5")) == 1


@pytest.mark.parametrize("text", ["", "0", "5-3", "-5", "1.5", "ten", "lognormal:0,1", "lognormal:5", "lognormal:5,0"])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match=r"length|range|mean of 0|sigma"):
        parse_lengths(text)

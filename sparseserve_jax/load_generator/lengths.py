"""How long prompts and answers are: a fixed number, a uniform range, or a log-normal distribution."""

from __future__ import annotations

import dataclasses
import math
import random
import re

FORMS = "N, LOW-HIGH (uniform), or lognormal:MEAN,SIGMA"
MAX_TOKENS = 10_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthDistribution:
    """Token counts from `low_tokens` to `high_tokens`; with a `sigma`, log-normal around `mean_tokens` within them.

    Raises:
        ValueError: an empty range, or a sigma that is none.
    """

    low_tokens: int
    high_tokens: int
    mean_tokens: float | None = None
    sigma: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.low_tokens <= self.high_tokens <= MAX_TOKENS:
            raise ValueError(
                f"lengths from {self.low_tokens} to {self.high_tokens} tokens are no range; give {FORMS}, "
                f"from 1 to {MAX_TOKENS}"
            )
        if self.sigma is not None and not 0 < self.sigma <= 5:
            raise ValueError(f"sigma={self.sigma} must be above 0 and at most 5")

    def sample(self, rng: random.Random) -> int:
        """One length in tokens."""
        if self.mean_tokens is None or self.sigma is None:
            return rng.randint(self.low_tokens, self.high_tokens)
        drawn = rng.lognormvariate(math.log(self.mean_tokens) - self.sigma**2 / 2, self.sigma)
        return round(min(max(drawn, self.low_tokens), self.high_tokens))


def parse_lengths(text: str) -> LengthDistribution:
    """`512`, `128-2048`, or `lognormal:1024,0.5` (its mean, and sigma of the logarithm).

    Raises:
        ValueError: none of the three.
    """
    if found := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip()):
        low = int(found[1])
        return LengthDistribution(low_tokens=low, high_tokens=int(found[2]) if found[2] else low)
    if found := re.fullmatch(r"lognormal:(\d{1,9}),(\d+(?:\.\d+)?)", text.strip()):
        mean = int(found[1])
        if mean < 1:
            raise ValueError(f"{text!r}: a mean of {mean} tokens must be at least 1")
        return LengthDistribution(
            low_tokens=1, high_tokens=MAX_TOKENS, mean_tokens=float(mean), sigma=float(found[2])
        )  # fmt: skip
    raise ValueError(f"{text!r} is no length; give {FORMS}")

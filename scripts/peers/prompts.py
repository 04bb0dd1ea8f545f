"""Prompts and arrivals, all from seeds: the same for every engine and in every run."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer

from sparseserve_jax.load_generator.arrivals import poisson


class Prompts:
    """Token ids of real English text: the paragraphs of Python's own documentation, shuffled by a seed.

    Two prompts of different seeds begin differently, so that no prefix is shared.
    """

    def __init__(self, tokenizer_file: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        paragraphs = [part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 80]
        encoded = tokenizer.encode_batch([part + "\n\n" for part in paragraphs], add_special_tokens=False)
        self._paragraphs = [encoding.ids for encoding in encoded]

    def prompt(self, num_tokens: int, seed: str) -> list[int]:
        """`num_tokens` token ids."""
        rng, ids = random.Random(seed), []
        while len(ids) < num_tokens:
            for paragraph in rng.sample(self._paragraphs, len(self._paragraphs)):
                ids += paragraph
        return ids[:num_tokens]

    def requests(
        self, count: int, *, prompt_tokens: tuple[int, int], new_tokens: tuple[int, int], seed: str
    ) -> list[dict[str, Any]]:
        """Requests that come all at once; lengths uniform in the given ranges, both ends included."""
        rng = random.Random(seed)
        return [
            {
                "prompt": self.prompt(rng.randint(*prompt_tokens), f"{seed}/{index}"),
                "max_tokens": rng.randint(*new_tokens), "arrival_s": 0.0,
            }
            for index in range(count)
        ]  # fmt: skip


def poisson_arrivals(requests: list[dict[str, Any]], rate_rps: float, seed: str) -> list[dict[str, Any]]:
    """The same requests at times of a Poisson process of `rate_rps` requests a second; the first comes at 0."""
    times = poisson(rate_rps, random.Random(seed))
    return [request | {"arrival_s": arrival_s} for request, arrival_s in zip(requests, times, strict=False)]

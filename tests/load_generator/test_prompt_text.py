from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sparseserve_jax.load_generator.prompt_text import WORDS, excerpt, fitted_text, random_words, tokens_per_word


def counter(tokens_per_word: float) -> Callable[[str], Awaitable[int]]:
    async def count(text: str) -> int:
        return round(len(text.split()) * tokens_per_word)

    return count


def test_words_are_seeded_and_a_shorter_text_begins_a_longer_one() -> None:
    assert len(random_words(500, "a").split()) == 500
    assert random_words(500, "a") != random_words(500, "b")
    assert random_words(500, "a").startswith(random_words(100, "a"))
    assert len(set(WORDS)) == len(WORDS) > 200


@pytest.mark.parametrize("word_tokens", [0.5, 1.0, 1.37, 3.0])
@pytest.mark.parametrize("num_tokens", [1, 10, 1000])
def test_fits_what_the_server_counts(word_tokens: float, num_tokens: int) -> None:
    text, found = asyncio.run(fitted_text(num_tokens, "s", count_tokens=counter(word_tokens)))
    assert found == round(len(text.split()) * word_tokens)
    assert abs(found - num_tokens) <= max(2, 0.005 * num_tokens)


def test_fits_behind_a_prefix() -> None:
    prefix = random_words(512, "p")
    for count_tokens, num_words in ((None, 600), (counter(1.0), 600), (counter(0.5), 1200), (counter(2.0), 513)):
        text, _ = asyncio.run(fitted_text(600, "s", prefix=prefix, prefix_tokens=512, count_tokens=count_tokens))
        assert text.startswith(prefix + " ") and len(text.split()) == num_words


def test_what_a_word_costs() -> None:
    assert asyncio.run(tokens_per_word(None)) == 1.0
    assert asyncio.run(tokens_per_word(counter(1.5))) == 1.5
    text, found = asyncio.run(fitted_text(600, "s", word_tokens=1.5))
    assert (len(text.split()), found) == (400, 600)


TEXT = " ".join(f"word{index:05}" for index in range(4000))


def test_excerpts_come_from_seeded_places() -> None:
    found = [asyncio.run(excerpt(TEXT, 300, seed, count_tokens=counter(1.0))) for seed in ("a", "b", "a")]
    assert found[0] == found[2] != found[1]
    assert all(text in TEXT and abs(tokens - 300) <= 2 for text, tokens in found)


def test_excerpts_without_a_count_are_estimates() -> None:
    text, tokens = asyncio.run(excerpt(TEXT, 300, "a"))
    assert (len(text), tokens) == (1200, 300)


def test_too_short_a_text() -> None:
    with pytest.raises(ValueError, match="the text has 5 characters, too few for a prompt of 300 tokens"):
        asyncio.run(excerpt("hello", 300, "a"))

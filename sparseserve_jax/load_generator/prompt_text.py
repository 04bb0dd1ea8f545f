"""Text of a wanted number of tokens: seeded common words, one token each in most vocabularies, or a place of a text."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

_ENGLISH = """
the of and to in is that for it was on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our used me man too any day same right look think also around another came come work three word must
because does part even place well such here take why things help put years different away again off went old number
great tell men say small every found still between name should home big give air line set own under read last never us
left end along while might next sound below saw something thought both few those always show large often together
asked house world going want school important until form food keep children feet land side without boy once animals
life enough took four head above kind began almost live page got earth need far hand high year mother light country
father let night picture being study second soon story since white ever paper hard near sentence better best across
during today however sure knew trying told young sun thing whole hear example heard several change answer room sea
against top turned learn point city play toward five using himself usually
"""
WORDS = tuple(_ENGLISH.split())
TOLERANCE = 0.005
MAX_ROUNDS = 6
SAMPLE_WORDS = 1024
CHARACTERS_PER_TOKEN = 4.0
"""Of English text; where the server does not count for us."""

CountTokens = Callable[[str], Awaitable[int]]


def random_words(count: int, seed: str) -> str:
    """`count` words, each after a blank, so that texts join without changing their tokens."""
    return "".join(f" {word}" for word in random.Random(seed).choices(WORDS, k=count))


async def tokens_per_word(count_tokens: CountTokens | None) -> float:
    """What a word costs on average; 1 where nobody counts."""
    if count_tokens is None:
        return 1.0
    return max(1, await count_tokens(random_words(SAMPLE_WORDS, "sample"))) / SAMPLE_WORDS


async def fitted_text(
    num_tokens: int,
    seed: str,
    *,
    prefix: str = "",
    prefix_tokens: int = 0,
    word_tokens: float = 1.0,
    count_tokens: CountTokens | None = None,
) -> tuple[str, int]:
    """Text that begins with `prefix` and has `num_tokens` tokens, and the number of tokens that it has.

    Args:
        num_tokens: wanted, together with the prefix.
        seed: of the words after the prefix.
        prefix: what it begins with.
        prefix_tokens: about how many tokens that is.
        word_tokens: about how many a word is.
        count_tokens: counts as the server does; the text is then lengthened or cut until it is within 0.5 % (one
            token at least). None = `word_tokens` is taken for the truth.
    """
    num_words = max(1, round((num_tokens - prefix_tokens) / word_tokens))
    text = prefix + random_words(num_words, seed)
    if count_tokens is None:
        return text, prefix_tokens + round(num_words * word_tokens)
    found = await count_tokens(text)
    for _ in range(MAX_ROUNDS):
        missing = num_tokens - found
        if abs(missing) <= max(1, TOLERANCE * num_tokens) or (missing < 0 and num_words == 1):
            break
        num_words = max(1, num_words + round(missing * text.count(" ") / max(1, found)))
        text = prefix + random_words(num_words, seed)
        found = await count_tokens(text)
    return text, found


async def excerpt(text: str, num_tokens: int, seed: str, *, count_tokens: CountTokens | None = None) -> tuple[str, int]:
    """A piece of `text` from a seeded place on that has `num_tokens` tokens, and the number of tokens that it has.

    Args:
        text: where it is taken from.
        num_tokens: wanted.
        seed: of the place.
        count_tokens: as for `fitted_text`; None = four characters are taken for a token.

    Raises:
        ValueError: the text is too short.
    """
    place, size, found = random.Random(seed).random(), num_tokens * CHARACTERS_PER_TOKEN, num_tokens
    piece = ""
    for _ in range(MAX_ROUNDS):
        if size > len(text):
            raise ValueError(
                f"the text has {len(text)} characters, too few for a prompt of {num_tokens} tokens; "
                "give a longer one, or a smaller --input-len"
            )
        start = int(place * (len(text) - size))
        piece = text[start : start + max(1, round(size))]
        if count_tokens is None:
            break
        found = await count_tokens(piece)
        if abs(found - num_tokens) <= max(1, TOLERANCE * num_tokens):
            break
        size *= num_tokens / max(1, found)
    return piece, found

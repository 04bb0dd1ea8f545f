"""Retrieval tasks made offline from a seed: needles in a haystack, chains of variables, common words.

After RULER (Hsieh et al., arXiv 2404.06654), in our words and with texts of our own: one passcode, one of several, all
values of one key, the variables that hold one value, the most common words of a list.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from sparseserve_jax.evaluation.example import Example, Task
from sparseserve_jax.evaluation.haystack import Haystack
from sparseserve_jax.evaluation.truncation import MAX_REFERENCE_TOKENS
from sparseserve_jax.text.tokenizer import Tokenizer

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="single", metric="found", max_tokens=24),
        Task(name="multi_key", metric="found", max_tokens=24),
        Task(name="multi_value", metric="found", max_tokens=64),
        Task(name="variable_tracing", metric="found", max_tokens=48),
        Task(name="common_words", metric="found", max_tokens=96),
    )
}
PLACED = ("single", "multi_key")
"""Tasks with one answer, which is hidden at a depth; the others are spread over the text."""
DEPTHS = tuple((place + 0.5) / 10 for place in range(10))

VAULTS = ("vault", "archive", "greenhouse", "observatory")
NUM_VALUES = 4
NUM_HOPS = 4
NUM_COMMON_WORDS = 5
COMMON_TO_OTHER = 10
"""How much more often a common word occurs than any other."""
SHORTEST_TOKENS = 512
_QUESTION_TOKENS = 96
"""Left for the question and the chat template."""
_TOKENS_A_NEEDLE = 32


def make_examples(
    tokenizer: Tokenizer, haystack: Haystack, tasks: Sequence[str], lengths: Sequence[int], *,
    depths: Sequence[float] = DEPTHS, samples: int = 1, seed: int = 0,
) -> list[Example]:  # fmt: skip
    """Examples of every task and length; `samples` at each depth, or as many as there are depths of a spread task.

    Args:
        lengths: of prompt and answer together, tokens; they are a little shorter.

    Raises:
        ValueError: an unknown task, a length below `SHORTEST_TOKENS`, or a depth outside [0, 1].
    """
    unknown = [name for name in tasks if name not in TASKS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no task; there are {', '.join(TASKS)}")
    short = [length for length in lengths if length < SHORTEST_TOKENS]
    if short:
        raise ValueError(f"length={short[0]} tokens leave no room for a text; give at least {SHORTEST_TOKENS}")
    outside = [depth for depth in depths if not 0.0 <= depth <= 1.0]
    if outside:
        raise ValueError(f"depth={outside[0]} must lie in [0, 1]")
    found = []
    for name in tasks:
        for length in lengths:
            for number in range(samples * len(depths)):
                rng = random.Random(f"{seed} {name} {length} {number}")
                depth = depths[number // samples] if name in PLACED else None
                room = length - max(TASKS[name].max_tokens, MAX_REFERENCE_TOKENS)
                prompt, answers = _MAKERS[name](tokenizer, haystack, room, depth or 0.0, rng)
                found.append(
                    Example(
                        task=TASKS[name], row_id=f"{length}-{number}", prompt=prompt, answers=answers, length=length,
                        depth=depth,
                    )
                )  # fmt: skip
    return found


def passcode_prompt(haystack: Haystack, num_tokens: int, depth: float, code: str) -> str:
    """A text of `num_tokens` tokens with a sentence about the passcode between two lines, and the question for it."""
    lines = haystack.lines(num_tokens - _QUESTION_TOKENS)
    _insert(lines, {depth: f"The passcode of the vault is {code}. Remember it."})
    return "\n".join(lines) + "\n\nWhat is the passcode of the vault? Answer with the number."


def _single(
    tokenizer: Tokenizer, haystack: Haystack, length: int, depth: float, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    (code,) = _codes(rng, 1)
    return passcode_prompt(haystack, length, depth, code), (code,)


def _multi_key(
    tokenizer: Tokenizer, haystack: Haystack, length: int, depth: float, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    """The asked key lies at the depth, the others anywhere."""
    codes = _codes(rng, len(VAULTS))
    asked = rng.randrange(len(VAULTS))
    places = [depth if index == asked else rng.random() for index in range(len(VAULTS))]
    lines = haystack.lines(length - _QUESTION_TOKENS - _TOKENS_A_NEEDLE * (len(VAULTS) - 1))
    needles = [
        f"The passcode of the {vault} is {code}. Remember it." for vault, code in zip(VAULTS, codes, strict=True)
    ]
    _insert(lines, dict(zip(places, needles, strict=True)))
    question = f"What is the passcode of the {VAULTS[asked]}? Answer with the number."
    return "\n".join(lines) + f"\n\n{question}", (codes[asked],)


def _multi_value(
    tokenizer: Tokenizer, haystack: Haystack, length: int, depth: float, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    codes = _codes(rng, NUM_VALUES)
    lines = haystack.lines(length - _QUESTION_TOKENS - _TOKENS_A_NEEDLE * NUM_VALUES)
    _insert(lines, {rng.random(): f"One of the passcodes of the vault is {code}. Remember it." for code in codes})
    question = f"The text names {NUM_VALUES} passcodes of the vault. What are they? Answer with the numbers."
    return "\n".join(lines) + f"\n\n{question}", tuple(codes)


def _variable_tracing(
    tokenizer: Tokenizer, haystack: Haystack, length: int, depth: float, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    """A chain of assignments in the order of the text; all its variables hold the first one's value."""
    names = ["".join(rng.sample("ABCDEFGHJKLMNPQRSTUVWXYZ", 5)) for _ in range(NUM_HOPS + 1)]
    (value,) = _codes(rng, 1)
    steps = [f"VAR {names[0]} = {value}"] + [f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names)]
    lines = haystack.lines(length - _QUESTION_TOKENS - _TOKENS_A_NEEDLE * len(steps))
    _insert(lines, dict(zip(sorted(rng.random() for _ in steps), steps, strict=True)))
    question = f"Find all variables that are assigned the value {value} in the text above. Answer with their names."
    return "\n".join(lines) + f"\n\n{question}", tuple(names)


def _common_words(
    tokenizer: Tokenizer, haystack: Haystack, length: int, depth: float, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    """A shuffled, numbered list in which a few words occur ten times as often as the others."""
    words = haystack.words()
    rng.shuffle(words)
    common, others = words[:NUM_COMMON_WORDS], words[NUM_COMMON_WORDS:]
    if len(others) < NUM_COMMON_WORDS:
        raise ValueError(f"the haystack has only {len(words)} different words; give a longer text")

    def listed(num_entries: int) -> str:
        repeats = max(2, num_entries // (3 * NUM_COMMON_WORDS))
        entries = [word for word in common for _ in range(repeats)]
        each = max(1, repeats // COMMON_TO_OTHER)
        rest = (word for word in others for _ in range(each))
        entries += [word for word, _ in zip(rest, range(num_entries - len(entries)), strict=False)]
        random.Random(f"{common} {num_entries}").shuffle(entries)
        return "\n".join(f"{number}. {word}" for number, word in enumerate(entries, start=1))

    room = length - _QUESTION_TOKENS
    largest = _largest(
        lambda count: len(tokenizer.encode(listed(count))) <= room, low=2 * NUM_COMMON_WORDS, high=room // 3
    )
    question = f"What are the {NUM_COMMON_WORDS} most common words in the list above? Answer with the words."
    return f"{listed(largest)}\n\n{question}", tuple(common)


_MAKERS: dict[
    str, Callable[[Tokenizer, Haystack, int, float, random.Random], tuple[str, tuple[str, ...]]]
] = {
    "single": _single,
    "multi_key": _multi_key,
    "multi_value": _multi_value,
    "variable_tracing": _variable_tracing,
    "common_words": _common_words,
}  # fmt: skip


def _codes(rng: random.Random, count: int) -> list[str]:
    return [str(code) for code in rng.sample(range(10000, 100000), count)]


def _insert(lines: list[str], needles: dict[float, str]) -> None:
    """Puts each needle before the line at its depth."""
    num_lines = len(lines)
    for depth, needle in sorted(needles.items(), reverse=True):
        lines.insert(int(num_lines * depth), needle)


def _largest(fits: Callable[[int], bool], *, low: int, high: int) -> int:
    """The largest number in [low, high] that fits, if those that fit come first; `low` if none does."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low

"""Prompts that fit: LongBench's cut in the middle, and the chat template around what is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sparseserve_jax.evaluation.example import Example
from sparseserve_jax.text.tokenizer import Tokenizer

MAX_REFERENCE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class FittedPrompt:
    """A prompt's token ids, and how many tokens its middle lost."""

    token_ids: list[int]
    num_cut_tokens: int


def cut_middle(token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The first and the last half of `max_tokens` ids (the first is the shorter one if that is odd), or all."""
    if len(token_ids) <= max_tokens:
        return list(token_ids)
    first = max_tokens // 2
    return [*token_ids[:first], *token_ids[len(token_ids) - (max_tokens - first) :]]


def fit_prompt(
    example: Example, tokenizer: Tokenizer, encode: Callable[[str, bool], list[int]], *, max_prompt_tokens: int,
    limit: int,
) -> FittedPrompt:  # fmt: skip
    """LongBench's protocol: tokenise, cut the middle, decode, and only then the chat template.

    Args:
        encode: token ids of a text as the engine sees them; the second argument asks for the chat template.
        max_prompt_tokens: of the text before the template.
        limit: of the whole prompt; where the template, or encoding the halves anew, leads beyond it, more is cut.

    Raises:
        ValueError: `limit` leaves no room for a text.
    """
    ids = tokenizer.encode(example.prompt)
    room = min(len(ids), max_prompt_tokens)
    while room > 0:
        text = example.prompt
        if room < len(ids):
            first = room // 2
            text = tokenizer.decode(ids[:first]) + tokenizer.decode(ids[len(ids) - (room - first) :])
        whole = encode(text, example.task.chat)
        if len(whole) <= limit:
            return FittedPrompt(whole, len(ids) - room)
        room -= len(whole) - limit
    raise ValueError(
        f"{example.task.name}: a prompt of at most {limit} tokens has no room for its text; raise max_model_len"
    )


def reference_tokens(example: Example, tokenizer: Tokenizer, *, chat: bool = False) -> list[int]:
    """The first tokens of the reference answer, whose likelihood is asked for; may be empty.

    After plain text there is a blank before it; a message of a chat begins with its first word.
    """
    text = example.reference.strip()
    return tokenizer.encode(text if chat else " " + text, add_special_tokens=False)[:MAX_REFERENCE_TOKENS]


def newline_token(tokenizer: Tokenizer) -> int:
    """The token that LongBench lets end a line: the last of an encoded newline."""
    return tokenizer.encode("\n", add_special_tokens=False)[-1]

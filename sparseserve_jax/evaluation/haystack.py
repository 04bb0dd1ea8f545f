"""Text to hide things in: Python's own language reference, which every installation has, or a file."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path
from pydoc_data.topics import topics

from sparseserve_jax.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 8
"""More than any tokenizer needs of prose: how much text is tokenised for a number of tokens."""
END_TOKENS = 32
"""The last tokens of a cut text, where words are halves, are not used: lines do not depend on what was asked before."""


class Haystack:
    """A text of any length, by repetition where it is too short.

    Args:
        path: a text file; None = the Python language reference, about 700,000 characters.

    Attributes:
        sha256: of the text.

    Raises:
        ValueError: the file is empty.
    """

    def __init__(self, tokenizer: Tokenizer, path: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # of as much text as was asked for so far
        if path is None:
            self.text = "\n".join(topics[name] for name in sorted(topics))
        else:
            self.text = path.read_text(encoding="utf-8", errors="replace")
        if not self.text.strip():
            raise ValueError(f"{path} is empty; give a file with text")
        self.sha256 = hashlib.sha256(self.text.encode()).hexdigest()

    def lines(self, num_tokens: int) -> list[str]:
        """The first `num_tokens` tokens, by line."""
        num_chars = CHARS_PER_TOKEN * num_tokens
        while len(self._ids) < num_tokens + END_TOKENS:  # more than once for dense scripts
            repeated = itertools.repeat(self.text, 1 + num_chars // len(self.text))
            self._ids = self._tokenizer.encode("\n".join(repeated)[:num_chars])
            num_chars *= 2
        return self._tokenizer.decode(self._ids[:num_tokens]).split("\n")

    def words(self) -> list[str]:
        """Its lower-case words of four to ten letters, each once, in alphabetical order."""
        return sorted(set(re.findall(r"\b[a-z]{4,10}\b", self.text)))

"""Grammars that generated text must follow: JSON schemas and regular expressions, by the llguidance library.

llguidance walks a trie of the vocabulary along a parser (Earley over derivatives of regular expressions), so a mask
costs microseconds. It is an optional dependency (the extra `server`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from sparseserve_jax.text.tokenizer import Tokenizer

MAX_GRAMMAR_CHARS = 100_000
"""Length of a schema or an expression."""

GrammarKind = Literal["json_schema", "json_object", "regex"]


class GrammarError(ValueError):
    """The grammar cannot be used; the message says why and can be shown to the one who sent it."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Threads may share it.

    Raises:
        GrammarError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise GrammarError("grammars need the package llguidance: pip install 'sparseserve-jax[server]'") from error
        self._library = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(
                tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=list(tokenizer.eos_token_ids)
            )
        except ValueError as error:
            raise GrammarError(f"grammars are not possible with this model's tokenizer: {error}") from error

    def compile(self, kind: GrammarKind, content: str | Mapping[str, Any] | None = None) -> LLGuidanceGrammar:
        """A grammar; takes milliseconds, rarely more than a second, without keeping other threads from running.

        Args:
            content: the schema (a mapping) or the regular expression (Rust's syntax, matched to the whole text);
                nothing for "json_object".

        Raises:
            GrammarError: not a valid or supported schema or expression, or one that is too large.
        """
        matcher_class = self._library.LLMatcher
        text = content if isinstance(content, str) else json.dumps(content)
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(f"{kind} has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed")
        try:
            if kind == "regex":
                source = matcher_class.grammar_from_regex(text)
            else:
                schema = '{"type": "object"}' if kind == "json_object" else text
                # No free whitespace: a model that likes line breaks would never come to an end.
                source = matcher_class.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
            matcher = matcher_class(self._tokenizer, source, log_level=0)
        except ValueError as error:
            raise GrammarError(f"{kind}: {error}") from error
        if matcher.is_error():
            raise GrammarError(f"{kind}: {matcher.get_error()}")
        return LLGuidanceGrammar(matcher, self._tokenizer.vocab_size)


class LLGuidanceGrammar:
    """A compiled grammar (`request.Grammar`)."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def start(self) -> LLGuidanceMatcher:
        """A matcher at the beginning, which shares what was compiled."""
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocab_size)


class LLGuidanceMatcher:
    """Where a continuation stands (`request.TokenMatcher`)."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._num_words = matcher, -(-vocab_size // 32)

    def allowed_tokens(self) -> np.ndarray:
        """The tokens that may come next, 32 in a word."""
        words = np.zeros(self._num_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words

    def accept(self, token_id: int) -> str | None:
        """Takes the token that came; returns why it cannot go on."""
        if self._matcher.consume_token(token_id) and not self._matcher.is_error():
            return None
        return self._matcher.get_error()

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""
        return self._matcher.is_stopped()

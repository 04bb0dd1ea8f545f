"""Token by token to text, at linear total cost and without ever showing half a character."""

from __future__ import annotations

import codecs

from sparseserve_jax.text.tokenizer import Tokenizer

# A UTF-8 character has at most 4 bytes, so text that is still incomplete after more tokens than that is invalid.
_MAX_PENDING_TOKENS = 4
_CONTEXT_TOKENS = 6


class IncrementalDetokenizer:
    """Turns a growing list of token ids into text, delta by delta.

    The deltas and the tail of `finish` concatenate to `tokenizer.decode` of all ids. Where tokens stand for fixed bytes
    (byte-level BPE, Llama 2's byte fallback) the bytes go through an incremental UTF-8 decoder: an incomplete
    character waits for its remaining bytes, an invalid byte becomes U+FFFD at once and holds up nothing. For other
    decoders a window of the last tokens is decoded with and without the new token and the difference is the delta
    (the prefix-offset method of text-generation-inference); after 4 tokens without a complete character the text goes
    out as it is.

    Args:
        tokenizer: of the model.
        skip_special_tokens: special tokens leave no text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.decoder_kind == "sentencepiece"
        # Prefix-offset method: ids whose text is out (context) and those whose text is not (pending).
        self._context: list[int] = []
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is incomplete.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        token_id = self._tokenizer.check_id(token_id)
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        if self._tokenizer.decoder_kind == "other":
            self._pending.append(token_id)
            return self._emit_window(force=len(self._pending) > _MAX_PENDING_TOKENS)
        data = self._tokenizer.token_bytes(token_id)
        if self._strip_space and data:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What was held back: "" or, for a character that never became complete, one U+FFFD. Call it once."""
        if self._tokenizer.decoder_kind == "other":
            return self._emit_window(force=True)
        return self._utf8.decode(b"", final=True)

    def _emit_window(self, *, force: bool) -> str:
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        if not force and (len(after) <= len(before) or after.endswith("\ufffd")):
            return ""
        self._context, self._pending = (self._context + self._pending)[-_CONTEXT_TOKENS:], []
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)

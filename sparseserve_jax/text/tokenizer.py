"""`Tokenizer`: text to token ids and back, over a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import tokenizers

DecoderKind = Literal["byte_level", "sentencepiece", "other"]

_METASPACE = "\u2581"
# The decoder of Llama 2 and Mistral, as their tokenizer.json spells it.
_SENTENCEPIECE_STEPS = (
    {"type": "Replace", "pattern": {"String": _METASPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)


class Tokenizer:
    """A `tokenizers.Tokenizer` with the ids of BOS and EOS, bounds on ids, and the bytes of every token.

    Text is made from bytes wherever the decoder allows it (`decoder_kind` is not "other"): each token stands for fixed
    bytes, so text can be produced token by token and is the same as when it is made at once.

    Args:
        serialized: the content of a `tokenizer.json`. Truncation and padding set in it are turned off.
        bos_token_id: None = the model has none.
        eos_token_ids: every id that ends a text.
        vocab_size: rows of the model's embedding; ids between the tokenizer's own and this leave no text. None = the
            tokenizer's own.

    Raises:
        ValueError: the serialization is not a tokenizer.
    """

    def __init__(
        self,
        serialized: str,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
    ) -> None:
        self._inner = parse_tokenizer(serialized)
        self._inner.no_truncation()
        self._inner.no_padding()
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        num_own_ids = 1 + max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = num_own_ids if vocab_size is None else vocab_size
        added = self._inner.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        self.decoder_kind = decoder_kind(serialized)
        self.max_token_chars = _max_token_chars(serialized, self._inner)
        """Characters of text that one token stands for at most; None where the tokenizer may shorten text first."""
        self._bytes: dict[int, bytes] = {}
        first = self._inner.encode("", add_special_tokens=True).ids[:1]
        self.adds_bos = bos_token_id is not None and first == [bos_token_id]
        """Whether `encode` puts BOS in front."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A BOS that the text spells and that the tokenizer adds appears once (L06a).

        Raises:
            ValueError: `text` is not text, has lone surrogates (no valid UTF-8), or spells a token the model lacks.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text has a lone surrogate at character {error.start}, which is no valid Unicode; remove or replace it"
            ) from error
        # Unlike `encode` this lets other threads run meanwhile, and makes no offsets: half the time.
        ids = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if ids and max(ids) >= self.vocab_size:  # an added token, e.g. for padding, without a row in the model
            raise ValueError(
                f"text spells {self._inner.id_to_token(max(ids))!r}, token {max(ids)}, but the model has only "
                f"vocab_size={self.vocab_size} tokens; remove it"
            )
        if add_special_tokens and self.adds_bos and ids[:2] == [self.bos_token_id] * 2:
            return ids[1:]
        return ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Token ids of a rendered chat template: nothing is added but a BOS the template left out (exactly one BOS)."""
        ids = self.encode(rendered, add_special_tokens=False)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not valid UTF-8 become U+FFFD, one for each maximal invalid part.

        Raises:
            ValueError: an id is outside `[0, vocab_size)`.
        """
        checked = [self.check_id(token_id) for token_id in ids]
        if self.decoder_kind == "other":
            return self._inner.decode(checked, skip_special_tokens=skip_special_tokens)
        data = b"".join(self.token_bytes(token_id, skip_special_tokens) for token_id in checked)
        if self.decoder_kind == "sentencepiece":
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def to_json(self) -> str:
        """The content of a `tokenizer.json`."""
        return self._inner.to_str()

    def check_id(self, token_id: int) -> int:
        """`token_id` as an int.

        Raises:
            ValueError: it is not an integer in `[0, vocab_size)`.
        """
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__") or not 0 <= token_id < self.vocab_size:
            raise ValueError(
                f"token id {token_id!r} must be an integer in [0, {self.vocab_size}) (the model's vocabulary)"
            )
        return int(token_id)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None for an id only the model has (padding of its vocabulary)."""
        return self._inner.id_to_token(self.check_id(token_id))

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._inner.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return self._inner.id_to_token(token_id) in self._special

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """The bytes a token stands for. With decoder kind "sentencepiece" the text's very first space goes (`decode`).

        Raises:
            ValueError: an id outside the vocabulary, or decoder kind "other", whose tokens have no fixed bytes.
        """
        if skip_special_tokens and self.is_special(token_id):
            return b""
        data = self._bytes.get(token_id)
        if data is None:
            token = self.id_to_token(token_id)
            if self.decoder_kind == "other":
                raise ValueError("tokens of this tokenizer's decoder have no fixed bytes; use decode()")
            data = b"" if token is None else _TOKEN_BYTES[self.decoder_kind](token)
            self._bytes[token_id] = data
        return data


def parse_tokenizer(serialized: str) -> tokenizers.Tokenizer:
    """The tokenizer of a `tokenizer.json` text; ValueError with the library's reason if it is none."""
    try:
        return tokenizers.Tokenizer.from_str(serialized)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"not a tokenizer.json that the tokenizers library can read: {error}") from error


def decoder_kind(serialized: str) -> DecoderKind:
    """How the tokenizer turns tokens into text: byte-level BPE, Llama 2's byte fallback, or anything else."""
    decoder = json.loads(serialized).get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    if len(steps) == 1 and steps[0].get("type") == "ByteLevel":
        return "byte_level"
    if len(steps) == len(_SENTENCEPIECE_STEPS) and all(map(_covers, steps, _SENTENCEPIECE_STEPS)):
        return "sentencepiece"
    return "other"


def _max_token_chars(serialized: str, inner: tokenizers.Tokenizer) -> int | None:
    normalizer = json.loads(serialized).get("normalizer") or {"type": "Sequence", "normalizers": []}
    steps = normalizer.get("normalizers", []) if normalizer.get("type") == "Sequence" else [normalizer]
    shortens = any(step.get("type") not in ("Prepend", "Replace") or step.get("content") == "" for step in steps)
    added = inner.get_added_tokens_decoder().values()
    if shortens or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, inner.get_vocab(with_added_tokens=True)), default=1)


def _covers(step: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(step.get(key) == value for key, value in expected.items())


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of every byte (openai/gpt-2, encoder.py `bytes_to_unicode`), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """As the library's ByteLevel decoder: a token with a character outside the alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode("utf-8")
    return token.replace(_METASPACE, " ").encode("utf-8")


_TOKEN_BYTES = {"byte_level": _byte_level_bytes, "sentencepiece": _sentencepiece_bytes}

"""Encoding, decoding, ids out of range, and BOS exactly once (L06a)."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseserve_jax.text.tokenizer import Tokenizer
from tests.text import tokenizers_for_tests as tiny


def make(*, add_bos: bool = False, vocab_size: int | None = None) -> Tokenizer:
    return Tokenizer(tiny.byte_level(add_bos=add_bos), bos_token_id=259, eos_token_ids=(260,), vocab_size=vocab_size)


@settings(deadline=None)
@given(st.text().filter(lambda text: "é" not in text))  # the added token, which the library's decoder takes for a byte
def test_byte_level_round_trip(text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("serialized", [tiny.byte_level(), tiny.sentencepiece()])
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decode_is_the_librarys(serialized: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, inner = Tokenizer(serialized), tokenizers.Tokenizer.from_str(serialized)
    if tokenizer.decoder_kind == "byte_level":
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    else:  # the library spoils a whole run of byte tokens that is not valid UTF-8; ours only the invalid bytes
        ids = inner.encode(data.draw(st.text()), add_special_tokens=False).ids
        ids += data.draw(st.lists(st.sampled_from([0, 1, 2, *range(259, tokenizer.vocab_size)]), max_size=20))
    assert tokenizer.decode(ids, skip) == inner.decode(ids, skip_special_tokens=skip)


def test_sentencepiece_keeps_valid_characters_next_to_an_invalid_byte() -> None:
    tokenizer = Tokenizer(tiny.sentencepiece())
    ids = [3 + byte for byte in "é".encode() + b"\xff" + "é".encode()]
    assert tokenizer.decode(ids) == "é\ufffdé"


def test_exactly_one_bos() -> None:
    tokenizer, plain = make(add_bos=True), make()
    bos = tokenizer.bos_token_id
    assert tokenizer.adds_bos
    assert not plain.adds_bos
    for text in ("the", "<s>the"):
        assert tokenizer.encode(text).count(bos) == 1
        assert tokenizer.encode_chat(text).count(bos) == 1
    assert bos not in tokenizer.encode("the", add_special_tokens=False)
    assert bos not in plain.encode_chat("the")
    assert tokenizer.encode("") == [bos]


def test_ids_out_of_range() -> None:
    tokenizer = make(vocab_size=300)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([299, np.int32(0)]) == "!"  # 299 is padding of the model's vocabulary: no text
    for bad in (-1, 300, 1.5, "1", True, None):
        with pytest.raises(ValueError, match=r"\[0, 300\)"):
            tokenizer.decode([bad])  # pyright: ignore
    pad = Tokenizer(tiny.byte_level(), vocab_size=261)  # <pad> is 261
    with pytest.raises(ValueError, match=r"<pad>.*261.*vocab_size=261"):
        pad.encode("a<pad>")


def test_text_that_is_no_text() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        make().encode("a\ud800")
    with pytest.raises(ValueError, match="int"):
        make().encode(5)  # pyright: ignore
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer("{}")


def test_truncation_and_padding_are_off() -> None:
    inner = tokenizers.Tokenizer.from_str(tiny.byte_level())
    inner.enable_truncation(4)
    inner.enable_padding(length=16)
    assert len(Tokenizer(inner.to_str()).encode("a" * 9)) == 9


def test_bytes_of_a_token() -> None:
    tokenizer = make()
    assert tokenizer.token_bytes(tokenizer.encode(" the")[0]) == b" the"
    assert tokenizer.token_bytes(259) == b"<s>"
    assert tokenizer.token_bytes(259, skip_special_tokens=True) == b""
    with pytest.raises(ValueError, match="no fixed bytes"):
        Tokenizer(tiny.wordpiece()).token_bytes(1)

"""Streams of text (L03): deltas concatenate to the whole, characters come whole, a bad byte stalls nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseserve_jax.text.detokenizer import IncrementalDetokenizer
from sparseserve_jax.text.tokenizer import Tokenizer
from tests.text import tokenizers_for_tests as tiny

BYTE_LEVEL = Tokenizer(tiny.byte_level())
SENTENCEPIECE = Tokenizer(tiny.sentencepiece())
WORDPIECE = Tokenizer(tiny.wordpiece())
ALL = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE, WORDPIECE], ids=lambda t: t.decoder_kind)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token a byte."""
    if tokenizer.decoder_kind == "sentencepiece":
        return [3 + byte for byte in data]
    of_byte = {tokenizer.token_bytes(i): i for i in range(256)}
    return [of_byte[bytes([byte])] for byte in data]


def test_kinds() -> None:
    assert [t.decoder_kind for t in (BYTE_LEVEL, SENTENCEPIECE, WORDPIECE)] == ["byte_level", "sentencepiece", "other"]


@ALL
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_concatenate_to_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=lambda t: t.decoder_kind)
@settings(deadline=None)
@given(text=st.text(max_size=30) | st.sampled_from(["👨‍👩‍👧‍👦🙂", "กำลังน้ำ", "a漢字b", "é"]))
def test_characters_come_whole(tokenizer: Tokenizer, text: str) -> None:
    deltas = stream(tokenizer, byte_ids(tokenizer, text.encode()))
    expected = text[1:] if tokenizer.decoder_kind == "sentencepiece" and text.startswith(" ") else text
    assert "".join(deltas) == expected
    assert deltas[-1] == ""  # nothing is held back at the end of a character
    assert all(len(delta) <= 1 for delta in deltas)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=lambda t: t.decoder_kind)
def test_bad_byte_does_not_stall(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, byte_ids(tokenizer, b"a\xffb\x80c")) == ["a", "\ufffd", "b", "\ufffd", "c", ""]
    assert stream(tokenizer, byte_ids(tokenizer, b"\xf0\x9fA")) == ["", "", "\ufffdA", ""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=lambda t: t.decoder_kind)
def test_incomplete_tail_is_one_replacement_character(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, byte_ids(tokenizer, "a🙂".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_other_decoders_do_not_stall_on_replacement_characters() -> None:
    bad = WORDPIECE.token_to_id("\ufffd")
    assert bad is not None
    deltas = stream(WORDPIECE, [bad] * 20 + [4])
    assert "".join(deltas) == WORDPIECE.decode([bad] * 20 + [4])
    assert sum(map(bool, deltas[:10])) >= 1


def test_skipped_tokens_leave_no_trace_between_others() -> None:
    go, unknown = 4, 0
    assert "".join(stream(WORDPIECE, [go, *[unknown] * 12, go])) == WORDPIECE.decode([go, go]) == "go go"


def test_special_tokens() -> None:
    bos = BYTE_LEVEL.token_to_id("<s>")
    assert bos is not None
    ids = [bos, *byte_ids(BYTE_LEVEL, b"hi"), bos]
    assert "".join(stream(BYTE_LEVEL, ids)) == "hi"
    assert "".join(stream(BYTE_LEVEL, ids, skip=False)) == "<s>hi<s>"


def test_id_out_of_range() -> None:
    with pytest.raises(ValueError, match="token id"):
        IncrementalDetokenizer(BYTE_LEVEL, True).add(BYTE_LEVEL.vocab_size)


@ALL
def test_cost_is_linear(tokenizer: Tokenizer) -> None:
    def cost_s(count: int) -> float:
        begin_s = time.thread_time()
        stream(tokenizer, [i % 4 + 3 for i in range(count)])
        return time.thread_time() - begin_s

    cost_s(1000)
    assert cost_s(40_000) < 8 * 4 * max(cost_s(10_000), 0.002)  # quadratic would be 16 times, and seconds

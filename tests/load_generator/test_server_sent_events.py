from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseserve_jax.load_generator import server_sent_events
from sparseserve_jax.load_generator.server_sent_events import Event, EventStream


def parse(*chunks: bytes) -> list[Event]:
    stream = EventStream()
    return [event for chunk in chunks for event in stream.feed(chunk)] + stream.close()


STREAM = '\ufeff: ping\r\n\r\ndata: {"a": "é😀"}\r\n\r\n:\n\nevent: error\ndata:no blank\rdata: two\r\r id: 1\ndata\n\n'
EVENTS = [Event("message", '{"a": "é😀"}'), Event("error", "no blank\ntwo"), Event("message", "")]


def test_lines_ends_comments_and_fields() -> None:
    assert parse(STREAM.encode()) == EVENTS


@given(st.lists(st.integers(0, len(STREAM.encode())), max_size=12))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    data = STREAM.encode()
    places = [0, *sorted(cuts), len(data)]
    assert parse(*(data[a:b] for a, b in itertools.pairwise(places))) == EVENTS


def test_byte_by_byte() -> None:
    assert parse(*(bytes([byte]) for byte in STREAM.encode())) == EVENTS


def test_an_event_is_there_with_its_blank_line_and_not_later() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\n") == []
    assert stream.feed(b"\n") == [Event("message", "a")]
    assert stream.feed(b"data: b\r\n\r") == [Event("message", "b")]
    assert stream.feed(b"\n") == []


def test_the_end_may_lack_its_blank_line() -> None:
    assert parse(b"data: [DONE]") == [Event("message", "[DONE]")]


def test_bad_bytes_are_replaced() -> None:
    assert parse(b"data: a\xffb\n\n") == [Event("message", "a\ufffdb")]


def test_an_endless_line_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sent_events, "MAX_EVENT_CHARACTERS", 100)
    stream = EventStream()
    with pytest.raises(ValueError, match="more than 100 characters"):
        for _ in range(11):
            stream.feed(b"x" * 10)
    stream = EventStream()
    with pytest.raises(ValueError, match="more than 100 characters"):
        for _ in range(11):
            stream.feed(b"data: 0123456789\n")

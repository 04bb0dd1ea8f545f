"""The framing of an event stream (WHATWG HTML, section 9.2), fed with bytes as they come."""

from __future__ import annotations

import codecs
from typing import NamedTuple

MAX_EVENT_CHARACTERS = 16 * 2**20


class Event(NamedTuple):
    """One event: its type ("message" unless named), and its data lines joined by newlines."""

    type: str
    data: str


class EventStream:
    """Parses a stream of any chunking: lines, line ends and characters may be cut anywhere. Comments are dropped.

    Malformed UTF-8 becomes U+FFFD, as the standard says.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._parts: list[str] = []  # of the line that has not ended
        self._held = 0
        self._after_return = False
        self._type = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that this chunk completes.

        Raises:
            ValueError: an event is larger than any answer should be.
        """
        return self._take(self._decoder.decode(chunk))

    def close(self) -> list[Event]:
        """The last event, where the stream ended without the blank line that ends it."""
        events = self._take(self._decoder.decode(b"", final=True) + "\n")
        return events + self._dispatch()

    def _take(self, text: str) -> list[Event]:
        if self._after_return and text:
            self._after_return = False
            text = text.removeprefix("\n")  # the second half of a line end that was cut in two
        self._after_return = text.endswith("\r")
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events: list[Event] = []
        for line in lines:
            events += self._line("".join([*self._parts, line]))
            self._parts.clear()
        self._parts.append(rest)
        self._held = len(rest) if lines else self._held + len(rest)
        if self._held + sum(map(len, self._data)) > MAX_EVENT_CHARACTERS:
            raise ValueError(f"an event of more than {MAX_EVENT_CHARACTERS} characters")
        return events

    def _line(self, line: str) -> list[Event]:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value
        return []  # a comment (no name), or a field that is of no use here

    def _dispatch(self) -> list[Event]:
        events = [Event(self._type or "message", "\n".join(self._data))] if self._data else []
        self._type, self._data = "", []
        return events

"""Stop strings in streamed text: `StopChecker`. No JAX here."""

from __future__ import annotations

import collections
import dataclasses


@dataclasses.dataclass(slots=True)
class _Node:
    """A prefix of some stop string: what follows, where to go when nothing does, the longest stop ending here."""

    depth: int
    children: dict[str, _Node] = dataclasses.field(default_factory=dict)
    fallback: _Node | None = None
    match: str | None = None


class StopChecker:
    """Cuts a text at the first stop string, however the text is chopped up.

    The text ends at the first character that completes a stop string, so generation never runs on past a complete one;
    of several completed by the same character the longest (the one that starts first) counts. The result does not
    depend on the deltas' borders. Text that could still become part of a stop string is held back; nothing of a stop
    string is ever emitted, unless `include` is set, and then all of it.

    An Aho-Corasick automaton (Aho and Corasick, CACM 1975): cost is linear in the text whatever the number of stops.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._include = include
        self._root = _build(stop)
        self._node = self._root
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._matched

    def feed(self, delta: str) -> tuple[str, str | None]:
        """Takes more text; returns what may be shown now and the stop string that was completed, if any.

        After a match everything is ignored.
        """
        if self._matched is not None:
            return "", self._matched
        if not self._root.children:
            return delta, None
        node = self._node
        for index, char in enumerate(delta):
            node = _next(node, char)
            if node.match is not None:
                self._matched = node.match
                text = self._held + delta[: index + 1]
                self._held = ""
                return (text if self._include else text[: -len(node.match)]), node.match
        self._node = node
        text = self._held + delta
        shown = len(text) - node.depth
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """Releases the text held back: there is no more."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _build(stop: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for text in stop:
        node = root
        for char in text:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.match = text
    queue = collections.deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            child.fallback = root if node.fallback is None else _next(node.fallback, char)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


def _next(node: _Node, char: str) -> _Node:
    while char not in node.children:
        if node.fallback is None:
            return node
        node = node.fallback
    return node.children[char]

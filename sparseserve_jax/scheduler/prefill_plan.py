"""How prompts become prefill work: chunks, packs, layer segments (paper section 3.3) and the injection budget.

A *call* is what goes through one layer at once: one chunk of a long prompt, or several short prompts packed. A *group*
is the calls that advance together: all chunks of one prompt, or one pack. Each iteration runs *units* of groups, first
come, first served, until `max_inject_tokens` (prompt tokens x layers) is spent:

    layer mode      unit = one call through one layer;   order: for each layer, for each call
    chunked mode    unit = one call through all layers;  order: for each call

Layer order needs the keys and values of one layer at a time on the device; chunk order is the ablation.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Sequence

from sparseserve_jax.cache.layout import MAX_PACKED_PROMPTS, KVLayout
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.plan import PrefillItem, PrefillSegment
from sparseserve_jax.scheduler.request_state import SchedulerRequest

TILE = 128
"""Tokens of the smallest call; packed prompts and chunks start on a multiple of it (and so on a block)."""
DEFAULT_INJECT_TOKENS = 2048
"""Prompt tokens per layer and iteration where `max_inject_tokens` is not set (the paper's evaluation)."""


def call_size(num_tokens: int) -> int:
    """Tokens of the call that holds `num_tokens`: the next power of two, at least one tile."""
    return max(TILE, 1 << (num_tokens - 1).bit_length())


def is_wasteful(num_tokens: int) -> bool:
    """Whether padding up to `call_size` leaves more than a quarter of the call empty."""
    size = call_size(num_tokens)
    return size > TILE and 4 * num_tokens < 3 * size


def split_chunks(num_tokens: int, max_chunk: int) -> list[tuple[int, int]]:
    """Cuts a prompt into chunks [start, end) that fill calls of 128, 256, ... `max_chunk` tokens.

    Whole calls first; what is left goes into one padded call, or is cut again where that would be wasteful:
    4200 tokens in calls of at most 2048 are 2048 + 2048 + 104. Every chunk starts on a multiple of 128.

    Args:
        max_chunk: a power of two, at least 128.
    """
    if max_chunk < TILE or max_chunk & (max_chunk - 1):
        raise ValueError(f"max_chunk={max_chunk} must be a power of two of at least {TILE}")
    chunks, start = [], 0
    while start < num_tokens:
        left = num_tokens - start
        size = min(call_size(left), max_chunk)
        if left < size and is_wasteful(left):
            size //= 2
        chunks.append((start, min(start + size, num_tokens)))
        start += size
    return chunks


def num_packable(lengths: Sequence[int], max_chunk: int) -> int:
    """How many of the first prompts share one call: as many as fit without waste, each starting on a tile."""
    num_aligned, best = 0, 1
    for count, length in enumerate(lengths[:MAX_PACKED_PROMPTS], start=1):
        num_aligned += -(-length // TILE) * TILE
        if num_aligned > max_chunk or len(split_chunks(length, max_chunk)) > 1:
            break
        if not is_wasteful(num_aligned):
            best = count
    return best


@dataclasses.dataclass
class PrefillGroup:
    """Calls that advance together, and how far they are.

    Attributes:
        calls: the prompts' tokens, in order; either one item each (chunks of one prompt) or one call of many items.
        order: scheduling order of the first prompt.
        position: units done.
    """

    calls: list[tuple[PrefillItem, ...]]
    order: tuple[int, float, int]
    num_layers: int
    layer_major: bool
    position: int = 0

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Whose prompts these are."""
        return tuple(item.request_id for item in self.calls[0])

    @property
    def is_done(self) -> bool:
        """Whether the last call is through the last layer."""
        return self.position == len(self.calls) * (self.num_layers if self.layer_major else 1)

    def next_unit(self) -> PrefillSegment:
        """The unit at `position`."""
        if not self.layer_major:
            return PrefillSegment(items=self.calls[self.position], layer_start=0, layer_end=self.num_layers)
        layer, call_idx = divmod(self.position, len(self.calls))
        return PrefillSegment(items=self.calls[call_idx], layer_start=layer, layer_end=layer + 1)

    def drop(self, request_id: str) -> None:
        """Takes a prompt out; the others go on where they are. Without any left, `calls` is empty."""
        calls = [tuple(item for item in call if item.request_id != request_id) for call in self.calls]
        self.calls = [call for call in calls if call]


class PrefillPlanner:
    """Owns the prompts between admission and their last layer."""

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        self._num_layers = layout.num_layers
        self._layer_major = config.prefill == "layer"
        self._packs = not config.deterministic
        self.max_inject_tokens = config.max_inject_tokens or DEFAULT_INJECT_TOKENS * layout.num_layers
        per_call = self.max_inject_tokens if self._layer_major else self.max_inject_tokens // layout.num_layers
        fitting = 1 << (max(per_call, TILE).bit_length() - 1)
        self.max_chunk = min(config.max_num_batched_tokens, fitting)
        self._queue: list[SchedulerRequest] = []
        self._groups: list[PrefillGroup] = []

    def add(self, request: SchedulerRequest) -> None:
        """Takes in an admitted request."""
        bisect.insort(self._queue, request, key=lambda r: r.order)

    def drop(self, request_id: str) -> None:
        """Forgets a request in whatever stage; unknown ids are those whose prefill is complete."""
        self._queue = [r for r in self._queue if r.request_id != request_id]
        for group in self._groups:
            if request_id in group.request_ids:
                group.drop(request_id)
        self._groups = [g for g in self._groups if g.calls]

    def plan(self) -> tuple[list[PrefillSegment], list[str]]:
        """The prefill work of one iteration and the requests that it completes.

        At least one unit if there is any, also where it alone exceeds `max_inject_tokens`. A group whose next unit
        does not fit into what is left waits; a prompt that does not fit is not started, nor any behind it.
        """
        segments: list[PrefillSegment] = []
        left, may_start = self.max_inject_tokens, True
        open_groups = collections.deque(sorted(self._groups, key=lambda g: g.order))
        while open_groups or (may_start and self._queue):
            is_next_open = bool(open_groups) and not (
                may_start and self._queue and self._queue[0].order < open_groups[0].order
            )
            if is_next_open:
                group = open_groups.popleft()
            else:
                group = self._form_group()
                if segments and group.next_unit().num_tokens > left // self._layers_per_unit:
                    may_start = False
                    continue
                self._start(group)
            left = self._run(group, left, segments)
        completed = [request_id for g in self._groups if g.is_done for request_id in g.request_ids]
        self._groups = [g for g in self._groups if not g.is_done]
        return segments, completed

    @property
    def _layers_per_unit(self) -> int:
        return 1 if self._layer_major else self._num_layers

    def _run(self, group: PrefillGroup, left: int, segments: list[PrefillSegment]) -> int:
        """Runs units of a group while they fit; the first unit of an iteration always does. Returns what is left."""
        while not group.is_done:
            unit = group.next_unit()
            cost = unit.num_tokens * self._layers_per_unit
            if segments and cost > left:
                break
            left = max(0, left - cost)
            group.position += 1
            last = segments[-1] if segments else None
            if last and last.items == unit.items:  # the same call again: its next layer
                segments[-1] = dataclasses.replace(last, layer_end=unit.layer_end)
            else:
                segments.append(unit)
        return left

    def _form_group(self) -> PrefillGroup:
        """The group of the first prompts of the queue, which stay there until `_start`."""
        first = self._queue[0]
        chunks = split_chunks(first.num_prompt_tokens, self.max_chunk)
        if len(chunks) == 1 and self._packs:
            lengths = [r.num_prompt_tokens for r in self._queue[:MAX_PACKED_PROMPTS]]
            packed = self._queue[: num_packable(lengths, self.max_chunk)]
            calls = [tuple(PrefillItem(request_id=r.request_id, start=0, end=r.num_prompt_tokens) for r in packed)]
        else:
            calls = [(PrefillItem(request_id=first.request_id, start=start, end=end),) for start, end in chunks]
        return PrefillGroup(calls, first.order, self._num_layers, self._layer_major)

    def _start(self, group: PrefillGroup) -> None:
        self._groups.append(group)
        started = set(group.request_ids)
        self._queue = [r for r in self._queue if r.request_id not in started]

"""When a request's work was done: `Interval`s of prefill segments and of bytes moved between the tiers. No JAX here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from sparseserve_jax.plan import StepPlan

IntervalKind = Literal["prefill", "load", "save"]


@dataclasses.dataclass(kw_only=True)
class Interval:
    """Work of one kind on one continuation.

    Attributes:
        kind: "prefill" = a prefill segment; "load" / "save" = bytes from / to host memory, in steps that follow one
            another.
        start_s / end_s: after the request's arrival: from when its (first) step was handed to the device, or the step
            before it came back, to when its (last) step came back; as the host sees it, since a step is one program to
            the device.
        amount: tokens (prefill) or bytes.
        layers: of a prefill segment, [first, end).
        num_steps: that it spans.
    """

    kind: IntervalKind
    start_s: float
    end_s: float
    amount: int
    layers: tuple[int, int] | None = None
    num_steps: int = 1


class Timeline:
    """Intervals of continuations, by id, so long as they live. Loads (and saves) of steps in a row are one."""

    def __init__(self) -> None:
        self._intervals: dict[str, list[Interval]] = {}
        self._open: dict[tuple[str, IntervalKind], Interval] = {}  # of the step before
        self._last_end_s = -math.inf

    def note_step(
        self, plan: StepPlan, *, start_s: float, end_s: float, loaded: Mapping[str, int], saved: Mapping[str, int],
        arrivals_s: Mapping[str, float],
    ) -> None:  # fmt: skip
        """Takes in a step that came back; all times on one clock.

        Args:
            start_s / end_s: when it was handed to the device, and when it came back.
            loaded / saved: bytes by id.
            arrivals_s: by id, of those that live; nothing is noted of others.
        """

        start_s, self._last_end_s = max(start_s, self._last_end_s), end_s

        def add(request_id: str, kind: IntervalKind, amount: int, layers: tuple[int, int] | None = None) -> Interval:
            arrival_s = arrivals_s[request_id]
            interval = Interval(
                kind=kind, start_s=start_s - arrival_s, end_s=end_s - arrival_s, amount=amount, layers=layers
            )
            self._intervals.setdefault(request_id, []).append(interval)
            return interval

        for segment in plan.prefill:
            for item in segment.items:
                if item.request_id in arrivals_s:
                    layers = (segment.layer_start, segment.layer_end)
                    add(item.request_id, "prefill", item.end - item.start, layers)
        before, self._open = self._open, {}
        moved: tuple[tuple[IntervalKind, Mapping[str, int]], ...] = (("load", loaded), ("save", saved))
        for kind, bytes_by_id in moved:
            for request_id, num_bytes in bytes_by_id.items():
                if num_bytes == 0 or request_id not in arrivals_s:
                    continue
                interval = before.get((request_id, kind))
                if interval is None:
                    interval = add(request_id, kind, num_bytes)
                else:
                    interval.end_s, interval.amount = end_s - arrivals_s[request_id], interval.amount + num_bytes
                    interval.num_steps += 1
                self._open[request_id, kind] = interval

    def pop(self, request_id: str) -> list[Interval]:
        """The intervals of a continuation that has ended; it is forgotten."""
        for kind in ("load", "save"):
            self._open.pop((request_id, kind), None)
        return self._intervals.pop(request_id, [])

"""A request as the scheduler sees it: sizes, order and progress; no tokens, no text."""

from __future__ import annotations

import dataclasses
import enum

from sparseserve_jax.config import DecodeSetting


class RequestState(enum.Enum):
    """Where a request stands. `PARKED` and `RUNNING` both mean: prefill complete, decoding."""

    WAITING = "waiting"
    """Known, holds nothing."""
    PREFILL = "prefill"
    """Holds a row and all its KV blocks; its first token is to come: its prompt is going through the layers, or it took
    over that of another request."""
    PARKED = "parked"
    """Decoding, but without device room (tiered mode only)."""
    RUNNING = "running"
    """Decoding; holds its device room, if there are tiers."""
    FINISHED = "finished"
    """Ended or aborted; holds nothing."""


@dataclasses.dataclass(kw_only=True)
class SchedulerRequest:
    """One continuation to schedule. The scheduler owns it from `add_request` on; others only read.

    Attributes:
        arrival_s: on the clock that `schedule` is called with.
        priority: lower is served first.
        max_new_tokens: it ends after this many at the latest.
        setting: how it decodes; requests of one setting share a batch. None = that of the engine.
        successor: takes over prompt, row and blocks when this one has ended, unless it is aborted. Of the same prompt
            and priority; it is not added itself.
        state: see `RequestState`.
        arrival_idx: number of the `add_request` call; -1 before.
        row: of the runner's per-sequence tables, -1 = none.
        block_ids: KV blocks of prompt and new tokens.
        num_generated: tokens sampled so far.
        prefill_start_s: time of the plan with its first prefill work; None before.
        num_parks: times it lost its device room.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    max_new_tokens: int
    priority: int = 0
    setting: DecodeSetting | None = None
    successor: SchedulerRequest | None = None
    state: RequestState = dataclasses.field(default=RequestState.WAITING, init=False)
    arrival_idx: int = dataclasses.field(default=-1, init=False)
    row: int = dataclasses.field(default=-1, init=False)
    block_ids: tuple[int, ...] = dataclasses.field(default=(), init=False)
    num_generated: int = dataclasses.field(default=0, init=False)
    prefill_start_s: float | None = dataclasses.field(default=None, init=False)
    num_parks: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in ("num_prompt_tokens", "max_new_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name}={value} of request {self.request_id!r} must be at least 1")

    @property
    def order(self) -> tuple[int, float, int]:
        """Sort key: priority, arrival, order of `add_request`."""
        return self.priority, self.arrival_s, self.arrival_idx

    @property
    def is_decoding(self) -> bool:
        """Its prefill is complete and it has not ended."""
        return self.state in (RequestState.PARKED, RequestState.RUNNING)

    @property
    def max_tokens(self) -> int:
        """Tokens whose blocks are reserved: prompt and new, of itself or a longer successor."""
        own = self.num_prompt_tokens + self.max_new_tokens
        return own if self.successor is None else max(own, self.successor.max_tokens)

    @property
    def context_tokens(self) -> int:
        """Tokens that the next decode step attends to: all so far; it also computes K and V of the newest."""
        return self.num_prompt_tokens + self.num_generated

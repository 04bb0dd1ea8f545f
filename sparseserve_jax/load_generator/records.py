"""A request as it is planned, and what became of it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

OK = "ok"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRequest:
    """One request, ready to be sent: nothing is left to compute once the clock runs.

    Attributes:
        index: its place in the plan.
        arrival_s: when it should be sent, since the start.
        body: the HTTP body.
        input_tokens: tokens that the prompt should have; None = not known.
        max_tokens: tokens that it asks for; None = the server's default.
    """

    index: int
    arrival_s: float
    body: bytes
    input_tokens: int | None
    max_tokens: int | None


@dataclasses.dataclass(kw_only=True)
class RequestRecord:
    """What a client saw of one request. Times are seconds since the start of the run.

    Attributes:
        index: its place in the plan.
        arrival_s: when it should have been sent.
        sent_s: when it was sent.
        text_s: for each choice, when each piece of its text came; empty pieces do not count.
        end_s: when the last text or the finish reason came; of a failure, when it was known.
        status: "ok" or the kind of failure.
        error: what the server or the connection said of a failure.
        input_tokens / output_tokens: the server's count (`usage_from="server"`), or else the planned length and the
            number of pieces, which is less than the tokens where a server sends several in one.
        finish_reason: of the first choice that gave one.
        done_marker: whether the stream ended with `[DONE]`.
    """

    index: int
    arrival_s: float
    sent_s: float
    text_s: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    end_s: float = 0.0
    status: str = OK
    error: str | None = None
    input_tokens: int | None = None
    output_tokens: int = 0
    usage_from: Literal["server", "estimate"] = "estimate"
    finish_reason: str | None = None
    done_marker: bool = False

    @property
    def ok(self) -> bool:
        """Whether the answer is whole."""
        return self.status == OK

    @property
    def first_text_s(self) -> float | None:
        """When the first text of any choice came."""
        return min((times[0] for times in self.text_s.values()), default=None)

    @property
    def queue_s(self) -> float:
        """How long it waited in the client: for a free place under the limit of concurrency."""
        return self.sent_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from sending; None without text."""
        return None if self.first_text_s is None else self.first_text_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the end, from sending."""
        return self.end_s - self.sent_s

    @property
    def tbt_s(self) -> list[float]:
        """Gaps between neighbouring pieces of text of a choice (also called ITL)."""
        return [later - earlier for times in self.text_s.values() for earlier, later in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time for a token after the first of a choice; None where there is none."""
        after_first = self.output_tokens / max(1, len(self.text_s)) - 1
        if self.first_text_s is None or after_first <= 0:
            return None
        return (max(times[-1] for times in self.text_s.values()) - self.first_text_s) / after_first

"""Who breaks steps: `Quarantine` finds the request by running suspects alone, half of them at a time. No JAX here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

TOKENS_TO_CLEAR = 2
"""A failed step is the one that the host waits for or the one after it: who got two tokens more is past both."""


class Quarantine:
    """Trials after a failed step, in which only some of the suspects run.

    All requests of the failed step are suspects. They run in two groups, one after the other, until each of a group has
    got past the point of failure; a group that fails again is halved, and a group of one that fails is guilty. After a
    failure the first group runs alone, the others wait; a group that got past it goes on beside the next, so when that
    fails both are suspects, the one on trial first. A request fails only if it was in a failing step twice, the second
    time alone, and the others start over from what they have.
    """

    def __init__(self) -> None:
        self._groups: list[list[str]] = []
        self._trial: dict[str, int] = {}  # request -> tokens that clear it

    @property
    def is_active(self) -> bool:
        """A trial runs or is to come: new requests wait."""
        return bool(self._groups or self._trial)

    def note_failure(self, in_step: Sequence[str], num_tokens: Mapping[str, int]) -> list[str]:
        """Takes in a failed step; returns who is guilty. Everybody else who lives waits for `release`.

        Args:
            in_step: requests of the failed step.
            num_tokens: by live request what it has generated.
        """
        trial = [request for request in self._not_cleared(num_tokens) if request in num_tokens]
        self._trial = {}
        members = [request for request in in_step if request in num_tokens]
        if len(members) == 1 and members[0] in trial:
            return members
        suspects = sorted(members, key=lambda request: request not in trial)
        middle = (len(suspects) + 1) // 2
        rest = [[request for request in group if request not in suspects] for group in (trial, *self._groups)]
        self._groups = [group for group in (suspects[:middle], suspects[middle:], *rest) if group]
        return []

    def release(self, num_tokens: Mapping[str, int]) -> list[str] | None:
        """Who may run from now on: the next group once the trial is over, None = nobody new.

        When the last trial is over the quarantine is, too (`is_active`), and everybody may run.
        """
        self._trial = self._not_cleared(num_tokens)
        while not self._trial and self._groups:
            group = [request for request in self._groups.pop(0) if request in num_tokens]
            self._trial = {request: num_tokens[request] + TOKENS_TO_CLEAR for request in group}
            if group:
                return group
        return None

    def _not_cleared(self, num_tokens: Mapping[str, int]) -> dict[str, int]:
        """Who of the trial lives and has not got past the failure."""
        return {r: enough for r, enough in self._trial.items() if num_tokens.get(r, enough) < enough}

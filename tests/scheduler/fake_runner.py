"""A runner that computes nothing and checks every word of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sparseserve_jax.cache.layout import MAX_PACKED_PROMPTS, KVLayout
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.plan import Admission, DecodeStats, Grant, PrefillSegment, Restart, StepPlan, StepResult
from sparseserve_jax.scheduler.request_state import SchedulerRequest


@dataclasses.dataclass
class Tracked:
    """What the fake runner knows of a request."""

    request: SchedulerRequest
    row: int | None = None
    block_ids: tuple[int, ...] = ()
    layer_tokens: list[int] = dataclasses.field(default_factory=list)
    prefilled: bool = False
    tokens: int = 0
    grant: Grant | None = None
    ended: bool = False
    skipped_steps: int = 0


class FakeRunner:
    """Executes plans literally; any breach of the contract in `plan.py` is an assertion error.

    Args:
        slots_of: the working set, in slots, that a decode step of this request reports.
        ends: whether this request ends with this token (besides reaching its maximum).
    """

    def __init__(
        self, config: EngineConfig, layout: KVLayout, slots_of: Callable[[str], int], ends: Callable[[str], bool]
    ) -> None:
        self.config, self.layout, self._slots_of, self._ends = config, layout, slots_of, ends
        self.max_inject = config.max_inject_tokens or 2048 * layout.num_layers
        self.known: dict[str, Tracked] = {}
        self.open_calls: dict[tuple[str, int], tuple[int, tuple[str, ...]]] = {}
        self.rows: set[int] = set()
        self.blocks: set[int] = set()
        self.slots: set[int] = set()
        self.dense: set[int] = set()
        self.admission_order: list[str] = []
        self.num_parks = 0

    def add(self, request: SchedulerRequest) -> None:
        follower: SchedulerRequest | None = request
        while follower is not None:
            assert follower.request_id not in self.known
            self.known[follower.request_id] = Tracked(follower)
            follower = follower.successor

    def end(self, request_id: str) -> None:
        """Notes that a request ended or was aborted; the next plan must say so."""
        self.known[request_id].ended = True

    def execute(self, plan: StepPlan, now_s: float = 0.0) -> StepResult:
        ended = {r for r, t in self.known.items() if t.ended}
        assert set(plan.finished) == ended and len(plan.finished) == len(ended)
        for restart in plan.restarts:
            self._restart(restart)
        for request_id in plan.finished:
            self._forget(self.known.pop(request_id))
        for request_id in plan.parks:
            assert self.known[request_id].grant is not None, "parked without device room"
            self._drop_grant(self.known[request_id])
            self.num_parks += 1
        for admission in plan.admissions:
            self._admit(admission)
        for grant in plan.grants:
            self._grant(grant)
        self._check_decode(plan)
        for restart in plan.restarts:
            self.known[restart.request_id].prefilled = True
        completed = self._prefill(plan.prefill)
        assert sorted(completed) == sorted(plan.completes_prefill)
        return self._result(plan)

    # --- room --------------------------------------------------------------------------------------------------------

    def _forget(self, tracked: Tracked) -> None:
        if tracked.row is not None:
            self.rows.remove(tracked.row)
            self.blocks.difference_update(tracked.block_ids)
            self._drop_grant(tracked)
        request_id = tracked.request.request_id
        for key, (layer, ids) in list(self.open_calls.items()):
            if request_id in ids:
                del self.open_calls[key]
                left = tuple(r for r in ids if r != request_id)
                if left:
                    self.open_calls[(left[0], key[1])] = (layer, left)

    def _drop_grant(self, tracked: Tracked) -> None:
        if tracked.grant is not None:
            self.slots.difference_update(tracked.grant.slot_ids)
            self.dense.difference_update(tracked.grant.dense_block_ids)
            tracked.grant = None

    def _restart(self, restart: Restart) -> None:
        before, tracked = self.known[restart.after], self.known[restart.request_id]
        assert before.ended and before.prefilled and before.tokens and before.row is not None
        assert before.request.successor is tracked.request
        assert not tracked.ended and tracked.row is None and tracked.tokens == 0
        self._drop_grant(before)
        tracked.row, tracked.block_ids, tracked.layer_tokens = before.row, before.block_ids, before.layer_tokens
        assert len(tracked.block_ids) >= self.layout.blocks_for(tracked.request.max_tokens)
        before.row = None

    def _admit(self, admission: Admission) -> None:
        tracked = self.known[admission.request_id]
        assert tracked.row is None, "admitted twice"
        assert 0 <= admission.row < self.layout.max_num_seqs and admission.row not in self.rows
        assert len(admission.block_ids) == self.layout.blocks_for(tracked.request.max_tokens)
        _take(self.blocks, admission.block_ids, self.layout.num_blocks)
        self.rows.add(admission.row)
        tracked.row, tracked.block_ids = admission.row, admission.block_ids
        tracked.layer_tokens = [0] * self.layout.num_layers
        self.admission_order.append(admission.request_id)

    def _grant(self, grant: Grant) -> None:
        assert self.layout.tiered
        tracked = self.known[grant.request_id]
        assert tracked.prefilled and not tracked.ended
        old = tracked.grant
        assert old != grant, "a grant that changes nothing"
        if old is not None:
            kept = min(len(old.slot_ids), len(grant.slot_ids))
            assert old.slot_ids[:kept] == grant.slot_ids[:kept], "slots change places: what they hold is lost"
            assert grant.dense_block_ids[: len(old.dense_block_ids)] == old.dense_block_ids
        self._drop_grant(tracked)
        assert len(grant.slot_ids) <= self.layout.max_grant_slots
        assert len(grant.dense_block_ids) <= self.layout.max_blocks_per_seq
        _take(self.slots, grant.slot_ids, self.layout.num_slots)
        _take(self.dense, grant.dense_block_ids, self.layout.num_dense_blocks)
        tracked.grant = grant

    # --- decode ------------------------------------------------------------------------------------------------------

    def _check_decode(self, plan: StepPlan) -> None:
        assert len(set(plan.decode)) == len(plan.decode)
        ready = [t for t in self.known.values() if t.prefilled]
        ready.sort(key=lambda t: t.request.order)
        if ready:
            assert plan.decode[0] == ready[0].request.request_id, "the first in order does not decode"
        chosen = set(plan.decode)
        order = [t.request.request_id for t in ready if t.request.request_id in chosen]
        assert list(plan.decode) == order, "decodes before its prefill is done, after its end, or out of order"
        for tracked in ready:
            if tracked.request.request_id not in chosen:
                assert self.layout.tiered
                tracked.skipped_steps += 1
            elif self.layout.tiered:
                self._check_room(tracked)

    def _check_room(self, tracked: Tracked) -> None:
        layout, grant = self.layout, tracked.grant
        assert grant is not None, "decodes without device room"
        context = layout.blocks_for(tracked.request.num_prompt_tokens + tracked.tokens)
        assert len(grant.slot_ids) >= min(layout.min_grant_slots, context)
        if layout.num_dense_layers:
            assert len(grant.dense_block_ids) >= context

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _prefill(self, segments: tuple[PrefillSegment, ...]) -> list[str]:
        pending = [t for t in self.known.values() if t.row is not None and not t.prefilled]
        assert bool(segments) == bool(pending), "prefill stands still"
        self._check_budget(segments)
        completed = []
        for segment in segments:
            self._check_call(segment)
            for item in segment.items:
                tracked = self.known[item.request_id]
                assert not tracked.prefilled and not tracked.ended
                self._run_layers(tracked, item.start, item.end, segment)
                if tracked.layer_tokens[-1] == tracked.request.num_prompt_tokens:
                    tracked.prefilled = True
                    completed.append(item.request_id)
        return completed

    def _run_layers(self, tracked: Tracked, start: int, end: int, segment: PrefillSegment) -> None:
        prompt, done = tracked.request.num_prompt_tokens, tracked.layer_tokens
        assert 0 <= start < end <= prompt and start % 128 == 0 and (end % 128 == 0 or end == prompt)
        for layer in range(segment.layer_start, segment.layer_end):
            assert done[layer] == start, "tokens twice, missing or out of order in a layer"
            if layer:
                below = prompt if self.config.prefill == "layer" else end
                assert done[layer - 1] >= below, "a layer runs before the layer below is ready"
            done[layer] = end

    def _check_call(self, segment: PrefillSegment) -> None:
        """One call goes on from layer to layer with the prompts it began with, less those that ended."""
        ids = tuple(item.request_id for item in segment.items)
        assert len(set(ids)) == len(ids) <= (1 if self.config.deterministic else MAX_PACKED_PROMPTS)
        aligned = sum(-(-(item.end - item.start) // 128) * 128 for item in segment.items)
        assert aligned <= self.config.max_num_batched_tokens
        if len(ids) > 1:
            assert all(
                i.start == 0 and i.end == self.known[i.request_id].request.num_prompt_tokens for i in segment.items
            )
        key = (segment.items[0].request_id, segment.items[0].start)
        layer, opened_with = self.open_calls.pop(key, (0, ids))
        assert (segment.layer_start, ids) == (layer, opened_with)
        assert segment.layer_start < segment.layer_end <= self.layout.num_layers
        if segment.layer_end < self.layout.num_layers:
            assert self.config.prefill == "layer", "a chunk stops half-way through the layers"
            self.open_calls[key] = (segment.layer_end, ids)

    def _check_budget(self, segments: tuple[PrefillSegment, ...]) -> None:
        cost = sum(s.num_tokens * (s.layer_end - s.layer_start) for s in segments)
        if cost > self.max_inject:
            assert len(segments) == 1, "more than one unit over the budget"
            layers = segments[0].layer_end - segments[0].layer_start
            assert layers == (1 if self.config.prefill == "layer" else self.layout.num_layers)

    # --- result ------------------------------------------------------------------------------------------------------

    def _result(self, plan: StepPlan) -> StepResult:
        sampled = (*(restart.request_id for restart in plan.restarts), *plan.decode, *plan.completes_prefill)
        finished = []
        for request_id in sampled:
            tracked = self.known[request_id]
            tracked.tokens += 1
            assert tracked.tokens <= tracked.request.max_new_tokens
            if tracked.tokens == tracked.request.max_new_tokens or self._ends(request_id):
                finished.append(request_id)
        stats = {}
        if self.layout.selection_blocks:
            stats = {request_id: _stats(self._slots_of(request_id)) for request_id in plan.decode}
        return StepResult(step=plan.step, sampled=sampled, finished=tuple(finished), stats=stats)


def _take(used: set[int], ids: tuple[int, ...], total: int) -> None:
    assert not ids or (min(ids) >= 1 and max(ids) <= total), "an id outside its pool, or the null block"
    before = len(used)
    used.update(ids)
    assert len(used) == before + len(ids), "an id with two owners"


def _stats(slots: int) -> DecodeStats:
    return DecodeStats(
        blocks_selected=0, blocks_hit=0, blocks_loaded=0, working_set_blocks=slots, working_set_slots=slots
    )

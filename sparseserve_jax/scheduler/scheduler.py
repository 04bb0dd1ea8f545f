"""`Scheduler`: one `StepPlan` per iteration, and what its `StepResult` changes."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

from sparseserve_jax.cache.block_pool import BlockPool
from sparseserve_jax.cache.layout import KVLayout
from sparseserve_jax.config import DecodeSetting, EngineConfig
from sparseserve_jax.plan import Admission, Grant, Restart, StepPlan, StepResult
from sparseserve_jax.scheduler.batch_control import Candidate, admit_without_control, admit_working_sets
from sparseserve_jax.scheduler.device_room import DeviceRoom
from sparseserve_jax.scheduler.prefill_plan import PrefillPlanner
from sparseserve_jax.scheduler.request_state import RequestState, SchedulerRequest
from sparseserve_jax.scheduler.working_set import WorkingSetEstimator


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolUsage:
    """Ids of a pool that are out, and all there are."""

    used: int
    total: int


@dataclasses.dataclass(kw_only=True)
class _DecodeBatch:
    decode: tuple[str, ...] = ()
    parks: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()


class Scheduler:
    """Decides who is admitted, who decodes with how much device room, and which prefill work runs beside.

    Call `schedule` and `update` in turns; requests may be added and aborted at any moment between calls. Not
    thread-safe: one thread calls it.

    Raises:
        ValueError: the layout cannot serve one sequence of full length, so a request could starve.
    """

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        _check_layout(layout)
        self._layout = layout
        self._one_group = config.decode_groups == "one"
        self._group: DecodeSetting | None = None  # that decoded last
        self._admit_batch = admit_working_sets if config.batch_control == "working-set" else admit_without_control
        self._rows = BlockPool(layout.max_num_seqs, "rows")
        self._blocks = BlockPool(layout.num_blocks, "host blocks" if layout.tiered else "blocks")
        self._room = DeviceRoom(layout.num_slots, layout.num_dense_blocks)
        self._working_sets = WorkingSetEstimator(layout, config.working_set_margin)
        self._prefill = PrefillPlanner(config, layout)
        self._live: dict[str, SchedulerRequest] = {}
        self._waiting: list[SchedulerRequest] = []  # both lists in scheduling order
        self._admitted: list[SchedulerRequest] = []
        self._ended: list[str] = []
        self._restarts: list[Restart] = []
        self._num_added = 0
        self._num_plans = 0
        self._owed: StepPlan | None = None

    # --- requests ----------------------------------------------------------------------------------------------------

    def check(self, request: SchedulerRequest) -> None:
        """Raises what `add_request` would raise, and changes nothing."""
        if request.request_id in self._live:
            raise ValueError(f"request_id={request.request_id!r} is in use by a live request; choose another")
        if request.request_id in self._ended:
            raise ValueError(
                f"request_id={request.request_id!r} has just ended and is in use until the next step; choose another"
            )
        if request.state is not RequestState.WAITING or request.arrival_idx >= 0:
            raise ValueError(f"request {request.request_id!r} was added before; make a new SchedulerRequest")
        sizes = f"prompt of {request.num_prompt_tokens} + max_tokens of {request.max_new_tokens} tokens"
        if request.max_tokens > self._layout.max_model_len:
            raise ValueError(
                f"{sizes} of request {request.request_id!r} exceed max_model_len={self._layout.max_model_len}; "
                "shorten the prompt, lower max_tokens or raise max_model_len"
            )
        num_blocks = self._layout.blocks_for(request.max_tokens)
        if num_blocks > self._layout.num_blocks:
            budget = "host_kv_bytes" if self._layout.tiered else "device_kv_bytes"
            raise ValueError(
                f"{sizes} of request {request.request_id!r} need {num_blocks} KV blocks, but the pool has "
                f"{self._layout.num_blocks}; raise {budget} or lower max_tokens"
            )

    def add_request(self, request: SchedulerRequest) -> None:
        """Queues a request.

        Raises:
            ValueError: its id is taken, or it could never run; names value, bound and remedy. Nothing was queued.
        """
        self.check(request)
        request.arrival_idx = self._num_added
        self._num_added += 1
        self._live[request.request_id] = request
        _insert(self._waiting, request)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state, also between a plan and its result; False if it is not live (any more).

        Everything it holds may be reused from the next plan on, which reports it and its successors as finished.
        """
        request = self._live.get(request_id)
        if request is None:
            return False
        self._end(request)
        return True

    def finish(self, request_id: str) -> bool:
        """Ends a request that has its last token, as `abort` does, but its successor follows, if it has one."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._end_or_hand_over(request)
        return True

    # --- one iteration -----------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan:
        """Plans the next iteration. A plan that `is_empty` needs no `update`.

        Raises:
            RuntimeError: the last plan's result was not handed to `update`.
        """
        if self._owed is not None:
            raise RuntimeError(f"schedule() before update() of plan {self._owed.step}")
        finished, self._ended = tuple(self._ended), []
        restarts, self._restarts = tuple(r for r in self._restarts if r.request_id in self._live), []
        batch = self._schedule_decode()  # before admissions: who is admitted now does not decode in this step
        admissions = self._admit()
        segments, completed = self._prefill.plan()
        for segment in segments:
            for item in segment.items:
                request = self._live[item.request_id]
                if request.prefill_start_s is None:
                    request.prefill_start_s = now_s
        plan = StepPlan(
            step=self._num_plans,
            restarts=restarts,
            finished=finished,
            parks=batch.parks,
            admissions=admissions,
            grants=batch.grants,
            decode=batch.decode,
            prefill=tuple(segments),
            completes_prefill=tuple(completed),
        )
        self._num_plans += 1
        self._owed = None if plan.is_empty else plan
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> None:
        """Takes in what became of the last plan; what it says of requests aborted meanwhile is ignored.

        Raises:
            ValueError: the result is not of this plan, or a live request of the plan got no token.
        """
        if result.step != plan.step or (plan is not self._owed and not plan.is_empty):
            owed = "none" if self._owed is None else str(self._owed.step)
            raise ValueError(f"result of step {result.step} for plan {plan.step}; the plan without a result is {owed}")
        restarted = (restart.request_id for restart in plan.restarts)
        expected = [r for r in (*restarted, *plan.decode, *plan.completes_prefill) if r in self._live]
        sampled = set(result.sampled)
        missing = [r for r in expected if r not in sampled]
        if missing:
            raise ValueError(f"result of step {result.step} has no token for {missing}; abort requests that failed")
        self._owed = None
        for request_id, stats in result.stats.items():
            if request_id in self._live:
                self._working_sets.observe(request_id, stats.working_set_slots)
        finished = set(result.finished)
        for request_id in expected:
            self._take_token(self._live[request_id], is_last=request_id in finished)

    def has_unfinished(self) -> bool:
        """Whether a request is live, or one has ended of which the runner was not told yet."""
        return bool(self._live or self._ended)

    # --- metrics -----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that hold nothing yet."""
        return len(self._waiting)

    @property
    def num_prefilling(self) -> int:
        """Admitted requests without a token: their prompts are not through the layers, or they are about to restart."""
        return self._count(RequestState.PREFILL)

    @property
    def num_running(self) -> int:
        """Decoding requests that hold their device room (all of them without tiers)."""
        return self._count(RequestState.RUNNING)

    @property
    def num_parked(self) -> int:
        """Decoding requests without device room."""
        return self._count(RequestState.PARKED)

    def pool_usage(self) -> dict[str, PoolUsage]:
        """By pool: "rows", "blocks", "slots", "dense_blocks"."""
        pools = {
            "rows": self._rows,
            "blocks": self._blocks,
            "slots": self._room.slots,
            "dense_blocks": self._room.dense_blocks,
        }
        return {name: PoolUsage(used=pool.num_used, total=pool.num_blocks) for name, pool in pools.items()}

    def _count(self, state: RequestState) -> int:
        return sum(r.state is state for r in self._admitted)

    # --- the parts ---------------------------------------------------------------------------------------------------

    def _admit(self) -> tuple[Admission, ...]:
        """Rows and whole reservations of blocks, strictly first come, first served.

        Nobody passes the first that does not fit: a stream of small requests would starve it.
        """
        admissions = []
        while self._waiting and self._rows.num_free:
            request = self._waiting[0]
            num_blocks = self._layout.blocks_for(request.max_tokens)
            if num_blocks > self._blocks.num_free:
                break
            del self._waiting[0]
            request.row = self._rows.allocate(1)[0] - 1
            request.block_ids = self._blocks.allocate(num_blocks)
            request.state = RequestState.PREFILL
            _insert(self._admitted, request)
            self._prefill.add(request)
            admissions.append(Admission(request_id=request.request_id, row=request.row, block_ids=request.block_ids))
        return tuple(admissions)

    def _schedule_decode(self) -> _DecodeBatch:
        """Everybody (of one group), or with tiers those whose working sets fit the device together."""
        decoding = [r for r in self._admitted if r.is_decoding]
        ready = [r.request_id for r in (self._choose_group(decoding) if self._one_group else decoding)]
        if not ready or not self._layout.tiered:
            return _DecodeBatch(decode=tuple(ready))
        shares = self._admit_batch(
            [self._candidate(self._live[r]) for r in ready],
            num_slots=self._layout.num_slots,
            num_dense_blocks=self._layout.num_dense_blocks,
        )
        batch = [share.request_id for share in shares]
        assert batch and batch[0] == ready[0], "the first in order must always decode, or it could starve"
        admitted = set(batch)
        parks, grants = self._room.place(shares, [r for r in ready if r not in admitted])
        for request_id in parks:
            self._live[request_id].state = RequestState.PARKED
            self._live[request_id].num_parks += 1
        for request_id in batch:
            self._live[request_id].state = RequestState.RUNNING
        return _DecodeBatch(decode=tuple(batch), parks=tuple(parks), grants=tuple(grants))

    def _choose_group(self, requests: Sequence[SchedulerRequest]) -> list[SchedulerRequest]:
        """Those of the setting that decoded last; if there are none, of the one that most have.

        Going over to a larger group at once would leave stragglers, which decode alone in the end.
        """
        groups: dict[DecodeSetting | None, list[SchedulerRequest]] = {}
        for request in requests:
            groups.setdefault(request.setting, []).append(request)
        if groups and self._group not in groups:
            self._group = max(groups, key=lambda setting: len(groups[setting]))
        return groups.get(self._group, [])

    def _candidate(self, request: SchedulerRequest) -> Candidate:
        context_blocks = self._layout.blocks_for(request.context_tokens)
        return Candidate(
            request_id=request.request_id,
            need_slots=self._working_sets.need(request.request_id, context_blocks),
            min_slots=self._working_sets.minimum(context_blocks),
            dense_blocks=context_blocks if self._layout.num_dense_layers else 0,
        )

    def _take_token(self, request: SchedulerRequest, *, is_last: bool) -> None:
        request.num_generated += 1
        if request.state is RequestState.PREFILL:
            request.state = RequestState.PARKED if self._layout.tiered else RequestState.RUNNING
        if is_last or request.num_generated >= request.max_new_tokens:
            self._end_or_hand_over(request)

    def _end_or_hand_over(self, request: SchedulerRequest) -> None:
        successor = request.successor
        if successor is None:
            self._end(request)
            return
        del self._live[request.request_id]
        _remove(self._admitted, request)
        self._room.release(request.request_id)
        self._working_sets.forget(request.request_id)
        successor.row, successor.block_ids = request.row, request.block_ids
        successor.arrival_s, successor.arrival_idx = request.arrival_s, request.arrival_idx
        successor.prefill_start_s = request.prefill_start_s
        request.row, request.block_ids = -1, ()
        request.state, successor.state = RequestState.FINISHED, RequestState.PREFILL
        self._live[successor.request_id] = successor
        _insert(self._admitted, successor)
        self._restarts.append(Restart(request_id=successor.request_id, after=request.request_id))
        self._ended.append(request.request_id)

    def _end(self, request: SchedulerRequest) -> None:
        """Frees everything a live request holds, once, whatever its state."""
        del self._live[request.request_id]
        if request.state is RequestState.WAITING:
            _remove(self._waiting, request)
        else:
            _remove(self._admitted, request)
            self._prefill.drop(request.request_id)
            self._room.release(request.request_id)
            self._working_sets.forget(request.request_id)
            self._rows.free((request.row + 1,))
            self._blocks.free(request.block_ids)
            request.row, request.block_ids = -1, ()
        request.state = RequestState.FINISHED
        self._ended.append(request.request_id)
        follower = request.successor
        while follower is not None:  # the runner knows them, too
            follower.state = RequestState.FINISHED
            self._ended.append(follower.request_id)
            follower = follower.successor


def _insert(requests: list[SchedulerRequest], request: SchedulerRequest) -> None:
    bisect.insort(requests, request, key=lambda r: r.order)


def _remove(requests: list[SchedulerRequest], request: SchedulerRequest) -> None:
    index = bisect.bisect_left(requests, request.order, key=lambda r: r.order)
    assert requests[index] is request
    del requests[index]


def _check_layout(layout: KVLayout) -> None:
    """One sequence of full length must always be able to run: this is what rules out starvation."""
    if not layout.tiered:
        return
    if layout.num_slots < layout.min_grant_slots:
        raise ValueError(
            f"num_slots={layout.num_slots} is less than one selection of {layout.min_grant_slots} blocks; "
            "raise device_kv_bytes or lower sparse_budget_tokens"
        )
    if layout.num_dense_layers and layout.num_dense_blocks < layout.max_blocks_per_seq:
        raise ValueError(
            f"num_dense_blocks={layout.num_dense_blocks} holds less than one sequence of {layout.max_blocks_per_seq} "
            "blocks in the dense layers; raise device_kv_bytes or lower max_model_len or num_dense_layers"
        )

"""A scheduler and a fake runner, moved together."""

from __future__ import annotations

from collections.abc import Callable

from sparseserve_jax.cache.layout import KVLayout
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.plan import StepPlan
from sparseserve_jax.scheduler.request_state import SchedulerRequest
from sparseserve_jax.scheduler.scheduler import Scheduler
from tests.scheduler.fake_runner import FakeRunner


class Harness:
    """Adds, aborts and steps; checks every plan and that both sides agree on what is used."""

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        slots_of: Callable[[str], int] = lambda request_id: 6,
        ends: Callable[[str], bool] = lambda request_id: False,
    ) -> None:
        self.layout = layout
        self.scheduler = Scheduler(config, layout)
        self.runner = FakeRunner(config, layout, slots_of, ends)
        self.requests: dict[str, SchedulerRequest] = {}
        self.finished: dict[str, SchedulerRequest] = {}
        self.num_steps = 0
        self.worst_skip_share = 0.0
        """Over finished requests: steps skipped while ready, as a share of the bound that is guaranteed."""

    def add(self, request: SchedulerRequest) -> None:
        self.scheduler.add_request(request)
        self.runner.add(request)
        follower: SchedulerRequest | None = request
        while follower is not None:
            self.requests[follower.request_id] = follower
            follower = follower.successor

    def abort(self, request_id: str) -> None:
        follower: SchedulerRequest | None = self.requests[request_id]
        assert self.scheduler.abort(request_id)
        while follower is not None:
            self._end(follower.request_id)
            follower = follower.successor

    def step(self, between: Callable[[], None] = lambda: None) -> StepPlan:
        """One iteration; `between` runs while the plan is on its way (aborts)."""
        plan = self.scheduler.schedule(float(self.num_steps))
        self.num_steps += 1
        result = self.runner.execute(plan)
        between()
        self.scheduler.update(plan, result)
        for request_id in result.finished:
            if request_id in self.requests:
                self._end(request_id)
        return plan

    def run(self, max_steps: int = 10_000) -> list[StepPlan]:
        """Steps until nothing is left."""
        plans = []
        while self.scheduler.has_unfinished():
            assert len(plans) < max_steps, "does not come to an end"
            plans.append(self.step())
        self.check_empty()
        return plans

    def check_usage(self) -> None:
        """The scheduler's pools hold exactly what the runner was given, less what ended since."""
        live = [t for t in self.runner.known.values() if not t.ended]
        usage = self.scheduler.pool_usage()
        assert usage["rows"].used == sum(t.row is not None for t in live)
        assert usage["blocks"].used == sum(len(t.block_ids) for t in live)
        assert usage["slots"].used == sum(len(t.grant.slot_ids) for t in live if t.grant)
        assert usage["dense_blocks"].used == sum(len(t.grant.dense_block_ids) for t in live if t.grant)
        s = self.scheduler
        assert s.num_waiting + s.num_prefilling + s.num_running + s.num_parked == len(live)

    def check_empty(self) -> None:
        """Everything was given back and everybody has ended."""
        assert not self.requests and not self.runner.known and not self.runner.open_calls
        assert not (self.runner.rows or self.runner.blocks or self.runner.slots or self.runner.dense)
        assert all(usage.used == 0 for usage in self.scheduler.pool_usage().values())

    def _end(self, request_id: str) -> None:
        self.runner.end(request_id)
        request = self.requests.pop(request_id)
        self.finished[request_id] = request
        skipped = self.runner.known[request_id].skipped_steps
        if request.priority == 0 and skipped:
            # Whenever it was skipped, somebody earlier decoded a token; rows bound how many of those there are.
            longest = max(r.max_new_tokens for r in (*self.finished.values(), *self.requests.values()))
            bound = (self.layout.max_num_seqs - 1) * longest
            self.worst_skip_share = max(self.worst_skip_share, skipped / bound)

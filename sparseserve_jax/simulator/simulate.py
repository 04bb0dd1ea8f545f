"""`simulate`: arrivals through the production scheduler, in simulated time."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from sparseserve_jax.cache.layout import KVLayout
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.percentiles import percentile
from sparseserve_jax.plan import DecodeStats, PrefillSegment, StepPlan, StepResult
from sparseserve_jax.scheduler.request_state import SchedulerRequest
from sparseserve_jax.scheduler.scheduler import Scheduler
from sparseserve_jax.simulator.cost_model import CostModel
from sparseserve_jax.simulator.residency import ResidencyModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One arrival; it generates exactly `new_tokens`."""

    arrival_s: float
    prompt_tokens: int
    new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulationReport:
    """What a trace came to.

    Attributes:
        queue_mean_s: arrival to first prefill work.
        ttft_mean_s / ttft_p99_s: arrival to first token.
        tbt_mean_s / tbt_p99_s: time between tokens of a request.
        tokens_per_s: generated tokens over the time from the first arrival to the last token.
        decode_batch_mean: sequences in a decode step.
        loads_per_step_mean: pieces (layer, KV head, block) that a decode step loads.
        hit_rate: share of selected pieces found on the device.
        prefill_loaded_bytes: earlier KV of prompts, fetched again for later chunks.
        num_parks: times a request lost its device room.
    """

    num_requests: int
    num_steps: int
    duration_s: float
    queue_mean_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    tbt_mean_s: float
    tbt_p99_s: float
    tokens_per_s: float
    decode_batch_mean: float
    loads_per_step_mean: float
    hit_rate: float
    prefill_loaded_bytes: int
    num_parks: int


def simulate(
    trace: Sequence[TraceRequest],
    config: EngineConfig,
    layout: KVLayout,
    cost_model: CostModel,
    residency: ResidencyModel | None = None,
) -> SimulationReport:
    """Serves a trace to its end; the same arguments always give the same report.

    Raises:
        ValueError: the trace is empty, or a request of it can never run under this layout.
    """
    if not trace:
        raise ValueError("the trace has 0 requests; give at least 1")
    return _Simulation(trace, config, layout, cost_model, residency or ResidencyModel()).run()


class _Simulation:
    def __init__(
        self,
        trace: Sequence[TraceRequest],
        config: EngineConfig,
        layout: KVLayout,
        cost: CostModel,
        residency: ResidencyModel,
    ) -> None:
        self._layout, self._cost, self._residency = layout, cost, residency
        self._scheduler = Scheduler(config, layout)
        arrivals = sorted(enumerate(trace), key=lambda pair: pair[1].arrival_s)
        self._requests = {
            str(index): SchedulerRequest(
                request_id=str(index),
                arrival_s=r.arrival_s,
                num_prompt_tokens=r.prompt_tokens,
                max_new_tokens=r.new_tokens,
            )
            for index, r in arrivals
        }
        self._arrivals = collections.deque(self._requests.values())
        self._token_s: dict[str, list[float]] = {request_id: [] for request_id in self._requests}
        self._slots: dict[str, int] = {}  # granted; a request is warm once it has decoded with its grant
        self._warm: set[str] = set()
        self._staged: tuple[str, int, int] | None = None  # request, layer, tokens in the prefill staging buffer
        self._now_s = self._arrivals[0].arrival_s
        self._num_steps = self._num_decode_steps = self._num_decoded = 0
        self._selected = self._loaded = 0
        self._prefill_loaded_bytes = 0

    def run(self) -> SimulationReport:
        while self._arrivals or self._scheduler.has_unfinished():
            while self._arrivals and self._arrivals[0].arrival_s <= self._now_s:
                self._scheduler.add_request(self._arrivals.popleft())
            plan = self._scheduler.schedule(self._now_s)
            if plan.is_empty:
                self._now_s = self._arrivals[0].arrival_s
                continue
            result = self._execute(plan)
            self._scheduler.update(plan, result)
        return self._report()

    def _execute(self, plan: StepPlan) -> StepResult:
        for request_id in (*plan.finished, *plan.parks):
            self._slots.pop(request_id, None)
            self._warm.discard(request_id)
        for grant in plan.grants:
            self._slots[grant.request_id] = len(grant.slot_ids)
        context_blocks = {r: self._layout.blocks_for(self._requests[r].context_tokens) for r in plan.decode}
        stats = {r: self._decode_stats(r, blocks) for r, blocks in context_blocks.items()}
        loaded = sum(s.blocks_loaded for s in stats.values())
        prefill_bytes = sum(self._staging_loads(segment) for segment in plan.prefill)
        sampled = (*plan.decode, *plan.completes_prefill)
        if plan.decode or plan.prefill:
            self._num_steps += 1
            self._now_s += (
                self._cost.step_overhead_s
                + self._cost.decode_s(self._layout, list(context_blocks.values()))
                + self._cost.prefill_s(plan.prefill)
                + self._cost.load_s(loaded * self._layout.piece_bytes + prefill_bytes)
            )
        for request_id in sampled:
            self._token_s[request_id].append(self._now_s)
        self._num_decode_steps += bool(plan.decode)
        self._num_decoded += len(plan.decode)
        self._selected += sum(s.blocks_selected for s in stats.values())
        self._loaded += loaded
        self._prefill_loaded_bytes += prefill_bytes
        return StepResult(step=plan.step, sampled=sampled, stats=stats)

    def _decode_stats(self, request_id: str, context_blocks: int) -> DecodeStats:
        layout, selection = self._layout, self._layout.selection_blocks
        pieces = layout.num_sparse_layers * layout.num_kv_heads
        attended = min(selection, context_blocks)
        share = 0.0
        if layout.tiered:
            share = 1.0 if request_id not in self._warm else self._residency.miss_share(
                slots=self._slots[request_id], selection_blocks=selection, context_blocks=context_blocks
            )  # fmt: skip
            self._warm.add(request_id)
        loaded = round(share * attended * pieces)
        slots = self._residency.working_set_slots(selection, context_blocks)
        return DecodeStats(
            blocks_selected=attended * pieces, blocks_hit=attended * pieces - loaded, blocks_loaded=loaded,
            working_set_blocks=slots * pieces, working_set_slots=slots,
        )  # fmt: skip

    def _staging_loads(self, segment: PrefillSegment) -> int:
        """Bytes of earlier chunks that have to come back, because the staging buffer has held something else since."""
        if not self._layout.tiered:
            return 0
        first, num_layers = segment.items[0], 0
        for layer in range(segment.layer_start, segment.layer_end):
            num_layers += first.start > 0 and self._staged != (first.request_id, layer, first.start)
            self._staged = (first.request_id, layer, first.end) if len(segment.items) == 1 else None
        blocks = self._layout.blocks_for(first.start)
        return num_layers * blocks * self._layout.num_kv_heads * self._layout.piece_bytes

    def _report(self) -> SimulationReport:
        requests = list(self._requests.values())
        ttft = [self._token_s[r.request_id][0] - r.arrival_s for r in requests]
        tbt = [b - a for times in self._token_s.values() for a, b in itertools.pairwise(times)]
        first_s = min(r.arrival_s for r in requests)
        duration = max(times[-1] for times in self._token_s.values()) - first_s
        num_tokens = sum(map(len, self._token_s.values()))
        return SimulationReport(
            num_requests=len(requests),
            num_steps=self._num_steps,
            duration_s=duration,
            queue_mean_s=statistics.fmean((r.prefill_start_s or 0.0) - r.arrival_s for r in requests),
            ttft_mean_s=statistics.fmean(ttft),
            ttft_p99_s=percentile(ttft, 0.99),
            tbt_mean_s=statistics.fmean(tbt) if tbt else 0.0,
            tbt_p99_s=percentile(tbt, 0.99) if tbt else 0.0,
            tokens_per_s=num_tokens / duration,
            decode_batch_mean=self._num_decoded / max(1, self._num_decode_steps),
            loads_per_step_mean=self._loaded / max(1, self._num_decode_steps),
            hit_rate=1.0 - self._loaded / max(1, self._selected),
            prefill_loaded_bytes=self._prefill_loaded_bytes,
            num_parks=sum(r.num_parks for r in requests),
        )

"""Prometheus metrics, under vLLM's names: `Metrics` counts, `EngineState` is what the gauges show.

The engine's thread counts tokens and ends of continuations as they happen, so aborted ones count as well. Gauges are
read off the engine after each of its steps; a scrape never waits for the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import prometheus_client
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from sparseserve_jax.engine import Engine
from sparseserve_jax.request import RequestOutput

TIME_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0, 640.0)  # fmt: skip
TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """What the engine holds at one moment.

    Attributes:
        num_running: continuations that prefill, or decode with device room.
        num_parked: decoding ones that wait for device room.
        num_known: all continuations that the engine knows of, also waiting ones.
        kv_usage: share of KV blocks in use.
        device_kv_bytes / host_kv_bytes: bytes of KV blocks in use, by tier.
        working_set_blocks: pieces in the working sets of all continuations.
    """

    num_running: int = 0
    num_parked: int = 0
    num_known: int = 0
    kv_usage: float = 0.0
    device_kv_bytes: int = 0
    host_kv_bytes: int = 0
    working_set_blocks: int = 0
    num_prefill_segments: int = 0
    num_failed_steps: int = 0


def read_state(engine: Engine) -> EngineState:
    """The state of an engine; called between its steps, in its thread."""
    scheduler, layout = engine.scheduler, engine.layout
    usage = scheduler.pool_usage()
    piece_bytes = layout.num_kv_heads * layout.piece_bytes  # of a block in one layer
    all_blocks = usage["blocks"].used * layout.num_layers * piece_bytes
    room = usage["slots"].used * layout.num_sparse_layers + usage["dense_blocks"].used * layout.num_dense_layers
    return EngineState(
        num_running=scheduler.num_prefilling + scheduler.num_running,
        num_parked=scheduler.num_parked,
        num_known=engine.num_unfinished,
        kv_usage=usage["blocks"].used / max(usage["blocks"].total, 1),
        device_kv_bytes=room * piece_bytes if layout.tiered else all_blocks,
        host_kv_bytes=all_blocks if layout.tiered else 0,
        working_set_blocks=engine.working_set_blocks(),
        num_prefill_segments=engine.num_prefill_segments,
        num_failed_steps=engine.num_failed_steps,
    )


@dataclasses.dataclass
class _Counted:
    """What of a continuation's running figures has been counted."""

    num_tokens: int = 0
    num_parks: int = 0
    selected: int = 0
    hit: int = 0
    loaded: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        prefix: goes before every name, with a colon.
        waiting: continuations that were accepted and have not begun, now.
        models: label `model_name` of every series.
    """

    def __init__(self, prefix: str, model_name: str, waiting: Callable[[EngineState], int]) -> None:
        self.registry = CollectorRegistry()
        self.state = EngineState()
        self._model_name = model_name
        self._prefix = prefix
        self._counted: dict[tuple[str, int], _Counted] = {}
        prometheus_client.ProcessCollector(registry=self.registry)
        self.registry.register(_Gauges(self, prefix, model_name, waiting))

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests whose prefill is complete.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._parks = self._counter("num_preemptions", "Times a request lost its device room (it is parked).")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up (no prefix cache yet: 0)."
        )
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found (no prefix cache yet: 0).")
        self._selected = self._counter("kv_block_selections", "Pieces (block x layer x KV head) attended to by choice.")
        self._hit = self._counter("kv_block_hits", "Chosen pieces that were on the device.")
        self._loaded = self._counter("kv_block_loads", "Chosen pieces that were fetched from the host.")
        self._bytes_loaded = self._counter("kv_load_bytes", "Bytes of KV moved from the host to the device.")
        self._bytes_saved = self._counter("kv_save_bytes", "Bytes of KV moved from the device to the host.")
        self._segments = self._counter("prefill_segments", "Segments of prompts (tokens x layers) that ran.")
        self._failed_steps = self._counter("failed_steps", "Steps of the engine that failed and were recovered from.")
        names = ["model_name", "finished_reason"]
        self._success = prometheus_client.Counter(
            f"{prefix}:request_success", "Continuations that ended.", names, registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model_name, reason)
        self._rejected = prometheus_client.Counter(
            f"{prefix}:admission_rejections", "Requests that were not accepted.", ["model_name", "reason"],
            registry=self.registry,
        )  # fmt: skip
        for reason in ("overload", "invalid"):
            self._rejected.labels(model_name, reason)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._tbt = self._histogram("inter_token_latency_seconds", "Time between tokens.")
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first prefill work.")
        self._prefill = self._histogram("request_prefill_time_seconds", "First prefill work to first token.")
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.")
        self._iteration = self._histogram(
            "iteration_tokens_total", "Tokens of one step: decoded, and prompts completed.", TOKEN_BUCKETS
        )

    def _counter(self, name: str, text: str) -> prometheus_client.Counter:
        family = prometheus_client.Counter(f"{self._prefix}:{name}", text, ["model_name"], registry=self.registry)
        return family.labels(self._model_name)

    def _histogram(
        self, name: str, text: str, buckets: Sequence[float] = TIME_BUCKETS_S
    ) -> prometheus_client.Histogram:
        family = prometheus_client.Histogram(
            f"{self._prefix}:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        )
        return family.labels(self._model_name)

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return prometheus_client.generate_latest(self.registry)

    def note_rejected(self, reason: str) -> None:
        """A request was refused: "overload" or "invalid"."""
        self._rejected.labels(self._model_name, reason).inc()

    def note_state(self, state: EngineState) -> None:
        """The engine's state after a step."""
        self._segments.inc(state.num_prefill_segments - self.state.num_prefill_segments)
        self._failed_steps.inc(state.num_failed_steps - self.state.num_failed_steps)
        self.state = state

    def note_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Counts what a step gave."""
        num_tokens = 0
        for output in outputs:
            num_tokens += self._note_output(output)
        if num_tokens:
            self._iteration.observe(num_tokens)

    def _note_output(self, output: RequestOutput) -> int:
        key, metrics = (output.request_id, output.index), output.metrics
        before = self._counted.get(key) or _Counted()
        now = _Counted(
            len(output.token_ids), metrics.num_parks, metrics.blocks_selected, metrics.blocks_hit,
            metrics.blocks_loaded, metrics.bytes_loaded, metrics.bytes_saved,
        )  # fmt: skip
        new_tokens = now.num_tokens - before.num_tokens
        num_tokens = new_tokens
        self._generation_tokens.inc(new_tokens)
        if new_tokens and not before.num_tokens:
            self._prompt_tokens.inc(len(output.prompt_token_ids))
            num_tokens += len(output.prompt_token_ids)
            if metrics.ttft_s is not None:
                self._ttft.observe(metrics.ttft_s)
                self._queue.observe(metrics.queue_s)
                self._prefill.observe(max(metrics.ttft_s - metrics.queue_s, 0.0))
        elif new_tokens:
            self._tbt.observe(metrics.tbt_s[-1])
        self._parks.inc(now.num_parks - before.num_parks)
        self._selected.inc(now.selected - before.selected)
        self._hit.inc(now.hit - before.hit)
        self._loaded.inc(now.loaded - before.loaded)
        self._bytes_loaded.inc(now.bytes_loaded - before.bytes_loaded)
        self._bytes_saved.inc(now.bytes_saved - before.bytes_saved)
        if output.finish_reason is None:
            self._counted[key] = now
            return num_tokens
        self._counted.pop(key, None)
        self._success.labels(self._model_name, output.finish_reason).inc()
        if metrics.ttft_s is not None:
            decode_s = sum(metrics.tbt_s)
            self._decode.observe(decode_s)
            self._e2e.observe(metrics.ttft_s + decode_s)
        return num_tokens


class _Gauges(Collector):
    """Gauges, read when they are asked for."""

    def __init__(self, metrics: Metrics, prefix: str, model_name: str, waiting: Callable[[EngineState], int]) -> None:
        self._metrics, self._prefix, self._model_name, self._waiting = metrics, prefix, model_name, waiting

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """One family for each gauge."""
        state = self._metrics.state
        rows = (
            ("num_requests_running", "Continuations in prefill, or decoding with device room.", state.num_running),
            ("num_requests_waiting", "Accepted continuations that have not begun.", self._waiting(state)),
            ("num_requests_parked", "Decoding continuations that wait for device room.", state.num_parked),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", state.kv_usage),
            ("device_kv_bytes", "Bytes of KV in use on the device.", state.device_kv_bytes),
            ("host_kv_bytes", "Bytes of KV in use in host memory.", state.host_kv_bytes),
            ("working_set_blocks", "Pieces in the working sets of all continuations.", state.working_set_blocks),
        )
        for name, text, value in rows:
            family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
            family.add_metric([self._model_name], value)
            yield family

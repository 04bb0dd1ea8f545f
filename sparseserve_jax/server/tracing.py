"""OpenTelemetry traces of requests, if configured: `RequestTracer`. The packages are the extra `tracing`.

A request's spans are made when it has ended, from the times that the engine measured: `tokenize`, and for each
continuation `queue`, `prefill` and `decode`; below `prefill` a `prefill_segment` each, below both `load` and `save` for
KV that moved between the tiers (`timeline.py`). Attributes follow OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparseserve_jax.request import SamplingParams
from sparseserve_jax.server.service import Job
from sparseserve_jax.server.tickets import Piece

OPERATIONS = {"prompt": "text_completion", "messages": "chat"}


class RequestTracer:
    """Records requests as spans.

    Args:
        provider: an OpenTelemetry `TracerProvider`.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("sparseserve")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, job: Job, *, name: str, model: str, response_id: str, sampling: SamplingParams,
        headers: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Spans of a request that has ended; their parent is the one that W3C headers name."""
        operation = OPERATIONS[name]
        span = self._tracer.start_span(
            f"{operation} {model}", context=self._propagator.extract(headers), kind=self._trace.SpanKind.SERVER,
            start_time=job.started_ns,
            attributes={
                "gen_ai.operation.name": operation, "gen_ai.provider.name": "sparseserve",
                "gen_ai.request.model": model, "gen_ai.response.model": model, "gen_ai.response.id": response_id,
                "gen_ai.request.temperature": sampling.temperature, "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.usage.input_tokens": job.num_prompt_tokens, "gen_ai.usage.output_tokens": job.num_generated,
                "gen_ai.response.finish_reasons": [str(piece.finish_reason) for piece in job.last.values()],
            },
        )  # fmt: skip
        if sampling.max_tokens is not None:
            span.set_attribute("gen_ai.request.max_tokens", sampling.max_tokens)
        parent = self._trace.set_span_in_context(span)
        end_ns = job.ended_ns
        self._child("tokenize", parent, job.started_ns, job.submitted_ns or end_ns)
        for piece in job.last.values():
            end_ns = max(end_ns, self._record_piece(piece, parent, job.submitted_ns))
        if any(piece.finish_reason == "error" for piece in job.last.values()):
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_ns)

    def _record_piece(self, piece: Piece, parent: Any, submitted_ns: int) -> int:
        """Spans of a continuation; returns when it ended."""
        metrics = piece.metrics
        if metrics is None or metrics.ttft_s is None:
            return submitted_ns
        begin_ns = submitted_ns + _ns(metrics.queue_s)
        first_ns = submitted_ns + _ns(metrics.ttft_s)
        last_ns = first_ns + _ns(sum(metrics.tbt_s))
        self._child("queue", parent, submitted_ns, begin_ns)
        prefill = self._child("prefill", parent, begin_ns, first_ns)
        decode = self._child(
            "decode", parent, first_ns, last_ns,
            {"sparseserve.kv.bytes_loaded": metrics.bytes_loaded, "sparseserve.kv.bytes_saved": metrics.bytes_saved,
             "sparseserve.kv.blocks_hit": metrics.blocks_hit, "sparseserve.kv.blocks_loaded": metrics.blocks_loaded,
             "sparseserve.num_parks": metrics.num_parks, "sparseserve.num_tokens": 1 + len(metrics.tbt_s)},
        )  # fmt: skip
        for interval in metrics.timeline:
            start_ns, end_ns = submitted_ns + _ns(interval.start_s), submitted_ns + _ns(interval.end_s)
            if interval.kind == "prefill":
                first, end = interval.layers or (0, 0)
                self._child(
                    "prefill_segment", prefill, start_ns, end_ns,
                    {"sparseserve.num_tokens": interval.amount, "sparseserve.layer_start": first,
                     "sparseserve.layer_end": end},
                )  # fmt: skip
            else:
                self._child(
                    interval.kind, prefill if start_ns < first_ns else decode, start_ns, end_ns,
                    {"sparseserve.kv.bytes": interval.amount, "sparseserve.num_steps": interval.num_steps},
                )  # fmt: skip
        return last_ns

    def _child(
        self, name: str, parent: Any, start_ns: int, end_ns: int, attributes: dict[str, Any] | None = None
    ) -> Any:
        """A span that has ended, as the parent of others."""
        span = self._tracer.start_span(name, context=parent, start_time=start_ns, attributes=attributes)
        span.end(max(start_ns, end_ns))
        return self._trace.set_span_in_context(span)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def tracer_to(endpoint: str) -> RequestTracer:
    """A tracer that sends spans to an OTLP endpoint (HTTP, e.g. `http://localhost:4318/v1/traces`).

    Raises:
        ValueError: the packages are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ValueError("traces need OpenTelemetry: pip install 'sparseserve-jax[tracing]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "sparseserve"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestTracer(provider)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

"""Metrics, traces and the log."""

from __future__ import annotations

import collections
import json
import logging

import httpx
import pytest

from sparseserve_jax.server.context import JsonFormatter
from sparseserve_jax.server.settings import ServerSettings
from tests.server.running_server import RunningServer, wait_until
from tests.tiny_model import random_prompt

EXPECTED = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket", "request_prefill_time_seconds_bucket",
    "request_decode_time_seconds_bucket", "iteration_tokens_total_bucket", "device_kv_bytes", "host_kv_bytes",
    "kv_block_loads_total", "kv_block_hits_total", "kv_load_bytes_total", "kv_save_bytes_total", "working_set_blocks",
    "admission_rejections_total", "prefill_segments_total", "num_requests_parked", "failed_steps_total",
)  # fmt: skip


@pytest.mark.parametrize("prefix", ["sparseserve", "vllm"])
def test_names(engine, prefix):
    with RunningServer(engine, ServerSettings(metrics_prefix=prefix)) as server:
        server.wait_ready()
        text = httpx.get(server.url + "/metrics").text
    for name in EXPECTED:
        assert f"\n{prefix}:{name}{{" in text, name
    assert 'finished_reason="stop"' in text


def test_counts(engine):
    with RunningServer(engine) as server:
        server.wait_ready()
        for i in range(3):
            server.complete(prompt=random_prompt(400, i), max_tokens=20, ignore_eos=True)
        server.complete(prompt="a", max_tokens=5, logit_bias={"260": 100})
        server.assert_idle()
        counts = server.gauges()
        assert counts["generation_tokens_total"] == 61 and counts["prompt_tokens_total"] == 3 * 400 + 2
        assert counts["time_to_first_token_seconds_count"] == counts["e2e_request_latency_seconds_count"] == 4
        assert counts["inter_token_latency_seconds_count"] == 57
        assert counts['request_success_total{finished_reason="length",model_name="tiny"}'] == 3
        assert counts['request_success_total{finished_reason="stop",model_name="tiny"}'] == 1
        assert counts["kv_block_selections_total"] == counts["kv_block_hits_total"] + counts["kv_block_loads_total"] > 0
        assert counts["kv_load_bytes_total"] > 0 and counts["kv_save_bytes_total"] > 0
        assert counts["prefill_segments_total"] >= 4


def test_traces(engine):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from sparseserve_jax.server.tracing import RequestTracer

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with RunningServer(engine, tracer=RequestTracer(provider)) as server:
        server.wait_ready()
        fields = {"prompt": random_prompt(400, 0), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        server.client.post("/v1/completions", json=fields, headers={"traceparent": parent})
    finished = exporter.get_finished_spans()
    spans = {span.name: span for span in finished}
    assert set(spans) == {
        "text_completion tiny", "tokenize", "queue", "prefill", "prefill_segment", "decode", "load", "save",
    }  # fmt: skip
    root = spans["text_completion tiny"]
    assert root.parent is not None and format(root.context.trace_id, "032x") == parent[3:35]
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 4 and root.attributes["gen_ai.request.max_tokens"] == 4
    for name in ("tokenize", "queue", "prefill", "decode"):
        child = spans[name]
        assert child.parent is not None and child.parent.span_id == root.context.span_id
        assert root.start_time <= child.start_time <= child.end_time <= root.end_time + 10**8
    assert spans["tokenize"].end_time <= spans["prefill"].start_time <= spans["prefill"].end_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    segments = [span.attributes or {} for span in finished if span.name == "prefill_segment"]
    by_layer: collections.Counter[int] = collections.Counter()
    for segment in segments:
        for layer in range(segment["sparseserve.layer_start"], segment["sparseserve.layer_end"]):
            by_layer[layer] += segment["sparseserve.num_tokens"]
    assert by_layer == dict.fromkeys(range(engine.layout.num_layers), 400)
    for name in ("load", "save"):
        moved = sum(s.attributes["sparseserve.kv.bytes"] for s in finished if s.name == name and s.attributes)
        assert moved == spans["decode"].attributes[f"sparseserve.kv.bytes_{name}{'d' if name == 'save' else 'ed'}"] > 0
    ids = {spans[name].context.span_id for name in ("prefill", "decode")}
    for span in finished:
        if span.name in ("prefill_segment", "load", "save"):
            assert span.parent is not None and span.parent.span_id in ids


def test_a_line_in_the_log_for_every_request(server, caplog):
    with caplog.at_level(logging.INFO, logger="sparseserve.access"):
        server.client.post(
            "/v1/completions", json={"prompt": "hello", "max_tokens": 3}, headers={"X-Request-Id": "log-me"}
        )
        server.client.get("/health")
        wait_until(lambda: len(caplog.records) > 0)
    (record,) = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert line["request_id"] == "log-me" and line["completion_tokens"] == 3 and line["status"] == 200
    assert line["ttft_s"] > 0 and line["finish_reasons"] and line["path"] == "/v1/completions"

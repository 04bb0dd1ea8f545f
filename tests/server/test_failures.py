"""When the engine fails: one request's fault, everybody's, at the start, for good."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.running_server import RunningServer, error_of, wait_until
from tests.tiny_model import random_prompt

POISON = 77


def poison(engine, monkeypatch, is_poisoned: Callable[[Any], bool]) -> None:
    """Steps fail that decode a continuation of which `is_poisoned(its processor)` is true."""
    real = engine.runner.begin

    def begin(plan, *, sample):
        if any(child in engine._processors and is_poisoned(engine._processors[child]) for child in plan.decode):
            raise RuntimeError("a poisoned step")
        return real(plan, sample=sample)

    monkeypatch.setattr(engine.runner, "begin", begin)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_poisoned_request_fails_alone(server, engine, monkeypatch, stream):
    prompts = [random_prompt(20 + 15 * i, i) for i in range(6)]  # within the sparse budget: all is exact
    expected = [server.complete(prompt=prompt, max_tokens=20)["choices"] for prompt in prompts]
    poison(engine, monkeypatch, lambda p: p._prompt_token_ids[0] == POISON and len(p.token_ids) >= 4)
    fields = {"prompt": [POISON, *random_prompt(50, 9)], "max_tokens": 20, "ignore_eos": True, "stream": stream}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(server.complete, prompt=prompt, max_tokens=20) for prompt in prompts]
        poisoned = pool.submit(server.client.post, "/v1/completions", json=fields)
        assert [future.result()["choices"] for future in others] == expected
        response = poisoned.result()
    if stream:
        assert response.status_code == 200, "tokens had been sent"
        lines = [line[6:] for line in response.text.splitlines() if line]
        assert json.loads(lines[-2])["error"]["code"] == "engine_error" and lines[-1] == "[DONE]"
    else:
        assert error_of(response, 500)["code"] == "engine_error"
    server.assert_idle()
    assert server.client.get("/health").status_code == 200
    assert server.gauges()["failed_steps_total"] >= 2


def test_a_request_poisoned_from_the_start_gets_a_status_also_as_stream(server, engine, monkeypatch):
    real = engine.runner.run_prefill

    def run_prefill(step, allowed=None):
        for item in (item for segment in step.plan.prefill for item in segment.items):
            if engine._processors[item.request_id]._prompt_token_ids[0] == POISON:
                raise RuntimeError("a poisoned step")
        real(step, allowed)

    monkeypatch.setattr(engine.runner, "run_prefill", run_prefill)
    response = server.client.post("/v1/completions", json={"prompt": [POISON, 1], "stream": True})
    assert error_of(response, 500)["code"] == "engine_error"
    assert server.complete(prompt="a", max_tokens=2)["choices"]
    server.assert_idle()


def test_an_engine_that_is_loading(engine):
    go = threading.Event()

    def build():
        go.wait(30)
        return engine

    with RunningServer(build) as server:
        response = server.client.get("/health")
        assert response.status_code == 503 and response.json() == {"status": "loading"}
        error = error_of(server.client.post("/v1/completions", json={"prompt": "a"}), 503)
        assert error["code"] == "engine_loading"
        assert server.client.get("/metrics").status_code == 200
        go.set()
        server.wait_ready()
        assert server.complete(prompt="a", max_tokens=1)["choices"]


def test_an_engine_that_cannot_be_loaded():
    def build():
        raise ValueError("device_kv_bytes=1 is too small")

    with RunningServer(build) as server:
        wait_until(lambda: server.client.get("/health").json() == {"status": "dead"})
        assert error_of(server.client.post("/v1/completions", json={"prompt": "a"}), 503)["code"] == "engine_dead"


def test_an_engine_that_dies(engine, monkeypatch):
    """Every step fails and recovery does, too: all get 503, and nobody waits for ever."""
    with RunningServer(engine) as server:
        server.wait_ready()
        with monkeypatch.context() as patch:
            poison(engine, patch, lambda p: True)

            def no_memory():
                raise MemoryError("no memory for KV")

            patch.setattr(engine, "recover", no_memory)
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                fields = {"prompt": "a", "max_tokens": 9, "ignore_eos": True}
                answers = list(pool.map(lambda _: server.client.post("/v1/completions", json=fields), range(3)))
            for answer in answers:
                assert "engine_dead" in answer.text and error_of(answer, 503)
        assert server.client.get("/health").status_code == 503
    engine.recover()  # for the tests that follow
    for request_id in list(engine._children):
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()

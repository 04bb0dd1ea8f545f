"""Clients that go away, requests that take too long, shutting down (L10)."""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
import time

import httpx
import pytest

from sparseserve_jax.server.settings import ServerSettings
from tests.server.running_server import RunningServer, error_of, wait_until
from tests.tiny_model import random_prompt


def request_on_a_socket(server: RunningServer, *, stream: bool, prompt: list[int]) -> socket.socket:
    body = json.dumps({"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    return connection


def send_and_vanish(server: RunningServer, *, stream: bool, prompt: list[int], after_s: float) -> None:
    with request_on_a_socket(server, stream=stream, prompt=prompt):
        time.sleep(after_s)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_goes_frees_everything(server, stream):
    aborted = 'request_success_total{finished_reason="abort",model_name="tiny"}'
    before = server.gauges()[aborted]
    with request_on_a_socket(server, stream=stream, prompt=random_prompt(300, 1)):
        wait_until(lambda: server.service.metrics.state.num_known == 1)
    server.assert_idle()
    assert server.gauges()[aborted] == before + 1


def test_rounds_of_clients_that_vanish(server):
    """At random points, among others that stay and whose answers stay the same."""
    prompts = [random_prompt(100 + 60 * i, i) for i in range(4)]
    expected = [server.complete(prompt=prompt, max_tokens=12)["choices"] for prompt in prompts]
    rng = random.Random(0)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        for _ in range(3):
            going = [
                pool.submit(
                    send_and_vanish, server, stream=rng.random() < 0.5, prompt=random_prompt(rng.randint(1, 300), i),
                    after_s=rng.random() * 0.8,
                )
                for i in range(20)
            ]  # fmt: skip
            staying = [pool.submit(server.complete, prompt=prompt, max_tokens=12) for prompt in prompts]
            assert [future.result()["choices"] for future in staying] == expected
            for future in going:
                future.result()
            server.assert_idle()
    assert [server.complete(prompt=prompt, max_tokens=12)["choices"] for prompt in prompts] == expected


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_request_that_takes_too_long_is_aborted(engine, stream):
    with RunningServer(engine, ServerSettings(request_timeout_s=0.1)) as server:
        server.wait_ready()
        fields = {"prompt": random_prompt(100, 0), "max_tokens": 400, "ignore_eos": True, "stream": stream}
        response = server.client.post("/v1/completions", json=fields)
        if stream and response.status_code == 200:
            lines = [line for line in response.text.splitlines() if line]
            assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["error"]["code"] == "timeout"
        else:
            assert error_of(response, 408)["code"] == "timeout"
        server.assert_idle()


def test_a_slow_reader_holds_up_nobody(server):
    """Nothing is read for a while: the engine goes on, and the text is whole in the end."""
    fields = {"prompt": "slow", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = server.complete(**fields)["choices"][0]["text"]
    with httpx.stream("POST", server.url + "/v1/completions", json=fields | {"stream": True}, timeout=60) as response:
        started_s = time.monotonic()
        server.complete(prompt="other", max_tokens=5)
        assert time.monotonic() - started_s < 10
        time.sleep(0.3)
        lines = [line[6:] for line in response.iter_lines() if line and line != "data: [DONE]"]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected


def test_draining_finishes_what_runs_and_takes_nothing_new(engine):
    with RunningServer(engine) as server:
        server.wait_ready()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.complete, prompt=random_prompt(200, 3), max_tokens=100, ignore_eos=True)
            wait_until(lambda: server.service.metrics.state.num_running)
            server.service.is_draining = True
            error = error_of(httpx.post(server.url + "/v1/completions", json={"prompt": "a"}), 503)
            assert error["code"] == "engine_draining"
            assert server.client.get("/health").json() == {"status": "draining"}
            server._server.should_exit = True
            assert running.result()["usage"]["completion_tokens"] == 100

"""`sparseserve serve` as users start it: ports, signals, kill -9, wrong options."""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

from tests.server.server_process import ServerProcess
from tests.tiny_model import random_prompt

_FROM_XLA = re.compile(r"[IWEF]\d{4} \d|WARNING: All log messages before absl")
"""What a compiler plugin that is installed beside JAX writes to standard error before any of us can hear of it."""
ENGINE = ["--dtype", "float32", "--block-size", "16", "--sparse-budget-tokens", "128", "--max-model-len", "512",
          "--max-num-batched-tokens", "256", "--max-num-seqs", "4", "--device-kv-bytes", "8MiB"]  # fmt: skip


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def complete(url: str, **fields) -> httpx.Response:
    return httpx.post(url + "/v1/completions", json={"temperature": 0} | fields, timeout=60)


def test_drain_on_sigterm(model, tmp_path):
    """The name, the log in JSON, and a request that runs when SIGTERM comes gets its whole answer."""
    keys = tmp_path / "keys"
    keys.write_text("# keys\nsecret\n")
    options = ["--model", str(model), "--port", str(free_port()), "--no-warm-up", "--log-format", "json",
               "--api-key-file", str(keys), *ENGINE]  # fmt: skip
    with ServerProcess(options, cache_dir=str(tmp_path / "xla")) as server:
        server.wait_ready()
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(server.url + "/v1/models").status_code == 401
        models = httpx.get(server.url + "/v1/models", headers=headers).json()["data"]
        assert models[0]["id"] == "tiny"
        fields = {"prompt": random_prompt(100, 1), "max_tokens": 300, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                httpx.post, server.url + "/v1/completions", json=fields, headers=headers, timeout=60
            )  # fmt: skip
            metrics = server.url + "/metrics"
            while 'num_requests_running{model_name="tiny"} 1.0' not in httpx.get(metrics, headers=headers).text:
                time.sleep(0.02)
            assert server.end(signal.SIGTERM) == 0
            assert answer.result().json()["usage"]["completion_tokens"] == 300
        lines = [json.loads(line) for line in server.log if line.startswith("{")]
        assert any(line.get("completion_tokens") == 300 and line["status"] == 200 for line in lines)
        ours = [line for line in server.log if not _FROM_XLA.match(line)]
        assert len(lines) == len(ours), "every line is JSON"


@pytest.mark.slow
def test_kill_9_under_load_and_restart(model, tmp_path):
    port = str(free_port())
    options = ["--model", str(model), "--port", port, "--no-warm-up", *ENGINE]
    cache = str(tmp_path / "xla")
    texts = []
    for _ in range(3):
        with ServerProcess(options, cache_dir=cache) as server:
            server.wait_ready()
            texts.append(complete(server.url, prompt="hello", max_tokens=8).json()["choices"][0]["text"])
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                running = [
                    pool.submit(complete, server.url, prompt=random_prompt(200, i), max_tokens=300, ignore_eos=True)
                    for i in range(8)
                ]
                time.sleep(0.3)
                assert server.end(signal.SIGKILL) == -signal.SIGKILL
                for future in running:
                    with pytest.raises(httpx.HTTPError):
                        future.result()
    assert len(set(texts)) == 1


@pytest.mark.parametrize("options, reason", [
    (["--model", "/nowhere/at/all"], "nowhere"),
    pytest.param(["--max-waiting", "-1"], "max_waiting", marks=pytest.mark.slow),
    pytest.param(["--log-format", "xml"], "xml", marks=pytest.mark.slow),
    pytest.param(["a", "--model", "b"], "once", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_cannot_be_served_says_why(options, reason):
    command = [sys.executable, "-m", "sparseserve_jax.cli", "serve", "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode in (1, 2) and reason in ended.stderr

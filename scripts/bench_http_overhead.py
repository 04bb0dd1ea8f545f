"""What HTTP costs: the same work through the server and through an engine in this process, in turns.

    python scripts/bench_http_overhead.py --json http_overhead.json

Throughput: requests at once, not streamed. Time to first token: one streamed request after another, the sides by turns;
what HTTP adds is the median difference of neighbours, since the machine may change its speed within seconds. Both sides
have the same settings and are warm; the one that is not measured is idle. The client runs on the same machine, so what
it costs counts against the server.
"""

from __future__ import annotations

import concurrent.futures
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.bench_serving import environment
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from tests.server.server_process import ServerProcess

MAX_THROUGHPUT_LOSS = 0.05
MAX_TTFT_S = 0.005


def main(
    num_requests: int = typer.Option(8, help="At once; all of them run together."),
    prompt_tokens: int = typer.Option(256, help="Of every request."),
    new_tokens: int = typer.Option(128, help="Of every request."),
    rounds: int = typer.Option(5, help="Turns of each side; medians count."),
    ttft_requests: int = typer.Option(10, help="Requests for time to first token in every turn."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the results."),
) -> None:
    config = EngineConfig(max_num_seqs=num_requests, max_model_len=prompt_tokens + new_tokens + 1)
    engine = Engine(model, config)
    for _ in engine.warm_up():
        pass
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 256, (num_requests, prompt_tokens)).tolist()
    options = ["--port", "0", "--max-num-seqs", str(num_requests), "--max-model-len", str(config.max_model_len)]
    with ServerProcess([*options, *(["--model", model] if model else [])]) as server:
        server.wait_ready()
        seconds: dict[str, list[float]] = {"engine": [], "http": []}
        ttft_s: list[tuple[float, float]] = []  # of the engine and by HTTP, neighbours
        with httpx.Client(base_url=server.url, timeout=600) as client:
            for number in range(rounds + 1):
                took = {
                    "engine": _engine_seconds(engine, prompts, new_tokens),
                    "http": _http_seconds(client, prompts, new_tokens),
                }
                pairs = [
                    (_engine_ttft_s(engine, prompts[0]), _http_ttft_s(client, prompts[0])) for _ in range(ttft_requests)
                ]
                if number:  # the first turn warms up
                    for side in took:
                        seconds[side].append(took[side])
                    ttft_s += pairs
        server.end()
    median_s = {side: statistics.median(values) for side, values in seconds.items()}
    added_ms = sorted(1000 * (http - engine) for engine, http in ttft_s)
    loss = 1 - median_s["engine"] / median_s["http"]
    result: dict[str, Any] = {
        "tokens_per_s": {side: num_requests * new_tokens / value for side, value in median_s.items()},
        "throughput_loss": loss, "throughput_loss_limit": MAX_THROUGHPUT_LOSS,
        "ttft_ms": {
            "engine": 1000 * statistics.median(engine for engine, _ in ttft_s),
            "http": 1000 * statistics.median(http for _, http in ttft_s),
        },
        "ttft_added_ms": statistics.median(added_ms), "ttft_limit_ms": 1000 * MAX_TTFT_S,
        "ttft_added_quartiles_ms": [added_ms[len(added_ms) // 4], added_ms[3 * len(added_ms) // 4]],
        "seconds": seconds, "environment": environment(),
        "settings": {"num_requests": num_requests, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
    }  # fmt: skip
    print(json.dumps({key: value for key, value in result.items() if key != "seconds"}, indent=1))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if loss > MAX_THROUGHPUT_LOSS or result["ttft_added_ms"] > result["ttft_limit_ms"]:
        raise typer.Exit(1)


def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _engine_seconds(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    started_s = time.perf_counter()
    engine.generate([Request(prompt=prompt, sampling=_sampling(new_tokens)) for prompt in prompts])
    return time.perf_counter() - started_s


def _http_seconds(client: httpx.Client, prompts: list[list[int]], new_tokens: int) -> float:
    def ask(prompt: list[int]) -> None:
        fields = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        response = client.post("/v1/completions", json=fields).raise_for_status()
        assert response.json()["usage"]["completion_tokens"] == new_tokens

    started_s = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(ask, prompts))
    return time.perf_counter() - started_s


def _engine_ttft_s(engine: Engine, prompt: list[int]) -> float:
    started_s = time.perf_counter()
    outputs = engine.stream([Request(prompt=prompt, sampling=_sampling(2))])
    next(outputs)
    ttft_s = time.perf_counter() - started_s
    list(outputs)
    return ttft_s


def _http_ttft_s(client: httpx.Client, prompt: list[int]) -> float:
    fields = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    started_s = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=fields) as response:
        lines = response.iter_lines()
        next(lines)
        ttft_s = time.perf_counter() - started_s
        list(lines)
    return ttft_s


if __name__ == "__main__":
    typer.run(main)

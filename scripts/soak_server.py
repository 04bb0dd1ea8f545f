"""A server under mixed load for minutes, with clients that vanish, hostile bodies and prompts that are too long.

Device memory is for about two working sets, so requests are parked and blocks travel all the time. What must hold, and
is checked: every accepted request ends; gauges and pools return to zero; greedy answers to fixed prompts are the same
before, during and after; resident memory grows by at most 5 % after the first fifth of the time.

    python scripts/soak_server.py --seconds 600 --json soak.json
"""

from __future__ import annotations

import collections
import json
import random
import socket
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import httpx
import psutil
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.bench_serving import environment
from tests.server.server_process import ServerProcess

ENGINE = ["--dtype", "float32", "--deterministic", "--kv-tiers", "tiered", "--sparse-budget-tokens", "512",
          "--max-model-len", "2048", "--max-num-batched-tokens", "512", "--max-num-seqs", "8"]  # fmt: skip
FIXED = [
    "The capital of France is",
    "Once upon a time there was a little robot who",
    "List of the planets:\n1. Mercury\n2.",
    "In the long history of the village nothing had ever " * 60 + "\nAnd then",
]
VANISHING_SHARE = 0.3
MAX_GROWTH = 0.05
HOSTILE = [
    b"", b"{", b'{"prompt": NaN}', b'{"prompt": []}', b'{"prompt": [[-1]]}', b'{"prompt": "a", "n": 1000000}',
    b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "a", "max_tokens": -1}', b"[" * 50_000, b"\xff\xfe",
    b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "model": "none"}', b'{"prompt": "a", "guided_regex": "("}',
]  # fmt: skip
TOO_LONG = [json.dumps({"prompt": "word " * 3000}).encode(), b'{"prompt": "' + b"a" * 5_000_000 + b'"}',
            b'{"prompt": "' + b"a" * 20_000_000 + b'"}']  # fmt: skip


def main(
    seconds: float = typer.Option(600.0, help="Time of load."),
    clients: int = typer.Option(12, help="Concurrent clients."),
    device_kv_bytes: str = typer.Option("110MiB", help="Device budget: about two working sets."),
    max_waiting: int = typer.Option(8, help="Of the server."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the results."),
) -> None:
    options = ["--port", "0", "--device-kv-bytes", device_kv_bytes, "--max-waiting", str(max_waiting), *ENGINE]
    options += ["--model", model] if model else []
    with ServerProcess(options) as server:
        server.wait_ready()
        result = Soak(server, clients, seconds).run()
        exit_code = server.end()
    result["exit_code_after_sigterm"] = exit_code
    result["environment"] = environment()
    print(json.dumps(result, indent=1))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if result["problems"]:
        raise typer.Exit(1)


class Soak:
    """Clients in threads, a thread that checks fixed prompts, one that polls `/health` and memory."""

    def __init__(self, server: ServerProcess, num_clients: int, seconds: float) -> None:
        self._server, self._url, self._seconds = server, server.url, seconds
        self._num_clients = num_clients
        self._address = ("127.0.0.1", urllib.parse.urlparse(server.url).port or 80)
        self._counts: collections.Counter[str] = collections.Counter()
        self._problems: list[str] = []
        self._health_s: list[float] = []
        self._memory: list[tuple[float, int]] = []
        self._end_s = 0.0
        self._process = psutil.Process(server.process.pid)

    def run(self) -> dict[str, Any]:
        expected = [self._answer(prompt) for prompt in FIXED]
        started_s = time.monotonic()
        self._end_s = started_s + self._seconds
        threads = [threading.Thread(target=self._client, args=(number,)) for number in range(self._num_clients)]
        threads += [threading.Thread(target=self._check_answers, args=(expected,)), threading.Thread(target=self._poll)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._seconds + 300)
            if thread.is_alive():
                self._problems.append("a client is still waiting for an answer")
        gauges = self._wait_idle()
        if [self._answer(prompt) for prompt in FIXED] != expected:
            self._problems.append("answers after the load differ from those before")
        early = max(size for when, size in self._memory if when <= started_s + 0.2 * self._seconds)
        late = max(size for when, size in self._memory if when >= started_s + 0.8 * self._seconds)
        growth = late / early - 1
        if growth > MAX_GROWTH:
            self._problems.append(f"resident memory grew by {growth:.1%}")
        if max(self._health_s) > 1.0:
            self._problems.append(f"/health took {max(self._health_s):.2f} s")
        return {
            "seconds": self._seconds, "problems": self._problems, "counts": dict(sorted(self._counts.items())),
            "gauges_at_end": gauges, "memory_growth": round(growth, 4), "resident_bytes": [early, late],
            "health_max_s": round(max(self._health_s), 3), "counters": self._read("_total"),
        }  # fmt: skip

    def _answer(self, prompt: str) -> str:
        """A greedy answer; the server may be full, then again."""
        fields = {"prompt": prompt, "temperature": 0, "max_tokens": 24}
        while True:
            response = httpx.post(self._url + "/v1/completions", json=fields, timeout=300)
            if response.status_code != 429:
                response.raise_for_status()
                return response.json()["choices"][0]["text"]
            time.sleep(0.3)

    def _check_answers(self, expected: list[str]) -> None:
        number = 0
        while time.monotonic() < self._end_s:
            place = number % len(FIXED)
            number += 1
            if self._answer(FIXED[place]) != expected[place]:
                self._problems.append(f"answer {place} during the load differs from that before")
            self._counts["fixed prompts checked"] += 1
            time.sleep(1)

    def _poll(self) -> None:
        with httpx.Client(timeout=30) as client:
            while time.monotonic() < self._end_s:
                started_s = time.monotonic()
                if client.get(self._url + "/health").status_code != 200:
                    self._problems.append("/health is not 200")
                self._health_s.append(time.monotonic() - started_s)
                self._memory.append((started_s, self._process.memory_info().rss))
                time.sleep(0.5)

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self._end_s:
            kind = rng.random()
            try:
                if kind < VANISHING_SHARE:
                    self._vanish(rng)
                elif kind < 0.4:
                    self._hostile(rng.choice(HOSTILE), "hostile")
                elif kind < 0.43:
                    self._hostile(rng.choice(TOO_LONG), "too long")
                else:
                    self._request(rng)
            except httpx.HTTPError as error:
                self._problems.append(f"{type(error).__name__}: {error}")
            time.sleep(rng.random() * 0.2)

    def _fields(self, rng: random.Random) -> dict[str, Any]:
        words = ["river", "stone", "light", "seven", "green", "paper", "slowly", "and", "the"]
        num_words = int(10 ** rng.uniform(0.5, 3.0))
        fields: dict[str, Any] = {
            "prompt": " ".join(rng.choice(words) for _ in range(num_words)), "max_tokens": rng.randint(1, 64),
            "stream": rng.random() < 0.5,
        }  # fmt: skip
        for name, value in (
            ("temperature", 0), ("seed", 1), ("stop", ["\n", " the"]), ("logprobs", 2), ("n", 2), ("top_p", 0.9),
            ("presence_penalty", 0.5), ("guided_regex", "[a-z ]{5,40}"), ("echo", True),
        ):  # fmt: skip
            if rng.random() < 0.2 and not (name == "echo" and "logprobs" in fields):
                fields[name] = value
        return fields

    def _request(self, rng: random.Random) -> None:
        fields = self._fields(rng)
        response = httpx.post(self._url + "/v1/completions", json=fields, timeout=300)
        self._counts[f"status {response.status_code}"] += 1
        if response.status_code == 429:
            time.sleep(rng.random() * 2)
            return
        if response.status_code != 200:
            self._problems.append(f"status {response.status_code}: {response.text[:300]}")
        elif fields["stream"]:
            lines = [line for line in response.text.splitlines() if line]
            if lines[-1] != "data: [DONE]" or '"error"' in lines[-2]:
                self._problems.append(f"a stream ended with {lines[-2:]}")

    def _hostile(self, body: bytes, kind: str) -> None:
        headers = {"content-type": "application/json"}
        response = httpx.post(self._url + "/v1/completions", content=body, headers=headers, timeout=300)
        self._counts[f"{kind}: {response.status_code}"] += 1
        if not 400 <= response.status_code < 500 or set(response.json()) != {"error"}:
            self._problems.append(f"{kind}: {response.status_code} {response.text[:300]}")

    def _vanish(self, rng: random.Random) -> None:
        body = json.dumps(self._fields(rng) | {"max_tokens": 200, "ignore_eos": True, "guided_regex": None}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
        with socket.create_connection(self._address, timeout=30) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
            sent = len(body) if rng.random() < 0.9 else rng.randint(0, len(body))
            connection.sendall(body[:sent])
            time.sleep(rng.random() ** 2 * 4)
        self._counts["vanished"] += 1

    def _read(self, suffix: str) -> dict[str, float]:
        values = {}
        for line in httpx.get(self._url + "/metrics", timeout=30).text.splitlines():
            name, _, value = line.rpartition(" ")
            if not line.startswith("#") and name.partition("{")[0].endswith(suffix) and name.startswith("sparseserve"):
                values[name] = float(value)
        return values

    def _wait_idle(self) -> dict[str, float]:
        deadline = time.monotonic() + 60
        while True:
            gauges = {}
            for name in ("running", "waiting", "parked", "usage_perc", "device_kv_bytes", "host_kv_bytes",
                         "working_set_blocks"):  # fmt: skip
                gauges |= self._read(name)
            if not any(gauges.values()):
                return gauges
            if time.monotonic() > deadline:
                self._problems.append(f"gauges are not back to zero: {gauges}")
                return gauges
            time.sleep(0.2)


if __name__ == "__main__":
    typer.run(main)

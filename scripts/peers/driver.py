"""The work itself, the same code for every engine: time to first token, decode steps, serving, greedy tokens.

Runs in the worker, so that no pipe is inside a measurement. Standard library only.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from peers.protocol import Handlers


class StepEngine(Protocol):
    """What a worker makes of its engine. Requests are greedy and run to `max_tokens`; EOS does not end them."""

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        """Queues a request of token ids."""
        ...

    def step(self) -> dict[str, list[int]]:
        """One iteration; the new tokens of every request that got some."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Drops unfinished requests and their KV."""
        ...


class Driver:
    """Drives one engine. At most one batch is held between two calls (`start_batch` to `end_batch`)."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self._batch: dict[str, int] = {}  # tokens in the KV by request
        self._counter = 0

    def handlers(self) -> Handlers:
        """What the worker answers to."""
        names = ("first_token", "generate", "start_batch", "steps", "end_batch", "serve")
        return {name: getattr(self, name) for name in names}

    def first_token(self, prompt: list[int]) -> dict[str, Any]:
        """Seconds from the request to its only token."""
        (name,) = self._names(1)
        started = time.perf_counter()
        self.engine.add(name, prompt, 1)
        while True:
            outputs = self.engine.step()
            if outputs.get(name):
                return {"seconds": time.perf_counter() - started, "token": outputs[name][0]}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Greedy tokens of each prompt."""
        names = self._names(len(prompts))
        tokens: dict[str, list[int]] = {name: [] for name in names}
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add(name, prompt, max_tokens)
        while any(len(found) < max_tokens for found in tokens.values()):
            for name, new in self.engine.step().items():
                tokens[name] += new
        return {"tokens": [tokens[name] for name in names]}

    def start_batch(self, prompts: list[list[int]], warm_tokens: int, room_tokens: int) -> dict[str, Any]:
        """Prefills a batch and decodes until each of its sequences has `warm_tokens` tokens; the batch stays.

        Args:
            room_tokens: tokens that a sequence may ever get.

        Returns:
            The context of each sequence: prompt and new tokens.
        """
        names = self._names(len(prompts))
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add(name, prompt, room_tokens)
        new = dict.fromkeys(names, 0)
        while min(new.values()) < warm_tokens:
            for name, tokens in self.engine.step().items():
                new[name] += len(tokens)
        self._batch = {name: len(prompt) + new[name] for name, prompt in zip(names, prompts, strict=True)}
        return {"contexts": list(self._batch.values())}

    def steps(self, count: int) -> dict[str, Any]:
        """Times of `count` decode steps of the batch, from one moment at which all of it has grown to the next.

        The first step after the pause is not among them: an engine that works ahead has its token already.
        """
        seconds: list[float] = []
        behind = set(self._batch)
        started = None
        while len(seconds) < count:
            for name, tokens in self.engine.step().items():
                self._batch[name] += len(tokens)
                behind.discard(name)
            if not behind:
                now = time.perf_counter()
                if started is not None:
                    seconds.append(now - started)
                started, behind = now, set(self._batch)
        return {"seconds": seconds, "contexts": list(self._batch.values())}

    def end_batch(self) -> None:
        """Drops the batch."""
        self.engine.abort(list(self._batch))
        self._batch = {}

    def serve(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Serves requests that come at their `arrival_s`; each is `{"prompt", "max_tokens", "arrival_s"}`.

        Returns:
            Seconds from the first arrival's clock to the last token, tokens made, and each request's time from its
            arrival to its first token (waiting included).
        """
        names = self._names(len(requests))
        waiting = sorted(zip(names, requests, strict=True), key=lambda pair: pair[1]["arrival_s"], reverse=True)
        left = {name: request["max_tokens"] for name, request in waiting}
        arrivals = {name: request["arrival_s"] for name, request in waiting}
        first: dict[str, float] = {}
        running: set[str] = set()
        started = time.perf_counter()
        while waiting or running:
            now = time.perf_counter() - started
            while waiting and waiting[-1][1]["arrival_s"] <= now:
                name, request = waiting.pop()
                self.engine.add(name, request["prompt"], request["max_tokens"])
                running.add(name)
            if not running:
                time.sleep(max(0.0, waiting[-1][1]["arrival_s"] - now))
                continue
            outputs = self.engine.step()
            now = time.perf_counter() - started
            for name, tokens in outputs.items():
                first.setdefault(name, now - arrivals[name])
                left[name] -= len(tokens)
                if left[name] <= 0:
                    running.discard(name)
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds, "output_tokens": sum(request["max_tokens"] for request in requests),
            "ttft_s": [first[name] for name in names],
        }  # fmt: skip

    def _names(self, count: int) -> list[str]:
        self._counter += count
        return [f"r{number}" for number in range(self._counter - count, self._counter)]

"""Our own worker: the public `Engine`, stepped.

Settings: `{"model": directory, "engine": fields of EngineConfig, "warm_up": bool}`.
"""

from __future__ import annotations

import dataclasses
import time
from importlib.metadata import version
from typing import Any

from peers.driver import Driver
from peers.protocol import Handlers, answer_requests
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams


class SparseServe:
    """`StepEngine` over an `Engine`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._seen: dict[str, int] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(Request(prompt=prompt, sampling=params, request_id=request_id))
        self._seen[request_id] = 0

    def next_logprobs(self, prompts: list[list[int]], token_ids: list[list[int]]) -> list[list[float | None]]:
        """Natural-log probabilities of candidates for the token after each prompt; None = not among the best 20."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
        outputs = self.engine.generate([Request(prompt=prompt, sampling=params) for prompt in prompts])
        found = []
        for output, candidates in zip(outputs, token_ids, strict=True):
            best = {entry.token_id: entry.logprob for entry in (output.logprobs or [[]])[0]}
            found.append([best.get(token_id) for token_id in candidates])
        return found

    def step(self) -> dict[str, list[int]]:
        new = {}
        for output in self.engine.step():
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            seen = self._seen.get(output.request_id)
            if seen is None:  # the last word about one that was dropped
                continue
            new[output.request_id] = output.token_ids[seen:]
            self._seen[output.request_id] = len(output.token_ids)
            if output.finish_reason is not None:
                del self._seen[output.request_id]
        return new

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)
            self._seen.pop(request_id, None)
        while self.engine.has_unfinished():
            self.engine.step()


def make(settings: dict[str, Any]) -> tuple[Handlers, dict[str, Any]]:
    """Loads the model and compiles."""
    started = time.perf_counter()
    engine = Engine(settings["model"], EngineConfig(**settings["engine"]))
    if settings["warm_up"]:
        for _ in engine.warm_up():
            pass
    info = {
        "versions": {name: version(name) for name in ("sparseserve-jax", "jax", "jaxlib") if _installed(name)},
        "start_s": time.perf_counter() - started,
        "in_force": dataclasses.asdict(engine.config) | {"lines": list(engine.info.lines())},
    }
    stepped = SparseServe(engine)
    return {**Driver(stepped).handlers(), "next_logprobs": stepped.next_logprobs}, info


def _installed(name: str) -> bool:
    try:
        version(name)
    except ModuleNotFoundError:  # run from a checkout
        return False
    return True


if __name__ == "__main__":
    answer_requests(make)

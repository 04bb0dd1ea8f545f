"""What is sent, and when: made before the clock starts, from seeds, so that two servers get the same."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseserve_jax.load_generator.arrivals import ArrivalPattern, arrivals
from sparseserve_jax.load_generator.client import Endpoint
from sparseserve_jax.load_generator.lengths import LengthDistribution
from sparseserve_jax.load_generator.prompt_file import FilePrompt, read_prompt_file
from sparseserve_jax.load_generator.prompt_text import CountTokens, excerpt, fitted_text, random_words, tokens_per_word
from sparseserve_jax.load_generator.records import PlannedRequest
from sparseserve_jax.load_generator.trace import BLOCK_TOKENS, TraceRow, read_trace

COUNTING_AT_ONCE = 8
RESERVED = ("stream",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """How a load is made.

    Attributes:
        num_prompts: requests.
        seed: of everything random.
        arrival: how they come; None = as the trace says, else Poisson with a rate, else all at once.
        rate_rps: requests a second.
        burst_size: requests of a burst.
        input_lengths / output_lengths: of prompts and answers, where neither trace nor file says it.
        trace: a recorded trace: its lengths and shared prefixes, and its times unless `arrival` or a rate is given.
        time_scale: times of the trace are multiplied by this: 0.5 = twice as fast.
        prompts: a `.jsonl` file of prompts, or a text that prompts are cut from; None = random words.
        max_input_tokens / max_output_tokens: longer ones are cut to this.
        ignore_eos: ask for answers of full length.
        extra_body: added to every request's body; None takes a field out.

    Raises:
        ValueError: settings that make no load.
    """

    num_prompts: int
    seed: int = 0
    arrival: ArrivalPattern | None = None
    rate_rps: float | None = None
    burst_size: int = 8
    input_lengths: LengthDistribution
    output_lengths: LengthDistribution
    trace: Path | None = None
    time_scale: float = 1.0
    prompts: Path | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"num_prompts={self.num_prompts} must be at least 1")
        if not 0 < self.time_scale < float("inf"):
            raise ValueError(f"time_scale={self.time_scale} must be above 0 and finite")
        for name in ("max_input_tokens", "max_output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.trace is not None and self.prompts is not None:
            raise ValueError("a trace and a file of prompts exclude each other; give one of --trace and --prompts")
        if self.arrival == "at-once" and self.rate_rps is not None:
            raise ValueError(f"requests that come all at once have no rate; leave out --rate {self.rate_rps:g}")
        taken = [name for name in RESERVED if name in self.extra_body]
        if taken:
            raise ValueError(f"extra_body must leave {', '.join(taken)} to the load generator")

    @property
    def pattern(self) -> str:
        """How requests come: a pattern of `arrivals`, or "trace"."""
        if self.arrival is not None:
            return self.arrival
        if self.rate_rps is not None:
            return "poisson"
        return "trace" if self.trace is not None else "at-once"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Draft:
    """A request before its text is made."""

    input_tokens: int
    max_tokens: int | None
    hash_ids: tuple[int, ...] = ()
    given: FilePrompt | None = None


async def make_plan(
    workload: Workload, *, model: str, endpoint: Endpoint, count_tokens: CountTokens | None = None
) -> list[PlannedRequest]:
    """All requests of a workload, by arrival.

    Args:
        workload: how they are made.
        model: the name that requests ask for.
        endpoint: for which they are.
        count_tokens: counts as the server does; None = lengths are estimates.

    Raises:
        ValueError: a file that does not hold what it should.
        OSError: a file that cannot be read.
    """
    rows = None if workload.trace is None else read_trace(workload.trace, workload.num_prompts)
    drafts, text = _drafts(workload, rows)
    if rows is not None and workload.pattern == "trace":
        times = [row.arrival_s * workload.time_scale for row in rows]
    else:
        rng = random.Random(f"{workload.seed}/arrivals")
        pattern: Any = workload.pattern
        endless = arrivals(pattern, workload.rate_rps, burst_size=workload.burst_size, rng=rng)
        times = list(itertools.islice(endless, len(drafts)))
    places = asyncio.Semaphore(COUNTING_AT_ONCE)
    word_tokens = await tokens_per_word(count_tokens)
    block_words = max(1, round(BLOCK_TOKENS / word_tokens))
    block = functools.cache(lambda hash_id: random_words(block_words, f"{workload.seed}/block/{hash_id}"))

    async def one(index: int, draft: _Draft, arrival_s: float) -> PlannedRequest:
        async with places:
            seed = f"{workload.seed}/prompt/{index}"
            if draft.given is not None:
                given = draft.given
                prompt, tokens = (given.prompt or "") if given.messages is None else given.messages, None
            elif text is not None:
                prompt, tokens = await excerpt(text, draft.input_tokens, seed, count_tokens=count_tokens)
            else:
                whole = draft.hash_ids[: (draft.input_tokens - 1) // BLOCK_TOKENS]
                rest = draft.hash_ids[len(whole) : len(whole) + 1]
                prompt, tokens = await fitted_text(
                    draft.input_tokens, f"{workload.seed}/block/{rest[0]}" if rest else seed,
                    prefix="".join(map(block, whole)), prefix_tokens=len(whole) * BLOCK_TOKENS,
                    word_tokens=word_tokens, count_tokens=count_tokens,
                )  # fmt: skip
            body = _body(workload, model, endpoint, prompt, draft.max_tokens)
            return PlannedRequest(
                index=index, arrival_s=arrival_s, body=body, input_tokens=tokens, max_tokens=draft.max_tokens
            )

    made = (one(index, draft, at_s) for index, (draft, at_s) in enumerate(zip(drafts, times, strict=True)))
    return list(await asyncio.gather(*made))


def _drafts(workload: Workload, rows: list[TraceRow] | None) -> tuple[list[_Draft], str | None]:
    """What every request should be like, and the text that prompts are cut from, if there is one."""
    rng = random.Random(f"{workload.seed}/lengths")
    if rows is not None:
        return [
            _Draft(
                input_tokens=_cut(row.input_tokens, workload.max_input_tokens),
                max_tokens=_cut(row.output_tokens, workload.max_output_tokens), hash_ids=row.hash_ids,
            )
            for row in rows
        ], None  # fmt: skip
    lengths = [
        (
            _cut(workload.input_lengths.sample(rng), workload.max_input_tokens),
            _cut(workload.output_lengths.sample(rng), workload.max_output_tokens),
        )
        for _ in range(workload.num_prompts)
    ]
    if workload.prompts is not None and workload.prompts.suffix == ".jsonl":
        given = itertools.cycle(read_prompt_file(workload.prompts))
        return [
            _Draft(
                input_tokens=0, given=prompt,
                max_tokens=_cut(prompt.max_tokens or output_tokens, workload.max_output_tokens),
            )
            for (_, output_tokens), prompt in zip(lengths, given, strict=False)
        ], None  # fmt: skip
    text = None if workload.prompts is None else workload.prompts.read_text(encoding="utf-8")
    return [_Draft(input_tokens=input_tokens, max_tokens=max_tokens) for input_tokens, max_tokens in lengths], text


def _cut(tokens: int, limit: int | None) -> int:
    return tokens if limit is None else min(tokens, limit)


def _body(
    workload: Workload, model: str, endpoint: Endpoint, prompt: str | list[dict[str, Any]], max_tokens: int | None
) -> bytes:
    if endpoint == "chat":
        messages = [{"role": "user", "content": prompt.lstrip()}] if isinstance(prompt, str) else prompt
        asked: dict[str, Any] = {"messages": messages}
    elif isinstance(prompt, str):
        asked = {"prompt": prompt}
    else:
        raise ValueError("prompts of messages are for the chat endpoint; give --endpoint chat")
    content = {
        "model": model, **asked, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True if workload.ignore_eos else None,
        **workload.extra_body,
    }  # fmt: skip
    return json.dumps({name: value for name, value in content.items() if value is not None}).encode()

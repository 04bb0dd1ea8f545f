"""Sends a plan's requests at their times: an open loop, which does not wait for answers unless it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from sparseserve_jax.load_generator.client import OpenAIClient
from sparseserve_jax.load_generator.records import PlannedRequest, RequestRecord


async def generate_load(
    plan: Sequence[PlannedRequest],
    client: OpenAIClient,
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Runs a plan to its end; the records are in the plan's order.

    Args:
        plan: requests by arrival.
        client: where they go.
        max_concurrency: requests under way at most; the others wait here, and their wait is in `queue_s`.
        on_done: told of every request that has ended.

    Raises:
        ValueError: a limit that lets nothing through.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise ValueError(f"max_concurrency={max_concurrency} must be at least 1, or None")
    places = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    started_s = time.perf_counter()

    def now_s() -> float:
        return time.perf_counter() - started_s

    async def one(request: PlannedRequest) -> RequestRecord:
        async with places:
            record = await client.send(request, now_s)
        on_done(record)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for request in plan:
            await asyncio.sleep(max(0.0, request.arrival_s - now_s()))
            tasks.append(group.create_task(one(request)))
    return [task.result() for task in tasks]

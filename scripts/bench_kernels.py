"""How near kernels, and a whole dense prefill, come to the limits of this machine: bf16 products and streaming reads.

A limit is the larger of the products at the peak rate and the bytes at the read rate. Both rates are measured in turn
with what they limit, since those of shared machines change within minutes: a share is that of neighbours. What is read
from memory when serving (weights, pools) is read from memory here, too: as many arrays as the model has layers take
turns, and measuring the read rate empties the caches.

    python scripts/bench_kernels.py --json bench_kernels.json --compare-reference
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import typer
from peers.limits import prefill_operations

from pallas_kernels.api import Kernels, get_kernels
from pallas_kernels.linear import quantize_rows
from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.storage import storage_dtype
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.request import Request, SamplingParams

BLOCK_SIZE = 32
CONTEXT_BLOCKS = 8192 // BLOCK_SIZE
SELECTED = 64
SMALL_BATCHES = (1, 8, 16)
PREFILL_TOKENS = 8160
TINY = 1e-9
"""What carries a result into the next call, so that calls run one after the other."""

Step = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`build(kernels)` returns a step: `calls` calls of the kernel, one after the other."""

    name: str
    shape: str
    build: Callable[[Kernels], Step]
    calls: int = 1
    flops: float = 0.0
    num_bytes: float = 0.0
    has_reference: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """A step that runs at a limit of the machine: `amount` operations or bytes."""

    by: str
    step: Step
    amount: float


def main(
    names: str = typer.Option("", help="Only kernels whose name contains one of these, by comma."),
    seconds: float = typer.Option(1.0, help="How long each kernel is measured, with its limits."),
    read_megabytes: int = typer.Option(1024, help="Size of what is read; more than any cache holds."),
    compare_reference: bool = typer.Option(False, help="Measure the XLA version as well, in turn."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the results."),
) -> None:
    jax.config.update("jax_platforms", "cpu")
    kernels, reference = get_kernels("auto", "cpu"), get_kernels("reference", "cpu")
    products, reads = fastest_products(kernels, reference), fastest_reads(kernels, read_megabytes << 20)
    limits = {"flops": products.limit, "bytes": reads.limit}
    print(f"products: {limits['flops'].by}; reads: {limits['bytes'].by}; {os.cpu_count()} threads", flush=True)
    wanted, rows, rates = (
        [name for name in names.split(",") if name],
        [],
        {"flops": [products.rate], "bytes": [reads.rate]},
    )
    for case in cases(open_checkpoint(None).config):
        if wanted and not any(name in case.name for name in wanted):
            continue
        row, seen = measure(case, [kernels, reference] if compare_reference else [kernels], limits, seconds)
        for name, rate in seen.items():
            rates[name].append(rate)
        rows.append(row)
        print(row, flush=True)
    if not rows:
        raise SystemExit(f"--names {names}: no kernel is called so")
    show(rows, kernels)
    report = {
        "implementation": kernels.describe(),
        "bf16_peak_tflops": max(rates["flops"]) / 1e12, "bf16_peak_by": limits["flops"].by,
        "bf16_peak_tflops_between": [rate / 1e12 for rate in extremes(rates["flops"])],
        "read_gbps": max(rates["bytes"]) / 1e9, "read_by": limits["bytes"].by,
        "read_gbps_between": [rate / 1e9 for rate in extremes(rates["bytes"])],
        "kernels": rows,
    }  # fmt: skip
    print(f"bf16 products {range_of(report['bf16_peak_tflops_between'])} TFLOP/s, "
          f"reads {range_of(report['read_gbps_between'])} GB/s while these were measured")  # fmt: skip
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1))


# --- limits ----------------------------------------------------------------------------------------------------------


class Fastest(NamedTuple):
    limit: Limit
    rate: float


def fastest_products(kernels: Kernels, reference: Kernels) -> Fastest:
    """Square products at the best size, by the kernels in force or by XLA."""
    found = []
    for size in (1024, 2048, 4096):
        x, weight = (normal((size, size), seed).astype(jnp.bfloat16) for seed in range(2))
        for by in {kernels, reference}:
            step = functools.partial(jax.jit(by.linear), x, weight)
            found.append(Limit(by=f"linear, {by.describe()}, {size} cubed", step=step, amount=2.0 * size**3))
    return fastest(found)


def fastest_reads(kernels: Kernels, num_bytes: int) -> Fastest:
    """All CPUs reading one array that no cache holds: a sum in NumPy (each its own part), or one row times a matrix."""
    num_threads = os.cpu_count() or 1
    parts = np.array_split(np.ones(num_bytes // 8, np.int64), num_threads)
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    width = 1024
    weight = jnp.ones((num_bytes // 2 // width, width), jnp.bfloat16)
    row = functools.partial(jax.jit(kernels.linear), jnp.ones((1, width), jnp.bfloat16), weight)
    return fastest([
        Limit(by="sum, numpy", step=lambda: list(pool.map(np.sum, parts)), amount=num_bytes),
        Limit(by=f"linear of one row, {kernels.describe()}", step=row, amount=num_bytes),
    ])  # fmt: skip


def fastest(limits: list[Limit]) -> Fastest:
    times = repeat([limit.step for limit in limits], 1.0)
    found = [Fastest(limit, limit.amount / min(each)) for limit, each in zip(limits, times, strict=True)]
    return max(found, key=lambda one: one.rate)


# --- measuring -------------------------------------------------------------------------------------------------------


def repeat(steps: list[Step], seconds: float) -> list[list[float]]:
    """Times of each step, taken in turn, so that what disturbs one disturbs all."""
    for step in steps:
        jax.block_until_ready(step())
    times: list[list[float]] = [[] for _ in steps]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 3:
        for index, step in enumerate(steps):
            started = time.perf_counter()
            jax.block_until_ready(step())
            times[index].append(time.perf_counter() - started)
    return times


def measure(
    case: Case, implementations: list[Kernels], limits: dict[str, Limit], seconds: float
) -> tuple[dict[str, Any], dict[str, float]]:
    """The row of a case, and the rates of the limits beside it; medians."""
    amounts = {name: amount for name, amount in (("flops", case.flops), ("bytes", case.num_bytes)) if amount}
    steps = [case.build(kernels) for kernels in (implementations if case.has_reference else implementations[:1])]
    times = repeat([*steps, *(limits[name].step for name in amounts)], seconds)
    medians = [statistics.median(each) for each in times]
    rates = {name: limits[name].amount / at for name, at in zip(amounts, medians[len(steps) :], strict=True)}
    least = max(amounts[name] / rates[name] for name in amounts)
    took = [each / case.calls for each in medians[: len(steps)]]
    row = {"name": case.name, "shape": case.shape, "seconds": took[0], "share_of_limit": least / took[0]}
    return row | ({"reference_seconds": took[1]} if len(took) > 1 else {}), rates


def jitted(program: Callable[[Kernels], Callable[..., Any]], inputs: Callable[[], tuple[Any, ...]]) -> Any:
    """Builds a step that calls `program(kernels)` with the inputs."""
    return lambda kernels: functools.partial(jax.jit(program(kernels)), *inputs())


def in_place(program: Callable[[Kernels], Callable[..., Any]], inputs: Callable[[], tuple[Any, ...]]) -> Any:
    """The same for a program whose first two results take the place of its first two arguments (donated)."""
    return lambda kernels: _InPlace(jax.jit(program(kernels), donate_argnums=(0, 1)), inputs())


class _InPlace:
    """A step whose first two arguments are its last results."""

    def __init__(self, step: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self.step, self.state, self.rest = step, inputs[:2], inputs[2:]

    def __call__(self) -> Any:
        self.state = self.step(*self.state, *self.rest)[:2]
        return self.state


# --- cases -----------------------------------------------------------------------------------------------------------


def cases(model: ModelConfig) -> Iterator[Case]:
    """All of them at the sizes of `model`."""
    for rows in (*SMALL_BATCHES, 1024, 8192):
        yield from linear_cases(model, rows, "bfloat16")
    for rows in SMALL_BATCHES:
        yield from linear_cases(model, rows, "int8")
    for batch in SMALL_BATCHES:
        yield decode_attention_case(model, batch, SELECTED)
    yield decode_attention_case(model, 8, CONTEXT_BLOCKS)
    for batch in SMALL_BATCHES:
        yield from selection_cases(model, batch)
    for num_tokens in (1024, 4096, 8192):
        yield prefill_attention_case(model, num_tokens)
    yield whole_prefill_case(model)


def linear_cases(model: ModelConfig, rows: int, dtype: str) -> Iterator[Case]:
    hidden, inner = model.hidden_size, model.intermediate_size
    qkv = (model.num_q_heads + 2 * model.num_kv_heads) * model.head_dim
    shapes = [(qkv, hidden), (hidden, model.num_q_heads * model.head_dim), (2 * inner, hidden), (hidden, inner)]
    if rows in SMALL_BATCHES:
        shapes.append((model.vocab_size, hidden))
    for out, width in shapes:
        gated = out == 2 * inner
        calls = 1 if rows not in SMALL_BATCHES else 4 if out == model.vocab_size else model.num_layers
        features = out // 2 if gated else out
        activations = rows * (2 * width + (2 if gated else 4) * features)
        yield Case(
            name="linear" if dtype == "bfloat16" else f"linear {dtype}",
            shape=f"{rows} x [{out}, {width}]{' gated' if gated else ''}",
            build=jitted(
                functools.partial(_linears, gated=gated),
                functools.partial(_linear_inputs, rows, out, width, dtype, calls),
            ),
            calls=calls,
            flops=2.0 * rows * out * width,
            num_bytes=out * width * (1 if dtype == "int8" else 2) + activations,
        )


def _linear_inputs(rows: int, out: int, width: int, dtype: str, calls: int) -> tuple[Any, ...]:
    weight = normal((out, width), 1)
    matrix = quantize_rows(weight) if dtype == "int8" else (weight.astype(dtype),)
    return normal((rows, width), 0).astype(jnp.bfloat16), [copies(matrix) for _ in range(calls)]


def _linears(kernels: Kernels, *, gated: bool) -> Callable[..., Any]:
    def step(x: jax.Array, weights: list[tuple[jax.Array, ...]]) -> jax.Array:
        out = None
        for weight, *scales in weights:
            if out is not None:
                x = x + (out[:, :1] * TINY).astype(x.dtype)
            out = kernels.linear(x, weight, scales=scales[0] if scales else None, gated=gated)
        assert out is not None
        return out

    return step


def decode_attention_case(model: ModelConfig, batch: int, num_selected: int) -> Case:
    heads, calls = model.num_kv_heads, model.num_layers if batch < 16 else 8

    def inputs() -> tuple[Any, ...]:
        chosen = np.random.default_rng(0).random((batch, heads, CONTEXT_BLOCKS)).argsort(axis=-1)[..., :num_selected]
        ids = np.sort(chosen, axis=-1) + np.arange(batch)[:, None, None] * CONTEXT_BLOCKS + 1
        pool = pool_of(model, batch * CONTEXT_BLOCKS, 0)
        q = normal((batch, model.num_q_heads, model.head_dim), 0).astype(jnp.bfloat16)
        tokens = jnp.full(ids.shape, BLOCK_SIZE, jnp.int32)
        return q, [jnp.copy(pool) for _ in range(calls)], jnp.asarray(ids, jnp.int32), tokens

    def program(kernels: Kernels) -> Callable[..., Any]:
        def step(q: jax.Array, pools: list[jax.Array], block_ids: jax.Array, tokens: jax.Array) -> jax.Array:
            for pool in pools:
                out = kernels.decode_attention(q, pool, block_ids, tokens, None, scale=model.head_dim**-0.5)
                q = q + (out * TINY).astype(q.dtype)
            return q

        return step

    return Case(
        name="decode_attention",
        shape=f"batch {batch}, {num_selected} blocks of {BLOCK_SIZE}",
        build=jitted(program, inputs),
        calls=calls,
        num_bytes=batch * heads * num_selected * 2.0 * BLOCK_SIZE * model.head_dim * 2,
    )


def selection_cases(model: ModelConfig, batch: int) -> Iterator[Case]:
    heads, dim, num_blocks = model.num_kv_heads, model.head_dim, batch * CONTEXT_BLOCKS
    table = jnp.arange(1, num_blocks + 1, dtype=jnp.int32).reshape(batch, CONTEXT_BLOCKS)
    counts = jnp.full((batch,), CONTEXT_BLOCKS, jnp.int32)
    of = f"batch {batch}, {CONTEXT_BLOCKS} blocks"

    def digests() -> jax.Array:
        return stored(normal((num_blocks + 1, heads, 2, dim), 0))

    def tokens() -> tuple[Any, ...]:
        kv = (normal((batch, heads, dim), seed).astype(jnp.bfloat16) for seed in (3, 4))
        newest = table[:, -1]
        ids = jnp.repeat(newest[:, None], heads, axis=1)
        return pool_of(model, num_blocks, 0), digests(), *kv, ids, jnp.full((batch,), BLOCK_SIZE, jnp.int32), newest

    yield Case(
        name="score_blocks",
        shape=of,
        build=jitted(
            lambda kernels: functools.partial(
                kernels.score_blocks, scale=dim**-0.5, per_query_head=False, num_sink_blocks=1, num_newest_blocks=2
            ),
            lambda: (normal((batch, model.num_q_heads, dim), 1).astype(jnp.bfloat16), digests(), table, counts),
        ),
        num_bytes=2.0 * num_blocks * heads * 2 * dim,
    )
    yield Case(
        name="select_blocks",
        shape=of,
        build=jitted(
            lambda kernels: functools.partial(kernels.select_blocks, num_selected=SELECTED),
            lambda: (normal((batch, heads, CONTEXT_BLOCKS), 2),),
        ),
        num_bytes=4.0 * batch * heads * (CONTEXT_BLOCKS + SELECTED),
    )
    yield Case(
        name="append_tokens",
        shape=f"batch {batch}, blocks of {BLOCK_SIZE}",
        build=in_place(lambda kernels: functools.partial(kernels.append_tokens, method="cuboid-mean"), tokens),
        num_bytes=2.0 * batch * heads * dim * (BLOCK_SIZE + 4),
    )


def prefill_attention_case(model: ModelConfig, num_tokens: int) -> Case:
    def inputs() -> tuple[Any, ...]:
        starts = jnp.arange(0, num_tokens, PREFILL_TILE, dtype=jnp.int32)
        table = jnp.arange(1, num_tokens // BLOCK_SIZE + 1, dtype=jnp.int32)[None]
        q = normal((num_tokens, model.num_q_heads, model.head_dim), 0).astype(jnp.bfloat16)
        pool = pool_of(model, num_tokens // BLOCK_SIZE, 1)
        return q, pool, table, jnp.zeros_like(starts), starts, jnp.full_like(starts, PREFILL_TILE)

    return Case(
        name="prefill_attention",
        shape=f"{num_tokens} tokens, dense",
        build=jitted(
            lambda kernels: functools.partial(kernels.prefill_attention, scale=model.head_dim**-0.5, merge_tiles=4),
            inputs,
        ),
        flops=4.0 * model.head_dim * model.num_q_heads * num_tokens * (num_tokens + 1) / 2,
    )


def whole_prefill_case(model: ModelConfig) -> Case:
    """A prompt through the engine to its first token, with the operations that are of use (peers/limits.py)."""

    def build(kernels: Kernels) -> Step:
        engine = Engine(None, EngineConfig(max_num_seqs=1))
        for _ in engine.warm_up():
            pass
        prompt = np.random.default_rng(0).integers(0, model.vocab_size, PREFILL_TOKENS).tolist()
        request = Request(prompt=prompt, sampling=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        return lambda: engine.generate([request])

    hugging_face = {
        "hidden_size": model.hidden_size, "head_dim": model.head_dim, "num_attention_heads": model.num_q_heads,
        "num_key_value_heads": model.num_kv_heads, "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers, "vocab_size": model.vocab_size,
    }  # fmt: skip
    return Case(
        name="dense prefill, whole",
        shape=f"{PREFILL_TOKENS} tokens",
        build=build,
        flops=prefill_operations(hugging_face, PREFILL_TOKENS),
        has_reference=False,
    )


def normal(shape: tuple[int, ...], seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def copies(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.copy(array) for array in arrays)


def stored(values: jax.Array) -> jax.Array:
    """As pools and digests hold bfloat16 on this platform."""
    return values.astype(jnp.bfloat16).view(storage_dtype(jnp.dtype(jnp.bfloat16), "cpu"))


def pool_of(model: ModelConfig, num_blocks: int, seed: int) -> jax.Array:
    return stored(normal((num_blocks + 1, model.num_kv_heads, 2, BLOCK_SIZE, model.head_dim), seed))


def extremes(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def range_of(values: list[float]) -> str:
    return f"{values[0]:.2f} to {values[1]:.2f}"


def show(rows: list[dict[str, Any]], kernels: Kernels) -> None:
    table = rich.table.Table(title=f"kernels: {kernels.describe()}")
    for column in ("kernel", "shape", "time", "of the limit", "XLA takes"):
        table.add_column(column, justify="left" if column in ("kernel", "shape") else "right")
    for row in rows:
        theirs = f"{row['reference_seconds'] / row['seconds']:.2f}x" if "reference_seconds" in row else ""
        took = f"{row['seconds'] * 1e6:,.0f} us"
        table.add_row(row["name"], row["shape"], took, f"{row['share_of_limit']:.0%}", theirs)
    rich.console.Console().print(table)


if __name__ == "__main__":
    typer.run(main)

"""Where serving stands on this machine: time to first token by prompt length, decode step time by context and batch.

Each figure is measured on a warmed engine, in one process, and written with the versions and the commit it came from.

    make bench ARGS="--json bench.json"
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import rich.console
import rich.table
import typer

from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.provenance import provenance
from sparseserve_jax.request import Request, SamplingParams


def main(
    prompts: str = typer.Option("1024,4096,8000", help="Prompt lengths, tokens, by comma."),
    batches: str = typer.Option("1,8", help="Batch sizes of the decode step."),
    context: int = typer.Option(8000, help="Context of the decode step, tokens."),
    steps: int = typer.Option(24, help="Decode steps measured."),
    repeats: int = typer.Option(3, help="Measurements of each time to first token."),
    budgets: str = typer.Option("2048,dense", help="Sparse budgets, tokens, by comma; dense = no budget."),
    tiers: str = typer.Option("unified,tiered", help="KV tiers, by comma (the dense budget runs unified only)."),
    device_share: float = typer.Option(0.25, help="Device KV of the tiered runs as a share of all KV."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the results."),
) -> None:
    lengths, sizes = _integers(prompts), _integers(batches)
    results = []
    for budget in budgets.split(","):
        for tier in tiers.split(","):
            if budget == "dense" and tier == "tiered":
                continue
            engine = _engine(model, budget, tier, max(sizes), device_share)
            if budget != "dense" and tier == tiers.split(",")[0]:
                results += [_time_to_first_token(engine, n, repeats) for n in lengths]  # prefill is dense in all modes
            for size in sizes:
                results.append(_decode(engine, size, context, steps) | {"budget": budget, "tiers": tier})
                print(results[-1], flush=True)
    _show(results)
    if json_file is not None:
        json_file.write_text(json.dumps({"environment": environment(), "results": results}, indent=1))


def _engine(model: str | None, budget: str, tier: str, max_num_seqs: int, device_share: float) -> Engine:
    config = EngineConfig(
        sparse_budget_tokens=None if budget == "dense" else int(budget), kv_tiers=tier, max_num_seqs=max_num_seqs
    )  # type: ignore[arg-type]
    if tier == "tiered":
        whole = Engine(model, config).layout
        bytes_of_all = whole.num_blocks * whole.num_layers * whole.num_kv_heads * whole.piece_bytes
        config = EngineConfig(
            sparse_budget_tokens=config.sparse_budget_tokens, kv_tiers="tiered", max_num_seqs=max_num_seqs,
            device_kv_bytes=int(device_share * bytes_of_all),
        )  # fmt: skip
    return Engine(model, config)


def _time_to_first_token(engine: Engine, num_tokens: int, repeats: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=1)
    prompt = _text(engine)[:num_tokens]
    runs = []
    for _ in range(1 + repeats):  # the first compiles
        output = engine.generate([Request(prompt=prompt, sampling=params)])[0]
        runs.append(output.metrics.ttft_s)
    seconds = runs[1:]
    result = {"work": "ttft", "prompt_tokens": num_tokens, "seconds": statistics.median(seconds), "all": seconds}
    print(result, flush=True)
    return result


def _decode(engine: Engine, batch: int, context: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a decode step while no prefill runs; the first steps compile and fetch the working sets."""
    warm = 4
    text = _text(engine)
    # the first requests decode while the others are still in prefill: enough tokens that all of them overlap
    iterations = -(-context * engine.layout.num_layers // (2048 * engine.layout.num_layers)) + 1
    params = SamplingParams(temperature=0, max_tokens=steps + warm + batch * iterations, ignore_eos=True)
    prompts = [text[index * 300 : index * 300 + context] for index in range(batch)]
    ids = [engine.add_request(Request(prompt=prompt, sampling=params)) for prompt in prompts]
    times, loaded, selected = [], 0, 0
    while engine.has_unfinished() and len(times) < steps:
        started = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - started
        everyone = len(outputs) == batch and all(len(o.token_ids) > warm for o in outputs)
        if everyone:
            times.append(elapsed * 1e3)
            loaded = sum(output.metrics.blocks_loaded for output in outputs)
            selected = sum(output.metrics.blocks_selected for output in outputs)
    for request_id in ids:
        engine.abort(request_id)
    engine.step()
    if not times:
        return {"work": "decode", "batch": batch, "context": context, "ms_per_step": None, "why": "never all at once"}
    return {
        "work": "decode", "batch": batch, "context": context, "ms_per_step": statistics.median(times),
        "spread_ms": [min(times), max(times)], "steps": len(times),
        "hit_rate": None if not selected else 1 - loaded / selected,
    }  # fmt: skip


def _text(engine: Engine) -> list[int]:
    return engine.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))


def environment() -> dict[str, Any]:
    """What a figure depends on."""
    device = jax.devices()[0]
    return provenance() | {
        "jax": jax.__version__, "platform": device.platform, "device": device.device_kind, "seed": 0
    }  # fmt: skip


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _show(results: list[dict[str, Any]]) -> None:
    table = rich.table.Table(title="serving")
    for column in ("work", "tokens", "batch", "budget", "tiers", "median"):
        table.add_column(column, justify="right")
    for r in results:
        if r["work"] == "ttft":
            table.add_row("first token", str(r["prompt_tokens"]), "1", "", "", f"{r['seconds']:.2f} s")
        else:
            shown = r.get("why") or f"{r['ms_per_step']:.0f} ms"
            table.add_row("decode step", str(r["context"]), str(r["batch"]), r["budget"], r["tiers"], shown)
    rich.console.Console().print(table)


if __name__ == "__main__":
    typer.run(main)

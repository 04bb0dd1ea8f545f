"""How a request's selections overlap from step to step: the paper's figure 8, working sets, hits of an LRU cache.

    python scripts/working_set.py --data-dir LONGBENCH_DIR [--record FILE] [--json FILE] [--png FILE]
    python scripts/working_set.py --recorded FILE [--json FILE] [--png FILE]

The first form generates from prompts of LongBench and can keep what was selected; the second reads such a file, also
one of `sparseserve generate --record-selection FILE`. Printed are means over sparse layers, KV heads, steps and
prompts:

- overlap: share of the blocks selected at a step that are in the union of the selections of the last w steps;
- working set: blocks in the union of the last 12 steps, in selections, by task;
- hits: share of the selected blocks that an LRU cache of a given size holds, size in selections.

The first 32 steps only serve as the past of those after them. The newest and sink blocks, which are selected at every
step, are part of it all, as in the paper.

LONGBENCH_DIR holds LongBench v1 as `<task>.jsonl` with `dataset2prompt.json` beside them (THUDM/LongBench).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.table
import typer
from serving_quality import answered_prompts

from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from sparseserve_jax.selection_record import RecordedRequest, SelectionRecord
from sparseserve_jax.simulator.selection_study import lru_hit_rates, window_overlap, working_set_blocks

TASKS = ("qasper", "narrativeqa", "multifieldqa_en", "gov_report", "qmsum", "multi_news", "lcc", "repobench-p")
"""Those of the paper's trace that are in English or code."""
WINDOWS = tuple(range(1, 33))
SHOWN_WINDOWS = (1, 2, 4, 8, 12, 16, 24, 32)
WORKING_SET_WINDOW = 12
GRANTS = (1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 5.0)
"""Sizes of a cache, in selections."""
PAPER = {(1, 12): 10.68, (12, 16): 0.31}
"""Figure 8: points that a longer window adds."""


def main(
    data_dir: Path | None = typer.Option(None, help="Folder with LongBench v1 rows."),
    recorded: Path | None = typer.Option(None, help="A recording to read in place of generating."),
    tasks: str = typer.Option(",".join(TASKS), help="Tasks, by comma."),
    rows: int = typer.Option(2, help="Prompts of each task, at most."),
    max_tokens: int = typer.Option(7900, help="Longer prompts lose their middle."),
    min_tokens: int = typer.Option(4000, help="Shorter prompts are passed over: little is left to select in them."),
    new_tokens: int = typer.Option(129, help="Tokens to generate, sampled at temperature 1 from a seed."),
    budget: int = typer.Option(1024, help="sparse_budget_tokens."),
    selection: str = typer.Option("cuboid-mean", help="Digest method."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    record_file: Path | None = typer.Option(None, "--record", help="Write what was selected (.npz)."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the figures."),
    png_file: Path | None = typer.Option(None, "--png", help="Plot them."),
) -> None:
    if (data_dir is None) == (recorded is None):
        raise typer.BadParameter("give --data-dir to generate, or --recorded to read a file")
    settings: dict[str, Any] = {}
    if recorded is not None:
        record = SelectionRecord.load(recorded)
    else:
        assert data_dir is not None
        settings = {"rows": rows, "max_tokens": max_tokens, "min_tokens": min_tokens, "new_tokens": new_tokens,
                    "sparse_budget_tokens": budget, "selection": selection}  # fmt: skip
        config = EngineConfig(
            sparse_budget_tokens=budget, selection=selection, record_selection=True, max_num_seqs=4,  # pyright: ignore
            max_model_len=max_tokens + new_tokens,
        )  # fmt: skip
        record = generate(Engine(model, config), data_dir, tasks.split(","), rows, min_tokens, max_tokens, new_tokens)
        if record_file is not None:
            record.save(record_file)
    figures = study(record)
    show(figures)
    if json_file is not None:
        json_file.write_text(json.dumps({"settings": settings} | figures, indent=1) + "\n")
    if png_file is not None:
        plot(figures, png_file)


def generate(
    engine: Engine, data_dir: Path, tasks: Sequence[str], rows: int, min_tokens: int, max_tokens: int, new_tokens: int
) -> SelectionRecord:
    """Continuations of prompts of real tasks, all served together."""
    prompts = []
    for task in tasks:
        found = [p for p in answered_prompts(data_dir, [task], 1000, engine.tokenizer, max_tokens)
                 if len(p.prompt) >= min_tokens]  # fmt: skip
        prompts += found[:rows]
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=new_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate([Request(prompt=prompt.prompt, sampling=params) for prompt in prompts])
    print(f"{len(outputs)} prompts, {new_tokens} tokens each: {time.perf_counter() - started:.0f} s", flush=True)
    return SelectionRecord.of_outputs(
        outputs, block_size=engine.layout.block_size, layers=engine.layout.sparse_layers,
        names=[prompt.task for prompt in prompts],
    )  # fmt: skip


def study(record: SelectionRecord) -> dict[str, Any]:
    """The figures of a recording.

    Raises:
        ValueError: a request has no more steps than the longest window.
    """
    first = max(WINDOWS)
    by_name: dict[str, list[RecordedRequest]] = {}
    for request in record.requests:
        by_name.setdefault(request.name, []).append(request)
    overlaps = [window_overlap(request.selected, WINDOWS, first) for request in record.requests]
    overlap = np.mean(overlaps, axis=0)
    sizes = [int((request.selected >= 0).sum(-1).max()) for request in record.requests]
    hits = [
        lru_hit_rates(request.selected, [round(grant * size) for grant in GRANTS], first)
        for request, size in zip(record.requests, sizes, strict=True)
    ]
    return {
        "block_size": record.block_size,
        "layers": list(record.layers),
        "requests": len(record.requests),
        "steps_counted": sum(len(request.selected) - first for request in record.requests),
        "overlap_by_window": dict(zip(WINDOWS, overlap.tolist(), strict=True)),
        "increments_points": [
            {"from": a, "to": b, "ours": 100 * float(overlap[b - 1] - overlap[a - 1]), "paper": points}
            for (a, b), points in PAPER.items()
        ],
        "hit_rate_by_grant": dict(zip(GRANTS, np.mean(hits, axis=0).tolist(), strict=True)),
        "tasks": {name: _task(requests, first) for name, requests in by_name.items()},
    }


def _task(requests: list[RecordedRequest], first: int) -> dict[str, float]:
    selected = np.mean([(request.selected >= 0).sum(-1).mean() for request in requests])
    working_set = np.mean([working_set_blocks(request.selected, WORKING_SET_WINDOW, first) for request in requests])
    overlaps = np.mean([window_overlap(r.selected, (1, WORKING_SET_WINDOW), first) for r in requests], axis=0)
    return {
        "requests": len(requests),
        "prompt_tokens": float(np.mean([request.prompt_tokens for request in requests])),
        "selected_blocks": float(selected),
        "working_set_blocks": float(working_set),
        "working_set_selections": float(working_set / selected),
        "overlap_1": float(overlaps[0]),
        "overlap_12": float(overlaps[1]),
    }


def show(figures: dict[str, Any]) -> None:
    """Tables on standard output."""
    console = rich.console.Console(width=110)
    table = rich.table.Table(title="overlap of the last w selections with the next one")
    for column in ("w", "overlap %"):
        table.add_column(column, justify="right")
    for window in SHOWN_WINDOWS:
        table.add_row(str(window), f"{100 * figures['overlap_by_window'][window]:.2f}")
    console.print(table)
    for row in figures["increments_points"]:
        console.print(f"window {row['from']} -> {row['to']}: {row['ours']:+.2f} points (paper: {row['paper']:+.2f})")
    table = rich.table.Table(title=f"working sets of {WORKING_SET_WINDOW} steps, blocks of a layer and head")
    for column in ("task", "prompts", "tokens", "selected", "working set", "in selections", "overlap 1 %", "12 %"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for task, row in figures["tasks"].items():
        table.add_row(
            task, str(row["requests"]), f"{row['prompt_tokens']:.0f}", f"{row['selected_blocks']:.1f}",
            f"{row['working_set_blocks']:.1f}", f"{row['working_set_selections']:.2f}", f"{100 * row['overlap_1']:.1f}",
            f"{100 * row['overlap_12']:.1f}",
        )  # fmt: skip
    console.print(table)
    table = rich.table.Table(title="hits of an LRU cache by its size in selections")
    table.add_column("selections", justify="right")
    table.add_column("hits %", justify="right")
    for grant, rate in figures["hit_rate_by_grant"].items():
        table.add_row(f"{grant:g}", f"{100 * rate:.2f}")
    console.print(table)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Overlap by window, and hits by size of the cache."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    windows, overlaps = zip(*figures["overlap_by_window"].items(), strict=True)
    left.plot(windows, [100 * overlap for overlap in overlaps], marker=".")
    left.axvline(WORKING_SET_WINDOW, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="window, steps", ylabel="overlap with the next selection, %", title="figure 8 of the paper, here")
    grants, rates = zip(*figures["hit_rate_by_grant"].items(), strict=True)
    right.plot(grants, [100 * rate for rate in rates], marker=".")
    right.set(xlabel="slots of a grant, in selections", ylabel="hits, %", title="LRU cache of one request")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)

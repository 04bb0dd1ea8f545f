"""Pictures of a report: time to first token by prompt length, decode step by context and batch, serving by rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Row = dict[str, Any]


def draw(content: dict[str, Any], folder: Path) -> list[Path]:
    """Writes the PNG files that there are rows for; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    results, written = content["results"], []
    for name, kinds, picture in (
        ("ttft.png", ("prefill", "prefill-32k"), _first_token),
        ("decode.png", ("decode", "decode-32k"), _decode),
        ("serving.png", ("serve", "serve-long", "serve-poisson"), _serving),
    ):
        rows = [row for row in results if row["kind"] in kinds]
        if rows:
            figure = picture(rows)
            figure.tight_layout()
            figure.savefig(folder / name, dpi=120)
            plt.close(figure)
            written.append(folder / name)
    return written


def _first_token(rows: list[Row]) -> Any:
    figure, axes = plt.subplots(figsize=(6.4, 4.4))
    for label, points in _series(rows, "tokens").items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    _logarithmic(axes, "prompt, tokens", "time to first token, s", sorted({row["tokens"] for row in rows}))
    return figure


def _decode(rows: list[Row]) -> Any:
    batches = sorted({row["batch"] for row in rows})
    figure, all_axes = plt.subplots(
        1, len(batches), figsize=(4.6 * len(batches), 4.4), sharey=True, squeeze=False
    )  # fmt: skip
    for batch, axes in zip(batches, all_axes[0], strict=True):
        here = [row for row in rows if row["batch"] == batch]
        for label, points in _series(here, "tokens", scale=1e3).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_title(f"batch {batch}")
        _logarithmic(axes, "context, tokens", "decode step, ms", sorted({row["tokens"] for row in here}))
    return figure


def _serving(rows: list[Row]) -> Any:
    """By request rate; requests that come all at once are marks beside the axis' right end."""
    figure, (throughput, first) = plt.subplots(1, 2, figsize=(10.4, 4.4))
    for axes, figure_name in ((throughput, "output_tokens_per_s"), (first, "mean_ttft_s")):
        at_once = max((row.get("rate_rps", 0.0) for row in rows), default=0.0) * 1.5 or 1.0

        def place(row: Row, at_once: float = at_once) -> float:
            return row.get("rate_rps", at_once)

        def value(row: Row, side: str, name: str = figure_name) -> float:
            worker = f"ours {row['variant']}" if side == "ours" else row["peer"]
            return row["last"][worker][name]

        for label, points in _series(rows, place, value=value).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_xlabel(f"requests a second (at {at_once:.2g}: all at once)")
    throughput.set_ylabel("output tokens a second")
    first.set_ylabel("mean time to first token, s")
    for axes in (throughput, first):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def _series(
    rows: list[Row],
    place: str | Callable[[Row], float],
    *,
    value: Callable[[Row, str], float] = lambda row, side: row[side],
    scale: float = 1.0,
) -> dict[str, list[tuple[float, float]]]:
    """Points by label. A side measured several times at a place, beside several others, is averaged."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        work = "" if row["kind"] != "serve-long" else ", long answers"
        for side, label in (("ours", f"ours, {row['variant']}"), ("theirs", row["peer"])):
            at = row[place] if isinstance(place, str) else place(row)
            found.setdefault(label + work, {}).setdefault(at, []).append(value(row, side) * scale)
    return {
        label: [(at, sum(values) / len(values)) for at, values in sorted(points.items())]
        for label, points in found.items()
    }


def _logarithmic(axes: Axes, x_label: str, y_label: str, ticks: list[int]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)

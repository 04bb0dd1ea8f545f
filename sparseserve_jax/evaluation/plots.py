"""Pictures of a run: score and likelihood against budget, and heat maps of length by depth. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparseserve_jax.evaluation.predictions import Prediction
from sparseserve_jax.evaluation.report import score_grid

DOTS_PER_INCH = 130


def plot_budgets(entries: Sequence[Mapping[str, Any]], path: Path) -> None:
    """PNG: average score and NLL of each method against its budget; dense is a horizontal line.

    Args:
        entries: of `report.summarize`.
    """
    figure = _figure(figsize=(11, 4.2))
    axes = figure.subplots(1, 2)
    for axis, value, bounds, title in (
        (axes[0], "average", "average_interval", "average score, percent"),
        (axes[1], "nll", None, "negative log-likelihood of the answers, nats a token"),
    ):
        for method, group in _lines(entries, value).items():
            budgets = [entry["budget_tokens"] for entry in group]
            axis.plot(budgets, [entry[value] for entry in group], marker="o", label=method)
            if bounds is not None:
                low, high = zip(*(entry[bounds] for entry in group), strict=True)
                axis.fill_between(budgets, low, high, alpha=0.12)
        for entry in entries:
            if entry["budget_tokens"] is None and entry[value] is not None:
                axis.axhline(entry[value], linestyle="--", linewidth=1, color="black", label=entry["name"])
        axis.set_xlabel("budget, tokens")
        axis.set_title(title, fontsize=10)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def plot_heat_maps(panels: Mapping[str, Sequence[Prediction]], path: Path) -> None:
    """PNG: for each title a map of mean scores, length by depth, 0 (red) to 100 (green).

    Args:
        panels: at least one; rows of one task in one setting.
    """
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = _figure(figsize=(3.4 * columns, 3.0 * lines))
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, rows) in zip(axes.flat, panels.items(), strict=False):
        lengths, depths, cells = score_grid(rows)
        values = np.array([[np.nan if cell is None else cell for cell in line] for line in cells])
        axis.imshow(values, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
        axis.set_yticks(range(len(depths)), ["any" if d is None else f"{d:.0%}" for d in depths], fontsize=7)
        for (row, column), value in np.ndenumerate(values):
            if not np.isnan(value):
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("length, tokens", fontsize=8)
        axis.set_ylabel("depth", fontsize=8)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _lines(entries: Sequence[Mapping[str, Any]], value: str) -> dict[str, list[Mapping[str, Any]]]:
    """Entries with a budget by what they share beside it, in the order of their budgets."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        if entry["budget_tokens"] is not None and entry[value] is not None:
            found.setdefault(entry["name"].replace(f" {entry['budget_tokens']}", "", 1), []).append(entry)
    return {name: sorted(group, key=lambda entry: entry["budget_tokens"]) for name, group in found.items()}


def _figure(**options: Any) -> Any:
    """A figure of its own, which no window system needs."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need 'matplotlib': pip install 'sparseserve-jax[eval]'") from error
    return Figure(layout="constrained", **options)

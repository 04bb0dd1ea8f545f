"""A picture of a run: every request on a time line, and how times are distributed. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparseserve_jax.load_generator.records import RequestRecord

PHASES = (("waits in the client", "#bbbbbb"), ("until the first token", "#e69f00"), ("answers", "#0072b2"))
FAILED = "#cc3311"


def draw(records: Sequence[RequestRecord], path: Path, title: str) -> None:
    """Writes a PNG file.

    Args:
        records: of a run, at least one.
        path: where to.
        title: above it.
    """
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    timeline, tokens, requests = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    _timeline(timeline, records)
    good = [record for record in records if record.ok]
    _distributions(tokens, {"between tokens": [gap for record in good for gap in record.tbt_s]})
    first = [(record.ttft_s, record.queue_s) for record in good]
    _distributions(
        requests,
        {
            "to first token": [ttft for ttft, _ in first if ttft is not None],
            "to first token, from arrival": [ttft + waited for ttft, waited in first if ttft is not None],
            "to the end": [record.e2e_s for record in good],
        },
    )
    figure.savefig(path, format="png", dpi=120)


def _timeline(axes: Axes, records: Sequence[RequestRecord]) -> None:
    for record in records:
        first_s = record.end_s if record.first_text_s is None else record.first_text_s
        parts = [
            (record.arrival_s, record.sent_s), (record.sent_s, first_s), (first_s, max(first_s, record.end_s))
        ]  # fmt: skip
        for (start_s, end_s), (_, colour) in zip(parts, PHASES, strict=True):
            axes.hlines(record.index, start_s, end_s, colors=colour, linewidth=max(0.6, min(4, 240 / len(records))))
    for name, colour in PHASES:
        axes.plot([], [], color=colour, label=name)
    failed = [record for record in records if not record.ok]
    if failed:
        marks: dict[str, Any] = {"color": FAILED, "marker": "x", "linestyle": "none", "markersize": 4}
        axes.plot([r.end_s for r in failed], [r.index for r in failed], label="failed", **marks)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("request")
    axes.legend(fontsize=7)


def _distributions(axes: Axes, series: dict[str, list[float]]) -> None:
    for name, values in series.items():
        if values:
            axes.ecdf([value * 1e3 for value in values], label=name)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share of " + ("gaps" if len(series) == 1 else "requests"))
    axes.grid(alpha=0.3)
    if any(series.values()):
        axes.set_xscale("log")
        axes.legend(fontsize=7)

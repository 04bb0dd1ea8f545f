"""A run as JSON and as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import rich.box
import rich.markup
import rich.table

from sparseserve_jax.load_generator.records import RequestRecord
from sparseserve_jax.provenance import provenance

DIGITS = 6
"""Of seconds in the JSON: microseconds."""
TIMES = {
    "ttft_s": "time to first token", "ttft_from_arrival_s": "  from intended arrival", "tbt_s": "time between tokens",
    "tpot_s": "time per output token", "e2e_s": "end to end", "e2e_from_arrival_s": "  from intended arrival",
    "queue_s": "waited in the client", "failure_after_s": "failed after",
}  # fmt: skip
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
LATE_S = 0.1


def to_json(
    settings: Mapping[str, Any], server: Mapping[str, Any], summary: Mapping[str, Any], records: Sequence[RequestRecord]
) -> dict[str, Any]:
    """Everything of a run as plain data: what it depends on, what was asked for, the summary, and every request."""
    return {
        "what": "measured by clients, with sparseserve bench",
        "environment": provenance(),
        "settings": dict(settings),
        "server": dict(server),
        "summary": dict(summary),
        "requests": [_plain(record) for record in records],
    }


def _plain(record: RequestRecord) -> dict[str, Any]:
    fields = dataclasses.asdict(record) | {
        "ttft_s": record.ttft_s, "tpot_s": record.tpot_s, "e2e_s": record.e2e_s, "queue_s": record.queue_s,
    }  # fmt: skip
    fields["text_s"] = {str(index): [round(at, DIGITS) for at in times] for index, times in record.text_s.items()}
    return {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in fields.items()}


def summary_tables(summary: Mapping[str, Any]) -> list[rich.table.Table]:
    """What came of it, and the percentiles of every time."""
    return [_counts(summary), _times(summary)]


def _counts(summary: Mapping[str, Any]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_row("requests", f"{summary['completed']} of {summary['requests']} completed")
    for kind, count in summary["failures"].items():
        table.add_row(f"  {kind}", rich.markup.escape(f"{count}, e.g. {summary['failure_examples'][kind]}"))
    table.add_row("duration", f"{summary['duration_s']:.2f} s, at most {summary['max_in_flight']} at a time")
    for name, what in (("requests", "requests"), ("input_tokens", "input tokens"), ("output_tokens", "output tokens")):
        rate = summary[f"{name}_per_s"]
        total = "" if name == "requests" else f" ({summary[name]:,} in all)"
        table.add_row(f"{what} / s", "-" if rate is None else f"{rate:.4g}{total}")
    goodput = summary.get("goodput")
    if goodput is not None:
        slos = ", ".join(f"{name} {limit_s:g} s" for name, limit_s in goodput["slos_s"].items())
        for base, what in (("from_arrival", "from intended arrival"), ("from_sending", "from sending")):
            rate = goodput[base]["requests_per_s"]
            shown = "-" if rate is None else f"{rate:.4g} requests / s"
            table.add_row(f"goodput {what}", f"{shown}, {goodput[base]['share']:.1%} of all ({slos})")
    return table


def _times(summary: Mapping[str, Any]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("milliseconds", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for name, what in TIMES.items():
        found = summary[name]
        if found is not None:
            table.add_row(what, *(f"{found[column] * 1e3:,.1f}" for column in COLUMNS))
    return table


def remarks(summary: Mapping[str, Any], *, max_concurrency: int | None) -> list[str]:
    """What a reader of the figures should know."""
    found = []
    completed, counted = summary["completed"], summary["usage_from_server"]
    if counted < completed:
        found.append(
            f"{completed - counted} answers came without usage: their tokens are the planned length and the pieces of "
            "text, which are fewer than the tokens where the server sends several in one"
        )
    if summary["without_done_marker"]:
        found.append(f"{summary['without_done_marker']} streams ended without [DONE]")
    if summary["without_text"]:
        found.append(f"{summary['without_text']} answers had no text: they have no time to first token")
    late = summary["queue_s"]["max"]
    if max_concurrency is None and late > LATE_S:
        found.append(
            f"requests were sent up to {late:.2f} s late although nothing held them back: the load generator itself "
            "has too little CPU for this load, and times from sending flatter the server"
        )
    return found

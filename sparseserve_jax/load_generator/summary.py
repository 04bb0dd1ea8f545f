"""What all requests together say: percentiles, throughput, goodput, failures by kind."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparseserve_jax.load_generator.records import RequestRecord
from sparseserve_jax.percentiles import percentile

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SLO_SHARE = 0.99
"""Share of a request's own TBT gaps that must keep the objective."""
SLO_NAMES = ("ttft", "tbt", "tpot", "e2e")


def parse_slos(text: str) -> dict[str, float]:
    """`ttft:2.0,tbt:0.1` as seconds by name.

    Raises:
        ValueError: an unknown name, one given twice, or no number of seconds above 0.
    """
    slos: dict[str, float] = {}
    for part in text.split(","):
        name, colon, value = part.strip().partition(":")
        name = {"itl": "tbt", "e2el": "e2e"}.get(name, name)
        try:
            limit_s = float(value)
        except ValueError:
            limit_s = math.nan
        if name not in SLO_NAMES or not colon or not 0 < limit_s < math.inf or name in slos:
            raise ValueError(
                f"--goodput {text!r}: {part!r} is no objective; give NAME:SECONDS by comma, each name once, with names "
                f"out of {', '.join(SLO_NAMES)}, e.g. ttft:2.0,tbt:0.1"
            )
        slos[name] = limit_s
    return slos


def keeps(record: RequestRecord, slos: Mapping[str, float], *, from_arrival: bool) -> bool:
    """Whether a request ended well within all objectives.

    Args:
        record: the request.
        slos: seconds by name; `tbt` is the 99th percentile of the request's own gaps.
        from_arrival: count `ttft` and `e2e` from when it should have been sent instead of from when it was.
    """
    if not record.ok or record.ttft_s is None:
        return False
    waited_s = record.queue_s if from_arrival else 0.0
    gaps = record.tbt_s
    seconds = {
        "ttft": record.ttft_s + waited_s, "e2e": record.e2e_s + waited_s, "tpot": record.tpot_s or 0.0,
        "tbt": percentile(gaps, SLO_SHARE) if gaps else 0.0,
    }  # fmt: skip
    return all(seconds[name] <= limit_s for name, limit_s in slos.items())


def summarize(records: Sequence[RequestRecord], slos: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The summary as plain data; times in seconds, None where nothing was there to measure.

    Durations are of requests that ended well only; failures are counted beside them, by kind. The time of the whole run
    is from the first arrival to the last end, also of a failure.

    Raises:
        ValueError: no records.
    """
    if not records:
        raise ValueError("no requests to summarize")
    good = [record for record in records if record.ok]
    duration_s = max(record.end_s for record in records) - min(record.arrival_s for record in records)
    input_tokens = sum(record.input_tokens or 0 for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    failures = collections.Counter(record.status for record in records if not record.ok)
    with_text = [record for record in good if record.ttft_s is not None]
    result: dict[str, Any] = {
        "requests": len(records), "completed": len(good), "failed": len(records) - len(good),
        "failures": dict(sorted(failures.items())), "failure_examples": _examples(records),
        "duration_s": duration_s,
        "requests_per_s": _rate(len(good), duration_s),
        "input_tokens": input_tokens, "output_tokens": output_tokens,
        "input_tokens_per_s": _rate(input_tokens, duration_s), "output_tokens_per_s": _rate(output_tokens, duration_s),
        "max_in_flight": max_in_flight(records),
        "usage_from_server": sum(record.usage_from == "server" for record in good),
        "without_done_marker": sum(not record.done_marker for record in good),
        "without_text": len(good) - len(with_text),
        "finish_reasons": dict(collections.Counter(record.finish_reason or "none" for record in good)),
        "ttft_s": distribution(record.ttft_s for record in with_text if record.ttft_s is not None),
        "ttft_from_arrival_s": distribution(
            record.ttft_s + record.queue_s for record in with_text if record.ttft_s is not None
        ),
        "tbt_s": distribution(gap for record in good for gap in record.tbt_s),
        "tpot_s": distribution(record.tpot_s for record in good if record.tpot_s is not None),
        "e2e_s": distribution(record.e2e_s for record in good),
        "e2e_from_arrival_s": distribution(record.e2e_s + record.queue_s for record in good),
        "queue_s": distribution(record.queue_s for record in records),
        "failure_after_s": distribution(record.e2e_s for record in records if not record.ok),
    }  # fmt: skip
    if slos:
        result["goodput"] = {"slos_s": dict(slos)} | {
            name: _goodput(records, slos, duration_s, from_arrival=name == "from_arrival")
            for name in ("from_arrival", "from_sending")
        }
    return result


def _goodput(
    records: Sequence[RequestRecord], slos: Mapping[str, float], duration_s: float, *, from_arrival: bool
) -> dict[str, Any]:
    kept = sum(keeps(record, slos, from_arrival=from_arrival) for record in records)
    return {"requests": kept, "share": kept / len(records), "requests_per_s": _rate(kept, duration_s)}


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, least, percentiles and greatest; None for nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return {
        "count": len(ordered), "mean": math.fsum(ordered) / len(ordered), "min": ordered[0],
        **{name: percentile(ordered, share) for name, share in SHARES.items()}, "max": ordered[-1],
    }  # fmt: skip


def max_in_flight(records: Sequence[RequestRecord]) -> int:
    """Requests that were under way at the same time, at most."""
    changes = [(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records]
    under_way = most = 0
    for _, change in sorted(changes):
        under_way += change
        most = max(most, under_way)
    return most


def _examples(records: Sequence[RequestRecord]) -> dict[str, str | None]:
    """What was said of the first failure of each kind."""
    found: dict[str, str | None] = {}
    for record in records:
        if not record.ok:
            found.setdefault(record.status, record.error)
    return found


def _rate(count: int, duration_s: float) -> float | None:
    return count / duration_s if duration_s > 0 else None

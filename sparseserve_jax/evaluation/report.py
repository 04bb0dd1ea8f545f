"""What a run found: scores with intervals, likelihoods and agreement, as plain data and as a table in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparseserve_jax.evaluation.predictions import Prediction
from sparseserve_jax.evaluation.settings import Setting
from sparseserve_jax.evaluation.statistics import Resampled, resample

Rows = Mapping[Setting, Sequence[Prediction]]


def summarize(rows: Rows, *, block_size: int) -> list[dict[str, Any]]:
    """One entry for each setting, in the given order; the shape is described in docs/accuracy.md.

    Scores are in percent, a task's the mean over its rows, the average that over tasks. `retention` and `nll_rise`
    compare with dense decode after dense prefill, if that is among the settings (else None), over equal bootstrap
    resamples of the rows.

    Args:
        rows: of every setting the same examples in the same order.
    """
    reference = next((setting for setting in rows if setting.is_reference), None)
    base = None if reference is None else rows[reference]
    return [_entry(setting, predictions, base, block_size) for setting, predictions in rows.items()]


def _entry(
    setting: Setting, predictions: Sequence[Prediction], base: Sequence[Prediction] | None, block_size: int
) -> dict[str, Any]:
    scores = resample(_by_task(predictions, _percent))
    likelihoods = _likelihoods(predictions)
    retention, retention_interval = nll_rise, nll_rise_interval = None, None
    if base is not None:
        retention, retention_interval = scores.ratio(resample(_by_task(base, _percent)))
        base_likelihoods = _likelihoods(base)
        if likelihoods is not None and base_likelihoods is not None:
            nll_rise, nll_rise_interval = likelihoods.ratio(base_likelihoods)
    budget = setting.budget_tokens
    return {
        "name": setting.name,
        "budget_tokens": budget,
        "budget_blocks": None if budget is None else budget // block_size,
        "method": setting.method,
        "prefill_sparsity": setting.prefill_sparsity,
        "kv_dtype": setting.kv_dtype,
        "tasks": _tasks(predictions, base),
        "average": scores.value,
        "average_interval": scores.interval(),
        "retention": retention,
        "retention_interval": retention_interval,
        "nll": None if likelihoods is None else likelihoods.value,
        "nll_rise": None if nll_rise is None else nll_rise - 1,
        "nll_rise_interval": None if nll_rise_interval is None else [bound - 1 for bound in nll_rise_interval],
        "agreement": None if base is None else _agreement(predictions, base),
        "same_answers": None if base is None else _same_answers(predictions, base),
        "rows": len(predictions),
        "failures": sum(row.failed for row in predictions),
    }


def _tasks(predictions: Sequence[Prediction], base: Sequence[Prediction] | None) -> dict[str, dict[str, Any]]:
    entries = {}
    for task in dict.fromkeys(row.task for row in predictions):
        own = [index for index, row in enumerate(predictions) if row.task == task]
        rows = [predictions[index] for index in own]
        scores = resample({task: [_percent(row) for row in rows]})
        likelihoods = [row.nll for row in rows if row.nll is not None]
        others = None if base is None else [base[index] for index in own]
        entries[task] = {
            "score": scores.value,
            "interval": scores.interval(),
            "nll": float(np.mean(likelihoods)) if likelihoods else None,
            "rows": len(rows),
            "failures": sum(row.failed for row in rows),
            "agreement": None if others is None else _agreement(rows, others),
            "same_answers": None if others is None else _same_answers(rows, others),
        }
    return entries


def _percent(row: Prediction) -> float:
    return 100 * row.score


def _by_task(predictions: Sequence[Prediction], value: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in predictions:
        found.setdefault(row.task, []).append(value(row))
    return found


def _likelihoods(predictions: Sequence[Prediction]) -> Resampled | None:
    """Of the rows that have one; the same rows in every setting but for errors of the engine."""
    found = _by_task([row for row in predictions if row.nll is not None], lambda row: row.nll)
    return resample(found) if found else None


def _agreement(rows: Sequence[Prediction], base: Sequence[Prediction]) -> float | None:
    """Share of the reference answers' tokens at which greedy decoding would take the same token as dense."""
    pairs = [
        (ours, theirs)
        for row, other in zip(rows, base, strict=True)
        for ours, theirs in zip(row.greedy_token_ids, other.greedy_token_ids, strict=False)
    ]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs) if pairs else None


def _same_answers(rows: Sequence[Prediction], base: Sequence[Prediction]) -> float:
    """Share of greedy answers that equal dense's, token for token."""
    return sum(row.token_ids == other.token_ids for row, other in zip(rows, base, strict=True)) / len(rows)


# --- tables ----------------------------------------------------------------------------------------------------------


def markdown_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """A row for each setting: the score of every task, their average, and how it compares with dense."""
    tasks = list(dict.fromkeys(task for entry in entries for task in entry["tasks"]))
    head = ["setting", "blocks", *tasks, "average", "of dense", "NLL", "NLL rise", "same token", "failures"]
    body = [
        [
            entry["name"],
            _shown(entry["budget_blocks"], "{}"),
            *(_shown(entry["tasks"].get(task, {}).get("score"), "{:.2f}") for task in tasks),
            _shown(entry["average"], "{:.2f}"),
            _with_interval(entry["retention"], entry["retention_interval"], "{:.1%}"),
            _shown(entry["nll"], "{:.4f}"),
            _with_interval(entry["nll_rise"], entry["nll_rise_interval"], "{:+.2%}"),
            _shown(entry["agreement"], "{:.1%}"),
            str(entry["failures"]),
        ]
        for entry in entries
    ]
    return _markdown(head, body)


def depth_table(rows: Sequence[Prediction]) -> str:
    """Scores in percent of one task in one setting: a row for each depth, a column for each length."""
    lengths, depths, cells = score_grid(rows)
    shown = ["any" if depth is None else f"{depth:.0%}" for depth in depths]
    body = [[name, *(_shown(cell, "{:.0f}") for cell in line)] for name, line in zip(shown, cells, strict=True)]
    return _markdown(["depth", *map(str, lengths)], body)


def score_grid(
    rows: Sequence[Prediction],
) -> tuple[list[int | None], list[float | None], list[list[float | None]]]:
    """Lengths, depths (None = spread over the text) and mean scores in percent `[depth][length]`, None = no row."""
    lengths = sorted({row.length for row in rows}, key=lambda length: length or 0)
    depths = sorted({row.depth for row in rows}, key=lambda depth: -1.0 if depth is None else depth)
    cells: list[list[float | None]] = []
    for depth in depths:
        groups = [[_percent(row) for row in rows if (row.length, row.depth) == (n, depth)] for n in lengths]
        cells.append([float(np.mean(group)) if group else None for group in groups])
    return lengths, depths, cells


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *(["---:"] * (len(head) - 1))], *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _shown(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)


def _with_interval(value: float | None, interval: Sequence[float] | None, form: str) -> str:
    if value is None or interval is None:
        return "-"
    return f"{form.format(value)} ({form.format(interval[0])} to {form.format(interval[1])})"

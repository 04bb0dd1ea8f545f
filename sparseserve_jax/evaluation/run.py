"""A whole evaluation: what it consists of, its progress, and the files that it leaves.

`OUT/run.json` says what is run, `OUT/<setting>.jsonl` are the predictions, `OUT/report.json`, `OUT/table.md` and the
pictures are made from these.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import rich.console
import rich.progress

from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.evaluation import metrics
from sparseserve_jax.evaluation.evaluate import evaluate
from sparseserve_jax.evaluation.example import Example
from sparseserve_jax.evaluation.plots import plot_budgets, plot_heat_maps
from sparseserve_jax.evaluation.predictions import Prediction, PredictionStore
from sparseserve_jax.evaluation.prompts import PromptEncoder
from sparseserve_jax.evaluation.report import depth_table, markdown_table, summarize
from sparseserve_jax.evaluation.settings import Setting
from sparseserve_jax.provenance import installed_version

ANSWER_AND_TEMPLATE_TOKENS = 692
"""What LongBench leaves of a model's window: 512 for the longest answer and 180 for the chat template. So a window of
8192 tokens cuts prompts to 7500."""
LIBRARIES = ("sparseserve-jax", "jax", "jaxlib", "tokenizers", "rouge", "rapidfuzz", "jieba")
"""Whose versions decide predictions and scores."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is to be evaluated.

    Attributes:
        suite: "longbench", "needles" or "babilong"; decides the pictures.
        model: as for `Engine`.
        config: of the engines; what belongs to settings is replaced. `max_model_len` None = the model's own.
        sources: hashes of templates and data, or the seed that the examples were made from.
        max_prompt_tokens: longer texts lose their middle; None = by `max_model_len`.
        out: the folder of all files; one that holds a part of the same run is completed.
        json_file: where the report goes as well.
    """

    suite: Literal["longbench", "needles", "babilong"]
    model: str | None
    config: EngineConfig
    examples: Sequence[Example]
    settings: Sequence[Setting]
    sources: Mapping[str, Any]
    out: Path
    max_prompt_tokens: int | None = None
    json_file: Path | None = None


def run_evaluation(evaluation: Evaluation, encoder: PromptEncoder) -> dict[str, Any]:
    """Serves what is missing, writes all files and returns the report.

    Args:
        encoder: of the evaluation's model.

    Raises:
        ImportError: a library that a metric or a picture needs is not installed.
        ValueError: nothing to evaluate, settings that do not fit, or a folder of another run.
    """
    if not evaluation.examples or not evaluation.settings:
        raise ValueError("nothing to evaluate; name at least one task and one budget")
    metrics.load_libraries({example.task.metric for example in evaluation.examples})
    config = evaluation.config
    max_model_len = min(config.max_model_len or encoder.max_model_len, encoder.max_model_len)
    max_prompt_tokens = evaluation.max_prompt_tokens or max_model_len - ANSWER_AND_TEMPLATE_TOKENS
    if max_prompt_tokens < 1:
        raise ValueError(
            f"max_model_len={max_model_len} leaves no prompt beside {ANSWER_AND_TEMPLATE_TOKENS} tokens for answer and "
            "template; raise it, or give max_prompt_tokens"
        )
    prepared = encoder.prepare(evaluation.examples, max_prompt_tokens=max_prompt_tokens, max_model_len=max_model_len)
    run = {
        "suite": evaluation.suite,
        "model": encoder.model_name,
        "chat_template": encoder.has_chat_template,
        "max_prompt_tokens": max_prompt_tokens,
        "max_model_len": max_model_len,
        "dtype": config.dtype,
        "weight_dtype": config.weight_dtype,
        "implementation": config.implementation,
        "max_num_seqs": config.max_num_seqs,
        "block_size": config.block_size,
        "num_dense_layers": config.num_dense_layers,
        "dense_layers": None if config.dense_layers is None else list(config.dense_layers),
        "num_sink_blocks": config.num_sink_blocks,
        "num_newest_blocks": config.num_newest_blocks,
        "selection_granularity": config.selection_granularity,
        "tasks": list(dict.fromkeys(example.task.name for example in evaluation.examples)),
        "rows": len(evaluation.examples),
        **evaluation.sources,
    }
    store = PredictionStore(evaluation.out, run, evaluation.examples, evaluation.settings)
    started = time.perf_counter()
    with ProgressBar(evaluation.examples, evaluation.settings, store) as progress:
        evaluate(lambda own: Engine(evaluation.model, own), config, prepared, evaluation.settings, store, progress.note)
    rows = {setting: store.rows(setting) for setting in evaluation.settings}
    report = {
        **run,
        "versions": {name: installed_version(name) for name in LIBRARIES},
        "seconds": round(time.perf_counter() - started, 1),
        "predictions_made": progress.num_made,
        "predictions_found": progress.num_found,
        "settings": summarize(rows, block_size=config.block_size),
    }
    _write(evaluation, report, rows)
    return report


def _write(evaluation: Evaluation, report: dict[str, Any], rows: Mapping[Setting, Sequence[Prediction]]) -> None:
    out, entries = evaluation.out, report["settings"]
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    for path in filter(None, (out / "report.json", evaluation.json_file)):
        path.write_text(text, encoding="utf-8")
    tables = [markdown_table(entries)]
    if evaluation.suite == "longbench":
        plot_budgets(entries, out / "score_by_budget.png")
    else:
        panels = {
            f"{task}, {setting.name}": [row for row in predictions if row.task == task]
            for task in report["tasks"]
            for setting, predictions in rows.items()
        }
        tables += [f"### {title}\n\n{depth_table(panel)}" for title, panel in panels.items()]
        plot_heat_maps(panels, out / "length_by_depth.png")
    (out / "table.md").write_text("\n".join(tables), encoding="utf-8")


class ProgressBar:
    """A bar of predictions with the time that is left, and a line for every task that is done, on standard error.

    Without a terminal there are the lines only.

    Attributes:
        num_made / num_found: predictions of this run, and those that were there.
    """

    def __init__(self, examples: Sequence[Example], settings: Sequence[Setting], store: PredictionStore) -> None:
        self._examples, self._started = examples, time.perf_counter()
        self.num_found = sum(len(store.rows(setting)) for setting in settings)
        self.num_made = 0
        self._left: dict[str, int] = {}
        for index, example in enumerate(examples):
            name = example.task.name
            self._left[name] = self._left.get(name, 0) + len(store.missing(index, settings))
        self._console = rich.console.Console(stderr=True)
        self._bar = rich.progress.Progress(
            "[progress.description]{task.description}", rich.progress.BarColumn(), "{task.completed}/{task.total}",
            rich.progress.TimeElapsedColumn(), "left", rich.progress.TimeRemainingColumn(),
            console=self._console, disable=not sys.stderr.isatty(),
        )  # fmt: skip
        total = len(examples) * len(settings)
        self._task = self._bar.add_task("predictions", total=total, completed=self.num_found)

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def note(self, index: int, setting: Setting, prediction: Prediction) -> None:
        """Counts a new prediction."""
        self.num_made += 1
        self._bar.update(self._task, advance=1)
        task = self._examples[index].task.name
        self._left[task] -= 1
        if self._left[task] == 0:
            seconds = time.perf_counter() - self._started
            self._console.print(f"{task} is done after {seconds:.0f} s", highlight=False)

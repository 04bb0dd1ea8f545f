"""What the options that make serving faster cost in quality: sparse decode, sparse prefill, int8 KV, int8 weights.

For each setting, through the same runner and engine that serve:

- "nll": mean negative log-likelihood of the reference answers' tokens after prompts of LongBench, teacher-forced, one
  decode step a token, and its change against the first setting;
- "passcode": share of passcodes hidden at ten depths of texts of several lengths that a greedy answer repeats.

    python scripts/serving_quality.py --data LONGBENCH_DIR [--json FILE]

LONGBENCH_DIR holds LongBench v1 as `<task>.jsonl` with `dataset2prompt.json` beside them (THUDM/LongBench).
"""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.table
import typer

from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.evaluation.haystack import Haystack
from sparseserve_jax.evaluation.longbench import load_longbench
from sparseserve_jax.evaluation.needles import DEPTHS, passcode_prompt
from sparseserve_jax.evaluation.truncation import cut_middle, reference_tokens
from sparseserve_jax.request import Request, SamplingParams
from sparseserve_jax.text.tokenizer import Tokenizer

SETTINGS: dict[str, dict[str, Any]] = {
    "dense": {"sparse_budget_tokens": None},
    "dense, sparse prefill": {"sparse_budget_tokens": None, "prefill_sparsity": 0.98},
    "dense, int8 KV": {"sparse_budget_tokens": None, "kv_dtype": "int8"},
    "dense, int8 weights": {"sparse_budget_tokens": None, "weight_dtype": "int8"},
    "sparse decode": {},
    "sparse decode, sparse prefill, int8 KV": {"prefill_sparsity": 0.98, "kv_dtype": "int8"},
}
"""By name, what differs from the defaults (sparse decode, dense prefill, bfloat16)."""
TASKS = ("qasper", "hotpotqa", "2wikimqa", "multifieldqa_en", "narrativeqa", "triviaqa", "gov_report", "qmsum", "lcc")


@dataclasses.dataclass(frozen=True)
class Answered:
    """A prompt and the answer whose likelihood is asked for."""

    task: str
    prompt: list[int]
    answer: list[int]


def main(
    data: Path | None = typer.Option(None, help="Folder with LongBench v1 rows; none = no likelihoods."),
    tasks: str = typer.Option(",".join(TASKS), help="Tasks, by comma."),
    rows: int = typer.Option(4, help="Prompts of each task, at most."),
    max_tokens: int = typer.Option(8000, help="Longer prompts lose their middle."),
    lengths: str = typer.Option("1000,2000,4000,7500", help="Lengths of the texts with passcodes, tokens, by comma."),
    settings: str = typer.Option(";".join(SETTINGS), help="By semicolon."),
    prefill_sparsity: float = typer.Option(0.98, help="Of the settings with sparse prefill."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the table; settings that are in it stay."),
) -> None:
    table: dict[str, dict[str, Any]] = {}
    if json_file is not None and json_file.exists():
        table = json.loads(json_file.read_text())["table"]
    for name in settings.split(";"):
        started = time.perf_counter()
        options = dict(SETTINGS[name])
        if "prefill_sparsity" in options:
            options["prefill_sparsity"] = prefill_sparsity
        engine = Engine(model, EngineConfig(max_num_seqs=1, max_model_len=max_tokens + 192, **options))
        row: dict[str, Any] = {"options": options}
        if data is not None:
            prompts = list(answered_prompts(data, tasks.split(","), rows, engine.tokenizer, max_tokens))
            row["nll_by_task"] = _by_task(prompts, [answer_nll(engine, p) for p in prompts])
            row["nll"] = float(np.mean(list(row["nll_by_task"].values())))
        row["passcode_by_length"] = {int(n): passcode_score(engine, int(n)) for n in lengths.split(",") if n}
        row["passcode"] = float(np.mean(list(row["passcode_by_length"].values()) or [float("nan")]))
        row["seconds"] = time.perf_counter() - started
        table[name] = row
        print(name, {k: v for k, v in row.items() if k != "options"}, flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps({"rows": rows, "max_tokens": max_tokens, "table": table}, indent=1))
    _show(table)


# --- likelihood of answers -------------------------------------------------------------------------------------------


def answer_nll(engine: Engine, item: Answered) -> float:
    """Mean negative log-likelihood of the answer's tokens, nats.

    All of the prompt but its last token is prefilled; that one and the answer's go in by decode steps, as when serving.
    """
    forced = (item.prompt[-1], *item.answer)
    sampling = SamplingParams(temperature=0, max_tokens=len(forced), forced_token_ids=forced, logprobs=0)
    logprobs = engine.generate([Request(prompt=item.prompt[:-1], sampling=sampling)])[0].logprobs
    assert logprobs is not None
    return -sum(candidates[0].logprob for candidates in logprobs[1:]) / len(item.answer)


def answered_prompts(
    data: Path, tasks: list[str], rows: int, tokenizer: Tokenizer, max_tokens: int
) -> Iterator[Answered]:
    """The first rows of each task as plain text; from a longer prompt the middle is cut (LongBench's protocol)."""
    for example in load_longbench(data, tasks, rows).examples:
        prompt, answer = tokenizer.encode(example.prompt), reference_tokens(example, tokenizer)
        if answer:
            yield Answered(example.task.name, cut_middle(prompt, max_tokens), answer)


def _by_task(prompts: list[Answered], values: list[float]) -> dict[str, float]:
    tasks = {prompt.task: None for prompt in prompts}
    return {task: float(np.mean([v for p, v in zip(prompts, values, strict=True) if p.task == task])) for task in tasks}


# --- passcodes -------------------------------------------------------------------------------------------------------


def passcode_score(engine: Engine, num_tokens: int) -> float:
    """Share of ten passcodes, one at each depth of a text of `num_tokens` tokens, that the answer repeats."""
    haystack, rng = Haystack(engine.tokenizer), random.Random(num_tokens)
    found = 0
    for depth in DEPTHS:
        code = str(rng.randint(10000, 99999))
        request = Request(
            prompt=[{"role": "user", "content": passcode_prompt(haystack, num_tokens, depth, code)}],
            sampling=SamplingParams(temperature=0, max_tokens=24),
        )
        found += code in engine.generate([request])[0].text
    return found / len(DEPTHS)


def _show(table: dict[str, dict[str, Any]]) -> None:
    shown = rich.table.Table(title="quality by setting")
    for column in ("setting", "nll", "change", "passcode"):
        shown.add_column(column, justify="left" if column == "setting" else "right")
    names = [name for name in SETTINGS if name in table]
    first = table[names[0]].get("nll")
    for name in names:
        row = table[name]
        nll = row.get("nll")
        change = f"{nll / first - 1:+.2%}" if nll is not None and first else ""
        shown.add_row(name, "" if nll is None else f"{nll:.4f}", change, f"{row['passcode']:.2f}")
    rich.console.Console().print(shown)


if __name__ == "__main__":
    typer.run(main)

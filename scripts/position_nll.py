"""How well a model predicts a long text by position, with rotary scalings beside each other.

    python scripts/position_nll.py --text FILE [--num-tokens 16384] [--json FILE] [--png FILE]

Each setting replaces the model's `rope_scaling` (`EngineConfig.rope_scaling`); its factor makes room for the text, and
"none" leaves frequencies as they are. Attention is dense, so that only the positions differ. The table has the mean
negative log-likelihood, nats a token, of stretches of the text.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.table
import typer
from prompt_logits import prompt_logits
from scipy.special import logsumexp

from sparseserve_jax import Engine, EngineConfig
from sparseserve_jax.checkpoint.open import open_checkpoint

SETTINGS: dict[str, dict[str, object]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear"},
    "dynamic": {"rope_type": "dynamic"},
    "yarn": {"rope_type": "yarn"},
}


def main(
    text: Path = typer.Option(..., help="A long text, UTF-8."),
    skip_chars: int = typer.Option(10000, help="Characters to leave out at its beginning (title, contents)."),
    num_tokens: int = typer.Option(16384, help="Tokens of it to read."),
    stretch: int = typer.Option(1024, help="Tokens of one mean."),
    settings: str = typer.Option("none,dynamic,yarn", help=f"By comma, of {', '.join(SETTINGS)}."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the table; settings that are in it stay."),
    png_file: Path | None = typer.Option(None, "--png", help="Plot it."),
) -> None:
    original = open_checkpoint(model).config.max_position_embeddings
    factor = -(-num_tokens // original)
    table: dict[str, Any] = {}
    if json_file is not None and json_file.exists():
        table = json.loads(json_file.read_text())["nll_by_stretch"]
    for name in settings.split(","):
        started = time.perf_counter()
        config = EngineConfig(
            rope_scaling=SETTINGS[name] | {"factor": float(factor)}, sparse_budget_tokens=None,
            max_model_len=num_tokens, max_num_seqs=1,
        )  # fmt: skip
        engine = Engine(model, config)
        token_ids = engine.tokenizer.encode(text.read_text(encoding="utf-8")[skip_chars : skip_chars + 10 * num_tokens])
        if len(token_ids) < num_tokens:
            raise SystemExit(f"{text} gives {len(token_ids)} tokens; give a longer one, or lower --num-tokens")
        table[name] = stretches(token_nll(engine, token_ids[:num_tokens]), stretch)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    result = {
        "model": model or "embedded", "original_positions": original, "factor": factor, "num_tokens": num_tokens,
        "stretch_tokens": stretch, "skip_chars": skip_chars, "text": text.name, "nll_by_stretch": table,
    }  # fmt: skip
    show(result)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    if png_file is not None:
        plot(result, png_file)


def token_nll(engine: Engine, token_ids: list[int]) -> np.ndarray:
    """Negative log-likelihood of every token but the first, nats."""
    following = np.asarray(token_ids[1:])
    parts, start = [], 0
    for logits in prompt_logits(engine, token_ids):
        targets = following[start : start + len(logits)]
        rows = logits[: len(targets)]
        parts.append(logsumexp(rows, axis=-1) - rows[np.arange(len(targets)), targets])
        start += len(logits)
    return np.concatenate(parts)


def stretches(nll: np.ndarray, length: int) -> list[float]:
    """Means of runs of `length`."""
    return [float(nll[start : start + length].mean()) for start in range(0, len(nll), length)]


def show(result: dict[str, Any]) -> None:
    """A row for each stretch."""
    columns, length = result["nll_by_stretch"], result["stretch_tokens"]
    table = rich.table.Table(title=f"nats a token; the model's own limit is {result['original_positions']} tokens")
    for column in ("positions", *columns):
        table.add_column(column, justify="right")
    for place, values in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(f"{place * length} - {(place + 1) * length}", *(f"{value:.3f}" for value in values))
    rich.console.Console().print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Lines by position."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    length = result["stretch_tokens"]
    for name, values in result["nll_by_stretch"].items():
        axes.plot([(place + 0.5) * length for place in range(len(values))], values, marker=".", label=name)
    axes.axvline(result["original_positions"], color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="position", ylabel="nats a token", title=f"{result['text']}, rotary factor {result['factor']}")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    typer.run(main)

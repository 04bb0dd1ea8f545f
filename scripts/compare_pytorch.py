"""Is the engine what PyTorch computes? The same model and prompts in transformers and in an oracle of our own.

    python scripts/compare_pytorch.py [--json FILE] [--parts dense,sparse,speed]

- dense (float32): logits and negative log-likelihood at every place of the prompts, and greedy tokens, against
  transformers.
- sparse (float32): for each method and budget the blocks that every layer and KV head selected at every decode step,
  the tokens, and their log-probabilities, against `torch_oracle.py`, which runs the whole model with its own KV.
- speed (bfloat16): time to first token, time of a decode step and peak memory of both, each in a process of its own on
  the same CPUs, at dense attention and at sparse budgets (transformers has dense only). Times mean something only if
  "load_average" is about the number of CPUs.

Prompts are parts of a text: by default Python's language reference. Needs the extra `baseline`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import rich.console
import rich.table
import torch
import transformers
import typer
from peers.contestants import Contestants, Shape
from peers.weights import huggingface_directory
from peers.worker_process import WorkerProcess
from prompt_logits import prompt_logits
from torch_oracle import Agreement, Selection, SparseLlama, block_lists, compare_selections

from sparseserve_jax import Engine, EngineConfig, Request, RequestOutput, SamplingParams
from sparseserve_jax.checkpoint.convert import convert
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.provenance import installed_version, provenance

PARTS = ("dense", "sparse", "speed")
TIE_NATS = 1e-4
"""Ranks this close, in nats of the score, are a tie: orders of summation in float32 differ by as much."""
SPEED_VARIANTS = ("dense", "sparse", "sparse-1024")


def main(
    parts: str = typer.Option(",".join(PARTS), help="By comma."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    text: Path | None = typer.Option(None, help="A text file to take prompts from."),
    lengths: str = typer.Option("2000,4000", help="Prompt lengths, tokens, by comma."),
    methods: str = typer.Option("cuboid-mean,quest,mean", help="Of sparse, by comma."),
    budgets: str = typer.Option("512,1024", help="Of sparse, tokens, by comma."),
    new_tokens: int = typer.Option(17, help="Tokens to generate from each prompt."),
    repeats: int = typer.Option(3, help="Of each time; the median counts."),
    threads: int = typer.Option(os.cpu_count() or 1, help="CPUs of each side in speed."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the figures; parts that are in it stay."),
) -> None:
    chosen = parts.split(",")
    if set(chosen) - set(PARTS):
        raise SystemExit(f"--parts {parts}: there are {', '.join(PARTS)}")
    content: dict[str, Any] = {}
    if json_file is not None and json_file.exists():
        content = json.loads(json_file.read_text())
    content |= {"environment": environment(threads)}
    with tempfile.TemporaryDirectory() as folder:
        source = open_checkpoint(model)
        directory = convert(source, Path(folder) / "float32", format="huggingface", dtype="float32")
        prompts = read_prompts(text, directory, [int(n) for n in lengths.split(",")])
        settings = [(method, int(budget)) for budget in budgets.split(",") for method in methods.split(",")]
        compare = {
            "dense": lambda: compare_dense(directory, prompts, new_tokens),
            "sparse": lambda: [compare_sparse(directory, prompts, new_tokens, *setting) for setting in settings],
            "speed": lambda: list(compare_speed(Path(folder), model, prompts, repeats, threads)),
        }
        for part in chosen:
            content[part] = compare[part]()
            show({part: content[part]})
            if json_file is not None:
                json_file.write_text(json.dumps(content, indent=1) + "\n")


def read_prompts(text: Path | None, directory: Path, lengths: list[int]) -> list[list[int]]:
    """One prompt of each length, from different places of the text."""
    content = "\n\n".join(topics[name] for name in sorted(topics)) if text is None else text.read_text("utf-8")
    ids = transformers.AutoTokenizer.from_pretrained(directory)(content, add_special_tokens=False)["input_ids"]
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    if starts[-1] + lengths[-1] > len(ids):
        raise SystemExit(f"the text has {len(ids)} tokens, lengths {lengths} need {sum(lengths)}; give a longer --text")
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


# --- dense -----------------------------------------------------------------------------------------------------------


def compare_dense(directory: Path, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Per prompt: differences of log-probabilities, mean NLL of both, and greedy tokens."""
    config = EngineConfig(
        dtype="float32", sparse_budget_tokens=None, max_model_len=max(map(len, prompts)) + new_tokens, max_num_seqs=2
    )
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    engine = Engine(directory, config)
    outputs = engine.generate([Request(prompt=prompt, sampling=params) for prompt in prompts])
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return [_dense_row(engine, reference, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


@torch.inference_mode()
def _dense_row(engine: Engine, reference: Any, prompt: list[int], output: RequestOutput) -> dict[str, Any]:
    tokens = torch.tensor(prompt + output.token_ids)
    hidden = reference.model(tokens[None, :-1]).last_hidden_state[0]
    worst, nll, differences, start = 0.0, {"ours": 0.0, "theirs": 0.0}, [0.0], 0
    for part in prompt_logits(engine, prompt):
        ours, theirs = torch.from_numpy(part.copy()), reference.lm_head(hidden[start : start + len(part)])
        worst = max(worst, float((ours - theirs).abs().max()))
        following = tokens[start + 1 : min(start + 1 + len(part), len(prompt))]
        rows = torch.arange(len(following))
        one, other = (-logits.log_softmax(-1)[rows, following] for logits in (ours, theirs))
        nll["ours"] += float(one.sum())
        nll["theirs"] += float(other.sum())
        differences.append(float((one - other).abs().max()))
        start += len(part)
    # If transformers' best token after each of our tokens is our next one, its greedy tokens are ours.
    best = reference.lm_head(hidden[len(prompt) - 1 :]).argmax(-1)
    return {
        "prompt_tokens": len(prompt),
        "max_logit_difference": worst,
        "max_nll_difference": max(differences),
        "nll": nll["ours"] / (len(prompt) - 1),
        "nll_transformers": nll["theirs"] / (len(prompt) - 1),
        "greedy_tokens": len(output.token_ids),
        "greedy_tokens_equal": int((best == tokens[len(prompt) :]).sum()),
    }


# --- sparse ----------------------------------------------------------------------------------------------------------


def compare_sparse(
    directory: Path, prompts: list[list[int]], new_tokens: int, method: str, budget_tokens: int
) -> dict[str, Any]:
    """Selections, tokens and log-probabilities of one method and budget, over all prompts."""
    config = EngineConfig(
        dtype="float32", sparse_budget_tokens=budget_tokens, selection=method, record_selection=True,  # pyright: ignore
        max_model_len=max(map(len, prompts)) + new_tokens, max_num_seqs=2,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0)
    engine = Engine(directory, config)
    outputs = engine.generate([Request(prompt=prompt, sampling=params) for prompt in prompts])
    rule = Selection(
        block_size=config.block_size, budget=budget_tokens // config.block_size, method=method,
        dense_layers=engine.layout.dense_layers, num_sink=config.num_sink_blocks, num_newest=config.num_newest_blocks,
    )  # fmt: skip
    total, worst = Agreement(), 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        found = compare_selections(
            SparseLlama(directory, rule), prompt, output.token_ids, block_lists(output.metrics.selected_block_ids)
        )
        for field in ("selections", "equal", "tie_gaps", "tokens", "equal_tokens"):
            setattr(total, field, getattr(total, field) + getattr(found, field))
        assert output.logprobs is not None
        ours = [row[0].logprob for row in output.logprobs]
        worst = max(worst, float(np.abs(np.subtract(ours, found.logprobs)).max()))
    print(f"{method} at {budget_tokens}: {total.equal} of {total.selections} selections equal", flush=True)
    return {
        "method": method,
        "budget_tokens": budget_tokens,
        "budget_blocks": budget_tokens // config.block_size,
        "selections": total.selections,
        "selections_equal": total.equal,
        "ties": total.selections - total.equal,
        "largest_tie_gap_nats": max(total.tie_gaps, default=0.0),
        "equal_up_to_ties": max(total.tie_gaps, default=0.0) <= TIE_NATS,
        "greedy_tokens": total.tokens,
        "greedy_tokens_equal": total.equal_tokens,
        "max_logprob_difference": worst,
    }


# --- speed -----------------------------------------------------------------------------------------------------------


def compare_speed(
    folder: Path, model: str | None, prompts: list[list[int]], repeats: int, threads: int
) -> Iterator[dict[str, Any]]:
    """One side after the other, a process each; no two run at a time.

    Raises:
        SystemExit: another model than the embedded one.
    """
    if model is not None:
        raise SystemExit("--parts speed is for the embedded model; leave --model out, or speed")
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    contestants = Contestants(
        pythons={"sparseserve": sys.executable, "transformers": sys.executable}, model=huggingface_directory(folder),
        gguf=folder, cpus=cpus, prefill_sparsity=1.0, llama_kv_type="f16", logs=folder,
    )  # fmt: skip
    shape = Shape(max_model_len=max(map(len, prompts)) + 128, max_num_seqs=2)
    for variant in ("transformers", *SPEED_VARIANTS):
        for prompt in prompts:
            is_peer = variant == "transformers"
            start = contestants.peer(variant, shape) if is_peer else contestants.ours(variant, shape, warm_up=False)
            with start as worker:
                row = {"side": variant, "prompt_tokens": len(prompt)} | _measure(worker, prompt, repeats)
            print(row, flush=True)
            yield row | {"load_average": round(os.getloadavg()[0], 1)}


def _measure(worker: WorkerProcess, prompt: list[int], repeats: int) -> dict[str, Any]:
    worker.call("first_token", prompt=prompt)  # whatever a first time costs, compiling for example
    first = [worker.call("first_token", prompt=prompt)["seconds"] for _ in range(repeats)]
    worker.call("start_batch", prompts=[prompt], warm_tokens=4, room_tokens=100)
    steps = worker.call("steps", count=16 * repeats)["seconds"]
    return {
        "first_token_s": statistics.median(first),
        "step_s": statistics.median(steps),
        "peak_resident_bytes": worker.peak_resident_bytes(),
    }


# --- report ----------------------------------------------------------------------------------------------------------


def environment(threads: int) -> dict[str, Any]:
    """Versions and machine."""
    names = ("jax", "jaxlib", "torch", "transformers", "numpy")
    return provenance() | {"threads": threads} | {name: installed_version(name) for name in names}


def show(content: dict[str, Any]) -> None:
    """A table for each part."""
    for part in PARTS:
        rows = content.get(part)
        if not rows:
            continue
        table = rich.table.Table(title=part)
        for column in rows[0]:
            table.add_column(column.replace("_", " "), justify="right")
        for row in rows:
            table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
        rich.console.Console(width=180).print(table)


if __name__ == "__main__":
    typer.run(main)

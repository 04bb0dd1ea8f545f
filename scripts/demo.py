"""Eight long prompts at once on the embedded model, with room on the device for a quarter of their KV.

The texts are chapters of the Python language reference, which every Python installation carries. Two of the questions
ask for a sentence that was hidden in the text. Run it by `make demo`.
"""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import rich.console
import rich.progress
import typer

from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.cli import metrics_table, output_dict, parse_bytes, wide_console, write_json
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.request import Request, RequestOutput, SamplingParams
from sparseserve_jax.text.tokenizer import Tokenizer

SECRET = "The password of the library is sunflower."
ASK_SECRET = "What is the password of the library?"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about the first `num_tokens` tokens of a topic; `depth`: where `SECRET` goes, None = nowhere."""

    topic: str
    num_tokens: int
    text: str = ASK_SECRET
    depth: float | None = None


QUESTIONS = (
    Question("naming", 1100, depth=0.5),
    Question("try", 1200, "What is a finally clause for? Answer in one sentence."),
    Question("execmodel", 1500, "What is a block, according to this text? Answer in one sentence."),
    Question("import", 1800, "What are the two steps of an import statement? Answer in one sentence."),
    Question("customization", 2000, "When is the method __init__ called? Answer in one sentence."),
    Question("formatstrings", 2500, depth=0.3),
    Question("debugger", 3000, "What is pdb? Answer in one sentence."),
    Question("compound", 7600, "What is a with statement for? Answer in one sentence."),
)
MAX_TOKENS = 32
TEMPLATE_TOKENS = 96
"""Room for the chat template, the question and the secret."""
SPARSE_BUDGET_TOKENS = 1024
DEVICE_SHARE = 0.25


def main(
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    device_kv_bytes: str | None = typer.Option(None, metavar="SIZE", help="Device KV; none = a quarter of all KV."),
    max_tokens: int = typer.Option(MAX_TOKENS, help="Tokens of each answer at most."),
    compilation_cache_dir: str | None = typer.Option(None, help="Where compiled programs persist."),
    json_file: str | None = typer.Option(None, "--json", metavar="FILE", help="Write outputs and figures."),
) -> None:
    started = time.perf_counter()
    model_config = open_checkpoint(model).config
    config = demo_config(
        model_config, max_tokens=max_tokens,
        device_kv_bytes=parse_bytes(device_kv_bytes) if device_kv_bytes else None, cache=compilation_cache_dir,
    )  # fmt: skip
    engine = Engine(model, config)
    for line in engine.info.lines():
        print(line)
    requests = [make_request(engine.tokenizer, question, max_tokens) for question in QUESTIONS]
    with Progress(len(requests)) as progress:
        begun = time.perf_counter()
        outputs = engine.generate(requests, on_output=progress.note)
        served_s = time.perf_counter() - begun
    report(engine, outputs, served_s, time.perf_counter() - started)
    if json_file is not None:
        totals = figures(engine, outputs, served_s)
        Path(json_file).parent.mkdir(parents=True, exist_ok=True)
        answers = [output_dict(output) | {"prompt": None, "prompt_token_ids": None} for output in outputs]
        write_json(json_file, {"engine": engine.info.to_dict(), "totals": totals, "outputs": answers})


def demo_config(model: ModelConfig, *, max_tokens: int, device_kv_bytes: int | None, cache: str | None) -> EngineConfig:
    """Host memory for all prompts, device memory for a share of them, decode beside short prefill segments."""
    block_size = 32
    lengths = [question.num_tokens + TEMPLATE_TOKENS + max_tokens for question in QUESTIONS]
    block_bytes = kv_token_bytes(model) * block_size
    num_blocks = sum(-(-length // block_size) for length in lengths)
    return EngineConfig(
        kv_tiers="tiered",
        block_size=block_size,
        sparse_budget_tokens=SPARSE_BUDGET_TOKENS,
        max_num_seqs=len(QUESTIONS),
        max_model_len=-(-max(lengths) // block_size) * block_size,
        device_kv_bytes=device_kv_bytes or int(DEVICE_SHARE * num_blocks * block_bytes),
        host_kv_bytes=(num_blocks + 1) * block_bytes,
        max_inject_tokens=512 * model.num_layers,
        deterministic=True,  # one decode shape: the compiler runs once
        max_grant_factor=2,
        compilation_cache_dir=cache,
    )


def kv_token_bytes(model: ModelConfig) -> int:
    """Bytes of K and V of one token in all layers, bfloat16."""
    return 2 * 2 * model.num_layers * model.num_kv_heads * model.head_dim


def make_request(tokenizer: Tokenizer, question: Question, max_tokens: int) -> Request:
    """The beginning of the topic, cut at a line, with the secret between two paragraphs, then the question."""
    token_ids = tokenizer.encode(pydoc_data.topics.topics[question.topic])[: question.num_tokens]
    lines = tokenizer.decode(token_ids).split("\n")[:-1]
    if question.depth is not None:
        place = int(len(lines) * question.depth)
        while place < len(lines) and lines[place].strip():
            place += 1
        lines[place:place] = ["", SECRET, ""]
    content = "\n".join(lines) + f"\n\n{question.text}"
    return Request(
        prompt=[{"role": "user", "content": content}],
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        request_id=question.topic,
    )


class Progress:
    """Prompts prefilled, tokens and answers so far: a bar on a terminal, else a line for each answer."""

    def __init__(self, num_requests: int) -> None:
        self._console = rich.console.Console()
        self._bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            "{task.fields[started]}/{task.total:.0f} prompts read, {task.completed:.0f} answered, "
            "{task.fields[tokens]} tokens",
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_requests, started=0, tokens=0)
        self._begun = time.perf_counter()
        self._num_tokens: dict[str, int] = {}
        self._answered = 0

    def __enter__(self) -> Progress:
        print("\nserving (the first time, programs are compiled; later they come from the cache) ...", flush=True)
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def note(self, output: RequestOutput) -> None:
        """Counts a token, and an answer when it is complete."""
        is_first = output.request_id not in self._num_tokens
        self._num_tokens[output.request_id] = len(output.token_ids)
        self._answered += output.finish_reason is not None
        self._bar.update(
            self._task, completed=self._answered, started=len(self._num_tokens), tokens=sum(self._num_tokens.values())
        )
        if not self._console.is_terminal and (is_first or output.finish_reason is not None):
            what = "answered" if output.finish_reason else f"read {len(output.prompt_token_ids)} tokens"
            print(f"{time.perf_counter() - self._begun:7.1f} s  {output.request_id}: {what}", flush=True)


def figures(engine: Engine, outputs: list[RequestOutput], served_s: float) -> dict[str, Any]:
    """Sums over all requests."""
    layout = engine.layout
    blocks = sum(layout.blocks_for(len(o.prompt_token_ids) + len(o.token_ids)) for o in outputs)
    return {
        "served_s": served_s,
        "prompt_tokens": sum(len(o.prompt_token_ids) for o in outputs),
        "new_tokens": sum(len(o.token_ids) for o in outputs),
        "device_kv_bytes": engine.info.device_kv_bytes,
        "resident_kv_bytes": blocks * layout.num_layers * layout.num_kv_heads * layout.piece_bytes,
        "blocks_selected": sum(o.metrics.blocks_selected for o in outputs),
        "blocks_hit": sum(o.metrics.blocks_hit for o in outputs),
        "bytes_loaded": sum(o.metrics.bytes_loaded for o in outputs),
        "bytes_saved": sum(o.metrics.bytes_saved for o in outputs),
        "num_parks": sum(o.metrics.num_parks for o in outputs),
    }


def report(engine: Engine, outputs: list[RequestOutput], served_s: float, total_s: float) -> None:
    """Answers, a row for each request, and the sums."""
    console = wide_console()
    for question, output in zip(QUESTIONS, outputs, strict=True):
        answer = " ".join(output.text.split())
        asked = f"{question.topic} ({len(output.prompt_token_ids)} tokens): {question.text}"
        console.print(f"\n{asked}", style="bold", markup=False, highlight=False)
        console.print(f"  {answer}{' ...' if output.finish_reason == 'length' else ''}", markup=False, highlight=False)
    console.print()
    console.print(metrics_table(outputs))
    f = figures(engine, outputs, served_s)
    hit_rate = f["blocks_hit"] / max(1, f["blocks_selected"])
    print(
        f"{f['prompt_tokens']} prompt + {f['new_tokens']} new tokens in {served_s:.1f} s "
        f"({(f['prompt_tokens'] + f['new_tokens']) / served_s:.0f} tokens/s, compilation included; "
        f"{total_s:.1f} s with loading)\n"
        f"device KV {f['device_kv_bytes'] / 2**20:.0f} MiB; all of it resident would take "
        f"{f['resident_kv_bytes'] / 2**20:.0f} MiB ({f['device_kv_bytes'] / f['resident_kv_bytes']:.0%})\n"
        f"hit rate {hit_rate:.1%}, {f['bytes_loaded'] / 2**20:.0f} MiB loaded, {f['bytes_saved'] / 2**20:.0f} MiB "
        f"saved, parked {f['num_parks']} times"
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")

"""Which layers should stay dense? The likelihood of reference answers with one layer, or one KV head, sparse at a time.

Few heads copy text from afar. If the budget hides the one block that such a head looks for, the answer is lost, while
most other layers may read whatever they like. This measures each layer's part in the loss, then that of each KV head of
the worst layers, and what is left when the worst layers are dense: the value for `EngineConfig.dense_layers`.

Prompts are those of `sparseserve eval longbench`, in the model's chat template where that puts them into it. By PyTorch
in float32 (`torch_oracle.SparseLlama` and its digests), all tokens of an answer at once: for each of them
the blocks are selected as in a decode step. Needs the extra `baseline`.

    python scripts/find_dense_layers.py --data LONGBENCH_DIR [--budget-tokens 2048] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.torch_oracle import Selection, SparseLlama, digest
from sparseserve_jax.checkpoint.convert import convert
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.evaluation.longbench import load_longbench
from sparseserve_jax.evaluation.prompts import PromptEncoder
from sparseserve_jax.provenance import provenance

TASKS = "qasper,multifieldqa_en,hotpotqa,2wikimqa,musique,gov_report,qmsum,trec,repobench-p"
CHUNK = 256
"""Prompt tokens that go through the model at a time."""


class Answerer(SparseLlama):
    """The oracle, with all tokens of an answer in one pass. `sparse` are the (layer, KV head) that select blocks."""

    def __init__(self, directory: Path, selection: Selection) -> None:
        super().__init__(directory, selection)
        self.sparse: Collection[tuple[int, int]] = ()

    @torch.inference_mode()
    def loss(self, prompt_end: int, token_ids: list[int]) -> float:
        """Mean negative log-likelihood of `token_ids[1:]` after a prompt of `prompt_end` tokens and `token_ids[0]`.

        Keys and values of the prompt stay, those of these tokens are dropped again.
        """
        logits = self.forward(token_ids[:-1], self._attend, all_logits=True)
        for kept in (self.keys, self.values):
            kept[:] = [array[:prompt_end] for array in kept]
        return float(-logits.log_softmax(-1)[torch.arange(len(logits)), torch.tensor(token_ids[1:])].mean())

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """`q` `[tokens, q_heads, head_dim]`; each token sees itself, those before, and of a sparse head its blocks."""
        keys, values = self.keys[layer], self.values[layer]
        positions = torch.arange(len(keys) - len(q), len(keys))
        grouped = q.reshape(len(q), self.num_kv_heads, self.group, self.head_dim)
        scores = torch.einsum("tkgd,nkd->ktgn", grouped, keys) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(torch.arange(len(keys)) > positions[:, None, None], -math.inf)
        for head in range(self.num_kv_heads):
            if (layer, head) in self.sparse:
                seen = self._selected(keys[:, head], grouped[:, head], positions)
                scores[head].masked_fill_(~seen[:, None, :], -math.inf)
        return torch.einsum("ktgn,nkd->tkgd", scores.softmax(-1), values).flatten(1, 2)

    def _selected(self, keys: Tensor, q: Tensor, positions: Tensor) -> Tensor:
        """`[tokens, keys]`: what each token of one KV head attends to; the rules of `torch_oracle`, per KV head."""
        rule = self.selection
        assert rule is not None and not rule.per_query_head
        size, num_blocks = rule.block_size, -(-len(keys) // rule.block_size)
        exists = positions // size + 1  # blocks, of each token
        blocks = torch.arange(num_blocks)
        full = len(keys) // size
        centre, radius = digest(rule.method, keys[: full * size].reshape(full, size, self.head_dim))
        scores = (q @ centre.T + q.abs() @ radius.T) / math.sqrt(self.head_dim)
        scores = torch.nn.functional.pad(scores, (0, num_blocks - full))
        scores = scores.masked_fill(blocks >= (exists - 1)[:, None, None], -math.inf)  # the newest is not scored
        ranks = scores.softmax(-1).mean(1)
        forced = (blocks < rule.num_sink) | (blocks >= (exists - rule.num_newest)[:, None])
        ranks = ranks.masked_fill(forced, math.inf).masked_fill(blocks >= exists[:, None], -math.inf)
        order = ranks.argsort(dim=-1, descending=True, stable=True)[:, : rule.budget]
        chosen = torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, order, True) & (blocks < exists[:, None])
        return chosen.repeat_interleave(size, dim=-1)[:, : len(keys)]


@dataclasses.dataclass(frozen=True)
class Losses:
    """Of all prompts: dense, and with some heads sparse."""

    dense: list[float]
    sparse: list[float]

    @property
    def rise(self) -> float:
        """Of the mean."""
        return sum(self.sparse) / sum(self.dense) - 1

    @property
    def worst(self) -> float:
        """Of a prompt."""
        return max(sparse / dense - 1 for dense, sparse in zip(self.dense, self.sparse, strict=True))


Heads = tuple[tuple[int, int], ...]


def measure(
    model: Answerer, prompts: Iterable[tuple[list[int], list[int]]], wanted: dict[str, Heads]
) -> dict[str, Losses]:
    """Losses of every set of sparse heads over pairs of prompt and answer; each prompt is prefilled once, densely."""
    losses = {name: Losses([], []) for name in wanted}
    for place, (prompt, answer) in enumerate(prompts):
        started = time.perf_counter()
        model.keys[:] = [array[:0] for array in model.keys]
        model.values[:] = [array[:0] for array in model.values]
        model.prefill(prompt[:-1], CHUNK)
        tokens = [prompt[-1], *answer]
        model.sparse = ()
        dense = model.loss(len(prompt) - 1, tokens)
        for name, heads in wanted.items():
            model.sparse = frozenset(heads)
            losses[name].dense.append(dense)
            losses[name].sparse.append(model.loss(len(prompt) - 1, tokens))
        seconds = time.perf_counter() - started
        print(f"prompt {place}: {len(prompt)} tokens, loss {dense:.3f} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return losses


def all_heads(model: SparseLlama, layers: Iterable[int]) -> Heads:
    """(layer, KV head) of whole layers."""
    return tuple((layer, head) for layer in layers for head in range(model.num_kv_heads))


def main(
    data: Path = typer.Option(..., help="LongBench folder: <task>.jsonl and dataset2prompt.json."),
    tasks: str = typer.Option(TASKS, help="By comma."),
    rows: int = typer.Option(2, min=1, help="Of each task."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    chat: bool = typer.Option(True, help="Put prompts into the model's chat template, where LongBench does."),
    budget_tokens: int = typer.Option(2048, help="Tokens that a sparse layer attends to."),
    block_size: int = typer.Option(32, help="Tokens of a block."),
    method: str = typer.Option("cuboid-mean", help="Digest."),
    max_prompt_tokens: int = typer.Option(7500, help="Longer prompts lose their middle."),
    answer_tokens: int = typer.Option(40, min=1, help="Of each reference answer."),
    num_worst: int = typer.Option(3, min=1, help="Layers to look at by head, and to leave dense in the end."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the figures."),
) -> None:
    source = open_checkpoint(model)
    encoder = PromptEncoder(model)
    examples = load_longbench(data, tasks.split(","), rows).examples
    if not chat:
        examples = [dataclasses.replace(e, task=dataclasses.replace(e.task, chat=False)) for e in examples]
    found = encoder.prepare(examples, max_prompt_tokens=max_prompt_tokens, max_model_len=encoder.max_model_len)
    long = [item for item in found if len(item.token_ids) > budget_tokens and item.reference]
    prompts = [(item.token_ids, item.reference[:answer_tokens]) for item in long]
    if not prompts:
        raise SystemExit(
            f"no prompt of {tasks} is longer than the budget of {budget_tokens} tokens; choose other tasks"
        )
    rule = Selection(block_size=block_size, budget=budget_tokens // block_size, method=method, dense_layers=())
    with tempfile.TemporaryDirectory() as folder:
        directory = convert(source, Path(folder) / "float32", format="huggingface", dtype="float32")
        answerer = Answerer(directory, rule)
        layers = range(answerer.num_layers)
        by_layer = measure(answerer, prompts, {f"{layer}": all_heads(answerer, [layer]) for layer in layers})
        worst = sorted(layers, key=lambda layer: by_layer[f"{layer}"].rise, reverse=True)[:num_worst]
        heads = {f"{layer}.{head}": ((layer, head),) for layer, head in all_heads(answerer, sorted(worst))}
        together = {
            "all sparse": all_heads(answerer, layers),
            "0, 1 dense": all_heads(answerer, layers[2:]),
            f"{', '.join(map(str, sorted(worst)))} dense": all_heads(
                answerer, [la for la in layers if la not in worst]
            ),
        }
        rest = measure(answerer, prompts, {**heads, **together})
    figures: dict[str, Any] = {
        "environment": provenance(), "tasks": tasks, "rows": rows, "prompts": len(prompts), "chat": chat,
        "answer_tokens": answer_tokens, "budget_tokens": budget_tokens, "block_size": block_size, "method": method,
        "dense_layers": sorted(worst),
    }  # fmt: skip
    for title, measured in (("layer", by_layer), ("head", {n: rest[n] for n in heads}),
                            ("together", {n: rest[n] for n in together})):  # fmt: skip
        print(f"\n| sparse: {title} | rise of the loss | worst prompt |\n| --- | ---: | ---: |")
        for name, losses in measured.items():
            print(f"| {name} | {losses.rise:+.2%} | {losses.worst:+.1%} |")
        figures[title] = {name: {"rise": losses.rise, "worst": losses.worst} for name, losses in measured.items()}
    print(f"\n--dense-layers {','.join(map(str, sorted(worst)))}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""How much attention the selected blocks keep, by digest method and budget, on long prompts of real tasks.

The reference answer follows the prompt, and the queries of the last tokens, which are those of decoding, select blocks
in every layer and head by the production operations. The table gives the share of the dense attention's probability
that falls on the selected blocks ("mass") and the relative error of the attention output ("error"), means over sparse
layers, query heads, queries and prompts. "oracle" selects by the true mass per KV head; "newest" takes the sink and the
newest blocks only.

    python scripts/selection_quality.py --data LONGBENCH_DIR [--json FILE]

LONGBENCH_DIR holds LongBench v1 as `<task>.jsonl` with `dataset2prompt.json` beside them (THUDM/LongBench). Without
--data the text is the Python language reference.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import typer

from pallas_kernels.api import Kernels, get_kernels
from pallas_kernels.reference import PREFILL_TILE, block_digests
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.config import SELECTION_METHODS
from sparseserve_jax.evaluation.longbench import load_longbench
from sparseserve_jax.evaluation.truncation import cut_middle, reference_tokens
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.llama import embed, run_layer
from sparseserve_jax.models.rope import rope_cos_sin, rope_frequencies
from sparseserve_jax.models.weights import load_params
from sparseserve_jax.text.tokenizer import Tokenizer

TASKS = ("qasper", "hotpotqa", "gov_report", "multifieldqa_en", "qmsum", "narrativeqa")
NUM_QUERIES = 16
NUM_SINK, NUM_NEWEST = 1, 2


def main(
    data: Path | None = typer.Option(None, help="Folder with LongBench v1 rows."),
    tasks: str = typer.Option(",".join(TASKS), help="Tasks, by comma."),
    rows: int = typer.Option(1, help="Prompts of each task."),
    budgets: str = typer.Option("512,1024,2048", help="Budgets in tokens, by comma."),
    block_size: int = typer.Option(32),
    min_tokens: int = typer.Option(4096, help="Shorter prompts are passed over."),
    max_tokens: int = typer.Option(8192, help="Longer prompts lose their middle."),
    first_layer: int = typer.Option(2, help="Layers from this one on count."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the table."),
) -> None:
    source = open_checkpoint(model)
    config = source.config
    tokenizer = Tokenizer(source.tokenizer_json, bos_token_id=config.bos_token_id, vocab_size=config.vocab_size)
    params = load_params(config, source.tensor, "float32")
    prompts = list(_prompts(data, tasks.split(","), rows, tokenizer, min_tokens, max_tokens))
    measures = []
    for name, token_ids in prompts:
        started = time.perf_counter()
        measures.append(
            measure(config, params, token_ids, tuple(map(int, budgets.split(","))), block_size, first_layer, max_tokens)
        )
        kept = measures[-1][max(b for b, _ in measures[-1]), "cuboid-mean"][0]
        seconds = time.perf_counter() - started
        print(f"{name}: {len(token_ids)} tokens, cuboid-mean keeps {kept:.3f} ({seconds:.0f} s)", flush=True)
    table = {key: tuple(float(np.mean([m[key][i] for m in measures])) for i in (0, 1)) for key in measures[0]}
    _show(table)
    if json_file is not None:
        result = {
            "model": config.name, "block_size": block_size, "prompts": [(n, len(t)) for n, t in prompts],
            "num_queries": NUM_QUERIES, "first_layer": first_layer,
            "table": [{"budget": b, "method": m, "mass": v[0], "error": v[1]} for (b, m), v in table.items()],
        }  # fmt: skip
        json_file.write_text(json.dumps(result, indent=1))


def measure(
    config: ModelConfig, params: Any, token_ids: list[int], budgets: tuple[int, ...], block_size: int,
    first_layer: int, pad_to: int,
) -> dict[tuple[int, str], tuple[float, float]]:  # fmt: skip
    """(budget in tokens, method) -> (mass kept, relative output error), means over layers from `first_layer` on."""
    num_tokens = len(token_ids)
    padded = jnp.asarray(np.pad(np.asarray(token_ids, np.int32), (0, pad_to - num_tokens)))
    hidden = embed(params, padded)
    kernels = get_kernels("auto", jax.devices()[0].platform)
    sums: dict[tuple[int, str], list[np.ndarray]] = {}
    for index, layer_params in enumerate(params["layers"]):
        hidden, layer = _layer(
            layer_params, hidden, jnp.int32(num_tokens),
            config=config, kernels=kernels, block_size=block_size, budgets=budgets,
        )  # fmt: skip
        if index >= first_layer:
            for key, value in layer.items():
                sums.setdefault(key, []).append(np.asarray(value))
    return {key: tuple(np.mean(values, axis=0).tolist()) for key, values in sums.items()}


@functools.partial(jax.jit, static_argnames=("config", "kernels", "block_size", "budgets"))
def _layer(
    layer_params: Any, hidden: jax.Array, num_tokens: jax.Array, *, config: ModelConfig, kernels: Kernels,
    block_size: int, budgets: tuple[int, ...],
) -> tuple[jax.Array, dict[tuple[int, str], jax.Array]]:  # fmt: skip
    positions = jnp.arange(hidden.shape[0])
    cos, sin = rope_cos_sin(positions, *rope_frequencies(config))
    scale = config.head_dim**-0.5

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, dict[tuple[int, str], jax.Array]]:
        blocks = kernels.make_blocks(k, v, jnp.full(len(k) // block_size, block_size), block_size=block_size)
        pool = jnp.pad(blocks, ((1, 0), (0, 0), (0, 0), (0, 0), (0, 0)))
        table = jnp.arange(1, pool.shape[0])[None]
        starts = jnp.arange(0, hidden.shape[0], PREFILL_TILE)
        counts = jnp.clip(num_tokens - starts, 0, PREFILL_TILE)
        out = kernels.prefill_attention(
            q, pool, table, jnp.zeros_like(starts), starts, counts, scale=scale, merge_tiles=4
        )
        asked = num_tokens - NUM_QUERIES + jnp.arange(NUM_QUERIES)
        return out, _quality(config, kernels, q[asked], pool, asked, budgets, scale)

    return run_layer(config, "float32", layer_params, hidden, cos, sin, attend, kernels=kernels)


def _quality(
    config: ModelConfig, kernels: Kernels, q: jax.Array, pool: jax.Array, positions: jax.Array,
    budgets: tuple[int, ...], scale: float,
) -> dict[tuple[int, str], jax.Array]:  # fmt: skip
    """[mass, error] of every budget and method for queries `q` [num_queries, num_q_heads, head_dim]."""
    num_heads, block_size = config.num_kv_heads, pool.shape[3]
    num_blocks = positions // block_size + 1
    table = jnp.broadcast_to(jnp.arange(1, pool.shape[0]), (len(q), pool.shape[0] - 1))
    keys = pool[1:, :, 0].transpose(1, 0, 2, 3).reshape(num_heads, -1, config.head_dim)
    grouped = q.reshape(len(q), num_heads, -1, config.head_dim)
    scores = jnp.einsum("qhgd,htd->qhgt", grouped, keys, precision="highest") * scale
    seen = jnp.arange(keys.shape[1]) <= positions[:, None, None, None]
    probs = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mass = probs.reshape(*probs.shape[:3], -1, block_size).sum(-1)  # [queries, heads, group, blocks]

    every = jnp.broadcast_to(jnp.arange(table.shape[1]), (len(q), num_heads, table.shape[1]))
    dense = kernels.decode_attention(q, pool, every + 1, _counts(every, positions, block_size), None, scale=scale)

    def result(selected: jax.Array) -> jax.Array:
        """Of a selection per KV head or per query head."""
        mask = None
        chosen = selected
        if selected.shape[1] != num_heads:
            num_union = min(table.shape[1], selected.shape[2] * selected.shape[1] // num_heads)
            chosen, mask = kernels.union_over_group(
                selected, num_kv_heads=num_heads, max_blocks=table.shape[1], num_union=num_union
            )
        counts = _counts(chosen, positions, block_size)
        sparse = kernels.decode_attention(q, pool, jnp.maximum(chosen, 0) + 1, counts, mask, scale=scale)
        error = jnp.linalg.norm(sparse - dense, axis=-1) / jnp.linalg.norm(dense, axis=-1)
        heads = selected.reshape(len(q), num_heads, -1, selected.shape[2])  # broadcasts over the group if per KV head
        kept = jnp.take_along_axis(mass, jnp.broadcast_to(heads, (*mass.shape[:3], heads.shape[3])), axis=3)
        kept = jnp.where(heads >= 0, kept, 0).sum(-1)
        return jnp.stack([kept.mean(), error.mean()])

    index = jnp.arange(table.shape[1])
    end = num_blocks[:, None, None]
    forced = (index < NUM_SINK) | (index >= end - NUM_NEWEST)

    def rank(values: jax.Array) -> jax.Array:
        return jnp.where(index < end, jnp.where(forced, jnp.inf, values), -jnp.inf)

    ranked = {"oracle": rank(mass.mean(2)), "newest": rank(jnp.broadcast_to(index * 1.0, mass.mean(2).shape))}
    for method in SELECTION_METHODS:
        digests = block_digests(pool[:, :, 0], jnp.full(pool.shape[0], block_size), method=method)
        for per_query_head, name in ((False, method), (True, f"{method}, per query head")):
            ranked[name] = kernels.score_blocks(
                q, digests, table, num_blocks, scale=scale, per_query_head=per_query_head,
                num_sink_blocks=NUM_SINK, num_newest_blocks=NUM_NEWEST,
            )  # fmt: skip
    return {
        (budget, method): result(kernels.select_blocks(values, num_selected=budget // block_size))
        for budget in budgets
        for method, values in ranked.items()
    }


def _counts(blocks: jax.Array, positions: jax.Array, block_size: int) -> jax.Array:
    """Tokens of each block that the query sees."""
    counts = jnp.clip(positions[:, None, None] + 1 - blocks * block_size, 0, block_size)
    return jnp.where(blocks >= 0, counts, 0)


def _prompts(
    data: Path | None, tasks: list[str], rows: int, tokenizer: Tokenizer, min_tokens: int, max_tokens: int
) -> Iterator[tuple[str, list[int]]]:
    if data is None:
        text = "\n\n".join(topics[name] for name in sorted(topics))
        token_ids = tokenizer.encode(text)
        for place in range(rows):
            yield f"python-reference-{place}", token_ids[place * max_tokens : (place + 1) * max_tokens]
        return
    for task in tasks:
        found = 0
        for example in load_longbench(data, [task]).examples:
            token_ids = tokenizer.encode(example.prompt)
            if len(token_ids) < min_tokens:
                continue
            answer = reference_tokens(example, tokenizer)[:NUM_QUERIES]
            yield task, cut_middle(token_ids, max_tokens - len(answer)) + answer
            found += 1
            if found == rows:
                break
        if not found:
            print(f"{task}: no prompt of {min_tokens} tokens or more", flush=True)


def _show(table: dict[tuple[int, str], tuple[float, float]]) -> None:
    shown = rich.table.Table(title="attention mass kept / relative output error")
    budgets = sorted({budget for budget, _ in table})
    shown.add_column("selection")
    for budget in budgets:
        shown.add_column(f"{budget} tokens", justify="right")
    names = sorted({method for _, method in table}, key=lambda name: -table[budgets[-1], name][0])
    for name in names:
        shown.add_row(name, *(f"{table[b, name][0]:.3f} / {table[b, name][1]:.3f}" for b in budgets))
    rich.console.Console().print(shown)


if __name__ == "__main__":
    typer.run(main)

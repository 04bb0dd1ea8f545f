"""How much attention sparse prefill keeps, and of how many key tiles, by threshold, on a long prompt of real text.

The model runs densely; in the sparse layers the production operation selects key tiles from the real queries and keys.
"mass" is the share of the dense attention's probability that falls on selected tiles, the mean over layers, query heads
and queries; "lowest" is that of the worst head of any layer; "density" is the share of causal tiles that are kept.
"best" keeps the largest tiles of every query tile and head by their true mass, until 0.98.

    python scripts/prefill_quality.py [--text FILE] [--num-tokens 8192] [--json FILE]
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import typer

from pallas_kernels.api import get_kernels
from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.storage import storage_dtype, to_storage
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.models.llama import embed, run_layer
from sparseserve_jax.models.rope import rope_cos_sin, rope_frequencies
from sparseserve_jax.models.weights import load_params
from sparseserve_jax.text.tokenizer import Tokenizer

BLOCK_SIZE = 32
FIRST_SPARSE_LAYER = 2


def main(
    text: Path | None = typer.Option(None, help="A text file; none = the Python language reference."),
    num_tokens: int = typer.Option(8192, help="Of the prompt; a multiple of 128."),
    thresholds: str = typer.Option("0.9,0.95,0.97,0.975,0.98,0.99", help="By comma."),
    dense_tokens: int = typer.Option(2048, help="Tokens up to here attend to everything (sparse_budget_tokens)."),
    layer_step: int = typer.Option(5, help="Every how many layers are looked at."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the table."),
) -> None:
    source = open_checkpoint(None)
    config, params = source.config, load_params(source.config, source.tensor, "bfloat16")
    tokenizer = Tokenizer(source.tokenizer_json, bos_token_id=config.bos_token_id, vocab_size=config.vocab_size)
    words = "\n\n".join(topics[name] for name in sorted(topics)) if text is None else text.read_text(errors="ignore")
    ids = tokenizer.encode(words[: 8 * num_tokens])[:num_tokens]
    if len(ids) < num_tokens:
        raise typer.BadParameter(f"the text has {len(ids)} tokens, not {num_tokens}")
    kernels, platform = get_kernels("auto", jax.default_backend()), jax.default_backend()
    num_tiles, scale = num_tokens // PREFILL_TILE, config.head_dim**-0.5
    table = jnp.arange(num_tokens // BLOCK_SIZE, dtype=jnp.int32)[None]
    starts = jnp.arange(num_tiles, dtype=jnp.int32) * PREFILL_TILE
    where = (table, jnp.zeros_like(starts), starts, jnp.full_like(starts, PREFILL_TILE))
    cos, sin = rope_cos_sin(jnp.arange(num_tokens), *rope_frequencies(config))

    def attend(q: Any, k: Any, v: Any) -> Any:
        blocks = kernels.make_blocks(k, v, jnp.full(num_tokens // BLOCK_SIZE, BLOCK_SIZE), block_size=BLOCK_SIZE)
        pool = to_storage(blocks, storage_dtype(jnp.dtype("bfloat16"), platform))
        return kernels.prefill_attention(q, pool, *where, scale=scale), (q, pool, k)

    run = jax.jit(lambda layer, hidden: run_layer(config, "bfloat16", layer, hidden, cos, sin, attend, kernels=kernels))
    causal = np.broadcast_to(np.tri(num_tiles, dtype=bool)[:, None], (num_tiles, config.num_q_heads, num_tiles))
    short = np.arange(num_tiles) < dense_tokens // PREFILL_TILE
    found: dict[str, list[tuple[float, float, float]]] = {}
    hidden = embed(params, jnp.asarray(ids, jnp.int32))
    for index, layer in enumerate(params["layers"]):
        hidden, (q, pool, k) = run(layer, hidden)
        if index < FIRST_SPARSE_LAYER or (index - FIRST_SPARSE_LAYER) % layer_step:
            continue
        group = config.num_q_heads // config.num_kv_heads
        mass = np.stack(
            [np.asarray(_tile_mass(q[:, h], k[:, h // group], scale)) for h in range(config.num_q_heads)], 1
        )
        kept = {"best": _largest(mass, 0.98) | (causal & short[:, None, None])}
        for threshold in map(float, thresholds.split(",")):
            select = functools.partial(
                kernels.select_key_tiles, scale=scale, threshold=threshold, dense_tokens=dense_tokens
            )
            kept[f"{threshold:g}"] = np.asarray(jax.jit(select)(q, pool, *where))
        for name, mask in kept.items():
            by_head = (mass * mask).sum(axis=2).mean(axis=0)
            density = float((mask & causal).sum() / causal.sum())
            found.setdefault(name, []).append((float(by_head.mean()), float(by_head.min()), density))
    rows = [
        {
            "threshold": name,
            "mass": round(float(np.mean([x[0] for x in values])), 4),
            "lowest": round(min(x[1] for x in values), 4),
            "density": round(float(np.mean([x[2] for x in values])), 3),
        }
        for name, values in found.items()
    ]
    shown = rich.table.Table(*rows[0])
    for row in rows:
        shown.add_row(*map(str, row.values()))
    rich.console.Console().print(shown)
    if json_file is not None:
        json_file.write_text(
            json.dumps({"num_tokens": num_tokens, "dense_tokens": dense_tokens, "rows": rows}, indent=1)
        )


@functools.partial(jax.jit, static_argnames="scale")
def _tile_mass(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """Of one head `[num_tokens, head_dim]`: mean attention of each query tile to each key tile."""
    num_tokens = q.shape[0]
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)

    def one_tile(start: jax.Array) -> jax.Array:
        scores = jax.lax.dynamic_slice_in_dim(q, start, PREFILL_TILE) @ k.T * scale
        seen = jnp.arange(num_tokens)[None] <= (start + jnp.arange(PREFILL_TILE))[:, None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return weights.reshape(PREFILL_TILE, -1, PREFILL_TILE).sum(axis=2).mean(axis=0)

    return jax.lax.map(one_tile, jnp.arange(0, num_tokens, PREFILL_TILE))


def _largest(mass: np.ndarray, share: float) -> np.ndarray:
    """The fewest key tiles of every query tile and head that together reach the share."""
    order = np.argsort(-mass, axis=-1)
    ordered = np.take_along_axis(mass, order, axis=-1)
    kept = np.zeros(mass.shape, bool)
    np.put_along_axis(kept, order, np.cumsum(ordered, axis=-1) - ordered < share, axis=-1)
    return kept


if __name__ == "__main__":
    typer.run(main)

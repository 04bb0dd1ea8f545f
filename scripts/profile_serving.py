"""Where the milliseconds of serving go: decode steps and a prompt's prefill, by operation, from XLA's own trace.

    python scripts/profile_serving.py --batch 8 --context 8000 [--json FILE]

Times are of the threads that ran an operation, summed (one that works in parallel counts once), a decode
step or a prompt at a time. "other" is what the compiler made of everything that is no native call; "not in any
operation" is the rest of the wall time: dispatch, waiting, and the Python between steps as far as nothing hides it.
"""

from __future__ import annotations

import collections
import gzip
import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
import rich.table
import typer

from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.request import Request, SamplingParams
from sparseserve_jax.runner.abstract_programs import AbstractRunner, Program


def main(
    batch: int = typer.Option(8, help="Sequences that decode."),
    context: int = typer.Option(8000, help="Tokens of each prompt."),
    steps: int = typer.Option(8, help="Decode steps in the trace."),
    budget: int = typer.Option(2048, help="Sparse budget, tokens; 0 = dense."),
    prefill_sparsity: float | None = typer.Option(None, help="Threshold of sparse prefill."),
    kv_dtype: str | None = typer.Option(None, help="int8, or as the model."),
    model: str | None = typer.Option(None, help="A checkpoint; none = the embedded SmolLM2-135M-Instruct."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the tables."),
) -> None:
    config = EngineConfig(
        max_num_seqs=batch, sparse_budget_tokens=budget or None, prefill_sparsity=prefill_sparsity,
        kv_dtype=kv_dtype,  # type: ignore[arg-type]  # checked by EngineConfig
    )  # fmt: skip
    engine = Engine(model, config)
    for _ in engine.warm_up():
        pass
    names = native_names(engine, config, batch, context)
    rng = np.random.default_rng(0)

    def requests(count: int, tokens: int) -> list[Request]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        size = engine.model_config.vocab_size
        return [Request(prompt=rng.integers(0, size, context).tolist(), sampling=params) for _ in range(count)]

    tables = {"prefill": profile(lambda: engine.generate(requests(1, 1)), names)}
    # The first sequence decodes while the others' prompts are prefilled, a piece beside each step.
    pieces = batch * (context // config.max_num_batched_tokens + 2)
    for request in requests(batch, steps + 8 + pieces):
        engine.add_request(request)
    while sum(len(p.token_ids) > 0 for p in engine._processors.values()) < batch:
        engine.step()
    engine.step()

    def decode() -> None:
        for _ in range(steps):
            engine.step()

    tables["decode step"] = profile(decode, names, per=steps)
    for name, table in tables.items():
        _show(name, table)
    if json_file is not None:
        json_file.write_text(json.dumps({"batch": batch, "context": context, "ms": tables}, indent=1))


def native_names(engine: Engine, config: EngineConfig, batch: int, context: int) -> list[dict[str, str]]:
    """Operation as a trace has it -> the native kernel behind it, from the compiled text of every program.

    A prefill layer is several programs: dense or sparse in decoding, and in prefill.
    """
    abstract = AbstractRunner(
        engine.model_config, config, device_bytes=engine.layout.device_bytes, host_bytes=engine.layout.host_bytes,
        platform="cpu",
    )  # fmt: skip
    layers = (*abstract.layout.dense_layers[:1], *abstract.layout.sparse_layers[:1])
    programs: list[Program] = [abstract.decode_step(batch, context)]
    for layer, end in itertools.product(layers, (config.max_num_batched_tokens, context)):
        programs.append(abstract.prefill_layer(config.max_num_batched_tokens, layer=layer, end=end))
    texts = (program.function.lower(*program.args, **program.kwargs).compile().as_text() for program in programs)
    pattern = re.compile(r'%?([\w.-]+) = [^\n]*custom_call_target="sparseserve_(\w+)_\w+"')
    return [dict(pattern.findall(text)) for text in texts]


def profile(run: Callable[[], Any], programs: list[dict[str, str]], *, per: int = 1) -> dict[str, float]:
    """Milliseconds by operation of one `run`, divided by `per`, the largest first; and "wall"."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            started = time.perf_counter()
            run()
            wall = time.perf_counter() - started
        (file,) = Path(directory).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    runs: dict[tuple[str, str], list[tuple[str, float]]] = collections.defaultdict(list)
    for event in events:
        args = event.get("args", {})
        if event.get("ph") == "X" and "hlo_op" in args and not event["name"].startswith("end: "):
            runs[args["hlo_module"], args["run_id"]].append((args["hlo_op"], event["dur"]))
    totals: collections.Counter[str] = collections.Counter()
    for (module, _), ops in runs.items():
        native = {op for op, _ in ops if op.startswith("ffi_call")}
        names = next((program for program in programs if set(program) == native), {})
        for op, microseconds in ops:
            name = names.get(op, "native, not named" if op in native else "other")
            totals[f"{module.removeprefix('jit_')}: {name}"] += microseconds
    table = {name: value / 1e3 / per for name, value in totals.most_common()}
    wall_ms = wall * 1e3 / per
    return table | {"not in any operation": wall_ms - sum(table.values()), "wall": wall_ms}


def _show(title: str, table: dict[str, float]) -> None:
    shown = rich.table.Table(title=title)
    shown.add_column("operation")
    shown.add_column("ms", justify="right")
    shown.add_column("share", justify="right")
    for name, value in table.items():
        shown.add_row(name, f"{value:.2f}", f"{value / table['wall']:.1%}")
    rich.console.Console().print(shown)


if __name__ == "__main__":
    typer.run(main)

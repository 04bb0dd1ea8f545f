"""What a start costs: `sparseserve generate` as a process of its own, first ever and with compiled programs on disk.

    python scripts/bench_start.py [--tokens 8000] [--json FILE]

Three numbers that a user feels: seconds from the command to the end of 16 tokens with an empty compilation cache, the
same with a full one, and the process's peak resident memory against what must be there: weights and KV pools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import typer

MAX_TOKENS = 16


def main(
    tokens: int = typer.Option(1000, help="Prompt length, about, in tokens."),
    repeats: int = typer.Option(3, min=1, help="Starts with a full cache; the median counts."),
    max_model_len: int = typer.Option(8192, help="Of the engine."),
    max_num_seqs: int = typer.Option(8, help="Of the engine."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the results."),
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prompt = Path(folder) / "prompt.txt"
        text = "\n".join(topics[name] for name in sorted(topics))
        prompt.write_text(text[: 4 * tokens])
        limits = ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
        runs = [_start(prompt, Path(folder), limits) for _ in range(1 + repeats)]
    first, later = runs[0], sorted(run["seconds"] for run in runs[1:])
    needed = first["weight_bytes"] + first["kv_bytes"]
    peak = max(run["peak_bytes"] for run in runs[1:])
    result = {
        "prompt_tokens": first["prompt_tokens"], "first_s": first["seconds"], "cached_s": later[len(later) // 2],
        "cached_spread_s": [later[0], later[-1]], "peak_bytes": peak, "first_peak_bytes": first["peak_bytes"],
        "weight_bytes": first["weight_bytes"], "kv_bytes": first["kv_bytes"], "peak_share": peak / needed,
    }  # fmt: skip
    for name, value in result.items():
        print(f"{name:16} {value}")
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1))


def _start(prompt: Path, folder: Path, limits: list[str]) -> dict[str, Any]:
    output = folder / "output.json"
    command = [
        sys.executable, "-m", "sparseserve_jax.cli", "generate", "--file", str(prompt), "--max-tokens", str(MAX_TOKENS),
        "--compilation-cache-dir", str(folder / "cache"), "--json", str(output), *limits,
    ]  # fmt: skip
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    found = json.loads(output.read_text())
    return {
        "seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024,  # KiB on Linux
        "weight_bytes": found["engine"]["weight_bytes"],
        "kv_bytes": found["engine"]["device_kv_bytes"] + found["engine"]["host_kv_bytes"],
        "prompt_tokens": len(found["outputs"][0]["prompt_token_ids"]),
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)

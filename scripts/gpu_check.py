"""The day a GPU is there: is every kernel right on it, how far is each from its limit, how fast are the transfers.

    python scripts/gpu_check.py --json gpu_check.json             # under six minutes on one GPU
    python scripts/gpu_check.py --dry-run --json gpu_check.json   # on a CPU: kernels interpreted, sizes tiny

One JSON: the conformance suite first, then every kernel's time against the roofline of its bytes and operations and
against plain XLA, bandwidths of FlashH2D and FlashD2H against block by block and one large copy, and the embedded model
served with its KV in two tiers. A part that the time budget leaves no room for counts as failed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

from host_offload.memory import place
from pallas_kernels.a100 import cases, target
from pallas_kernels.a100.cases import Case
from pallas_kernels.api import Kernels, get_kernels
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.provenance import provenance
from sparseserve_jax.request import Request, SamplingParams
from sparseserve_jax.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
PEAKS = {  # device kind contains: (memory bytes/s, dense bf16 FLOP/s, host link bytes/s), from NVIDIA's data sheets
    "A100-SXM4-80GB": (2039e9, 312e12, 32e9),
    "A100": (target.MEMORY_BYTES_PER_S, target.BF16_FLOPS, target.PCIE_BYTES_PER_S),
    "H200": (4800e9, 989e12, 64e9),
    "H100": (3350e9, 989e12, 64e9),
}
PIECE = (2, 32, 128)
CONFORMANCE = (
    "test_conformance.py", "test_decode_attention.py", "test_prefill_attention.py", "test_selection_kernels.py"
)  # fmt: skip
"""Whose tests run compiled kernels when there is a GPU; the others need the interpreter."""
CONFORMANCE_SHARE = 0.6
"""Of the time budget that the suite may take: the rest must have its turn, too."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of everything."""

    dry_run: bool
    deadline_s: float
    calls: int
    repeats: int
    copied_blocks: int

    def left_s(self) -> float:
        return self.deadline_s - time.perf_counter()


PARTS = ("conformance", "kernels", "transfers", "serving")


def main(
    json_file: Path = typer.Option(Path("gpu_check.json"), "--json", help="Where the report goes."),
    dry_run: bool = typer.Option(False, help="On a CPU, with interpreted kernels and tiny sizes: tests this script."),
    budget_s: float = typer.Option(340.0, help="Parts that would begin later than this are skipped: a failure."),
    only: str = typer.Option(",".join(PARTS), help="Parts, by comma."),
) -> None:
    wanted = only.split(",")
    unknown = sorted(set(wanted) - set(PARTS))
    if unknown:
        raise SystemExit(f"--only {','.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    device = jax.devices()[0]
    if device.platform != "gpu" and not dry_run:
        raise SystemExit(
            f"no GPU: jax runs on {device.platform} ({device.device_kind}); use --dry-run to test the script"
        )
    plan = Plan(
        dry_run=dry_run, deadline_s=time.perf_counter() + budget_s, calls=2 if dry_run else 50,
        repeats=1 if dry_run else 5, copied_blocks=8 if dry_run else 256,
    )  # fmt: skip
    report: dict[str, Any] = {"environment": environment(device), "dry_run": dry_run, "failed": [], "skipped": []}
    _write(json_file, report)  # a path that cannot be written shows now and not after minutes
    parts: dict[str, Callable[[Plan, jax.Device], Any]] = {
        "conformance": run_conformance, "kernels": time_kernels, "transfers": time_transfers, "serving": serve_embedded,
    }  # fmt: skip
    for name, part in parts.items():
        if name not in wanted:
            continue
        if plan.left_s() <= 0:
            report["skipped"].append(name)
        else:
            _run_part(name, part, plan, device, report)
        _write(json_file, report)
    if report["failed"] or report["skipped"]:
        raise SystemExit(f"failed: {report['failed']}, no time for: {report['skipped']}; see {json_file}")


def _run_part(
    name: str, part: Callable[[Plan, jax.Device], Any], plan: Plan, device: jax.Device, report: dict[str, Any]
) -> None:
    began = time.perf_counter()
    try:
        report[name] = part(plan, device)
    except Exception as error:  # a part that breaks must not cost the others
        report[name] = {"error": f"{type(error).__name__}: {error}"}
    result = report[name]
    if isinstance(result, dict) and (result.get("error") or result.get("failures")):
        report["failed"].append(name)
    report[f"{name}_seconds"] = round(time.perf_counter() - began, 1)
    print(f"{name}: {json.dumps(result)[:2000]}", flush=True)


def _write(path: Path, report: dict[str, Any]) -> None:
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise SystemExit(f"--json {path}: {error.strerror}") from error


def environment(device: jax.Device) -> dict[str, Any]:
    return provenance() | {
        "jax": jax.__version__,
        "platform": device.platform,
        "device": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "pinned_host_limit_gb": os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "default (64)"),
    }


# --- conformance -----------------------------------------------------------------------------------------------------


def run_conformance(plan: Plan, device: jax.Device) -> dict[str, Any]:
    """The suite in a process of its own, with jax on this device; a dry run takes a sample of it."""
    files = [str(ROOT / "tests" / "pallas_kernels" / name) for name in CONFORMANCE]
    if plan.dry_run:
        files = [f"{files[0]}::{name}" for name in ("test_select_blocks", "test_match_slots_over_some_steps")]
        files.append(f"{ROOT / 'tests' / 'pallas_kernels' / CONFORMANCE[0]}::test_says_where_it_runs")
    else:
        files.append(f"{files[0]}::test_says_where_it_runs")
    # Nearly all of the time goes into compiling. The processes share one GPU: without the setting the first would take
    # all of its memory.
    workers = 1 if plan.dry_run else max(1, min(8, (os.cpu_count() or 1) // 2))
    env = os.environ | {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_PLATFORMS": "cuda" if device.platform == "gpu" else device.platform,  # the tests' own default is the CPU
    }
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(workers), "-k", "not reference",
            f"--junitxml={xml}", *files,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=plan.left_s() * CONFORMANCE_SHARE
            )
        except subprocess.TimeoutExpired as error:
            return {"error": f"the suite did not end in {error.timeout:.0f} s; give it more with --budget-s"}
        if not xml.exists():
            return {"error": done.stdout[-2000:] + done.stderr[-2000:]}
        result = _count_results(xml)
    if result["platform"] != device.platform:
        result["error"] = f"the suite ran on {result['platform']}, not on {device.platform}"
    return result


def _count_results(xml: Path) -> dict[str, Any]:
    from xml.etree import ElementTree

    suite = next(ElementTree.parse(xml).getroot().iter("testsuite"))
    total, failed = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    names = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    platforms = [p.get("value") for p in suite.iter("property") if p.get("name") == "platform"]
    return {
        "platform": platforms[0] if platforms else None, "tests": total, "failed": failed,
        "skipped": int(suite.get("skipped", 0)), "failures": names[:50],
    }  # fmt: skip


# --- kernels ---------------------------------------------------------------------------------------------------------


def time_kernels(plan: Plan, device: jax.Device) -> list[dict[str, Any]]:
    """Every operation: seconds of a call, its roofline on this device, and plain XLA's seconds."""
    kernels, reference = get_kernels("pallas", device.platform), get_kernels("reference", device.platform)
    rows = []
    for case in _timed_cases(plan):
        if plan.left_s() <= 0:
            break
        row = {"operation": case.operation, "shape": case.shape, "roofline_s": _roofline(case, device)}
        row["seconds"] = _seconds(case, kernels, plan, device)
        row["share_of_roofline"] = row["roofline_s"] / row["seconds"]
        try:
            row["xla_seconds"] = _seconds(case, reference, plan, device)
            row["speedup"] = row["xla_seconds"] / row["seconds"]
        except Exception as error:  # XLA cannot gather from a host pool on CUDA, for one
            row["xla_error"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
    return rows


def _timed_cases(plan: Plan) -> Iterator[Case]:
    if plan.dry_run:
        small: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 64}
        yield cases.decode_attention(num_seqs=1, num_selected=4, **small)
        yield cases.score_blocks(num_seqs=1, max_blocks=64, **small)
        yield cases.select_blocks(num_seqs=1, num_kv_heads=1, max_blocks=64, num_selected=8)
        yield from cases.transfers(num_seqs=1, num_selected=4, **small)
        return
    # Of a pool that is larger than the L2 cache, so that blocks come from memory.
    yield from (case for case in cases.reported_cases() if case.operation not in ("decode_attention",))
    for num_kv_heads, group, head_dim in ((8, 4, 128), (32, 1, 128), (3, 3, 64)):
        size: dict[str, Any] = {"num_kv_heads": num_kv_heads, "group": group, "head_dim": head_dim}
        for num_seqs in (1, 8, 16):
            yield cases.decode_attention(num_seqs=num_seqs, own_blocks=True, **size)
        yield cases.decode_attention(num_seqs=8, own_blocks=True, dtype="int8", **size)
        yield cases.prefill_attention(num_tokens=8192, **size)


def _roofline(case: Case, device: jax.Device) -> float:
    memory, flops, link = next((peak for kind, peak in PEAKS.items() if kind in device.device_kind), PEAKS["A100"])
    return max(case.bytes_minimum / memory, case.flops_minimum / flops, case.pcie_bytes_minimum / link)


def _seconds(case: Case, kernels: Kernels, plan: Plan, device: jax.Device) -> float:
    """Of one call, the median over repeats of `calls` calls that are waited for together."""
    function = case.function(kernels)
    arguments = [place(array, device, in_host_memory=i in case.in_host_memory) for i, array in enumerate(case.arrays)]

    def call() -> Any:
        out = function(*arguments)
        for index, array in zip(case.in_place, jax.tree.leaves(out), strict=False):
            arguments[index] = array  # it was donated
        return out

    jax.block_until_ready(call())
    times = []
    for _ in range(plan.repeats):
        began = time.perf_counter()
        for _ in range(plan.calls):
            out = call()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - began) / plan.calls)
    return statistics.median(times)


# --- transfers -------------------------------------------------------------------------------------------------------


def time_transfers(plan: Plan, device: jax.Device) -> dict[str, Any]:
    """GB/s between pinned host memory and the device: our kernels, one copy a block, and one large copy."""
    kernels = get_kernels("pallas", device.platform)
    num_heads, count = 8, plan.copied_blocks
    shape = (count + 1, num_heads, *PIECE)
    values = np.random.default_rng(0).standard_normal(shape, np.float32).astype(jnp.bfloat16)
    if device.platform == "cpu":
        values = values.view(np.uint16)  # as pools are stored there
    host, pool = place(values, device, in_host_memory=True), place(values, device)
    ids = jnp.arange(1, count + 1, dtype=jnp.int32)
    every = jnp.broadcast_to(ids, (1, num_heads, count))
    missing = jnp.ones(every.shape, bool)
    slots = jnp.broadcast_to(ids[:, None], (count, num_heads))
    moved = count * num_heads * math.prod(PIECE) * 2
    flash_h2d = jax.jit(kernels.flash_h2d, donate_argnums=0)
    save_pieces = jax.jit(kernels.save_pieces, donate_argnums=0)
    blocks_in_host = [place(values[i], device, in_host_memory=True) for i in range(1, count + 1)]
    blocks_on_device = [place(values[i], device) for i in range(1, count + 1)]
    state = {"host": host, "pool": pool}

    def h2d_kernel() -> Any:
        state["pool"] = flash_h2d(state["pool"], state["host"], every, every, missing)
        return state["pool"]

    def d2h_kernel() -> Any:
        state["host"] = save_pieces(state["host"], state["pool"], slots, ids)
        return state["host"]

    ways: dict[str, Callable[[], Any]] = {
        "flash_h2d": h2d_kernel,
        "h2d_block_by_block": lambda: [place(block, device) for block in blocks_in_host],
        "h2d_one_copy": lambda: place(state["host"], device),
        "flash_d2h": d2h_kernel,
        "d2h_block_by_block": lambda: [place(block, device, in_host_memory=True) for block in blocks_on_device],
        "d2h_one_copy": lambda: place(state["pool"], device, in_host_memory=True),
    }
    out: dict[str, Any] = {"bytes": moved, "block_bytes": moved // count}
    for name, way in ways.items():
        jax.block_until_ready(way())
        times = []
        for _ in range(plan.repeats):
            began = time.perf_counter()
            jax.block_until_ready(way())
            times.append(time.perf_counter() - began)
        out[f"{name}_gbps"] = moved / statistics.median(times) / 1e9
    out["flash_h2d_over_block_by_block"] = out["flash_h2d_gbps"] / out["h2d_block_by_block_gbps"]
    out["flash_d2h_over_block_by_block"] = out["flash_d2h_gbps"] / out["d2h_block_by_block_gbps"]
    return out


# --- serving ---------------------------------------------------------------------------------------------------------


def serve_embedded(plan: Plan, device: jax.Device) -> dict[str, Any]:
    """The embedded model with device room for a part of its KV, against all KV on the device and plain XLA.

    A dry run serves a small random model instead: 30 interpreted layers would take hours.
    """
    if plan.dry_run:
        return _serve_dry()
    source = open_checkpoint(None)
    tokenizer = Tokenizer(source.tokenizer_json, bos_token_id=source.config.bos_token_id)
    text = tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    prompts = [text[: 500 + 450 * i] for i in range(8)]
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    shared: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 8, "sparse_budget_tokens": 1024}
    modes = {
        "tiered": EngineConfig(kv_tiers="tiered", device_kv_bytes=160 << 20, host_kv_bytes=2 << 30, **shared),
        "unified": EngineConfig(device_kv_bytes=2 << 30, **shared),
        "unified, plain XLA": EngineConfig(device_kv_bytes=2 << 30, implementation="reference", **shared),
    }
    return _serve_modes(plan, None, modes, prompts, sampling)


def _serve_dry() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    from tests.tiny_model import random_prompt, write_sharp_model

    shared: dict[str, Any] = {
        "dtype": "float32", "block_size": 16, "sparse_budget_tokens": 64, "max_model_len": 128, "max_num_seqs": 2,
        "num_dense_layers": 1, "max_num_batched_tokens": 128, "compilation_cache_dir": "",
    }  # fmt: skip
    tiered: dict[str, Any] = {"kv_tiers": "tiered", "device_kv_bytes": 2 << 20, "host_kv_bytes": 8 << 20}
    modes = {
        "tiered": EngineConfig(implementation="pallas", **tiered, **shared),
        "unified": EngineConfig(implementation="reference", device_kv_bytes=8 << 20, **shared),
    }
    prompts = [random_prompt(100, 0)]
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_sharp_model(Path(folder) / "model")
        return _serve_modes(Plan(True, math.inf, 1, 1, 1), model, modes, prompts, sampling)


def _serve_modes(
    plan: Plan, model: Path | None, modes: dict[str, EngineConfig], prompts: list[Any], sampling: SamplingParams
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    tokens: dict[str, list[list[int]]] = {}
    for name, config in modes.items():
        if plan.left_s() <= 0:
            break
        engine = Engine(model, config)
        requests = [Request(prompt=prompt, sampling=sampling) for prompt in prompts]
        if not plan.dry_run:
            engine.generate(requests)  # compiles
        began = time.perf_counter()
        outputs = engine.generate(requests)
        seconds = time.perf_counter() - began
        tokens[name] = [list(output.token_ids) for output in outputs]
        metrics = [output.metrics for output in outputs]
        out[name] = {
            "kernels": engine.info.implementation,
            "seconds": seconds,
            "output_tokens_per_s": sum(map(len, tokens[name])) / seconds,
            "ttft_mean_s": statistics.mean(m.ttft_s or math.nan for m in metrics),
            "blocks_loaded": sum(m.blocks_loaded for m in metrics),
            "bytes_loaded": sum(m.bytes_loaded for m in metrics),
            "bytes_saved": sum(m.bytes_saved for m in metrics),
        }
    first = next(iter(tokens.values()))
    for name, other in tokens.items():
        pairs = [(a, b) for one, two in zip(first, other, strict=True) for a, b in zip(one, two, strict=True)]
        out[name]["same_tokens_as_tiered"] = statistics.mean(a == b for a, b in pairs)
    return out


if __name__ == "__main__":
    typer.run(main)

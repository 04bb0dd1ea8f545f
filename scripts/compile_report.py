"""Compiles every kernel and the whole steps of real models for an A100, without one, and sets them against its limits.

    make compile-report ARGS='--json docs/results/a100_compile_report.json --png docs/results/a100_roofline.png'

A kernel's machine code gives registers, spills, shared memory, occupancy and instruction counts. Its bytes are counted
by running it in the interpreter: what its loads and stores ask for, without what their masks leave out. Times are what
the A100 could do at best with those bytes and operations (the roofline); nothing is measured, so what is left out is
latency and launch time.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import typer

from pallas_kernels.a100 import target
from pallas_kernels.a100.cases import Case, reported_cases
from pallas_kernels.a100.compiler import CompiledKernel, CompiledProgram, compile_for_a100, missing_reason
from pallas_kernels.api import Kernels, get_kernels
from pallas_kernels.triton import Traffic
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.runner.abstract_programs import AbstractRunner, Program

GIB = 2**30
OUR_KERNELS = (
    "append_blocks", "append_tokens", "decode_attention", "flash_h2d", "load_blocks",
    "match_slots", "merge_scores", "prefill_attention", "save_blocks", "save_pieces", "score_blocks", "select_blocks",
)  # fmt: skip
LLAMA_3_8B = ModelConfig(
    name="llama-3-8b", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_q_heads=32,
    num_kv_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0,
)  # fmt: skip
LWM_7B = ModelConfig(
    name="lwm-7b", vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_q_heads=32,
    num_kv_heads=32, head_dim=128, max_position_embeddings=1048576, rms_norm_eps=1e-5, rope_theta=5e7,
)  # fmt: skip
CONTEXT_TOKENS = 32768
NUM_SEQS = 8
SERVING: dict[str, EngineConfig] = {
    "llama-3-8b": EngineConfig(
        kv_tiers="tiered", max_model_len=CONTEXT_TOKENS, max_num_seqs=NUM_SEQS, max_num_batched_tokens=CONTEXT_TOKENS,
        device_kv_bytes=12 * GIB, host_kv_bytes=40 * GIB,
    ),
    # Four times the KV of Llama-3-8B for each token: no dense layers, or eight dense contexts alone would take 34 GB.
    "lwm-7b": EngineConfig(
        kv_tiers="tiered", max_model_len=CONTEXT_TOKENS, max_num_seqs=NUM_SEQS, max_num_batched_tokens=CONTEXT_TOKENS,
        dense_layers=(), device_kv_bytes=18 * GIB, host_kv_bytes=150 * GIB,
    ),
}  # fmt: skip


def main(
    json_file: Path | None = typer.Option(None, "--json", help="Write the report."),
    png_file: Path | None = typer.Option(None, "--png", help="Draw the roofline (needs matplotlib)."),
    layers: int = typer.Option(0, help="Compile the steps with this many layers; 0 = all that the models have."),
    kernels_only: bool = typer.Option(False, help="Leave the whole steps out."),
) -> None:
    reason = missing_reason()
    if reason:
        raise SystemExit(reason)
    kernels = get_kernels("pallas", "gpu")
    began = time.perf_counter()
    rows = [row for case in reported_cases() for row in kernel_rows(case, kernels)]
    _print_kernels(rows)
    steps = [] if kernels_only else [step for model in (LLAMA_3_8B, LWM_7B) for step in step_rows(model, layers)]
    if steps:
        _print_steps(steps)
    report = {"target": target.describe(), "kernels": rows, "steps": steps, "seconds": time.perf_counter() - began}
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if png_file:
        draw_roofline(rows, png_file)


def kernel_rows(case: Case, kernels: Kernels) -> list[dict[str, Any]]:
    """One row for every kernel of an operation, the main one first."""
    program = compile_for_a100(case.function(kernels), *case.abstract_arguments())
    return [
        _kernel_row(case, program, program.kernels[traffic.name], traffic, is_main=index == 0)
        for index, traffic in enumerate(case.traffic())
    ]


def _kernel_row(
    case: Case, program: CompiledProgram, kernel: CompiledKernel, traffic: Traffic, *, is_main: bool
) -> dict[str, Any]:
    requested = case.bytes_requested(traffic)
    # Transfers store pieces and nothing else: once on each side of the link.
    pcie = traffic.stored_bytes if case.pcie_bytes_minimum else 0
    minimum = case.bytes_minimum if is_main else traffic.stored_bytes
    moved = minimum if case.reread else requested - pcie
    limits = {
        "memory": moved / target.MEMORY_BYTES_PER_S,
        "tensor cores": traffic.flops / target.BF16_FLOPS,
        "PCIe": pcie / target.PCIE_BYTES_PER_S,
    }
    counts = kernel.instructions
    return {
        "name": kernel.name,
        "operation": case.operation,
        "shape": case.shape,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_memory_bytes": kernel.shared_memory_bytes,
        "static_shared_memory_bytes": kernel.static_shared_memory_bytes,
        "dynamic_shared_memory_bytes": kernel.dynamic_shared_memory_bytes,
        "programs": list(kernel.grid),
        "threads": kernel.threads,
        "programs_per_sm": kernel.programs_per_sm,
        "mma": counts.get("mma.sync", 0),
        "async_copies": counts.get("cp.async.cg", 0) + counts.get("cp.async.ca", 0),
        "vector_loads": counts.get("ld.global.v4", 0),
        "bytes_requested": requested,
        "bytes_moved": moved,
        "bytes_minimum": minimum,
        "overhead": moved / minimum - 1,
        "pcie_bytes": pcie,
        "pcie_bytes_minimum": case.pcie_bytes_minimum,
        "flops": traffic.flops,
        "roofline_s": max(limits.values()),
        "bound_by": max(limits, key=lambda name: limits[name]),
    }


def step_rows(model: ModelConfig, layers: int) -> list[dict[str, Any]]:
    """The decode step, one layer of prefill and both saves of a model served with tiers, as the runner runs them."""
    if layers:
        model = dataclasses.replace(model, num_layers=layers)
    runner = AbstractRunner(model, SERVING[model.name], device_bytes=0, host_bytes=0, platform="gpu")
    programs = {
        f"decode_step, {NUM_SEQS} sequences of {CONTEXT_TOKENS}": runner.decode_step(NUM_SEQS, CONTEXT_TOKENS),
        f"prefill_layer, {CONTEXT_TOKENS} tokens": runner.prefill_layer(CONTEXT_TOKENS),
        f"save_newest, {NUM_SEQS} sequences": runner.save_newest(NUM_SEQS),
        f"save_layer, {CONTEXT_TOKENS} tokens": runner.save_layer(CONTEXT_TOKENS),
    }
    return [_step_row(f"{model.name} {name}", program, runner) for name, program in programs.items()]


def _step_row(name: str, program: Program, runner: AbstractRunner) -> dict[str, Any]:
    began = time.perf_counter()
    compiled = compile_for_a100(program.function, *program.args, **program.kwargs)
    pools = {pool.shape for pool in (*runner.state.pools, *runner.state.digests, *runner.host_pools)}
    return {
        "name": name,
        "alias_bytes": compiled.alias_bytes + compiled.host_alias_bytes,
        "temp_bytes": compiled.temp_bytes,
        "host_temp_bytes": compiled.host_temp_bytes,
        "argument_bytes": compiled.argument_bytes,
        "host_argument_bytes": compiled.host_argument_bytes,
        "pool_copies": sum(len(compiled.copies_of(shape)) for shape in sorted(pools)),
        "host_calls": len(compiled.host_calls()),
        "launches": len(compiled.launches),
        "our_launches": sum(_is_ours(launch) for launch in compiled.launches),
        "spill_bytes": sum(kernel.spill_bytes for kernel in compiled.kernels.values()),
        "compile_s": round(time.perf_counter() - began, 1),
    }


def _is_ours(launch: str) -> bool:
    return launch.split("__")[0] in OUR_KERNELS


def _print_kernels(rows: list[dict[str, Any]]) -> None:
    table = rich.table.Table(title=f"Kernels compiled for {target.describe()}")
    for column in ("kernel", "shape"):
        table.add_column(column, overflow="fold")
    for column in ("registers", "spills", "shared KiB", "programs", "per SM", "mma", "async", "MB moved", "overhead",
                   "MB PCIe", "MFLOP", "roofline us", "bound by"):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row["name"], row["shape"], str(row["registers"]), str(row["spill_bytes"]),
            f"{row['shared_memory_bytes'] / 1024:.1f}", "x".join(map(str, row["programs"])),
            str(row["programs_per_sm"]), str(row["mma"]), str(row["async_copies"]), f"{row['bytes_moved'] / 1e6:.2f}",
            f"{row['overhead']:.1%}", f"{row['pcie_bytes'] / 1e6:.2f}", f"{row['flops'] / 1e6:.0f}",
            f"{row['roofline_s'] * 1e6:.2f}", row["bound_by"],
        )  # fmt: skip
    rich.console.Console(width=200).print(table)


def _print_steps(rows: list[dict[str, Any]]) -> None:
    table = rich.table.Table(title="Whole steps, as the runner runs them")
    table.add_column("step", overflow="fold")
    columns = {
        "alias_bytes": "aliased GB", "temp_bytes": "temporaries MB", "host_argument_bytes": "host arguments GB",
        "pool_copies": "pool copies", "host_calls": "host calls", "launches": "kernels", "our_launches": "ours",
        "compile_s": "compiled in s",
    }  # fmt: skip
    scale = {"alias_bytes": 1e9, "temp_bytes": 1e6, "host_argument_bytes": 1e9}
    for title in columns.values():
        table.add_column(title, justify="right")
    for row in rows:
        shown = (f"{row[name] / scale[name]:.2f}" if name in scale else str(row[name]) for name in columns)
        table.add_row(row["name"], *shown)
    rich.console.Console(width=200).print(table)


def draw_roofline(rows: list[dict[str, Any]], path: Path) -> None:
    """Operations per byte against what the A100 can do, one point a kernel with matrix products; transfers are text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    intensity = [2.0**x for x in range(-2, 14)]
    memory, peak = target.MEMORY_BYTES_PER_S, target.BF16_FLOPS
    axes.loglog(
        intensity, [min(peak, x * memory) / 1e12 for x in intensity], "k-", label="A100: 1,555 GB/s, 312 TFLOP/s"
    )
    for operation in dict.fromkeys(row["operation"] for row in rows if row["flops"]):
        points = [row for row in rows if row["operation"] == operation and row["flops"]]
        x = [row["flops"] / row["bytes_moved"] for row in points]
        axes.loglog(x, [min(peak, value * memory) / 1e12 for value in x], "o", label=operation)
    axes.set(
        xlabel="floating-point operations of matrix products per byte of device memory",
        ylabel="TFLOP/s at the roofline", title="Kernels on the roofline of an A100 (compiled, not measured)",
    )  # fmt: skip
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)

"""Simulates a LongBench-like trace: working-set control on and off, layer-segmented and chunked prefill.

    python scripts/simulate.py --rate 0.3 --requests 100 --json simulation.json

Times are of the cost model (an A100 40 GB), not measured. The policies are compared on one and the same trace.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import get_args

from sparseserve_jax.cache.layout import KVLayout, KVShape, plan_layout
from sparseserve_jax.config import BatchControl, EngineConfig, PrefillMode
from sparseserve_jax.load_generator.arrivals import poisson
from sparseserve_jax.provenance import git_commit
from sparseserve_jax.selection_record import SelectionRecord
from sparseserve_jax.simulator.cost_model import CostModel
from sparseserve_jax.simulator.residency import ResidencyModel
from sparseserve_jax.simulator.simulate import SimulationReport, TraceRequest, simulate

LONGBENCH = {
    # set: (mean prompt tokens, about 1.3 per word or 0.8 per Chinese character of the LongBench table; new tokens)
    "qasper": (4_700, 128), "narrativeqa": (24_000, 128), "multifieldqa_en": (5_900, 64), "dureader": (12_600, 128),
    "gov_report": (11_400, 512), "qmsum": (13_800, 512), "multi_news": (2_700, 512), "vcsum": (12_300, 512),
    "lcc": (1_600, 64), "repobench-p": (5_500, 64),
}  # fmt: skip
MODELS = {  # cost model, KV shape, longest prompt + answer
    "llama3-8b": (
        CostModel.a100_llama3_8b,
        KVShape(num_layers=32, num_q_heads=32, num_kv_heads=8, head_dim=128),
        131_072,
    ),
    "lwm-7b": (
        CostModel.a100_lwm_7b,
        KVShape(num_layers=32, num_q_heads=32, num_kv_heads=32, head_dim=128),
        32_768,
    ),
}
COLUMNS = {
    "queue_mean_s": "queue s", "ttft_mean_s": "TTFT s", "ttft_p99_s": "p99", "tbt_mean_s": "TBT s", "tbt_p99_s": "p99",
    "tokens_per_s": "tokens/s", "decode_batch_mean": "batch", "loads_per_step_mean": "loads/step", "hit_rate": "hits",
    "num_parks": "parks",
}  # fmt: skip


def make_trace(rate: float, num_requests: int, max_len: int, seed: int) -> list[TraceRequest]:
    """Poisson arrivals; sets drawn uniformly; prompt lengths log-normal around the set's mean."""
    rng, trace = random.Random(seed), []
    for now_s in itertools.islice(poisson(rate, rng), 1, num_requests + 1):
        mean, new_tokens = rng.choice(list(LONGBENCH.values()))
        prompt = int(rng.lognormvariate(0.0, 0.5) * mean / 1.133)  # exp(0.5^2 / 2) = 1.133
        trace.append(
            TraceRequest(
                arrival_s=now_s, prompt_tokens=max(64, min(prompt, max_len - new_tokens)), new_tokens=new_tokens
            )
        )
    return trace


def make_engine(
    args: argparse.Namespace, shape: KVShape, max_len: int, prefill: PrefillMode, control: BatchControl
) -> tuple[EngineConfig, KVLayout]:
    """The tiered engine of the paper's machine under one policy."""
    config = EngineConfig(
        kv_tiers="tiered", max_num_seqs=args.max_num_seqs, max_model_len=max_len,
        device_kv_bytes=int(args.device_gb * 1e9), host_kv_bytes=int(args.host_gb * 1e9),
        prefill=prefill, batch_control=control,
    )  # fmt: skip
    layout = plan_layout(config, shape, model_max_len=max_len, available_device_bytes=0, available_host_bytes=0)
    return config, layout


def print_table(runs: dict[str, SimulationReport]) -> None:
    """One line per policy."""
    print(f"{'':30}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
    for name, report in runs.items():
        print(f"{name:30}" + "".join(f"{getattr(report, key):>11.4g}" for key in COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b")
    parser.add_argument("--rate", type=float, default=0.3, help="requests per second")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--device-gb", type=float, default=20.0, help="device bytes for KV, in 10^9")
    parser.add_argument("--host-gb", type=float, default=128.0, help="host bytes for KV, in 10^9")
    parser.add_argument("--recorded", type=Path, help="selections of real requests in place of assumed overlaps (.npz)")
    parser.add_argument("--json", type=Path, help="write settings and reports to this file")
    args = parser.parse_args()

    make_cost_model, shape, max_len = MODELS[args.model]
    residency = ResidencyModel()
    if args.recorded:
        record = SelectionRecord.load(args.recorded)
        residency = ResidencyModel.measured([request.selected for request in record.requests])
    trace = make_trace(args.rate, args.requests, max_len, args.seed)
    runs = {}
    for prefill, control in itertools.product(get_args(PrefillMode), get_args(BatchControl)):
        config, layout = make_engine(args, shape, max_len, prefill, control)
        runs[f"{prefill}, control {control}"] = simulate(trace, config, layout, make_cost_model(), residency)
    print(f"{args.model}, {args.requests} requests at {args.rate}/s, {layout.num_slots} device slots, simulated")
    print_table(runs)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in ("json", "recorded")}
        reports = {name: dataclasses.asdict(report) for name, report in runs.items()}
        content = {
            "what": "simulated, not measured", "commit": git_commit(), "settings": settings,
            "cost_model": dataclasses.asdict(make_cost_model()), "residency": dataclasses.asdict(residency),
            "reports": reports,
        }  # fmt: skip
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

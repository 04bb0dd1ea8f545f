"""How near a dense prefill comes to the machine's measured peak, in useful operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def prefill_operations(config: dict[str, Any], num_tokens: int) -> float:
    """Floating-point operations that a dense causal prefill needs, two for each multiply-add.

    Every token passes the layers' matrices; a query meets the keys up to its own, half of all pairs, in two products
    (with K and with V); logits are made for the last token only. Norms, rotations and softmax are not counted.

    Args:
        config: a Llama `config.json`.
    """
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    matrices = hidden * (2 * q_size + 2 * kv_size + 3 * config["intermediate_size"])
    pairs = num_tokens * (num_tokens + 1) / 2
    per_layer = 2 * num_tokens * matrices + 2 * 2 * pairs * q_size
    return config["num_hidden_layers"] * per_layer + 2 * hidden * config["vocab_size"]


def read_bf16_peak_tflops(path: Path) -> float:
    """The peak that `scripts/bench_kernels.py --json FILE` measured.

    Raises:
        ValueError: the file has none.
    """
    found = json.loads(path.read_text()).get("bf16_peak_tflops")
    if not isinstance(found, (int, float)) or not found > 0:
        raise ValueError(f"{path}: bf16_peak_tflops={found!r} must be a number above 0; write it by bench_kernels.py")
    return float(found)


def speed(config: dict[str, Any], row: dict[str, Any], peak_tflops: float | None) -> dict[str, Any]:
    """What to add to a row of dense prefill: useful TFLOP/s of both sides and, with a peak, their share of it."""
    operations = prefill_operations(config, row["tokens"])
    tflops = {side: operations / row[side] / 1e12 for side in ("ours", "theirs")}
    if peak_tflops is None:
        return {"useful_tflops": tflops}
    return {
        "useful_tflops": tflops,
        "share_of_bf16_peak": {side: value / peak_tflops for side, value in tflops.items()},
    }

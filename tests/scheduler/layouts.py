"""Configs and layouts for scheduler tests, without any model behind them."""

from sparseserve_jax.cache.layout import KVLayout
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.scheduler.request_state import SchedulerRequest


def make_config(**changes) -> EngineConfig:
    """A small engine: selections of 4 blocks of 32."""
    settings = {
        "sparse_budget_tokens": 128, "num_newest_blocks": 1, "max_num_batched_tokens": 256, "num_dense_layers": 1,
        "working_set_margin": 0.0,
    }  # fmt: skip
    return EngineConfig(**(settings | changes))


def make_layout(**changes) -> KVLayout:
    """4 layers, one of them dense; sequences of up to 32 blocks; selections of 4 blocks."""
    tiered = changes.get("tiered", False)
    settings = {
        "block_size": 32, "num_layers": 4, "num_dense_layers": 1, "num_kv_heads": 2, "head_dim": 64,
        "piece_bytes": 8192, "tiered": tiered, "max_model_len": 1024, "max_num_seqs": 6, "selection_blocks": 4,
        "num_blocks": 96, "num_slots": 40 if tiered else 0, "num_dense_blocks": 64 if tiered else 0,
        "num_staging_blocks": 32 if tiered else 0, "max_blocks_per_seq": 32, "min_grant_slots": 4,
        "max_grant_slots": 16, "device_bytes": 0, "host_bytes": 0,
    }  # fmt: skip
    settings |= changes
    settings["dense_layers"] = tuple(range(settings.pop("num_dense_layers")))
    return KVLayout(**settings)


def make_request(request_id: str, prompt: int = 100, new: int = 8, *, arrival_s: float = 0.0, priority: int = 0):
    """A request that waits."""
    return SchedulerRequest(
        request_id=request_id, arrival_s=arrival_s, num_prompt_tokens=prompt, max_new_tokens=new, priority=priority
    )

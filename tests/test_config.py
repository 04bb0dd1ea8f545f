import dataclasses
import math

import pytest

from sparseserve_jax.config import EngineConfig

COUNTS = (
    "num_dense_layers", "num_sink_blocks", "num_newest_blocks", "max_num_seqs", "working_set_window",
    "max_grant_factor", "max_num_batched_tokens", "device_kv_bytes", "max_model_len", "max_inject_tokens",
)  # fmt: skip


def test_defaults_are_valid():
    config = EngineConfig()
    assert config.sparse_budget_blocks == 64
    assert EngineConfig(sparse_budget_tokens=None).sparse_budget_blocks is None


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [-1, 1.0, math.nan, math.inf, True, "8", [8]], ids=repr)
def test_bad_counts(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"), ("dtype", None), ("block_size", 8), ("block_size", "32"), ("selection", "best"),
        ("selection_granularity", "layer"), ("kv_tiers", "both"), ("prefill", ""), ("batch_control", True),
        ("implementation", "cuda"),
        ("num_newest_blocks", 0), ("max_num_seqs", 0), ("working_set_window", 0), ("max_grant_factor", 0),
        ("max_num_batched_tokens", 64), ("max_num_batched_tokens", 1000),
        ("working_set_margin", -0.1), ("working_set_margin", 4.1), ("working_set_margin", math.nan),
        ("working_set_margin", math.inf),
        ("sparse_budget_tokens", 0), ("sparse_budget_tokens", -32), ("sparse_budget_tokens", 100),
        ("sparse_budget_tokens", 96),
    ],
)  # fmt: skip
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


def test_the_message_names_the_value_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"block_size=8 .* 16, 32, 64"):
        EngineConfig(block_size=8)
    with pytest.raises(ValueError, match=r"sparse_budget_tokens=96 .*block_size=32 .*128"):
        EngineConfig(sparse_budget_tokens=96)


def test_the_smallest_budget_holds_sink_newest_and_one_chosen_block():
    config = EngineConfig(sparse_budget_tokens=48, block_size=16, num_sink_blocks=0)
    assert config.sparse_budget_blocks == 3


def test_host_bytes_need_tiers():
    with pytest.raises(ValueError, match="kv_tiers='tiered'"):
        EngineConfig(host_kv_bytes=1 << 20)
    EngineConfig(host_kv_bytes=1 << 20, kv_tiers="tiered")


def test_frozen_and_hashable():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 16  # type: ignore[misc]
    assert hash(config) == hash(EngineConfig())

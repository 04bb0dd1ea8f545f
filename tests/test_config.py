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
        ("prefill_sparsity", 0.0), ("prefill_sparsity", 1.1), ("prefill_sparsity", -0.5),
        ("prefill_sparsity", math.nan),
        ("sparse_budget_tokens", 0), ("sparse_budget_tokens", -32), ("sparse_budget_tokens", 100),
        ("sparse_budget_tokens", 96),
    ],
)  # fmt: skip
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("sparse_budget_tokens", 2048.0, "an integer"), ("sparse_budget_tokens", "x", "an integer"),
        ("sparse_budget_tokens", True, "an integer"), ("sparse_budget_tokens", [2048], "an integer"),
        ("sparse_budget_tokens", math.nan, "an integer"),
        ("block_size", 32.0, "16, 32, 64"), ("block_size", True, "16, 32, 64"), ("block_size", None, "16, 32, 64"),
        ("seed", "x", "an integer"), ("seed", 1.0, "an integer"), ("seed", None, "an integer"),
        ("seed", True, "an integer"),
        ("deterministic", "no", "True or False"), ("deterministic", 1, "True or False"),
        ("deterministic", None, "True or False"), ("record_selection", "yes", "True or False"),
        ("prefill_sparsity", True, "a number"), ("prefill_sparsity", "0.9", "a number"),
        ("working_set_margin", True, "a number"), ("working_set_margin", "0.1", "a number"),
        ("working_set_margin", None, "a number"),
        ("compilation_cache_dir", 5, "a string"), ("compilation_cache_dir", False, "a string"),
        ("rope_scaling", "yarn", "map names"), ("rope_scaling", {"factor": None}, "map names"),
        ("rope_scaling", {4: 1.0}, "map names"),
        ("dense_layers", 7, "a tuple"), ("dense_layers", (1.0,), "a tuple"), ("dense_layers", (-1,), "from 0 on"),
        ("dense_layers", (True,), "a tuple"), ("dense_layers", (3, 3), "twice"), ("record_timeline", 1, "True or"),
        ("dtype", ["bfloat16"], "'bfloat16', 'float32'"), ("selection", None, "'cuboid-mean'"),
    ],
)  # fmt: skip
def test_wrong_types(name, value, wanted):
    with pytest.raises(ValueError, match=f"{name}=.*{wanted}"):
        EngineConfig(**{name: value})


def test_whole_margins_and_any_integer_seed():
    EngineConfig(working_set_margin=0, seed=-1)
    EngineConfig(working_set_margin=4, seed=2**70)


def test_the_message_names_the_value_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"block_size=8 .* 16, 32, 64"):
        EngineConfig(block_size=8)
    with pytest.raises(ValueError, match=r"sparse_budget_tokens=96 .*block_size=32 .*128"):
        EngineConfig(sparse_budget_tokens=96)


def test_the_smallest_budget_holds_sink_newest_and_one_chosen_block():
    config = EngineConfig(sparse_budget_tokens=48, block_size=16, num_sink_blocks=0)
    assert config.sparse_budget_blocks == 3


def test_dense_layers_are_kept_in_order_and_exclude_a_number_of_them():
    assert EngineConfig(dense_layers=[18, 7]).dense_layers == (7, 18)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"num_dense_layers=2 and dense_layers=.*one of them"):
        EngineConfig(num_dense_layers=2, dense_layers=(7,))


def test_host_bytes_need_tiers():
    with pytest.raises(ValueError, match="kv_tiers='tiered'"):
        EngineConfig(host_kv_bytes=1 << 20)
    EngineConfig(host_kv_bytes=1 << 20, kv_tiers="tiered")


def test_frozen_and_hashable():
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 16  # type: ignore[misc]
    assert hash(config) == hash(EngineConfig())
    scaling = {"rope_type": "yarn", "factor": 2.0}
    scaled = EngineConfig(rope_scaling=scaling)
    scaling["factor"] = 3.0
    assert scaled == EngineConfig(rope_scaling={"rope_type": "yarn", "factor": 2.0}) != config
    assert isinstance(hash(scaled), int)


def test_int8_kv_is_for_one_pool():
    assert EngineConfig(kv_dtype="int8").kv_dtype == "int8"
    with pytest.raises(ValueError, match=r"kv_dtype='int4' is not supported; choose 'int8', or None"):
        EngineConfig(kv_dtype="int4")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"kv_dtype='int8' needs kv_tiers='unified'.*kv_dtype=None"):
        EngineConfig(kv_dtype="int8", kv_tiers="tiered")

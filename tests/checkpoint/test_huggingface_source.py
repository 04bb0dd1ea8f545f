"""Hugging Face directories: what is read, the three shapes of tied embeddings (L08), EOS ids (L07), refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sparseserve_jax.checkpoint.open import open_checkpoint
from tests.checkpoint.tiny_checkpoints import CONFIG, TEMPLATE, tensors, write_checkpoint, write_json, write_tensors

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_reads_tensors_as_stored(tmp_path: Path, dtype: Any, num_files: int) -> None:
    source = open_checkpoint(write_checkpoint(tmp_path / "tiny", dtype=dtype, num_files=num_files))
    expected = tensors(CONFIG, dtype)
    assert source.tensor_names() == tuple(expected)
    for name, value in expected.items():
        got = source.tensor(name)
        assert got.dtype == value.dtype
        np.testing.assert_array_equal(got, value)
    assert "tiny: Hugging Face safetensors" in source.describe()
    with pytest.raises(ValueError, match="nothing"):
        source.tensor("nothing")


def test_reads_config_tokenizer_and_template(tmp_path: Path) -> None:
    source = open_checkpoint(write_checkpoint(tmp_path / "tiny"))
    config = source.config
    assert (config.name, config.num_q_heads, config.num_kv_heads, config.head_dim) == ("tiny", 4, 2, 8)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (10000.0, None, 128)
    assert (config.bos_token_id, config.eos_token_ids) == (259, (260,))
    assert (source.special.bos_token, source.special.eos_token) == ("<s>", "</s>")
    assert source.chat_template == TEMPLATE
    assert json.loads(source.tokenizer_json)["model"]["type"] == "BPE"


def test_sidecar_template_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    write_json(path / "tokenizer_config.json", {"chat_template": [{"name": "tool_use", "template": "x"}]})
    assert open_checkpoint(path).chat_template is None
    write_json(path / "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "d"}]})
    assert open_checkpoint(path).chat_template == "d"
    (path / "chat_template.jinja").write_text("sidecar")
    assert open_checkpoint(path).chat_template == "sidecar"


def test_eos_ids_are_the_union(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, eos_token_id=5)
    write_json(path / "generation_config.json", {"eos_token_id": [7, 8, 5]})
    assert open_checkpoint(path).config.eos_token_ids == (7, 8, 5, 260)
    write_json(path / "generation_config.json", {"eos_token_id": 9})
    assert open_checkpoint(path).config.eos_token_ids == (9, 5, 260)
    write_json(path / "generation_config.json", {"eos_token_id": 9000})
    with pytest.warns(UserWarning, match="9000"):
        assert open_checkpoint(path).config.eos_token_ids == (5, 260)
    write_json(path / "generation_config.json", {"eos_token_id": "</s>"})
    with pytest.raises(ValueError, match=r"generation_config\.json.*eos_token_id"):
        open_checkpoint(path)


def test_tied_embeddings(tmp_path: Path) -> None:
    tied = write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(tied).tensor_names()

    values = tensors(CONFIG)
    write_tensors(tied, values | {"lm_head.weight": values["model.embed_tokens.weight"]})
    assert "lm_head.weight" not in open_checkpoint(tied).tensor_names()

    write_tensors(tied, values)  # a head of its own
    with pytest.warns(UserWarning, match=r"lm_head\.weight.*ignored"):
        source = open_checkpoint(tied)
    assert "lm_head.weight" not in source.tensor_names()
    with pytest.raises(ValueError, match="lm_head"):
        source.tensor("lm_head.weight")

    untied = write_checkpoint(tmp_path / "untied")
    write_tensors(untied, {name: value for name, value in values.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"lm_head\.weight' is missing and tie_word_embeddings is false"):
        open_checkpoint(untied)


def test_rope_in_both_spellings(tmp_path: Path) -> None:
    old = open_checkpoint(write_checkpoint(tmp_path / "m", rope_theta=500000.0, rope_scaling=LLAMA3)).config
    new_raw = {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}
    new = open_checkpoint(write_checkpoint(tmp_path / "m", **new_raw)).config
    assert old == new
    assert dict(new.rope_scaling or ()) == LLAMA3
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32}
    config = open_checkpoint(write_checkpoint(tmp_path / "m", **yarn)).config
    assert (config.rope_scaling_dict or {})["original_max_position_embeddings"] == 32
    plain = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    config = open_checkpoint(write_checkpoint(tmp_path / "m", **plain)).config
    assert (config.rope_theta, config.rope_scaling) == (5000.0, None)


def test_biases_and_derived_tables(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, attention_bias=True, mlp_bias=True)
    assert open_checkpoint(path).tensor("model.layers.1.self_attn.k_proj.bias").shape == (16,)
    values = tensors(CONFIG)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_tensors(write_checkpoint(tmp_path), values | table)
    assert not any("inv_freq" in name for name in open_checkpoint(tmp_path).tensor_names())


def test_retrieval_layers(tmp_path: Path) -> None:
    assert open_checkpoint(write_checkpoint(tmp_path / "m", retrieval_layers=[1, 0])).config.retrieval_layers == (0, 1)
    assert open_checkpoint(write_checkpoint(tmp_path / "m")).config.retrieval_layers == ()


def test_mistral_without_a_window(tmp_path: Path) -> None:
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    assert open_checkpoint(write_checkpoint(tmp_path, **mistral, sliding_window=None)).config.num_layers == 2
    with pytest.raises(ValueError, match="sliding_window=64"):
        open_checkpoint(write_checkpoint(tmp_path, **mistral, sliding_window=64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "qwen3"}, "qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "surprise", "factor": 2.0}}, "surprise"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"rope_theta": 0}, "rope_theta=0"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ({"eos_token_id": -1}, "eos_token_id=-1"),
        ({"retrieval_layers": [2]}, "retrieval_layers=.* from 0 to 1"),
        ({"retrieval_layers": [1.0]}, "retrieval_layers"),
        ({"retrieval_layers": 1}, "retrieval_layers"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no'"),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, changes: dict, reason: str) -> None:
    path = write_checkpoint(tmp_path)
    write_json(path / "config.json", CONFIG | changes)
    with pytest.raises(ValueError, match=reason) as caught:
        open_checkpoint(path)
    assert str(path / "config.json") in str(caught.value)


@pytest.mark.parametrize("number", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, 0, 1.5, "8", True])
def test_numbers_that_are_refused(tmp_path: Path, number: str, value: object) -> None:
    path = write_checkpoint(tmp_path)
    write_json(path / "config.json", CONFIG | {number: value})
    with pytest.raises(ValueError, match=number):
        open_checkpoint(path)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    values = tensors(CONFIG)
    norm = "model.layers.1.input_layernorm.weight"
    write_tensors(path, {name: value for name, value in values.items() if name != norm})
    with pytest.raises(ValueError, match=rf"{norm}' is missing"):
        open_checkpoint(path)
    write_tensors(path, values | {norm: np.ones(31, np.float32)})
    with pytest.raises(ValueError, match=r"shape \(31,\), the config calls for \(32,\)"):
        open_checkpoint(path)
    write_tensors(path, values | {"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)})
    with pytest.raises(ValueError, match=r"q_norm\.weight' does not belong"):
        open_checkpoint(path)
    write_tensors(path, values | {norm: np.ones(32, np.int8)})
    with pytest.raises(ValueError, match="dtype I8"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_empty_and_truncated_files_are_refused(tmp_path: Path, name: str) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    whole = (path / name).read_bytes()
    for content in (whole[: len(whole) // 2], b"", None):
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content)
        with pytest.raises((ValueError, FileNotFoundError), match=name.replace(".", r"\.")):
            open_checkpoint(path)


def test_shards_that_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, num_files=2)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    for weight_map, reason in (
        ({name: "../elsewhere.safetensors" for name in good}, "same directory"),
        (good | {"lm_head.weight": "part-9.safetensors"}, r"part-9\.safetensors is missing"),
        (good | {"surprise": "part-0.safetensors"}, "'surprise' is missing"),
        ({}, "weight_map"),
    ):
        write_json(index, {"weight_map": weight_map})
        with pytest.raises((ValueError, FileNotFoundError), match=reason):
            open_checkpoint(path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin, which is not supported"):
        open_checkpoint(path)

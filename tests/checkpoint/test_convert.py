"""Conversions there and back, and that transformers reads what we write."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sparseserve_jax.checkpoint import convert as convert_module
from sparseserve_jax.checkpoint.convert import convert
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.checkpoint.orbax_source import OrbaxSource
from sparseserve_jax.text.tokenizer import Tokenizer
from tests.checkpoint.tiny_checkpoints import CONFIG, TEMPLATE, tensors, write_checkpoint, write_json

TEXTS = ["the theory 123", "<s>x</s> two words 語é", "👨‍👩‍👧‍👦 กำลัง", " \n\t "]


@pytest.mark.parametrize("format", ["orbax", "huggingface"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_round_trip(tmp_path: Path, format, dtype) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    path = write_checkpoint(tmp_path / "in" / "tiny", rope_scaling=yarn, attention_bias=True, retrieval_layers=[1])
    write_json(path / "generation_config.json", {"eos_token_id": [3, 260]})
    source = open_checkpoint(path)
    written = convert(source, tmp_path / "out" / "tiny", format=format, dtype=dtype)
    again = open_checkpoint(written)
    assert again.config == source.config
    assert (again.tokenizer_json, again.special) == (source.tokenizer_json, source.special)
    assert again.chat_template == source.chat_template == TEMPLATE
    for name in source.tensor_names():
        value = again.tensor(name)
        assert value.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(value, source.tensor(name).astype(dtype))
    assert [p.name for p in written.parent.iterdir()] == ["tiny"]  # nothing temporary is left


def test_float32_becomes_nearest_bfloat16(tmp_path: Path) -> None:
    source = open_checkpoint(write_checkpoint(tmp_path / "in", dtype=np.float32))
    again = open_checkpoint(convert(source, tmp_path / "out", format="huggingface", dtype="bfloat16"))
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(again.tensor(name), tensors(CONFIG, np.float32)[name].astype(ml_dtypes.bfloat16))


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert_module, "MAX_SHARD_BYTES", 20_000)
    source = open_checkpoint(write_checkpoint(tmp_path / "in"))
    written = convert(source, tmp_path / "out", format="huggingface", dtype="float32")
    assert len(list(written.glob("model-*-of-*.safetensors"))) > 2
    for name, value in tensors(CONFIG).items():
        np.testing.assert_array_equal(open_checkpoint(written).tensor(name), value.astype(np.float32))


def test_nothing_is_overwritten_and_failures_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(write_checkpoint(tmp_path / "in"))
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    with pytest.raises(ValueError, match="not an empty directory"):
        convert(source, full, format="orbax", dtype="bfloat16")
    with pytest.raises(ValueError, match="not an empty directory"):
        convert(source, full / "mine", format="orbax", dtype="bfloat16")
    with pytest.raises(ValueError, match="float16"):
        convert(source, tmp_path / "x", format="orbax", dtype="float16")  # pyright: ignore
    with pytest.raises(ValueError, match="gguf"):
        convert(source, tmp_path / "x", format="gguf", dtype="float32")  # pyright: ignore

    before = sorted(p.name for p in tmp_path.iterdir())

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(convert_module, "save_file", fail)
    with pytest.raises(OSError, match="no room"):
        convert(source, tmp_path / "new", format="huggingface", dtype="float32")
    assert sorted(p.name for p in tmp_path.iterdir()) == before

    (tmp_path / "empty").mkdir()
    monkeypatch.undo()
    assert open_checkpoint(convert(source, tmp_path / "empty", format="huggingface", dtype="float32"))


def test_transformers_reads_what_we_write(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    path = write_checkpoint(tmp_path / "in", dtype=np.float32, rope_scaling=rope)
    source = open_checkpoint(path)
    written = convert(source, tmp_path / "out", format="huggingface", dtype="float32")
    models = [transformers.AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (path, written)]
    with torch.no_grad():
        logits = [model(torch.arange(100)[None]).logits for model in models]
    assert torch.equal(*logits)
    state = models[1].state_dict()
    assert set(state) == set(source.tensor_names())
    theirs = transformers.AutoTokenizer.from_pretrained(written)
    ours = Tokenizer(source.tokenizer_json, bos_token_id=259)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            if ids[:2] == [259, 259]:
                ids = ids[1:]  # where transformers doubles the BOS of the text
            assert ours.encode(text, add_special_tokens=special) == ids
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "<s>[user]hi\n"


def test_orbax_is_preferred_to_safetensors_beside_it(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "in")
    written = convert(open_checkpoint(path), tmp_path / "out", format="orbax", dtype="float32")
    shutil.copy(path / "model.safetensors", written)
    assert isinstance(open_checkpoint(written), OrbaxSource)

"""Tiny Llama checkpoints on disk, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from sparseserve_jax.checkpoint.hf_config import parse_config
from sparseserve_jax.checkpoint.source import expected_shapes
from tests.text import tokenizers_for_tests

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 272, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "bos_token_id": 259, "eos_token_id": 260,
}  # fmt: skip
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"


def tensors(raw: dict[str, Any], dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Random values for every tensor of the config."""
    rng = np.random.default_rng(0)
    shapes = expected_shapes(parse_config(raw, name="tiny", where="tiny"))
    return {name: (rng.standard_normal(shape) * 0.1).astype(dtype) for name, shape in shapes.items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def write_checkpoint(directory: Path, *, dtype: Any = ml_dtypes.bfloat16, num_files: int = 1, **changes: Any) -> Path:
    """A Hugging Face directory; `changes` go into its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = CONFIG | changes
    write_json(directory / "config.json", raw)
    (directory / "tokenizer.json").write_text(tokenizers_for_tests.byte_level(add_bos=True), encoding="utf-8")
    write_json(
        directory / "tokenizer_config.json",
        {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE},
    )
    write_tensors(directory, tensors(raw, dtype), num_files)
    return directory


def write_tensors(directory: Path, values: dict[str, np.ndarray], num_files: int = 1) -> None:
    if num_files == 1:
        save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: f"part-{i % num_files}.safetensors" for i, name in enumerate(values)}
    for file_name in set(weight_map.values()):
        save_file({n: values[n] for n, f in weight_map.items() if f == file_name}, directory / file_name)
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})

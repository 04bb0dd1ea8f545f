"""A small random model whose attention is sharp, so that a wrong block changes its tokens; and prompts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.tiny_checkpoints import CONFIG, tensors, write_checkpoint, write_tensors

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "eos_token_id": 260,
}  # fmt: skip
VOCAB_SIZE = CONFIG["vocab_size"]


def write_sharp_model(directory: Path, **changes: Any) -> Path:
    """A Hugging Face directory in float32; `changes` go into its config.json."""
    write_checkpoint(directory, dtype=np.float32, **SHAPE | changes)
    values = tensors(CONFIG | SHAPE | changes, np.float32)
    for name, value in values.items():
        if "norm" in name:
            values[name] = 1.0 + value
        elif "embed" in name:
            values[name] = value * 10.0
        else:
            values[name] = value * 2.5
    write_tensors(directory, values)
    return directory


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids that are plain bytes (no special tokens)."""
    return np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()

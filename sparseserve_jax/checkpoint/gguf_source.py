"""Llama models in GGUF files; the `gguf` package turns quantised tensors into float32 when they are asked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from gguf.quants import dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from sparseserve_jax.checkpoint.gguf_file import StoredTensor, read_gguf
from sparseserve_jax.checkpoint.source import SpecialTokens, check_shapes, describe_source, expected_shapes
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.rope import rope_frequencies

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PRE_TOKENIZERS = ("smollm",)
_CONTROL_TOKEN, _USER_DEFINED_TOKEN = 3, 4
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Keys that change the model and that we do not implement, with the values that leave it as it is.
_NEUTRAL = {
    "expert_count": (None, 0),
    "attention.sliding_window": (None, 0),
    "attention.causal": (None, True),
    "attention.clamp_kqv": (None, 0),
    "attention.scale": (None, 0),
    "attention.max_alibi_bias": (None, 0),
    "use_parallel_residual": (None, False),
    "rope.scaling.attn_factor": (None, 1),
    "rope.scale_linear": (None, 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFSource:
    """A `CheckpointSource` over one GGUF file. Opened by `open_gguf`; the file stays mapped as long as it lives."""

    path: Path
    config: ModelConfig
    tokenizer_json: str = dataclasses.field(repr=False)
    chat_template: str | None = dataclasses.field(repr=False)
    special: SpecialTokens
    stored: Mapping[str, StoredTensor] = dataclasses.field(repr=False)
    """Hugging Face name -> tensor."""

    def tensor_names(self) -> tuple[str, ...]:
        """See `CheckpointSource`."""
        return tuple(expected_shapes(self.config))

    def tensor(self, name: str) -> np.ndarray:
        """See `CheckpointSource`; always float32."""
        if name not in self.stored:
            raise ValueError(f"{self.path} has no tensor {name!r}")
        stored = self.stored[name]
        try:
            values = dequantize(stored.data, stored.quantization)
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name!r} has quantisation {stored.quantization.name}, which the gguf package "
                "cannot turn into numbers; use a file with another quantisation"
            ) from error
        values = np.array(values, np.float32).reshape(stored.shape)
        if name.endswith("q_proj.weight"):
            return _unpermute(values, self.config.num_q_heads)
        if name.endswith("k_proj.weight"):
            return _unpermute(values, self.config.num_kv_heads)
        return values

    def describe(self) -> str:
        """See `CheckpointSource`."""
        kinds = sorted({stored.quantization.name for stored in self.stored.values() if len(stored.shape) > 1})
        return describe_source(self.config, f"GGUF {'/'.join(kinds)}", self.path)


def open_gguf(path: Path, *, name: str | None = None) -> GGUFSource:
    """Opens a GGUF file of architecture `llama`.

    Args:
        name: of the model; None = `general.name` or the file's name.

    Raises:
        ValueError: truncated, no GGUF, another architecture, or something in it that is not supported; names it.
    """
    file = read_gguf(path)
    fields = file.fields
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path}: architecture {architecture!r} is not supported; supported is 'llama'")
    try:
        tokens = _list(fields, "tokenizer.ggml.tokens")
        tensors = {_hugging_face_name(key): tensor for key, tensor in file.tensors.items()}
        config = _model_config(
            fields,
            name=name or str(fields.get("general.name") or path.stem),
            vocab_size=len(tokens),
            tied="lm_head.weight" not in tensors,
        )
        rope_frequencies(config)
        special = SpecialTokens(
            bos_token=None if config.bos_token_id is None else tokens[config.bos_token_id],
            eos_token=tokens[config.eos_token_ids[0]] if config.eos_token_ids else None,
        )
        tokenizer_json = _build_tokenizer(fields, config, special)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    check_shapes(path, config, {key: tensor.shape for key, tensor in tensors.items()})
    template = fields.get("tokenizer.chat_template")
    return GGUFSource(
        path=path, config=config, tokenizer_json=tokenizer_json, special=special, stored=tensors,
        chat_template=None if template is None else str(template),
    )  # fmt: skip


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer is None or layer[2] not in _LAYER_NAMES:
        hint = " (frequencies of scaled RoPE: use the model's safetensors)" if name.startswith("rope_") else ""
        raise ValueError(f"tensor {name!r} is not supported{hint}")
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"


def _model_config(fields: Mapping[str, Any], *, name: str, vocab_size: int, tied: bool) -> ModelConfig:
    for key, values in _NEUTRAL.items():
        if fields.get(f"llama.{key}") not in values:
            raise ValueError(f"llama.{key}={fields[f'llama.{key}']!r} is not supported")

    def number(key: str, default: int | None = None) -> int:
        value = fields.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"llama.{key}={value!r} must be one integer of at least 1")
        return value

    hidden_size, num_q_heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden_size // num_q_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(f"llama.{key}={fields[f'llama.{key}']} is not supported; it must be head_dim={head_dim}")
    if number("vocab_size", vocab_size) != vocab_size:
        raise ValueError(f"llama.vocab_size={fields['llama.vocab_size']} differs from the {vocab_size} tokens")

    def token_id(key: str) -> int | None:
        value = fields.get(f"tokenizer.ggml.{key}")
        if value is not None and not 0 <= value < vocab_size:
            raise ValueError(f"tokenizer.ggml.{key}={value} must lie in [0, {vocab_size})")
        return value

    eos_ids = dict.fromkeys(token_id(key) for key in _EOS_KEYS)
    return ModelConfig(
        name=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=number("block_count"),
        num_q_heads=num_q_heads,
        num_kv_heads=number("attention.head_count_kv", num_q_heads),
        head_dim=head_dim,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=_shortest_decimal(fields["llama.attention.layer_norm_rms_epsilon"])
        if "llama.attention.layer_norm_rms_epsilon" in fields
        else 1e-5,
        rope_theta=float(fields.get("llama.rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(fields),
        tie_word_embeddings=tied,
        bos_token_id=token_id("bos_token_id"),
        eos_token_ids=tuple(token_id for token_id in eos_ids if token_id is not None),
    )


def _shortest_decimal(value: float) -> float:
    """GGUF keeps 1e-5 as the float32 next to it; Hugging Face configs say 1e-5. Both are the same float32."""
    return float(str(np.float32(value)))


def _rope_scaling(fields: Mapping[str, Any]) -> tuple[tuple[str, object], ...] | None:
    kind = fields.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return (("factor", float(fields.get("llama.rope.scaling.factor", 1.0))), ("rope_type", "linear"))
    raise ValueError(f"llama.rope.scaling.type={kind!r} is not supported in GGUF files; use the model's safetensors")


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of rotary pairs (convert_hf_to_gguf.py, `LlamaModel.permute`): `[out, in]`."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _build_tokenizer(fields: Mapping[str, Any], config: ModelConfig, special: SpecialTokens) -> str:
    """A byte-level BPE tokenizer from the file's tokens and merges, as the content of a `tokenizer.json`."""
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={model!r} is not supported in GGUF files; supported is 'gpt2' (BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre={pre!r} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}")
    tokens, merges = _list(fields, "tokenizer.ggml.tokens"), _list(fields, "tokenizer.ggml.merges")
    kinds = _list(fields, "tokenizer.ggml.token_type")
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens has {len(tokens)} entries, not all distinct or not all with a type")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("tokenizer.ggml.merges has an entry that is not two tokens")
    try:
        bpe = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=pairs)  # type: ignore[arg-type]
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer.ggml.merges do not fit the tokens: {error}") from error
    tokenizer = tokenizers.Tokenizer(bpe)
    # SmolLM2's tokenizer.json: single digits, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    of_kind = {kind: [t for t, k in zip(tokens, kinds, strict=True) if k == kind] for kind in set(kinds)}
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in of_kind.get(_CONTROL_TOKEN, ())]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in of_kind.get(_USER_DEFINED_TOKEN, ())])
    if fields.get("tokenizer.ggml.add_bos_token") and special.bos_token is not None:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=["$BOS:0".replace("$BOS", special.bos_token), "$A"],
            special_tokens=[(special.bos_token, config.bos_token_id)],
        )
    return tokenizer.to_str()


def _list(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = fields.get(key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} is missing")
    return value

"""GGUF files: the default model, synthetic files with everything that is refused, dequantisation and row order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from sparseserve_jax.checkpoint.embedded import find_embedded
from sparseserve_jax.checkpoint.gguf_file import read_gguf
from sparseserve_jax.checkpoint.gguf_source import GGUFSource, open_gguf
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.text.chat_template import render_chat
from sparseserve_jax.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import BYTE_ALPHABET

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 4, 2, 8
TOKENS = ["<eos>", "<bos>", *BYTE_ALPHABET, "Ġt", "he", "Ġthe"]


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's, as in convert_hf_to_gguf.py."""
    shape = (num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    *,
    fields: dict[str, object] | None = None,
    architecture: str = "llama",
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    head: bool = False,
    extra_tensor: str | None = None,
    pre: str = "smollm",
    model: str = "gpt2",
    alignment: int = 32,
) -> dict[str, np.ndarray]:
    """Writes a one-layer model; returns the values under Hugging Face names."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_custom_alignment(alignment)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(["Ġ t", "h e", "Ġt he"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    for key, value in (fields or {}).items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)  # type: ignore[operator]

    values: dict[str, np.ndarray] = {}

    def put(name: str, hugging_face: str, shape: tuple[int, ...], num_heads: int = 0) -> None:
        value = rng.standard_normal(shape).astype(np.float32)
        kind = quantization if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quants.quantize(permute(value, num_heads) if num_heads else value, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
        values[hugging_face] = value

    put("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN))
    put("output_norm.weight", "model.norm.weight", (HIDDEN,))
    if head:
        put("output.weight", "lm_head.weight", (len(TOKENS), HIDDEN))
    layer = "model.layers.0."
    put("blk.0.attn_norm.weight", layer + "input_layernorm.weight", (HIDDEN,))
    put("blk.0.ffn_norm.weight", layer + "post_attention_layernorm.weight", (HIDDEN,))
    put("blk.0.attn_q.weight", layer + "self_attn.q_proj.weight", (HIDDEN, HIDDEN), HEADS)
    put("blk.0.attn_k.weight", layer + "self_attn.k_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN), KV_HEADS)
    put("blk.0.attn_v.weight", layer + "self_attn.v_proj.weight", (KV_HEADS * HEAD_DIM, HIDDEN))
    put("blk.0.attn_output.weight", layer + "self_attn.o_proj.weight", (HIDDEN, HIDDEN))
    put("blk.0.ffn_gate.weight", layer + "mlp.gate_proj.weight", (INNER, HIDDEN))
    put("blk.0.ffn_up.weight", layer + "mlp.up_proj.weight", (INNER, HIDDEN))
    put("blk.0.ffn_down.weight", layer + "mlp.down_proj.weight", (HIDDEN, INNER))
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
def test_reads_tensors(tmp_path: Path, kind: str, head: bool) -> None:
    expected = write_gguf(tmp_path / "a.gguf", quantization=gguf.GGMLQuantizationType[kind], head=head)
    source = open_checkpoint(tmp_path / "a.gguf")
    assert source.config.tie_word_embeddings is not head
    assert set(source.tensor_names()) == set(expected)
    tolerance = {"F32": 0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2, "Q4_1": 0.3}[kind]
    for name, value in expected.items():
        got = source.tensor(name)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, value, atol=tolerance)
    assert f"Tiny: GGUF {kind}" in source.describe()
    with pytest.raises(ValueError, match="nothing"):
        source.tensor("nothing")


def test_reads_config_and_tokenizer(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "a.gguf",
        fields={
            "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0,
            "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eot_token_id": 5,
        },
    )  # fmt: skip
    source = open_checkpoint(tmp_path / "a.gguf")
    config = source.config
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 50000.0)
    assert config.rope_scaling == (("factor", 2.0), ("rope_type", "linear"))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (0, 5))
    assert (source.special.bos_token, source.special.eos_token) == ("<bos>", "<eos>")
    assert source.chat_template is None
    tokenizer = Tokenizer(source.tokenizer_json, bos_token_id=1)
    assert tokenizer.encode(" the") == [1, TOKENS.index("Ġthe")]
    assert tokenizer.decode(tokenizer.encode("<eos> the 12")) == " the 12"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"extra_tensor": "rope_freqs.weight"}, r"rope_freqs\.weight"),
        ({"extra_tensor": "blk.0.attn_q.bias"}, r"attn_q\.bias"),
        ({"extra_tensor": "blk.0.ffn_gate_inp.weight"}, r"ffn_gate_inp\.weight"),
        ({"extra_tensor": "blk.7.ffn_norm.weight"}, r"layers\.7"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"fields": {"llama.expert_count": 8}}, "expert_count=8"),
        ({"fields": {"llama.attention.key_length": 16}}, "head_dim=16"),
        ({"fields": {"llama.vocab_size": 300}}, "vocab_size=300"),
        ({"fields": {"tokenizer.ggml.eot_token_id": 5000}}, "eot_token_id=5000"),
        ({"pre": "surprise"}, r"tokenizer\.ggml\.pre='surprise'"),
        ({"model": "llama"}, r"tokenizer\.ggml\.model='llama'"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: dict, reason: str) -> None:
    write_gguf(tmp_path / "a.gguf", **arguments)
    with pytest.raises(ValueError, match=reason) as caught:
        open_checkpoint(tmp_path / "a.gguf")
    assert str(tmp_path / "a.gguf") in str(caught.value)


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    for length in (*range(1, 200, 13), len(whole) // 20, len(whole) // 3, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"a\.gguf is truncated or no GGUF file"):
            open_checkpoint(path)
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(ValueError, match="no GGUF file"):
        open_checkpoint(path)


@pytest.fixture(scope="module")
def embedded() -> GGUFSource:
    try:
        path = find_embedded()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return open_gguf(path, name="SmolLM2-135M-Instruct")


def test_default_model(embedded: GGUFSource) -> None:
    config = embedded.config
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (49152, 576, 30)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.max_position_embeddings, config.rms_norm_eps) == (100000.0, 8192, 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)
    assert len(embedded.tensor_names()) == 272
    assert "134.5 M parameters" in embedded.describe()
    weight = embedded.tensor("model.layers.29.self_attn.k_proj.weight")
    assert (weight.shape, weight.dtype) == ((192, 576), np.float32)


def test_default_models_tokenizer_and_template(embedded: GGUFSource) -> None:
    tokenizer = Tokenizer(embedded.tokenizer_json, bos_token_id=1, eos_token_ids=(2,), vocab_size=49152)
    text = "Hello 2024, it's <|im_end|>日本 👨‍👩‍👧‍👦\n\n  x"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode("12") == [tokenizer.token_to_id("1"), tokenizer.token_to_id("2")]
    chat = render_chat(embedded.chat_template, [{"role": "user", "content": "Hi"}], bos_token="<|im_start|>")
    ids = tokenizer.encode_chat(chat)
    assert ids.count(1) == 3
    assert ids[0] == 1
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_default_model_matches_transformers_own_reader(embedded: GGUFSource) -> None:
    """transformers reads GGUF itself, with its own row order, names and dequantisation."""
    pytest.importorskip("torch")
    loader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    processor_of = getattr(loader, "TENSOR_PROCESSORS", None)
    if processor_of is None:
        pytest.skip("this version of transformers has no GGUF tensor processors")
    processor = processor_of["llama"](config={"num_attention_heads": 9, "num_key_value_heads": 3})
    tensors = read_gguf(embedded.path).tensors
    for ours, theirs in (("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("mlp.up_proj", "ffn_up")):
        stored = tensors[f"blk.3.{theirs}.weight"]
        expected = processor.process(
            weights=gguf.quants.dequantize(stored.data, stored.quantization), name=f"blk.3.{theirs}.weight"
        )
        np.testing.assert_array_equal(embedded.tensor(f"model.layers.3.{ours}.weight"), expected.weights)

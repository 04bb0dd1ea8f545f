"""The same weights for everybody: the embedded model as a bfloat16 Hugging Face directory and as GGUF files.

Every side gets the same bfloat16 values (Q8_0 is made from them). `max_position_embeddings` is raised for prompts
beyond the 8,192 tokens that the model was trained for: what it says there is irrelevant, the time is not. Positions
below are not affected, as the model's rotary embedding does not depend on the limit.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

from sparseserve_jax.checkpoint.convert import convert
from sparseserve_jax.checkpoint.embedded import find_embedded
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.models.rope import with_rope_scaling

LONGER = {"rope_type": "default", "factor": 5.0}
"""As `EngineConfig.rope_scaling`: five times the positions, nothing scaled."""
GGUF_TYPES = {
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}


def huggingface_directory(folder: Path) -> Path:
    """The embedded model in bfloat16 safetensors; written once."""
    directory = folder / "smollm2-bf16"
    if not directory.exists():
        source = open_checkpoint(None)
        longer = with_rope_scaling(source.config, LONGER)
        convert(dataclasses.replace(source, config=longer), directory, format="huggingface", dtype="bfloat16")
    return directory


def gguf_file(folder: Path, kind: str) -> Path:
    """The embedded model as GGUF of one kind of `GGUF_TYPES`; written once.

    The tokenizer's and the model's fields are those of the embedded file; matrices are its values rounded to bfloat16
    and then, for Q8_0, quantised; norms stay float32 (llama.cpp takes no others) but hold the bfloat16 values.
    """
    path = folder / f"smollm2-{kind}.gguf"
    if path.exists():
        return path
    quantization, file_type = GGUF_TYPES[kind]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    reader = GGUFReader(find_embedded())
    writer = GGUFWriter(unfinished, arch="llama")
    _copy_fields(reader, writer)
    writer.add_context_length(with_rope_scaling(open_checkpoint(None).config, LONGER).max_position_embeddings)
    writer.add_file_type(file_type)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        values = values.astype(ml_dtypes.bfloat16).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.move(unfinished, path)
    return path


def _copy_fields(reader: GGUFReader, writer: GGUFWriter) -> None:
    ours = {"general.architecture", "general.file_type", "general.quantization_version", "llama.context_length"}
    for key, field in reader.fields.items():
        if key in ours or key.startswith("GGUF."):
            continue
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], element)

"""The files beside the weights, for Hugging Face and Orbax: config, tokenizer, chat template, generation config."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparseserve_jax.checkpoint.hf_config import config_to_dict, one_or_list, parse_config, token_ids
from sparseserve_jax.checkpoint.source import CheckpointSource, SpecialTokens, expected_shapes
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.text.tokenizer import parse_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sidecars:
    """What the files say; see `CheckpointSource` for the fields."""

    config: ModelConfig
    tokenizer_json: str
    chat_template: str | None
    special: SpecialTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectorySource:
    """What the sources that are directories share: everything but the tensors."""

    path: Path
    sidecars: Sidecars

    @property
    def config(self) -> ModelConfig:
        """See `CheckpointSource`."""
        return self.sidecars.config

    @property
    def tokenizer_json(self) -> str:
        """See `CheckpointSource`."""
        return self.sidecars.tokenizer_json

    @property
    def chat_template(self) -> str | None:
        """See `CheckpointSource`."""
        return self.sidecars.chat_template

    @property
    def special(self) -> SpecialTokens:
        """See `CheckpointSource`."""
        return self.sidecars.special

    def tensor_names(self) -> tuple[str, ...]:
        """See `CheckpointSource`."""
        return tuple(expected_shapes(self.config))


def read_sidecars(directory: Path) -> Sidecars:
    """Reads the files that are there; `config.json` and `tokenizer.json` must be.

    The others are `tokenizer_config.json`, `special_tokens_map.json`, `generation_config.json` and
    `chat_template.jinja`, which wins over the template in `tokenizer_config.json`.
    The EOS ids are the union of those in `generation_config.json`, `config.json` and the tokenizer's EOS token.

    Raises:
        FileNotFoundError: `config.json` or `tokenizer.json` is missing.
        ValueError: a file cannot be read or says something that is not supported.
    """
    config = parse_config(read_json(directory / "config.json"), name=directory.name, where=directory / "config.json")
    tokenizer_json = read_text(directory / "tokenizer.json")
    try:
        tokenizer = parse_tokenizer(tokenizer_json)
    except ValueError as error:
        raise ValueError(f"{directory / 'tokenizer.json'}: {error}") from error
    tokenizer_config = _optional_json(directory / "special_tokens_map.json")
    tokenizer_config |= _optional_json(directory / "tokenizer_config.json")
    generation = _optional_json(directory / "generation_config.json")
    try:
        generation_eos = token_ids(generation.get("eos_token_id"), "eos_token_id")
    except ValueError as error:
        raise ValueError(f"{directory / 'generation_config.json'}: {error}") from error
    special = SpecialTokens(
        bos_token=_token_text(tokenizer_config.get("bos_token")),
        eos_token=_token_text(tokenizer_config.get("eos_token")),
    )
    bos_id, eos_id = (None if text is None else tokenizer.token_to_id(text) for text in dataclasses.astuple(special))
    eos_ids = dict.fromkeys((*generation_eos, *config.eos_token_ids, *(() if eos_id is None else (eos_id,))))
    config = dataclasses.replace(
        config,
        bos_token_id=config.bos_token_id if bos_id is None else bos_id,
        eos_token_ids=_inside_vocabulary(tuple(eos_ids), config, directory),
    )
    return Sidecars(
        config=config,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, tokenizer_config),
        special=SpecialTokens(
            bos_token=special.bos_token or _spelling(tokenizer, config.bos_token_id),
            eos_token=special.eos_token or _spelling(tokenizer, next(iter(config.eos_token_ids), None)),
        ),
    )


def write_sidecars(source: CheckpointSource, directory: Path, dtype: str) -> None:
    """Writes all files that `read_sidecars` reads, in a form that transformers reads too."""
    config, special = source.config, source.special
    write_json(directory / "config.json", config_to_dict(config, dtype))
    (directory / "tokenizer.json").write_text(source.tokenizer_json, encoding="utf-8")
    tokens = {key: value for key, value in dataclasses.asdict(special).items() if value is not None}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    if source.chat_template is not None:
        (directory / "chat_template.jinja").write_text(source.chat_template, encoding="utf-8", newline="")
    eos = one_or_list(config.eos_token_ids)
    write_json(directory / "generation_config.json", {"bos_token_id": config.bos_token_id, "eos_token_id": eos})


def read_text(path: Path) -> str:
    """A UTF-8 file's content, line ends as they are.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: empty or no UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; the checkpoint is incomplete")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty; the checkpoint is incomplete")
    return text


def read_json(path: Path) -> dict[str, Any]:
    """A file with one JSON object.

    Raises:
        FileNotFoundError, ValueError: as `read_text`, or truncated or otherwise no JSON object.
    """
    try:
        found = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON (truncated?): {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    sidecar = directory / "chat_template.jinja"
    if sidecar.exists():
        return read_text(sidecar)
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be text, got {type(template).__name__}"
        )
    return template


def _token_text(token: object) -> str | None:
    """A special token is spelled as text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _spelling(tokenizer: Any, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.id_to_token(token_id)


def _inside_vocabulary(eos_ids: tuple[int, ...], config: ModelConfig, directory: Path) -> tuple[int, ...]:
    outside = [token_id for token_id in eos_ids if token_id >= config.vocab_size]
    if outside:
        warnings.warn(
            f"{directory}: EOS ids {outside} are ignored; the model has only vocab_size={config.vocab_size} tokens",
            stacklevel=3,
        )
    return tuple(token_id for token_id in eos_ids if token_id < config.vocab_size)

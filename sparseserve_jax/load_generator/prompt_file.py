"""Prompts of the user's own: JSON lines of `{"prompt": ...}` or `{"messages": [...]}`, with `max_tokens` if wanted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from sparseserve_jax.load_generator.json_lines import json_object, positive_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilePrompt:
    """A line: one of `prompt` and `messages`, and how many tokens it asks for."""

    prompt: str | None
    messages: list[dict[str, Any]] | None
    max_tokens: int | None


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """All prompts of a file.

    Raises:
        ValueError: a line that is none, with its number; or a file without any.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as lines:
        found = [_prompt(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} has no prompts")
    return found


def _prompt(line: str, where: str) -> FilePrompt:
    content = json_object(line, where)
    prompt, messages = content.get("prompt"), content.get("messages")
    if (prompt is None) == (messages is None):
        raise ValueError(f"{where}: needs one of prompt and messages")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"{where}: prompt must be a string")
    if messages is not None and (not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages)):
        raise ValueError(f"{where}: messages must be a list of objects")
    asks = content.get("max_tokens") is not None
    max_tokens = positive_integer(content, "max_tokens", where) if asks else None
    return FilePrompt(prompt=prompt, messages=messages, max_tokens=max_tokens)

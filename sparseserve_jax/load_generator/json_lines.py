"""Input files of one JSON object a line: every mistake names its line."""

from __future__ import annotations

import json
from typing import Any


def json_object(line: str, where: str) -> dict[str, Any]:
    """The object on a line.

    Raises:
        ValueError: it is none.
    """
    try:
        content: Any = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{where}: not a JSON object")
    return content


def positive_integer(content: dict[str, Any], name: str, where: str) -> int:
    """A field that must be there.

    Raises:
        ValueError: it is no integer of at least 1.
    """
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name}={value!r} must be an integer of at least 1")
    return value

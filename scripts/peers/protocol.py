"""The worker's side of the protocol: one JSON object a line on standard input, one on standard output.

A worker says `{"ready": info}` once it has loaded everything, then answers each `{"op": name, "args": {...}}` by
`{"value": ...}` or `{"error": text}`, and ends when its input ends. Between two requests it waits in a blocking read,
which uses no CPU. Standard library only: this runs in the peers' environments.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Handlers = Mapping[str, Callable[..., Any]]


def claim_stdout() -> TextIO:
    """The real standard output, for answers only; whatever a library prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def answer_requests(make: Callable[[dict[str, Any]], tuple[Handlers, dict[str, Any]]]) -> None:
    """Runs a worker: builds its handlers from the JSON of the first argument, then answers until the input ends.

    Args:
        make: from the settings to handlers by operation and the info of the `ready` line.
    """
    answers = claim_stdout()
    try:
        handlers, info = make(json.loads(sys.argv[1]))
    except Exception:
        _send(answers, {"error": traceback.format_exc()})
        raise SystemExit(1) from None
    _send(answers, {"ready": info})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _send(answers, {"value": handlers[request["op"]](**request["args"])})
        except Exception:
            _send(answers, {"error": traceback.format_exc()})


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()

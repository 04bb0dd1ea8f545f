"""`serve`: the one-call way in."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast, overload

import numpy as np
import rich.console
import rich.progress

from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.request import Prompt, Request, RequestOutput, SamplingParams
from sparseserve_jax.validation import RequestError

Requests = Prompt | Request | Sequence[Prompt | Request]


@overload
def serve(
    requests: Requests,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
    stream: Literal[False] = False,
) -> list[RequestOutput]: ...
@overload
def serve(
    requests: Requests,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
    stream: Literal[True],
) -> Iterator[RequestOutput]: ...
def serve(
    requests: Requests,
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    model: str | Path | None = None,
    config: EngineConfig | None = None,
    stream: bool = False,
) -> list[RequestOutput] | Iterator[RequestOutput]:
    """Serves requests to their end on an engine of their own.

    Args:
        requests: one or a list of: text, token ids, chat messages, `Request`. A list of integers is one prompt of
            token ids, a list of mappings one chat.
        sampling_params: for all, or one for each; a `Request`'s own win.
        model: a GGUF file, a Hugging Face or an Orbax directory; None = the embedded SmolLM2-135M-Instruct.
        stream: yield a snapshot whenever a request grows (`delta` holds the new text) instead of returning at the end.

    Returns:
        outputs in the order of the requests (n of them for a request with n > 1), or an iterator of snapshots.

    Raises:
        ValueError: a request can never be served (`RequestError`, names it by place), or the model or the config is at
            fault. Nothing was generated.
    """
    items = as_requests(requests)
    params = _params_for(items, sampling_params)
    engine = Engine(model, config)
    if stream:
        return engine.stream(items, params)
    with Progress(len(items)) as progress:
        return engine.generate(items, params, on_output=progress.note)


def as_requests(requests: Requests) -> list[Request]:
    """One or many prompts in any of their forms as `Request`s."""
    if isinstance(requests, Request):
        return [requests]
    if isinstance(requests, Mapping) or not isinstance(requests, (str, Sequence, np.ndarray)):
        raise RequestError(
            f"requests is a {type(requests).__name__}; give text, token ids, a list of chat messages, a Request, or a "
            "list of these",
            "prompt",
        )
    if isinstance(requests, (str, bytes, bytearray)) or _is_one_prompt(requests):
        return [Request(prompt=cast(Prompt, requests))]
    return [item if isinstance(item, Request) else Request(prompt=cast(Prompt, item)) for item in requests]


def _is_one_prompt(requests: object) -> bool:
    if isinstance(requests, np.ndarray):
        return requests.ndim == 1
    if not isinstance(requests, Sequence) or not requests:
        return False
    return all(isinstance(part, numbers.Integral) for part in requests) or all(
        isinstance(part, Mapping) for part in requests
    )


def _params_for(
    requests: list[Request], sampling_params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * len(requests)
    if len(sampling_params) != len(requests):
        raise ValueError(
            f"{len(sampling_params)} sampling_params for {len(requests)} requests; give one for all or one for each"
        )
    return list(sampling_params)


class Progress:
    """A bar of finished requests on standard error, if that is a terminal."""

    def __init__(self, num_requests: int) -> None:
        self._bar = rich.progress.Progress(
            "[progress.description]{task.description}",
            rich.progress.BarColumn(),
            "{task.completed}/{task.total} requests, {task.fields[tokens]} tokens",
            rich.progress.TimeElapsedColumn(),
            console=rich.console.Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("serving", total=num_requests, tokens=0)
        self._tokens = 0
        self._ended: set[tuple[str, int]] = set()

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def note(self, output: RequestOutput) -> None:
        """Counts a snapshot's token, and its request when that has ended."""
        self._tokens += 1
        if output.finish_reason is not None:
            self._ended.add((output.request_id, output.index))
        num_ended = len({request_id for request_id, _ in self._ended})
        self._bar.update(self._task, completed=num_ended, tokens=self._tokens)

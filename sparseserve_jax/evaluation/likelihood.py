"""How likely the model finds given continuations: what harnesses ask for, by the decode steps that serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from sparseserve_jax.engine import Engine
from sparseserve_jax.request import Request, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Likelihood:
    """Of one continuation.

    Attributes:
        logprob: natural-log probability, the sum over its tokens.
        is_greedy: every token is the most likely one at its place.
    """

    logprob: float
    is_greedy: bool


def continuation_likelihoods(engine: Engine, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
    """Likelihood of each continuation after its context, token ids both.

    The context is prefilled and the continuation's tokens are decoded, so that they see what generated tokens would:
    the engine's budget and selection. A context too long for the model loses its beginning. An empty continuation is
    certain.

    Raises:
        ValueError: an empty context, or a continuation that alone is too long for the model.
        RuntimeError: the engine failed at one of them.
    """
    limit = engine.layout.max_model_len
    requests, places = [], []
    for place, (context, continuation) in enumerate(pairs):
        if not context:
            raise ValueError("a continuation needs a context of at least 1 token; give the model's BOS or EOS token")
        if len(continuation) >= limit:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens leaves no room for a context in max_model_len={limit}; "
                "raise max_model_len or shorten it"
            )
        if continuation:
            params = SamplingParams(
                temperature=0.0, max_tokens=len(continuation), forced_token_ids=tuple(continuation), logprobs=0,
                ignore_eos=True,
            )  # fmt: skip
            requests.append(Request(prompt=list(context[-(limit - len(continuation)) :]), sampling=params))
            places.append(place)
    found = [Likelihood(logprob=0.0, is_greedy=True)] * len(pairs)
    for place, output in zip(places, engine.generate(requests), strict=True):
        if output.error is not None or output.logprobs is None:
            raise RuntimeError(f"{output.request_id}: {output.error}")
        chosen = [row[0] for row in output.logprobs]
        found[place] = Likelihood(
            logprob=sum(entry.logprob for entry in chosen), is_greedy=all(entry.rank == 1 for entry in chosen)
        )
    return found


def rolling_windows(token_ids: Sequence[int], prefix: int, length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Splits a text into (context, continuation), so that each token is scored once.

    The first window is `prefix` and up to `length` - 1 tokens. Each later one scores up to half a window and has the
    tokens before it, `length` together, as context.
    """
    end = min(len(token_ids), length - 1)
    if end:
        yield [prefix], list(token_ids[:end])
    while end < len(token_ids):
        start, end = end, min(len(token_ids), end + length // 2)
        yield list(token_ids[max(0, end - length) : start]), list(token_ids[start:end])

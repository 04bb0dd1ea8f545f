"""What goes in and what comes out: `SamplingParams`, `Request`, `RequestOutput`, `RequestMetrics`. No JAX here."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from sparseserve_jax.config import SelectionMethod
from sparseserve_jax.timeline import Interval

FinishReason = Literal["stop", "length", "abort", "error"]
ChatMessage = Mapping[str, object]
SparseBudget = int | None | Literal["default"]
Prompt = str | Sequence[int] | Sequence[ChatMessage]

MAX_LOGPROBS = 20
MAX_N = 64
MAX_VARIANTS = 256
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
"""Characters of all stop strings together: every continuation keeps an automaton of them."""
MAX_TOKENS_NAMED = 1024
"""Entries of `logit_bias` and of `stop_token_ids`: each costs the whole batch a little in every step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Names, defaults and ranges follow vLLM's `SamplingParams`.

    Attributes:
        n: continuations of the prompt.
        temperature: 0 = greedy.
        top_p: smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: tokens kept; 0 = all.
        min_p: tokens kept have at least this share of the best token's probability, in [0, 1].
        repetition_penalty: > 1 makes tokens of prompt and output rarer (CTRL, arXiv 1909.05858); > 0.
        presence_penalty / frequency_penalty: OpenAI's, over output tokens, in [-2, 2].
        seed: None = the engine's seed folded with the request's number.
        stop: strings that end the text.
        stop_token_ids: tokens that end it, besides the model's own EOS ids.
        include_stop_str_in_output: keep the stop string in the text.
        max_tokens: at most this many tokens; None = up to max_model_len.
        min_tokens: EOS and stop tokens are not sampled before this many.
        ignore_eos: EOS does not end it (the tokens are kept like any other).
        forced_token_ids: the first tokens, given instead of sampled (teacher forcing). With `logprobs` each has its
            log-probability and rank like a sampled one. Nothing ends the continuation within them: neither EOS nor
            stop tokens or strings; they count towards `max_tokens`, which must leave room for all of them.
        logprobs: None = none; k = the chosen token's and the k best.
        prompt_logprobs: None = none; k = of every prompt token after the first its log-probability and rank, and the
            k best (before bias and penalties).
        logit_bias: token id -> number added to its logit, in [-100, 100].
        skip_special_tokens: special tokens leave no text.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    forced_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        keep("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        keep("top_p", _number("top_p", self.top_p, 0.0, 1.0, low_open=True))
        keep("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        keep("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True))
        for name in ("presence_penalty", "frequency_penalty"):
            keep(name, _number(name, getattr(self, name), -2.0, 2.0))
        keep("n", _integer("n", self.n, 1, MAX_N))
        keep("top_k", _integer("top_k", self.top_k, 0, None))
        keep("min_tokens", _integer("min_tokens", self.min_tokens, 0, None))
        if self.max_tokens is not None:
            keep("max_tokens", _integer("max_tokens", self.max_tokens, 1, None))
            if self.min_tokens > self.max_tokens:
                low, high = short_repr(self.min_tokens), short_repr(self.max_tokens)
                raise ValueError(f"min_tokens={low} exceeds max_tokens={high}; lower it")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                keep(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.seed is not None:
            keep("seed", _integer("seed", self.seed, -(2**63), 2**63 - 1))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={short_repr(getattr(self, name))} must be True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, MAX_STOP_STRINGS)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop contains {short_repr(text)}; every stop string must be non-empty text")
        keep("stop", stop)
        num_chars = sum(map(len, self.stop))
        if num_chars > MAX_STOP_CHARS:
            raise ValueError(f"stop holds {num_chars} characters; at most {MAX_STOP_CHARS} are allowed in all")
        ids = _items("stop_token_ids", self.stop_token_ids, MAX_TOKENS_NAMED)
        keep("stop_token_ids", tuple(_integer("stop_token_ids", token, 0, None) for token in ids))
        keep("logit_bias", _biases(self.logit_bias))
        forced = _items("forced_token_ids", self.forced_token_ids, None)
        keep("forced_token_ids", tuple(_integer("forced_token_ids", token, 0, None) for token in forced))
        if self.max_tokens is not None and len(self.forced_token_ids) > self.max_tokens:
            raise ValueError(
                f"forced_token_ids has {len(self.forced_token_ids)} entries, but max_tokens={self.max_tokens} ends the "
                "continuation before; raise max_tokens, or None for all that the model's length leaves"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0.0


class TokenMatcher(Protocol):
    """Where one continuation stands in its grammar. One thread uses it."""

    def allowed_tokens(self) -> np.ndarray:
        """The tokens that may come next: bit `i % 32` of word `i // 32` for token i, uint32."""
        ...

    def accept(self, token_id: int) -> str | None:
        """Takes the token that came; returns why the grammar cannot go on, None if it can."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""
        ...


class Grammar(Protocol):
    """What a text may be (`text.grammar.compile_grammar`). Threads and requests may share it."""

    def start(self) -> TokenMatcher:
        """A matcher at the beginning."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One of several continuations of a prompt; see `Request.variants` and, for the fields, `Request`."""

    sampling: SamplingParams
    sparse_budget_tokens: SparseBudget = "default"
    selection: SelectionMethod | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    Attributes:
        prompt: text, token ids, or chat messages (`{"role": ..., "content": ...}`).
        sampling: None = the defaults of `serve` or `SamplingParams()`.
        request_id: None = numbered by the engine; unique among live requests.
        priority: lower is served first; equal priorities first come, first served.
        grammar: the text must follow it, and ends where it does; None = free. Not with `min_tokens` or `ignore_eos`.
        sparse_budget_tokens: tokens a decode step of this request may attend to, None = all; "default" = the engine's.
        selection: how it chooses them; None = the engine's way. Budget and selection together must be the engine's own
            or among its `extra_decode_settings`.
        variants: several continuations from the same prefilled prompt, one after the other; they take the place of
            `sampling` (n = 1 in each), `sparse_budget_tokens` and `selection`. Each gives the tokens that a request
            of its own would; its output's `index` is its place here.
    """

    prompt: Prompt
    sampling: SamplingParams | None = None
    request_id: str | None = None
    priority: int = 0
    grammar: Grammar | None = None
    sparse_budget_tokens: SparseBudget = "default"
    selection: SelectionMethod | None = None
    variants: tuple[Variant, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """The natural-log probability of one candidate token, after penalties and bias, before temperature and cuts."""

    token_id: int
    logprob: float
    rank: int


@dataclasses.dataclass(kw_only=True)
class RequestMetrics:
    """What a request cost. Block counts are (layer, KV head, block) pieces of the sparse layers, over all its steps.

    Attributes:
        queue_s: arrival to first prefill work.
        ttft_s: arrival to first token; of a variant after the first: its start to its first token.
        tbt_s: time between tokens, one per token after the first.
        blocks_selected / blocks_hit / blocks_loaded: pieces attended to, found on the device, fetched from the host.
            In unified mode every piece is a hit.
        working_set_blocks: pieces in the window of the last decode step.
        working_set_slots: the same as slots (largest over layers and heads).
        bytes_loaded / bytes_saved: bytes moved host to device and device to host.
        num_parks: times the request lost its device room and came back.
        selected_block_ids: with `record_selection`: per decode step an int array
            `[num_sparse_layers, num_kv_heads, selection_blocks]` of logical block ids, -1 = unused.
        timeline: with `record_timeline`, when it has ended: its prefill segments, loads and saves.
    """

    queue_s: float = 0.0
    ttft_s: float | None = None
    tbt_s: list[float] = dataclasses.field(default_factory=list)
    blocks_selected: int = 0
    blocks_hit: int = 0
    blocks_loaded: int = 0
    working_set_blocks: int = 0
    working_set_slots: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0
    num_parks: int = 0
    selected_block_ids: list[object] = dataclasses.field(default_factory=list)
    timeline: list[Interval] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class RequestOutput:
    """A continuation, whole or so far (`finish_reason` is None while it grows).

    With `n` > 1 a prompt gives n outputs with `index` 0..n-1, next to each other; so it does with n `variants`.

    Attributes:
        text: all text so far; never part of a stop string, never half a character.
        delta: with `stream=True` the text added since the last output of this request.
        logprobs: per token the candidates, the chosen token first; None unless asked for.
        prompt_logprobs: per prompt token the candidates, itself first; None for the first token. None unless asked for,
            and of a request that ended before its prompt was through the layers. Snapshots share the list.
        error: why, when `finish_reason` is "error".
    """

    request_id: str
    index: int = 0
    prompt: str | None = None
    prompt_token_ids: list[int]
    text: str = ""
    delta: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
    error: str | None = None


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    """The value as a float; integers, fractions and numpy's scalars are numbers too, bools are not."""
    left = "(" if low_open else "["
    right = ")" if high == math.inf else "]"
    bounds = f"{left}{low:g}, {high:g}{right}"
    try:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer such as 10**400
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={short_repr(value)} must be a finite number in {bounds}")
    if number < low or number > high or (low_open and number == low):
        raise ValueError(f"{name}={short_repr(value)} must lie in {bounds}")
    return number


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    """The value as an int; numpy's integers are integers too, bools and whole floats are not."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    bounds = f"at least {low}" if high is None else f"between {low} and {high}"
    raise ValueError(f"{name}={short_repr(value)} must be an integer, {bounds}")


def _items(name: str, value: object, at_most: int | None) -> tuple[object, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={short_repr(value)} must be a list")
    items = tuple(value)
    if at_most is not None and len(items) > at_most:
        raise ValueError(f"{name} has {len(items)} entries; at most {at_most} are allowed")
    return items


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias={short_repr(value)} must map token ids to numbers")
    if len(value) > MAX_TOKENS_NAMED:
        raise ValueError(f"logit_bias has {len(value)} entries; at most {MAX_TOKENS_NAMED} are allowed")
    biases = {}
    for token, bias in value.items():
        token_id = _integer("logit_bias token", token, 0, None)
        biases[token_id] = _number(f"logit_bias[{short_repr(token_id)}]", bias, -100.0, 100.0)
    return biases


def short_repr(value: object) -> str:
    """A short repr for messages (Python refuses to print integers of more than 4,300 digits)."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"<an integer of {value.bit_length()} bits>"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."

"""What the sampler needs of a batch, built on the host: `SamplingBatch` and its parts.

A part is None where no row needs it; the sampler then does not run that part's program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from sparseserve_jax.request import SamplingParams
from sparseserve_jax.sampling.penalties import PADDING_ROW, PenaltyParams

MIN_TEMPERATURE = 1e-5
"""Below this a row is greedy (vLLM's bound): the division by it would only lose precision."""
BIAS_CHUNK = 64
"""Entries a row of one bias call: any number of entries is served by repeating one compiled program."""
NOT_FORCED = -1
MAX_SCALE = 1e30
"""Temperatures and repetition penalties are clipped to [1 / MAX_SCALE, MAX_SCALE]: float32 logits stay finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingRow:
    """One row to sample.

    Attributes:
        seed: of `seeds.derive_seed`.
        position: tokens this continuation has generated so far. With `seed`, all that the draw depends on.
        penalty_row: its row of `PenaltyState`; read only if `uses_penalties(params)`.
        allowed: bits of the tokens that may come (`TokenMatcher.allowed_tokens`); None = all.
    """

    params: SamplingParams
    seed: tuple[int, int]
    position: int
    penalty_row: int = PADDING_ROW
    allowed: np.ndarray | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomParams:
    """Rows that draw. Temperature 0 = greedy row; `top_k` 0, `top_p` 1 and `min_p` 0 = off."""

    temperature: Float[Array | np.ndarray, " num_seqs"]
    top_p: Float[Array | np.ndarray, " num_seqs"]
    top_k: Int[Array | np.ndarray, " num_seqs"]
    min_p: Float[Array | np.ndarray, " num_seqs"]
    seeds: UInt[Array | np.ndarray, "num_seqs 2"]
    positions: Int[Array | np.ndarray, " num_seqs"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasChunk:
    """Numbers added to single logits; an id equal to the vocabulary size is padding and dropped."""

    token_ids: Int[Array | np.ndarray, "num_seqs bias_chunk"]
    values: Float[Array | np.ndarray, "num_seqs bias_chunk"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """All rows of one call, padded. The default is the all-greedy batch: nothing to send, one argmax."""

    allowed: UInt[Array | np.ndarray, "num_seqs num_words"] | None = None
    random: RandomParams | None = None
    penalties: PenaltyParams | None = None
    bias: tuple[BiasChunk, ...] = ()
    forced: Int[np.ndarray, " num_seqs"] | None = None
    """Tokens that take the place of sampled ones; `NOT_FORCED` elsewhere."""
    wants_logprobs: bool = False


def uses_penalties(params: SamplingParams) -> bool:
    """Whether the request's row of `PenaltyState` must be kept current."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def build_batch(
    rows: Sequence[SamplingRow], *, num_seqs: int, vocab_size: int, eos_token_ids: Collection[int] = ()
) -> SamplingBatch:
    """The batch of `rows` padded to `num_seqs`; a row's numbers do not depend on the others.

    Args:
        eos_token_ids: like a request's `stop_token_ids`, masked while its `min_tokens` are not reached (unless it
            ignores EOS).
    """
    assert len(rows) <= num_seqs
    params = [row.params for row in rows]
    return SamplingBatch(
        allowed=_allowed(rows, num_seqs, vocab_size) if any(row.allowed is not None for row in rows) else None,
        random=_random(rows, num_seqs, vocab_size) if any(map(_is_random, params)) else None,
        penalties=_penalties(rows, num_seqs) if any(map(uses_penalties, params)) else None,
        bias=_bias([_bias_entries(row, eos_token_ids) for row in rows], num_seqs, vocab_size),
        forced=_forced(rows, num_seqs),
        wants_logprobs=any(p.logprobs is not None for p in params),
    )


def _is_random(params: SamplingParams) -> bool:
    return params.temperature >= MIN_TEMPERATURE


def _allowed(rows: Sequence[SamplingRow], num_seqs: int, vocab_size: int) -> np.ndarray:
    words = np.full((num_seqs, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    for index, row in enumerate(rows):
        if row.allowed is not None:
            words[index] = row.allowed
    return words


def _random(rows: Sequence[SamplingRow], num_seqs: int, vocab_size: int) -> RandomParams:
    temperature, min_p = np.zeros(num_seqs, np.float32), np.zeros(num_seqs, np.float32)
    top_p, top_k = np.ones(num_seqs, np.float32), np.zeros(num_seqs, np.int32)
    seeds, positions = np.zeros((num_seqs, 2), np.uint32), np.zeros(num_seqs, np.int32)
    for index, row in enumerate(rows):
        if not _is_random(row.params):
            continue
        temperature[index] = min(row.params.temperature, MAX_SCALE)
        top_p[index], min_p[index] = row.params.top_p, row.params.min_p
        top_k[index] = row.params.top_k if row.params.top_k < vocab_size else 0
        seeds[index], positions[index] = row.seed, row.position
    return RandomParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seeds=seeds, positions=positions
    )


def _penalties(rows: Sequence[SamplingRow], num_seqs: int) -> PenaltyParams:
    table_rows, repetition = np.full(num_seqs, PADDING_ROW, np.int32), np.ones(num_seqs, np.float32)
    presence, frequency = np.zeros(num_seqs, np.float32), np.zeros(num_seqs, np.float32)
    for index, row in enumerate(rows):
        if not uses_penalties(row.params):
            continue
        table_rows[index] = row.penalty_row
        repetition[index] = min(max(row.params.repetition_penalty, 1 / MAX_SCALE), MAX_SCALE)
        presence[index], frequency[index] = row.params.presence_penalty, row.params.frequency_penalty
    return PenaltyParams(rows=table_rows, repetition=repetition, presence=presence, frequency=frequency)


def _forced(rows: Sequence[SamplingRow], num_seqs: int) -> np.ndarray | None:
    if all(row.position >= len(row.params.forced_token_ids) for row in rows):
        return None
    tokens = np.full(num_seqs, NOT_FORCED, np.int32)
    for index, row in enumerate(rows):
        if row.position < len(row.params.forced_token_ids):
            tokens[index] = row.params.forced_token_ids[row.position]
    return tokens


def _bias_entries(row: SamplingRow, eos_token_ids: Collection[int]) -> list[tuple[int, float]]:
    entries = list(row.params.logit_bias.items())
    if row.position < row.params.min_tokens:
        eos = () if row.params.ignore_eos else eos_token_ids
        entries += [(token, -np.inf) for token in sorted({*row.params.stop_token_ids, *eos})]
    return entries


def _bias(entries: list[list[tuple[int, float]]], num_seqs: int, vocab_size: int) -> tuple[BiasChunk, ...]:
    num_chunks = -(-max(map(len, entries), default=0) // BIAS_CHUNK)
    token_ids = np.full((num_chunks, num_seqs, BIAS_CHUNK), vocab_size, np.int32)
    values = np.zeros((num_chunks, num_seqs, BIAS_CHUNK), np.float32)
    for index, row in enumerate(entries):
        for place, (token, value) in enumerate(row):
            if 0 <= token < vocab_size:  # a checkpoint may name EOS ids that its head does not have
                chunk, column = divmod(place, BIAS_CHUNK)
                token_ids[chunk, index, column], values[chunk, index, column] = token, value
    return tuple(BiasChunk(token_ids=i, values=v) for i, v in zip(token_ids, values, strict=True))

"""Joins sequences and the device sampler: builds batches, keeps counts and newest tokens, fetches tokens late."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from host_offload.memory import commit
from sparseserve_jax.request import TokenLogprob
from sparseserve_jax.runner.sequences import Sequence
from sparseserve_jax.sampling.batch import SamplingRow, build_batch, uses_penalties
from sparseserve_jax.sampling.penalties import (
    PADDING_ROW,
    PenaltyState,
    add_tokens,
    allocate_penalty_state,
    count_tokens,
    set_row,
)
from sparseserve_jax.sampling.sampler import Sampled, sample, token_logprobs


@dataclasses.dataclass(frozen=True)
class SampledToken:
    """A token on the host. `ok` is False where the logits held NaN; the request must end with an error."""

    token_id: int
    ok: bool
    logprobs: list[TokenLogprob] | None


@dataclasses.dataclass(frozen=True)
class PendingTokens:
    """Tokens that the device may still be computing."""

    sequences: list[Sequence]
    sampled: Sampled

    def fetch(self) -> dict[str, SampledToken]:
        """Waits for the tokens; by request id."""
        sampled: Sampled = jax.tree.map(np.asarray, self.sampled)
        tokens = {}
        for row, sequence in enumerate(self.sequences):
            token_id, wanted = int(sampled.token_ids[row]), sequence.sampling.logprobs
            logprobs = None
            if wanted is not None and sampled.logprobs is not None and sampled.ok[row]:
                logprobs = token_logprobs(sampled.logprobs, row, token_id, wanted)
            tokens[sequence.request_id] = SampledToken(token_id, bool(sampled.ok[row]), logprobs)
        return tokens


class TokenSampler:
    """Samples one token for each of some sequences from a (padded) batch of logits.

    Attributes:
        newest_tokens: `[max_num_seqs + 1]`, on the device: each row's newest token. The next decode step takes it from
            there, so that it can be dispatched before the host has seen the token.
    """

    newest_tokens: Int[Array, "num_rows"]

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...], max_num_seqs: int, device: jax.Device) -> None:
        self._vocab_size, self._eos, self._num_rows = vocab_size, eos_token_ids, max_num_seqs
        self._device = device
        self.newest_tokens = commit(jnp.zeros(max_num_seqs + 1, jnp.int32), device)
        self._penalties: PenaltyState | None = None

    def sample(
        self, sequences: list[Sequence], logits: Array, allowed: Mapping[str, np.ndarray] | None = None
    ) -> PendingTokens:
        """Dispatches sampling and counts each sequence's token; rows of `logits` past the sequences are padding.

        Args:
            allowed: by request id the tokens that may come (`SamplingRow.allowed`), for those that are not free.
        """
        allowed = allowed or {}
        penalised = [s for s in sequences if uses_penalties(s.sampling)]
        for sequence in penalised:
            if sequence.num_generated == sequence.num_resumed:
                self._enter(sequence)
        rows = [
            SamplingRow(
                params=s.sampling, seed=s.seed, position=s.num_generated, penalty_row=s.row,
                allowed=allowed.get(s.request_id),
            )
            for s in sequences
        ]  # fmt: skip
        num_seqs = logits.shape[0]
        batch = build_batch(rows, num_seqs=num_seqs, vocab_size=self._vocab_size, eos_token_ids=self._eos)
        sampled = sample(logits, batch, self._penalties)
        if penalised and self._penalties is not None:
            table_rows = np.full(num_seqs, PADDING_ROW, np.int32)
            for index, s in enumerate(sequences):
                if uses_penalties(s.sampling):
                    table_rows[index] = s.row
            self._penalties = add_tokens(self._penalties, table_rows, sampled.token_ids)
        table_rows = np.full(num_seqs, self._num_rows, np.int32)
        table_rows[: len(sequences)] = [s.row for s in sequences]
        self.newest_tokens = _note_tokens(self.newest_tokens, table_rows, sampled.token_ids)
        for sequence in sequences:
            sequence.num_generated += 1
        return PendingTokens(list(sequences), sampled)

    def _enter(self, sequence: Sequence) -> None:
        if self._penalties is None:
            self._penalties = commit(allocate_penalty_state(self._num_rows, self._vocab_size), self._device)
        prompt, output = np.split(sequence.prompt_token_ids, [len(sequence.prompt_token_ids) - sequence.num_resumed])
        counts = count_tokens(prompt, output, self._vocab_size)
        self._penalties = set_row(self._penalties, np.int32(sequence.row), *counts)


@functools.partial(jax.jit, donate_argnums=0)
def _note_tokens(
    newest_tokens: Int[Array, "num_rows"], rows: Int[Array | np.ndarray, "num_seqs"], token_ids: Int[Array, "num_seqs"]
) -> Int[Array, "num_rows"]:
    return newest_tokens.at[rows].set(token_ids)

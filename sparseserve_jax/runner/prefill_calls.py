"""Lays out the prompts of a prefill call and keeps their activations from layer to layer."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array

from host_offload.memory import to_device
from pallas_kernels.reference import PREFILL_TILE
from sparseserve_jax.models.prefill import PrefillCall
from sparseserve_jax.plan import PrefillItem
from sparseserve_jax.runner.buckets import NUM_PREFILL_PROMPTS, bucket_for
from sparseserve_jax.runner.sequences import Sequence


@dataclasses.dataclass(frozen=True)
class _Placed:
    """A prompt's tokens inside a call."""

    item: PrefillItem
    sequence: Sequence
    offset: int


class OpenCall:
    """Prompt tokens on their way through the layers: the call's layout and the activations after the last layer run.

    Prompts start on a tile. In tiered mode keys and values pass through the staging buffer, where prompt i of the call
    has its own range of blocks; a request that ends meanwhile is blotted out, so that its blocks can be reused.

    Args:
        min_tokens: pad to at least this (warm-up).
    """

    def __init__(
        self, items: tuple[PrefillItem, ...], sequences: dict[str, Sequence], *, block_size: int, max_blocks: int,
        token_buckets: tuple[int, ...], staged: bool, min_tokens: int = 1,
    ) -> None:  # fmt: skip
        self._block_size, self._max_blocks, self._staged = block_size, max_blocks, staged
        offset, placed = 0, []
        for item in items:
            placed.append(_Placed(item, sequences[item.request_id], offset))
            offset += -(-(item.end - item.start) // PREFILL_TILE) * PREFILL_TILE
        self._placed = placed
        self.num_tokens = bucket_for(max(offset, min_tokens), token_buckets)
        self.hidden: Array | None = None
        self.rope: tuple[Array, Array] | None = None
        self.is_single = len(items) == 1
        self.call, self.save_ids = self._lay_out()

    @property
    def items(self) -> tuple[PrefillItem, ...]:
        """Prompts still alive in this call."""
        return tuple(p.item for p in self._placed)

    @property
    def first(self) -> PrefillItem:
        """The first prompt; it names the call."""
        return self._placed[0].item

    def token_ids(self) -> np.ndarray:
        """The call's tokens, zeros where there are none."""
        tokens = np.zeros(self.num_tokens, np.int32)
        for p in self._placed:
            n = p.item.end - p.item.start
            tokens[p.offset : p.offset + n] = p.sequence.prompt_token_ids[p.item.start : p.item.end]
        return tokens

    def last_rows(self) -> list[tuple[Sequence, int]]:
        """Prompts that end in this call, with the row of their last token."""
        return [
            (p.sequence, p.offset + p.item.end - p.item.start - 1)
            for p in self._placed
            if p.item.end == len(p.sequence.prompt_token_ids)
        ]

    def scored_rows(self) -> list[tuple[Sequence, np.ndarray, np.ndarray]]:
        """For each prompt that wants log-probabilities of its tokens: the rows that have a next token, and these."""
        scored = []
        for p in self._placed:
            if p.sequence.num_prompt_logprobs is not None:
                targets = p.sequence.prompt_token_ids[p.item.start + 1 : p.item.end + 1]
                scored.append((p.sequence, p.offset + np.arange(len(targets), dtype=np.int32), targets))
        return scored

    def drop(self, request_id: str) -> bool:
        """Blots a request out; returns whether any other is left."""
        if any(p.item.request_id == request_id for p in self._placed):
            self._placed = [p for p in self._placed if p.item.request_id != request_id]
            if self._placed:
                self.call, self.save_ids = self._lay_out()
        return bool(self._placed)

    def staged_before(self) -> tuple[np.ndarray, np.ndarray]:
        """(staging ids, host ids) of the blocks before this call, for a call that does not begin its prompt."""
        start = self.first.start // self._block_size
        return np.arange(1, start + 1, dtype=np.int32), self._placed[0].sequence.block_ids[:start]

    def saved_blocks(self) -> list[tuple[str, int]]:
        """Per request the number of blocks that one layer of this call saves."""
        return [(p.item.request_id, -(-(p.item.end - p.item.start) // self._block_size)) for p in self._placed]

    def _lay_out(self) -> tuple[PrefillCall, Array]:
        bs, runs, tiles = self._block_size, self.num_tokens // self._block_size, self.num_tokens // PREFILL_TILE
        positions = np.zeros(self.num_tokens, np.int32)
        pool_ids, digest_ids, block_tokens = (np.zeros(runs, np.int32) for _ in range(3))
        tables = np.zeros((NUM_PREFILL_PROMPTS, self._max_blocks), np.int32)
        tile_prompt, tile_start, tile_tokens = (np.zeros(tiles, np.int32) for _ in range(3))
        staging_next = 1
        for index, p in enumerate(self._placed):
            n, start = p.item.end - p.item.start, p.item.start
            positions[p.offset : p.offset + n] = np.arange(start, start + n)
            first, count, run = start // bs, -(-n // bs), p.offset // bs
            global_ids = p.sequence.block_ids[first : first + count]
            if self._staged:
                ids = np.arange(staging_next, staging_next + first + count, dtype=np.int32)
                staging_next += len(ids)
            else:
                ids = p.sequence.block_ids[: first + count]
            tables[index, : first + count] = ids
            pool_ids[run : run + count] = ids[first:]
            digest_ids[run : run + count] = global_ids
            block_tokens[run : run + count] = np.minimum(bs, n - np.arange(count) * bs)
            tile, num_tiles = p.offset // PREFILL_TILE, -(-n // PREFILL_TILE)
            tile_prompt[tile : tile + num_tiles] = index
            tile_start[tile : tile + num_tiles] = start + np.arange(num_tiles) * PREFILL_TILE
            tile_tokens[tile : tile + num_tiles] = np.minimum(PREFILL_TILE, n - np.arange(num_tiles) * PREFILL_TILE)
        arrays = {
            "positions": positions, "pool_ids": pool_ids, "digest_ids": digest_ids, "block_tokens": block_tokens,
            "block_tables": tables, "tile_prompt": tile_prompt, "tile_start": tile_start, "tile_tokens": tile_tokens,
        }  # fmt: skip
        call = PrefillCall(**to_device(arrays))
        return call, call.digest_ids

"""What the runner knows of each request on the host, and the per-row tables it feeds to the device."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Array

from sparseserve_jax.cache.layout import KVLayout
from sparseserve_jax.config import DecodeSetting
from sparseserve_jax.plan import Admission, Grant
from sparseserve_jax.request import SamplingParams


@dataclasses.dataclass(frozen=True)
class PromptEnd:
    """The device's state at the end of a prompt, as far as later tokens overwrite it.

    Attributes:
        logits: `[vocab]`, of the first token.
        block: by layer the prompt's partial block and its scales, where quantised blocks lose by every further token;
            None where they do not, or the last block is full.
    """

    logits: Array
    block: tuple[tuple[Array, Array], ...] | None


@dataclasses.dataclass
class Sequence:
    """One admitted continuation.

    Attributes:
        setting: how it decodes; None = the engine's own way.
        num_computed: tokens whose K and V are in the cache, or will be when the device has done what it was given.
        num_generated: tokens sampled so far, likewise. The newest is on the device (`TokenSampler.newest_tokens`).
        has_grant: it holds device slots or dense blocks (tiered).
        num_resumed: of the prompt's tokens the last that many were generated, before a failed step; `num_generated`
            begins with them.
        num_prompt_logprobs: candidates wanted for each prompt token; None = none of it.
        has_successor: another request will begin with its prompt.
        prompt_end: what that needs beside the prompt's full blocks; None before the prompt is through the layers.
    """

    request_id: str
    prompt_token_ids: np.ndarray
    sampling: SamplingParams
    seed: tuple[int, int]
    setting: DecodeSetting | None = None
    row: int = -1
    block_ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    num_computed: int = 0
    num_generated: int = 0
    has_grant: bool = False
    num_prompt_logprobs: int | None = None
    has_successor: bool = False
    prompt_end: PromptEnd | None = None
    num_resumed: int = 0

    def __post_init__(self) -> None:
        self.num_generated = max(self.num_generated, self.num_resumed)


class SequenceTables:
    """Block, slot and dense tables by row; the last row is all null and serves padding.

    Attributes:
        version: changes whenever a table does.
    """

    def __init__(self, layout: KVLayout) -> None:
        rows = layout.max_num_seqs + 1
        self.padding_row = layout.max_num_seqs
        self.version = 0
        self.blocks = np.zeros((rows, layout.max_blocks_per_seq), np.int32)
        self.slots = np.zeros((rows, layout.max_grant_slots if layout.tiered else 0), np.int32)
        self.num_slots = np.zeros(rows, np.int32)
        self.dense = np.zeros((rows, layout.max_blocks_per_seq if layout.tiered else 0), np.int32)

    def admit(self, admission: Admission) -> None:
        """A row gets its blocks and loses everything else."""
        self.clear(admission.row)
        self.blocks[admission.row, : len(admission.block_ids)] = admission.block_ids

    def grant(self, row: int, grant: Grant) -> None:
        """A row gets its device room."""
        self.withdraw(row)
        self.version += 1
        self.slots[row, : len(grant.slot_ids)] = grant.slot_ids
        self.num_slots[row] = len(grant.slot_ids)
        self.dense[row, : len(grant.dense_block_ids)] = grant.dense_block_ids

    def withdraw(self, row: int) -> None:
        """A row loses its device room."""
        self.version += 1
        self.slots[row] = 0
        self.num_slots[row] = 0
        self.dense[row] = 0

    def clear(self, row: int) -> None:
        """A row is forgotten."""
        self.version += 1
        self.blocks[row] = 0
        self.withdraw(row)

    def decode_tables(self, rows: np.ndarray, width: int) -> dict[str, np.ndarray]:
        """Fields of `DecodeInputs` that stay the same while the batch does; block tables of `width` blocks."""
        return {
            "rows": rows,
            "block_tables": self.blocks[rows, :width], "dense_tables": self.dense[rows, :width],
            "slot_tables": self.slots[rows], "num_slots": self.num_slots[rows],
        }  # fmt: skip

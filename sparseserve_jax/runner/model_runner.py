"""`ModelRunner`: owns parameters and KV of both tiers and carries out plans, one after the other.

A plan's device work is only dispatched; what it gave is fetched later, when the next plan's decode step is already on
its way. So the device has work while the host handles tokens and plans.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from host_offload.memory import allocate_host_pools, commit, to_device
from pallas_kernels.api import Kernels
from pallas_kernels.storage import storage_dtype
from sparseserve_jax.cache.layout import KVLayout
from sparseserve_jax.config import DecodeSetting, EngineConfig
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.decode import DecodeInputs, DecodeOutputs, decode_step
from sparseserve_jax.models.kv_state import allocate_kv_state, make_spec, pool_shape
from sparseserve_jax.models.prefill import begin_prefill, prefill_layer, prefill_logits
from sparseserve_jax.models.rope import rope_frequencies
from sparseserve_jax.plan import Admission, DecodeStats, Grant, PrefillItem, PrefillSegment, Restart, StepPlan
from sparseserve_jax.request import SamplingParams, TokenLogprob
from sparseserve_jax.runner import buckets, restarts, transfers
from sparseserve_jax.runner.prefill_calls import OpenCall
from sparseserve_jax.runner.prompt_logprobs import PendingPromptLogprobs, possible_slices, score_prompts, score_rows
from sparseserve_jax.runner.sequences import PromptEnd, Sequence, SequenceTables
from sparseserve_jax.runner.token_sampler import PendingTokens, SampledToken, TokenSampler


@dataclasses.dataclass(kw_only=True)
class RunnerResult:
    """What a plan gave.

    Attributes:
        tokens: by request id: the sampled token (decode and completed prefill).
        stats: by request id: what the decode step did; empty when every layer is dense.
        selected: by request id, with `record_selection`: logical ids `[num_sparse_layers, num_kv_heads, n]`.
        prompt_logprobs: by request id: entries of its prompt's next tokens (the first token has none).
        bytes_loaded / bytes_saved: by request id, moved between the tiers in this step.
    """

    tokens: dict[str, SampledToken]
    stats: dict[str, DecodeStats]
    selected: dict[str, np.ndarray]
    prompt_logprobs: dict[str, list[list[TokenLogprob]]]
    bytes_loaded: dict[str, int]
    bytes_saved: dict[str, int]


@dataclasses.dataclass
class RunningStep:
    """A plan that the device may still be working on.

    Attributes:
        decoded: batches of the decode step with what it gave.
        pending: tokens that are being sampled.
        scored: log-probabilities of prompts that are being computed, in order.
        loaded / saved: bytes by request id that the host knows of (what decode steps load, only the device knows).
    """

    plan: StepPlan
    layout: KVLayout
    decoded: list[tuple[list[Sequence], DecodeOutputs]] = dataclasses.field(default_factory=list)
    pending: list[PendingTokens] = dataclasses.field(default_factory=list)
    scored: list[PendingPromptLogprobs] = dataclasses.field(default_factory=list)
    loaded: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    saved: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def fetch(self) -> RunnerResult:
        """Waits for the step and reads what it gave. Once only."""
        tokens: dict[str, SampledToken] = {}
        for part in self.pending:
            tokens.update(part.fetch())
        stats: dict[str, DecodeStats] = {}
        selected: dict[str, np.ndarray] = {}
        for sequences, outputs in self.decoded if self.layout.num_sparse_layers else ():
            chosen = None if outputs.selected is None else np.asarray(outputs.selected)
            for index, (sequence, row) in enumerate(zip(sequences, np.asarray(outputs.stats).tolist(), strict=False)):
                stats[sequence.request_id] = DecodeStats(
                    blocks_selected=row[0], blocks_hit=row[1], blocks_loaded=row[2],
                    working_set_blocks=row[3], working_set_slots=row[4],
                )  # fmt: skip
                self.loaded[sequence.request_id] += row[2] * self.layout.piece_bytes
                if chosen is not None:
                    selected[sequence.request_id] = chosen[:, index]
        prompt_logprobs: dict[str, list[list[TokenLogprob]]] = {}
        for scored in self.scored:
            for request_id, entries in scored.fetch().items():
                prompt_logprobs.setdefault(request_id, []).extend(entries)
        return RunnerResult(
            tokens=tokens, stats=stats, selected=selected, prompt_logprobs=prompt_logprobs,
            bytes_loaded=dict(self.loaded), bytes_saved=dict(self.saved),
        )  # fmt: skip


class ModelRunner:
    """Executes `StepPlan`s. One at a time, from one thread.

    Args:
        params: of `models.weights.load_params`.

    Attributes:
        huge_page_bytes: bytes of the weights that lie in huge pages (native CPU kernels on Linux).
    """

    def __init__(
        self,
        params: Any,
        model: ModelConfig,
        config: EngineConfig,
        layout: KVLayout,
        kernels: Kernels,
        device: jax.Device,
    ) -> None:
        self.layout, self.config, self.params = layout, config, commit(params, device)
        self.huge_page_bytes = kernels.prepare_weights(self.params)
        self._specs = {
            setting: make_spec(config, model, layout, kernels, setting) for setting in config.decode_settings
        }
        self._own_setting = config.decode_settings[0]
        self.spec = self._specs[self._own_setting]
        self._model, self._device = model, device
        self._seq_buckets = buckets.decode_seq_buckets(layout.max_num_seqs, deterministic=config.deterministic)
        self._table_buckets = buckets.table_buckets(layout.max_blocks_per_seq, deterministic=config.deterministic)
        self._token_buckets = buckets.prefill_token_buckets(config.max_num_batched_tokens)
        self._copy_buckets = buckets.copy_buckets(layout.max_blocks_per_seq)
        self._begin_empty()

    def reset(self) -> None:
        """Begins anew, with empty KV and without requests, after a step that failed half-way."""
        del self._state, self._host_pools, self._staging  # they go before their successors come
        self._begin_empty()

    def _begin_empty(self) -> None:
        layout, device = self.layout, self._device
        self._host_pools: tuple[Array, ...] = ()
        self._staging: Array | None = None
        if layout.tiered:
            stored = storage_dtype(jnp.dtype(self.config.dtype), device.platform)
            shape = pool_shape(layout, layout.num_blocks)
            self._host_pools = allocate_host_pools(layout.num_layers, shape, stored, device)
            self._staging = commit(jnp.zeros(pool_shape(layout, layout.num_staging_blocks), stored), device)
        self._state = commit(allocate_kv_state(layout, self.config, self.spec.kernels, device.platform), device)
        self._staged: tuple[str, int, int] | None = None  # request, layer, tokens that the staging buffer holds
        self._tables = SequenceTables(layout)
        self._sequences: dict[str, Sequence] = {}
        self._calls: dict[tuple[str, int], OpenCall] = {}
        self._sampler = TokenSampler(self._model.vocab_size, self._model.eos_token_ids, layout.max_num_seqs, device)
        self._loaded: collections.Counter[str] = collections.Counter()  # of the step that is being dispatched
        self._saved: collections.Counter[str] = collections.Counter()
        # By setting: what the tables of its last batch depend on, and these.
        self._decode_tables: dict[DecodeSetting, tuple[object, dict[str, Array]]] = {}

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_sequence(self, sequence: Sequence) -> None:
        """Makes a request known before a plan admits it."""
        self._sequences[sequence.request_id] = sequence

    def device_kv_bytes(self) -> int:
        """Bytes of the device KV arrays that exist now (pools, scales, digests, staging), read off the arrays."""
        arrays = [*self._state.pools, *self._state.scales, *self._state.digests]
        return sum(a.nbytes for a in arrays) + (0 if self._staging is None else self._staging.nbytes)

    def host_kv_bytes(self) -> int:
        """Bytes of the pinned host pools, read off the arrays."""
        return sum(a.nbytes for a in self._host_pools)

    def table_bytes(self) -> int:
        """Bytes of the residency and selection tables on the device."""
        return sum(a.nbytes for a in (*self._state.resident, *self._state.last_selected))

    def block_checksums(self, request_id: str) -> list[np.ndarray]:
        """Per layer the sums of bytes of the request's full blocks, in the tier that holds it whole (tests).

        Scales of int8 blocks count; their sums follow those of the pools.
        """
        sequence = self._sequences[request_id]
        ids = sequence.block_ids[: sequence.num_computed // self.layout.block_size]
        arrays = [np.asarray(array)[ids] for array in (*(self._host_pools or self._state.pools), *self._state.scales)]
        return [a.view(np.uint8).sum(axis=tuple(range(1, a.ndim)), dtype=np.uint64) for a in arrays]

    # --- warm-up -----------------------------------------------------------------------------------------------------

    def warm_up(self) -> Iterator[str]:
        """Runs every program that plans can need once, on padding; yields what comes next, for a progress bar.

        After it no request waits for the compiler (a test counts compilations).
        """
        for setting in self._specs:
            for width, num_seqs in itertools.product(self._table_buckets, self._seq_buckets):
                yield f"decode {num_seqs} x {width} blocks{f', {setting}' if len(self._specs) > 1 else ''}"
                padding = np.zeros(num_seqs, np.int32)
                rows = np.full(num_seqs, self._tables.padding_row, np.int32)
                self._warm_up_sampler(self._run_decode(setting, padding - 1, rows, width).logits)
        ends = (0,) if self.spec.prefill_sparsity is None else (0, self.layout.max_model_len)
        # One layer of each kind: dense or not, in decode and in prefill.
        kinds = {
            (layer in self.layout.dense_layers, layer in self.spec.prefill_dense_layers): layer
            for layer in range(self.layout.num_layers)
        }
        layers = tuple(kinds.values())
        for num_tokens, single in itertools.product(self._token_buckets, (True, False)):
            yield f"prefill {num_tokens} tokens{'' if single else ', packed'}"
            call = self._open_call((), min_tokens=num_tokens)
            call.is_single = single
            self._begin(call)
            for layer, call.longest_end in itertools.product(layers, ends):
                self._prefill_layer(call, layer)
            if single:
                for size in possible_slices(num_tokens):
                    zeros = to_device([np.zeros(size, np.int32), np.zeros(size, np.int32)])
                    score_rows(self.params, call.hidden, *zeros, spec=self.spec)
            rows = np.zeros(buckets.NUM_PREFILL_PROMPTS, np.int32)
            logits = prefill_logits(self.params, call.hidden, *to_device([rows]), spec=self.spec)
            self._warm_up_sampler(logits)
            self._warm_up_restarts(logits)
        yield "tables and transfers"
        self._forget(self._tables.padding_row, 0, history=True)
        if self.layout.tiered:
            self._warm_up_transfers()

    def _warm_up_sampler(self, logits: Array) -> None:
        greedy = SamplingParams(temperature=0.0)
        everything = SamplingParams(logprobs=1, logit_bias={0: 0.0}, presence_penalty=1.0, forced_token_ids=(0,))
        words = np.full(-(-self._model.vocab_size // 32), 0xFFFFFFFF, np.uint32)
        for params, allowed in ((greedy, {}), (everything, {"": words}), (greedy, {"": words})):
            sequence = Sequence("", np.zeros(1, np.int32), params, (0, 0), row=self._tables.padding_row)
            self._sampler.sample([sequence], logits, allowed).fetch()

    def _warm_up_restarts(self, logits: Array) -> None:
        restarts.as_batch(restarts.take_row(logits, to_device(np.int32(0))))
        if self._state.scales:
            null_block = to_device(np.int32(0))
            self._state = restarts.put_block(self._state, restarts.take_block(self._state, null_block), null_block)

    def _warm_up_transfers(self) -> None:
        layout = self.layout
        self._save_rows([])
        for width in self._copy_buckets:
            ids = to_device([np.zeros(width, np.int32), np.zeros(width, np.int32)])
            self._staging = transfers.load_layer(self._staging, self._host_pools[0], *ids, kernels=self.spec.kernels)
            for layer in layout.dense_layers[:1]:
                pools, host = self._state.pools, self._host_pools[layer]
                pool = transfers.load_layer(pools[layer], host, *ids, kernels=self.spec.kernels)
                self._state = dataclasses.replace(self._state, pools=_replaced(pools, layer, pool))

    # --- one plan ----------------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> RunnerResult:
        """Carries out a plan in the order of its fields and waits for what it gives."""
        step = self.begin(plan)
        self.run_prefill(step)
        return step.fetch()

    def begin(self, plan: StepPlan, *, sample: bool = True) -> RunningStep:
        """Dispatches a plan up to decode; its prefill work (`run_prefill`) must follow before the next plan.

        Args:
            sample: also the choice of the decoded tokens; else `sample_decoded` follows, when it is known which tokens
                are allowed.
        """
        step = RunningStep(plan, self.layout)
        self._loaded, self._saved = step.loaded, step.saved
        step.pending += [self._restart(restart) for restart in plan.restarts]
        for request_id in plan.finished:
            self._finish(request_id)
        self._park(plan.parks)
        for admission in plan.admissions:
            self._admit(admission)
        for grant in plan.grants:
            self._grant(grant)
        step.decoded = self._decode([self._sequences[request_id] for request_id in plan.decode])
        if sample:
            self.sample_decoded(step)
        return step

    def sample_decoded(self, step: RunningStep, allowed: Mapping[str, np.ndarray] | None = None) -> None:
        """Dispatches the choice of the decoded tokens; `allowed` as in `TokenSampler.sample`."""
        step.pending += [
            self._sampler.sample(sequences, outputs.logits, allowed) for sequences, outputs in step.decoded
        ]

    def run_prefill(self, step: RunningStep, allowed: Mapping[str, np.ndarray] | None = None) -> None:
        """Dispatches the plan's prefill work and the choice of first tokens; `allowed` as in `TokenSampler.sample`."""
        for segment in step.plan.prefill:
            ended = self._prefill(segment, step.scored)
            if ended is not None:
                step.pending.append(self._sampler.sample(*ended, allowed))

    def _restart(self, restart: Restart) -> PendingTokens:
        """A request takes over the prompt of another and gets its first token."""
        before, sequence = self._sequences[restart.after], self._sequences[restart.request_id]
        end = before.prompt_end
        assert end is not None, "a request ends after its prompt is through the layers"
        sequence.row, sequence.block_ids, before.row = before.row, before.block_ids, -1
        sequence.num_computed = len(sequence.prompt_token_ids)
        if sequence.has_successor:
            sequence.prompt_end = end
        if end.block is not None:
            block_id = to_device(self._last_prompt_block(sequence))
            self._state = restarts.put_block(self._state, end.block, block_id)
        # The host has the prompt's blocks whole, so that without its device room it is where prefill left it.
        self._tables.withdraw(sequence.row)
        self._forget(sequence.row, 0, history=True)
        return self._sampler.sample([sequence], restarts.as_batch(end.logits))

    def _note_prompt_end(self, sequence: Sequence, logits: Array, row: int) -> None:
        block = None
        if self._state.scales and len(sequence.prompt_token_ids) % self.layout.block_size:
            block = restarts.take_block(self._state, to_device(self._last_prompt_block(sequence)))
        sequence.prompt_end = PromptEnd(restarts.take_row(logits, to_device(np.int32(row))), block)

    def _last_prompt_block(self, sequence: Sequence) -> np.generic:
        """Id of the block of the prompt's last token."""
        return sequence.block_ids[(len(sequence.prompt_token_ids) - 1) // self.layout.block_size]

    def _finish(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        if sequence.row >= 0:
            self._tables.clear(sequence.row)
        for key, call in list(self._calls.items()):
            if not call.drop(request_id):
                del self._calls[key]
            elif key != self._key(call):
                self._calls[self._key(call)] = self._calls.pop(key)

    def _admit(self, admission: Admission) -> None:
        sequence = self._sequences[admission.request_id]
        sequence.row = admission.row
        sequence.block_ids = np.asarray(admission.block_ids, np.int32)
        sequence.inv_freq, _ = rope_frequencies(self.spec.model, sequence.num_positions)
        self._tables.admit(admission, sequence.inv_freq)
        self._forget(admission.row, 0, history=True)

    # --- device room -------------------------------------------------------------------------------------------------

    def _grant(self, grant: Grant) -> None:
        sequence = self._sequences[grant.request_id]
        row, layout = sequence.row, self.layout
        kept = self._common_slots(row, grant)
        if sequence.has_grant and kept < self._tables.num_slots[row]:
            self._save_partial([sequence])  # a slot that goes may be the only one with the newest block
            self._forget(row, kept, history=False)
        self._tables.grant(row, grant)
        if not sequence.has_grant and layout.num_dense_layers:
            self._load_dense(sequence)
        sequence.has_grant = True

    def _common_slots(self, row: int, grant: Grant) -> int:
        """How many leading slots a changed grant shares with the old one: what they hold stays valid."""
        old = self._tables.slots[row, : self._tables.num_slots[row]]
        new = np.asarray(grant.slot_ids[: len(old)], np.int32)
        different = np.flatnonzero(old[: len(new)] != new)
        return int(different[0]) if different.size else len(new)

    def _load_dense(self, sequence: Sequence) -> None:
        """A resumed request's dense layers come back whole."""
        count = -(-sequence.num_computed // self.layout.block_size)
        width = buckets.bucket_for(count, self._copy_buckets)
        target, source = np.zeros(width, np.int32), np.zeros(width, np.int32)
        target[:count] = self._tables.dense[sequence.row, :count]
        source[:count] = sequence.block_ids[:count]
        target_d, source_d = to_device([target, source])
        pools = list(self._state.pools)
        for layer in self.layout.dense_layers:
            pools[layer] = transfers.load_layer(
                pools[layer], self._host_pools[layer], target_d, source_d, kernels=self.spec.kernels
            )
        self._state = dataclasses.replace(self._state, pools=tuple(pools))
        pieces = count * self.layout.num_dense_layers * self.layout.num_kv_heads
        self._loaded[sequence.request_id] += pieces * self.layout.piece_bytes

    def _park(self, request_ids: tuple[str, ...]) -> None:
        sequences = [self._sequences[r] for r in request_ids]
        self._save_partial(sequences)
        for sequence in sequences:
            self._tables.withdraw(sequence.row)
            self._forget(sequence.row, 0, history=False)
            sequence.has_grant = False

    def _save_partial(self, sequences: list[Sequence]) -> None:
        """Saves newest blocks that are not full, which so far only the device has."""
        self._save_newest([s for s in sequences if s.num_computed % self.layout.block_size])

    def _save_newest(self, sequences: list[Sequence]) -> None:
        """Writes the newest block of each through to the host tier."""
        width = self._seq_buckets[-1]
        for start in range(0, len(sequences), width):
            self._save_rows(sequences[start : start + width])

    def _save_rows(self, sequences: list[Sequence]) -> None:
        layout, width = self.layout, self._seq_buckets[-1]
        rows = np.full(width, self._tables.padding_row, np.int32)
        logical, block_ids, dense_ids = (np.zeros(width, np.int32) for _ in range(3))
        for index, s in enumerate(sequences):
            rows[index] = s.row
            logical[index] = (s.num_computed - 1) // layout.block_size
            block_ids[index] = s.block_ids[logical[index]]
            dense_ids[index] = self._tables.dense[s.row, logical[index]]
            self._saved[s.request_id] += layout.num_layers * layout.num_kv_heads * layout.piece_bytes
        arrays = to_device([rows, logical, block_ids, dense_ids, self._tables.slots[rows]])
        self._host_pools = transfers.save_newest(
            self._host_pools, self._state.pools, self._state.resident, *arrays, dense_layers=layout.dense_layers,
            kernels=self.spec.kernels,
        )  # fmt: skip

    def _forget(self, row: int, first_slot: int, *, history: bool) -> None:
        if not self._state.last_selected:
            return
        arrays = to_device([np.int32(row), np.int32(first_slot), np.bool_(history)])
        resident, last = transfers.forget(self._state.resident, self._state.last_selected, *arrays)
        self._state = dataclasses.replace(self._state, resident=resident, last_selected=last)

    # --- decode ------------------------------------------------------------------------------------------------------

    def _decode(self, sequences: list[Sequence]) -> list[tuple[list[Sequence], DecodeOutputs]]:
        """One step for all, in as many batches as it takes: one for each decode setting, unless `deterministic`."""
        largest, decoded = self._seq_buckets[-1], []
        alike: dict[DecodeSetting, list[Sequence]] = {}
        for sequence in sequences:
            alike.setdefault(sequence.setting or self._own_setting, []).append(sequence)
        for setting, members in alike.items():
            groups = [members[start : start + largest] for start in range(0, len(members), largest)]
            decoded += [(group, self._decode_batch(setting, group)) for group in groups]
        for sequence in sequences:
            sequence.num_computed += 1
        if self.layout.tiered:
            self._save_newest([s for s in sequences if s.num_computed % self.layout.block_size == 0])
        return decoded

    def _decode_batch(self, setting: DecodeSetting, sequences: list[Sequence]) -> DecodeOutputs:
        longest = max(s.num_computed + 1 for s in sequences)
        num_seqs = buckets.bucket_for(len(sequences), self._seq_buckets)
        width = buckets.bucket_for(-(-longest // self.layout.block_size), self._table_buckets)
        rows = np.full(num_seqs, self._tables.padding_row, np.int32)
        positions = np.full(num_seqs, -1, np.int32)
        for index, s in enumerate(sequences):
            assert s.num_generated, "decoding begins when prefill has sampled a token"
            rows[index], positions[index] = s.row, s.num_computed
        return self._run_decode(setting, positions, rows, width)

    def _run_decode(self, setting: DecodeSetting, positions: np.ndarray, rows: np.ndarray, width: int) -> DecodeOutputs:
        key = (rows.tobytes(), width, self._tables.version)
        known, tables = self._decode_tables.get(setting, (None, {}))
        if key != known:  # the same batch as before, as a rule
            tables = to_device(self._tables.decode_tables(rows, width))
            self._decode_tables[setting] = key, tables
        tokens = self._sampler.newest_tokens
        inputs = DecodeInputs(newest_tokens=tokens, positions=to_device(positions), **tables)
        self._state, outputs = decode_step(
            self.params, self._state, self._host_pools, inputs, spec=self._specs[setting]
        )
        return outputs

    # --- prefill -----------------------------------------------------------------------------------------------------

    def _key(self, call: OpenCall) -> tuple[str, int]:
        return call.first.request_id, call.first.start

    def _prefill(
        self, segment: PrefillSegment, scored: list[PendingPromptLogprobs]
    ) -> tuple[list[Sequence], Array] | None:
        """Runs a segment; returns the sequences whose prompt it completed and their logits.

        Args:
            scored: gets the log-probabilities of prompt tokens that are through the last layer.
        """
        key = (segment.items[0].request_id, segment.items[0].start)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self._open_call(segment.items)
        if call.hidden is None:
            self._begin(call)
        assert call.items == segment.items, "the plan and the open prefill call name different prompts"
        for layer in range(segment.layer_start, segment.layer_end):
            self._prefill_layer(call, layer)
        if segment.layer_end < self.layout.num_layers:
            return None
        del self._calls[key]
        for item in segment.items:
            self._sequences[item.request_id].num_computed = item.end
        pending = score_prompts(self.params, call, spec=self.spec)
        if pending is not None:
            scored.append(pending)
        ended = call.last_rows()
        if not ended:
            return None
        rows = np.zeros(buckets.NUM_PREFILL_PROMPTS, np.int32)
        rows[: len(ended)] = [row for _, row in ended]
        logits = prefill_logits(self.params, call.hidden, *to_device([rows]), spec=self.spec)
        for place, (sequence, _) in enumerate(ended):
            if sequence.has_successor:
                self._note_prompt_end(sequence, logits, place)
        return [sequence for sequence, _ in ended], logits

    def _open_call(self, items: tuple[PrefillItem, ...], *, min_tokens: int = 1) -> OpenCall:
        layout = self.layout
        return OpenCall(
            items, self._sequences, block_size=layout.block_size, token_buckets=self._token_buckets,
            max_blocks=layout.num_staging_blocks if layout.tiered else layout.max_blocks_per_seq,
            staged=layout.tiered, min_tokens=min_tokens,
        )  # fmt: skip

    def _begin(self, call: OpenCall) -> None:
        inv_freq = np.zeros((buckets.NUM_PREFILL_PROMPTS, self.layout.head_dim // 2), np.float32)
        for index, item in enumerate(call.items):
            inv_freq[index] = self._sequences[item.request_id].inv_freq
        token_ids, inv_freq = to_device([call.token_ids(), inv_freq])
        call.hidden, call.rope = begin_prefill(
            self.params, token_ids, call.call.positions, call.call.tile_prompt, inv_freq, spec=self.spec
        )

    def _prefill_layer(self, call: OpenCall, layer: int) -> None:
        layout, state = self.layout, self._state
        places = _digest_places(layout, layer, len(state.digests))
        digests = tuple(state.digests[place] for place in places)
        scales = state.scales[layer] if state.scales else None
        if layout.tiered and call.items:
            self._fill_staging(call, layer)
        pool = self._staging if layout.tiered else state.pools[layer]
        call.hidden, pool, digests, scales, blocks = prefill_layer(
            self.params["layers"][layer], call.hidden, call.rope, pool, digests, scales, call.call,
            spec=self.spec, single_prompt=call.is_single, sparse=self.spec.prefills_sparsely(layer, call.longest_end),
        )  # fmt: skip
        if layout.tiered:
            self._staging = pool
            single = call.is_single and call.items
            self._staged = (call.first.request_id, layer, call.first.end) if single else None
            self._save_prefilled(call, layer, blocks)
        else:
            self._state = dataclasses.replace(state, pools=_replaced(state.pools, layer, pool))
        for place, renewed in zip(places, digests, strict=True):
            self._state = dataclasses.replace(self._state, digests=_replaced(self._state.digests, place, renewed))
        if scales is not None:
            self._state = dataclasses.replace(self._state, scales=_replaced(self._state.scales, layer, scales))

    def _fill_staging(self, call: OpenCall, layer: int) -> None:
        """Earlier tokens of the prompt must be in the staging buffer; loads them where the last call was another's."""
        first = call.first
        if first.start == 0 or self._staged == (first.request_id, layer, first.start):
            return
        target, source = call.staged_before()
        width = buckets.bucket_for(len(target), self._copy_buckets)
        padded = to_device([np.pad(ids, (0, width - len(ids))) for ids in (target, source)])
        self._staging = transfers.load_layer(self._staging, self._host_pools[layer], *padded, kernels=self.spec.kernels)
        self._loaded[first.request_id] += len(target) * self.layout.num_kv_heads * self.layout.piece_bytes

    def _save_prefilled(self, call: OpenCall, layer: int, blocks: Array) -> None:
        saved = transfers.save_layer(self._host_pools[layer], blocks, call.save_ids, kernels=self.spec.kernels)
        self._host_pools = _replaced(self._host_pools, layer, saved)
        for request_id, count in call.saved_blocks():
            self._saved[request_id] += count * self.layout.num_kv_heads * self.layout.piece_bytes


def _digest_places(layout: KVLayout, layer: int, num_digests: int) -> range:
    """Places in `KVState.digests` of a layer: one of each method; none of a dense layer."""
    if layer in layout.dense_layers:
        return range(0)
    return range(layout.sparse_layers.index(layer), num_digests, layout.num_sparse_layers)


def _replaced(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])

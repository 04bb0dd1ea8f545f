"""What a user may set: `EngineConfig`. Frozen, validated, printed at start. No JAX here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

BLOCK_SIZES = (16, 32, 64)
MAX_NUM_SEQS = 4096
SELECTION_METHODS = ("cuboid-mean", "quest", "mean")

DType = Literal["bfloat16", "float32"]
WeightDType = Literal["int8"]
KVDType = Literal["int8"]
SelectionMethod = Literal["cuboid-mean", "quest", "mean"]
SelectionGranularity = Literal["kv_head", "query_head"]
KVTiers = Literal["unified", "tiered"]
PrefillMode = Literal["layer", "chunked"]
DecodeGroups = Literal["all", "one"]
BatchControl = Literal["working-set", "none"]
Implementation = Literal["auto", "pallas", "cpu", "reference"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSetting:
    """How much of its context a decode step attends to, and by which digests it chooses; `str` is `512:cuboid-mean`.

    Attributes:
        sparse_budget_tokens: None = everything; `selection` then says nothing.
    """

    sparse_budget_tokens: int | None
    selection: SelectionMethod

    def __str__(self) -> str:
        if self.sparse_budget_tokens is None:
            return "dense"
        return f"{self.sparse_budget_tokens}:{self.selection}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine. `sparseserve info` prints what is in force.

    Attributes:
        dtype: dtype of weights, activations and KV; accumulation is float32 in both.
        weight_dtype: "int8" = weight matrices as int8 with a scale for each row, multiplied as bfloat16 (not with
            dtype "float32", and not on a GPU); None = as `dtype` says.
        kv_dtype: "int8" = keys and values in 8 bits with a scale for K and V of each block and head, so that a budget
            holds about twice the tokens (unified, implementation "cpu" or "reference"); None = as `dtype`.
        block_size: tokens of one KV block (one layer, one KV head, K and V together).
        sparse_budget_tokens: tokens a decode step may attend to per layer and head; None = dense.
            A multiple of `block_size`. A context no longer than this is attended to densely.
        selection: block digest and score (paper section 2; ArkVale cuboid-mean, Quest, mean).
        extra_decode_settings: pairs (budget in tokens or None = dense, selection) that a request may choose instead of
            `sparse_budget_tokens` and `selection`. Every further method costs digests of its own. With kv_tiers
            "tiered" no budget above `sparse_budget_tokens`.
        selection_granularity: one selection per KV head (all its query heads share it) or one per query head.
        num_dense_layers: how many of the first layers attend to everything also when a budget is set; None = 2, or
            those of the embedded model that were found to retrieve (`dense_layers`).
        dense_layers: the layers that do, by index from 0, in place of the first ones: few layers copy text from afar,
            and these suffer from a budget (docs/accuracy.md says how to find them).
        num_sink_blocks: oldest blocks that are always selected, inside the budget (at least 0).
        num_newest_blocks: newest blocks that are always selected, inside the budget (at least 1).
        kv_tiers: "unified" = one pool; "tiered" = a device pool as a cache of the pinned host pool.
        device_kv_bytes: bound on KV bytes on the device (pools, digests, prefill staging); None = by memory.
        host_kv_bytes: bound on KV bytes in host memory (tiered only); None = by memory.
        max_num_seqs: sequences in flight (prefilling, decoding, parked).
        max_model_len: prompt + generated tokens of one request; None = the model's own limit.
        rope_scaling: the model's rotary scaling, replaced: a mapping as in `config.json`, e.g. `{"rope_type": "yarn",
            "factor": 4.0}`; the model's limit becomes its original length times the factor. None = as the checkpoint.
        prefill: "layer" = layer-segmented (paper section 3.3); "chunked" = token chunks through all layers.
        prefill_sparsity: share of its attention, in (0, 1], that each head of a prompt keeps (an estimate by tiles of
            128 tokens, from every 16th query); None = dense. Dense stay the dense layers and tokens within
            `sparse_budget_tokens`.
        max_inject_tokens: prompt tokens x layers that may run beside one decode step; None = 2048 x layers.
        max_num_batched_tokens: the longest prefill call in tokens (and the chunk of "chunked" prefill).
        working_set_window: decode steps w whose selections make up the working set (paper: 12).
        working_set_margin: share of slots granted beyond the measured working set.
        max_grant_factor: a grant never exceeds this many times the selection (SPIN: hits saturate at 4-5).
        batch_control: "working-set" = Algorithm 1; "none" = admit first come, first served (the ablation).
        decode_groups: "all" = a step decodes everybody, in a batch for each decode setting; "one" = those of one
            setting until nobody is at it, then of the one that most are at: four times fuller batches where settings
            follow one another (evaluation), and no fairness. "one" with kv_tiers "unified" only.
        deterministic: one decode batch shape and unpacked prefill, so that tokens do not depend on batch mates
            to the last bit.
        implementation: kernel implementation: "pallas" (GPU; on the CPU interpreted, for tests), "cpu" (native code),
            "reference" (XLA); "auto" picks by platform and says which.
        record_selection: keep every decode step's selected block ids on the outputs (tests and studies).
        record_timeline: keep when each request's prefill segments, loads and saves ran, on its last output (traces).
        seed: base seed for requests that bring none.
        compilation_cache_dir: where compiled programs persist; None = the per-user cache, "" = off.
    """

    dtype: DType = "bfloat16"
    weight_dtype: WeightDType | None = None
    kv_dtype: KVDType | None = None
    block_size: int = 32
    sparse_budget_tokens: int | None = 2048
    selection: SelectionMethod = "cuboid-mean"
    extra_decode_settings: tuple[tuple[int | None, SelectionMethod], ...] = ()
    selection_granularity: SelectionGranularity = "kv_head"
    num_dense_layers: int | None = None
    dense_layers: tuple[int, ...] | None = None
    num_sink_blocks: int = 1
    num_newest_blocks: int = 2
    kv_tiers: KVTiers = "unified"
    device_kv_bytes: int | None = None
    host_kv_bytes: int | None = None
    max_num_seqs: int = 8
    max_model_len: int | None = None
    rope_scaling: Mapping[str, object] | None = dataclasses.field(default=None, hash=False)
    prefill: PrefillMode = "layer"
    prefill_sparsity: float | None = None
    max_inject_tokens: int | None = None
    max_num_batched_tokens: int = 2048
    working_set_window: int = 12
    working_set_margin: float = 0.1
    max_grant_factor: int = 4
    batch_control: BatchControl = "working-set"
    decode_groups: DecodeGroups = "all"
    deterministic: bool = False
    implementation: Implementation = "auto"
    record_selection: bool = False
    record_timeline: bool = False
    seed: int = 0
    compilation_cache_dir: str | None = None

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, ("bfloat16", "float32"))
        if self.weight_dtype is not None:
            _one_of("weight_dtype", self.weight_dtype, ("int8",))
            if self.dtype == "float32":
                raise ValueError(
                    f"weight_dtype={self.weight_dtype!r} needs dtype='bfloat16', which its products are computed in; "
                    "use weight_dtype=None with dtype='float32'"
                )
        if self.kv_dtype is not None and self.kv_dtype != "int8":
            raise ValueError(f"kv_dtype={self.kv_dtype!r} is not supported; choose 'int8', or None for that of dtype")
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        _one_of("selection", self.selection, SELECTION_METHODS)
        _one_of("selection_granularity", self.selection_granularity, ("kv_head", "query_head"))
        _one_of("kv_tiers", self.kv_tiers, ("unified", "tiered"))
        _one_of("prefill", self.prefill, ("layer", "chunked"))
        _one_of("decode_groups", self.decode_groups, ("all", "one"))
        _one_of("batch_control", self.batch_control, ("working-set", "none"))
        _one_of("implementation", self.implementation, ("auto", "pallas", "cpu", "reference"))
        _at_least("num_sink_blocks", self.num_sink_blocks, 0)
        _at_least("num_newest_blocks", self.num_newest_blocks, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        if self.max_num_seqs > MAX_NUM_SEQS:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} must be at most {MAX_NUM_SEQS}: each sequence has tables"
            )
        _at_least("working_set_window", self.working_set_window, 1)
        _at_least("max_grant_factor", self.max_grant_factor, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 128)
        _integer("seed", self.seed)
        for name in ("deterministic", "record_selection", "record_timeline"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.compilation_cache_dir, str | None):
            raise ValueError(
                f"compilation_cache_dir={self.compilation_cache_dir!r} must be a string, or None for the per-user cache"
            )
        if self.rope_scaling is not None:
            _rope_scaling(self.rope_scaling)
            object.__setattr__(self, "rope_scaling", dict(self.rope_scaling))
        margin = self.working_set_margin
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0.0 <= margin <= 4.0:
            raise ValueError(f"working_set_margin={margin!r} must be a number in [0, 4]")
        share = self.prefill_sparsity
        if share is not None and (
            isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 < share <= 1.0
        ):
            raise ValueError(
                f"prefill_sparsity={share!r} must be a number in (0, 1], the share of attention to keep, or None for "
                "dense prefill"
            )
        if self.max_num_batched_tokens & (self.max_num_batched_tokens - 1):
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be a power of two (prefill calls come in "
                "power-of-two shapes)"
            )
        for name in ("device_kv_bytes", "host_kv_bytes", "max_model_len", "max_inject_tokens", "num_dense_layers"):
            value = getattr(self, name)
            if value is not None:
                _at_least(name, value, 0 if name == "num_dense_layers" else 1)
        if self.dense_layers is not None:
            object.__setattr__(self, "dense_layers", self._checked_layers())
        if self.kv_dtype is not None and self.kv_tiers != "unified":
            raise ValueError(
                f"kv_dtype={self.kv_dtype!r} needs kv_tiers='unified': scales do not move between tiers; use it, or "
                "kv_dtype=None"
            )
        if self.decode_groups == "one" and self.kv_tiers != "unified":
            raise ValueError(
                "decode_groups='one' needs kv_tiers='unified': device room is planned for all who decode; use it, "
                "or decode_groups='all'"
            )
        if self.kv_tiers == "unified" and self.host_kv_bytes is not None:
            raise ValueError("host_kv_bytes needs kv_tiers='tiered'; the unified mode has one pool (device_kv_bytes)")
        if self.sparse_budget_tokens is not None:
            self._check_budget("sparse_budget_tokens", self.sparse_budget_tokens)
        object.__setattr__(self, "extra_decode_settings", self._checked_settings())

    def _checked_layers(self) -> tuple[int, ...]:
        """`dense_layers` in order."""
        layers = self.dense_layers
        if not isinstance(layers, (tuple, list)) or not all(_is_integer(layer) and layer >= 0 for layer in layers):
            raise ValueError(f"dense_layers={layers!r} must be a tuple of layer indices from 0 on, such as (7, 18)")
        if len(set(layers)) < len(layers):
            raise ValueError(f"dense_layers={layers!r} names a layer twice; name each once")
        if self.num_dense_layers is not None:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} and dense_layers={layers!r} both say which layers are "
                "dense; give one of them"
            )
        return tuple(sorted(layers))

    def _check_budget(self, name: str, budget_tokens: object) -> None:
        _integer(name, budget_tokens)
        assert isinstance(budget_tokens, int)
        smallest = (self.num_sink_blocks + self.num_newest_blocks + 1) * self.block_size
        if budget_tokens % self.block_size or budget_tokens < smallest:
            raise ValueError(
                f"{name}={budget_tokens} must be a multiple of block_size={self.block_size} and at least {smallest} "
                "(sink, newest and one chosen block); use None for dense attention"
            )

    def _checked_settings(self) -> tuple[tuple[int | None, SelectionMethod], ...]:
        """`extra_decode_settings` as a tuple of tuples."""
        name, settings, own = "extra_decode_settings", self.extra_decode_settings, self.sparse_budget_tokens
        if not isinstance(settings, (tuple, list)) or not all(
            isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in settings
        ):
            raise ValueError(
                f"{name}={settings!r} must be a tuple of (budget in tokens or None, selection), such as "
                "((512, 'cuboid-mean'), (None, 'cuboid-mean'))"
            )
        for budget, selection in settings:
            _one_of(f"selection of {name}", selection, SELECTION_METHODS)
            if budget is not None:
                self._check_budget(f"budget of {name}", budget)
                if own is None:
                    raise ValueError(
                        f"{name} has a budget of {budget} tokens, but sparse_budget_tokens=None keeps no digests; give "
                        "sparse_budget_tokens a budget, and (None, ...) as an extra setting for dense attention"
                    )
            if self.kv_tiers == "tiered" and own is not None and (budget is None or budget > own):
                raise ValueError(
                    f"{name} has {'dense attention' if budget is None else f'a budget of {budget} tokens'}, but with "
                    f"kv_tiers='tiered' device room is planned for sparse_budget_tokens={own}; raise that, or use "
                    "kv_tiers='unified'"
                )
        return tuple((budget, selection) for budget, selection in settings)

    @property
    def decode_settings(self) -> tuple[DecodeSetting, ...]:
        """What a request may choose, each once: the engine's own first, then `extra_decode_settings`."""
        settings = [DecodeSetting(sparse_budget_tokens=self.sparse_budget_tokens, selection=self.selection)]
        for budget, selection in self.extra_decode_settings:
            method = self.selection if budget is None else selection  # every dense setting is the same
            settings.append(DecodeSetting(sparse_budget_tokens=budget, selection=method))
        return tuple(dict.fromkeys(settings))

    @property
    def digest_methods(self) -> tuple[SelectionMethod, ...]:
        """Methods whose digests are kept, the engine's own first."""
        return tuple(dict.fromkeys(setting.selection for setting in self.decode_settings))

    @property
    def sparse_budget_blocks(self) -> int | None:
        """The budget in blocks (2048 tokens = 64 blocks of 32), or None when dense."""
        return None if self.sparse_budget_tokens is None else self.sparse_budget_tokens // self.block_size


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    # 32.0 equals 32, but it is no number of tokens.
    if not isinstance(value, type(allowed[0])) or value not in allowed:
        raise ValueError(f"{name}={value!r} is not supported; choose one of {', '.join(map(repr, allowed))}")


def _rope_scaling(value: object) -> None:
    if not isinstance(value, Mapping) or not all(
        isinstance(key, str) and isinstance(entry, (bool, int, float, str)) for key, entry in value.items()
    ):
        raise ValueError(
            f"rope_scaling={value!r} must map names to numbers, text or booleans, such as "
            '{"rope_type": "yarn", "factor": 4.0}'
        )


def _integer(name: str, value: object) -> None:
    if not _is_integer(value):
        raise ValueError(f"{name}={value!r} must be an integer")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_least(name: str, value: int, bound: int) -> None:
    if not _is_integer(value) or value < bound:
        raise ValueError(f"{name}={value!r} must be an integer of at least {bound}")

"""Every operation in every shape that is supported, with example arrays: to compile, to count bytes, to time.

Arrays are small where size does not matter to a kernel (a pool holds just the blocks that are used); what decides the
machine code (head_dim, block size, dtype, group, table widths, selection) is as in serving.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from host_offload.memory import PINNED_HOST, abstract
from pallas_kernels.api import Kernels, get_kernels
from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.support import BLOCK_SIZES, DTYPES
from pallas_kernels.triton import Traffic, TrafficMeter

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 3, 4, 7, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One operation in one shape.

    Attributes:
        operation: its name in the `Kernels` table.
        shape: in words, for reports.
        arrays: positional arguments, NumPy or None.
        names: of the last arrays, which go in by keyword.
        fixed: keyword arguments that are no arrays.
        in_place: indices of arguments that are donated.
        in_host_memory: indices of arguments that lie in pinned host memory.
        bytes_minimum: the fewest bytes of device memory that must move: what is read and written, once.
        pcie_bytes_minimum: the same over PCIe.
        flops_minimum: of matrix products, without padding.
        reread: the kernel reads keys again for each query tile, from L2; what moves is then not what loads ask for.
        merged_bytes: of the result that XLA merges from partial results, when a kernel gives those; else 0.
        part: a smaller case and how often it is contained in this one: what `traffic` runs in its place, where programs
            have nothing to do with each other (the interpreter takes minutes for thousands of them).
    """

    operation: str
    shape: str
    arrays: tuple[Any, ...]
    names: tuple[str, ...] = ()
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    in_place: tuple[int, ...] = ()
    in_host_memory: tuple[int, ...] = ()
    bytes_minimum: int = 0
    pcie_bytes_minimum: int = 0
    flops_minimum: int = 0
    reread: bool = False
    merged_bytes: int = 0
    part: tuple[Case, int] | None = None

    def function(self, kernels: Kernels) -> Callable[..., Any]:
        """The jitted operation of an implementation; donates what is updated in place."""
        return jax.jit(functools.partial(self._call, getattr(kernels, self.operation)), donate_argnums=self.in_place)

    def _call(self, operation: Callable[..., Any], *arrays: Any) -> Any:
        first = len(arrays) - len(self.names)
        return operation(*arrays[:first], **dict(zip(self.names, arrays[first:], strict=True)), **self.fixed)

    def abstract_arguments(self) -> tuple[Any, ...]:
        """The arrays' shapes, in the memories where they lie."""
        return tuple(
            abstract(array, *((PINNED_HOST,) if index in self.in_host_memory else ()))
            for index, array in enumerate(self.arrays)
        )

    def traffic(self) -> list[Traffic]:
        """What the kernels load, store and multiply, by running them in the interpreter."""
        if self.part is not None:
            case, times = self.part
            return [traffic.scaled(times) for traffic in case.traffic()]
        operation = getattr(get_kernels("pallas", "cpu"), self.operation)
        with TrafficMeter() as meter:
            self._call(operation, *map(_to_jax, self.arrays))
        return meter.calls

    def bytes_requested(self, traffic: Traffic) -> int:
        """Of a kernel, and of the merge in XLA of its partial results, where it gives those."""
        requested = traffic.loaded_bytes + traffic.stored_bytes
        is_partial = self.merged_bytes and traffic.stored_bytes > self.merged_bytes
        return requested + (traffic.stored_bytes + self.merged_bytes if is_partial else 0)


def _to_jax(array: Any) -> Any:
    return None if array is None else jnp.asarray(array)


def every_case() -> Iterator[Case]:
    """All operations in all supported shapes, one of each kind of machine code."""
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for block_size in BLOCK_SIZES:
                size: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "dtype": dtype}
                yield decode_attention(**size)
                if dtype == "bfloat16" or block_size == 32:  # float32 takes ten times as long to compile
                    yield prefill_attention(**size)
                yield append_tokens(**size)
                yield append_blocks(**size)
                yield from transfers(**size)
            yield score_blocks(head_dim=head_dim, dtype=dtype)
    for head_dim in HEAD_DIMS:
        for block_size in BLOCK_SIZES:
            yield decode_attention(head_dim=head_dim, block_size=block_size, dtype="int8")
    for group in GROUPS:
        yield decode_attention(group=group)
        yield decode_attention(group=group, masked=True)
        yield score_blocks(group=group)
    for group in (3, 8):  # a program has one query head: the group is only in an index
        yield prefill_attention(group=group, masked=True)
    for head_dim in (64, 256):
        yield decode_attention(head_dim=head_dim, masked=True)
        yield prefill_attention(head_dim=head_dim, masked=True)
    yield decode_attention(num_seqs=1, num_selected=1024)
    yield score_blocks(group=4, per_query_head=True)
    yield score_blocks(max_blocks=32768)
    for method in ("quest", "mean"):
        yield append_tokens(method=method)
        yield append_blocks(method=method)
    yield append_tokens(method=None)
    yield append_blocks(method=None)
    for max_blocks, num_selected in ((64, 16), (1024, 64), (4096, 256), (32768, 64)):
        yield select_blocks(max_blocks=max_blocks, num_selected=num_selected)
    for num_selected, num_slots in ((16, 64), (64, 256), (256, 2048)):
        yield match_slots(num_selected=num_selected, num_slots=num_slots)


def reported_cases() -> Iterator[Case]:
    """Shapes of Llama-3-8B, LWM-7B and SmolLM2-135M at the default budget: what the report shows."""
    for model, heads in (("llama-3-8b", (8, 4, 128)), ("lwm-7b", (32, 1, 128)), ("smollm2-135m", (3, 3, 64))):
        num_kv_heads, group, head_dim = heads
        size: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "model": model}
        grouped = {**size, "group": group}
        for num_seqs in (1, 8):
            yield decode_attention(num_seqs=num_seqs, **grouped)
        yield decode_attention(num_seqs=8, dtype="int8", **grouped)
        yield score_blocks(num_seqs=8, max_blocks=1024, **grouped)
        yield select_blocks(num_seqs=8, num_kv_heads=num_kv_heads, max_blocks=1024, num_selected=64, model=model)
        yield match_slots(num_seqs=8, num_kv_heads=num_kv_heads, num_selected=64, num_slots=256, model=model)
        yield append_tokens(num_seqs=8, **size)
        yield append_blocks(**size)
        yield from transfers(num_seqs=8, **size)
        yield prefill_attention(num_tokens=4096, **grouped)


# --- one builder an operation ----------------------------------------------------------------------------------------


def decode_attention(
    *, num_seqs: int = 2, num_kv_heads: int = 2, group: int = 4, head_dim: int = 128, block_size: int = 32,
    num_selected: int = 64, dtype: str = "bfloat16", masked: bool = False, own_blocks: bool = False, model: str = "",
) -> Case:  # fmt: skip
    """Every selected block is full and read once.

    Args:
        own_blocks: each sequence has its own, as in serving; else all share a few, which is enough to count bytes.
    """
    rng = np.random.default_rng(0)
    quantised = dtype == "int8"
    pool = _pool(rng, num_selected * (num_seqs if own_blocks else 1), num_kv_heads, block_size, head_dim, dtype)
    q = _values(rng, (num_seqs, num_kv_heads * group, head_dim), "bfloat16" if quantised else dtype)
    ids = np.stack([1 + rng.permutation(num_selected) for _ in range(num_seqs * num_kv_heads)]).astype(np.int32)
    ids = ids.reshape(num_seqs, num_kv_heads, num_selected)
    if own_blocks:
        ids += np.arange(num_seqs, dtype=np.int32)[:, None, None] * num_selected
    num_valid = np.full_like(ids, block_size)
    mask = np.ones((num_seqs, num_kv_heads, group, num_selected), bool) if masked else None
    blocks = ids.size * pool[0, 0].nbytes
    arrays = (q, pool, ids, num_valid, mask)
    if quantised:
        arrays += (np.full((len(pool), num_kv_heads, 2), 0.01, np.float32),)
        blocks += ids.size * 2 * 4
    return Case(
        operation="decode_attention",
        shape=_shape(model, seqs=num_seqs, kv_heads=num_kv_heads, group=group, head_dim=head_dim, blocks=num_selected,
                     block_size=block_size, dtype=dtype, masked=masked),
        arrays=arrays, names=("kv_scales",) if quantised else (), fixed={"scale": head_dim**-0.5},
        bytes_minimum=blocks + q.nbytes + q.size * 4, flops_minimum=4 * q.size * num_selected * block_size,
        merged_bytes=q.size * 4,
    )  # fmt: skip


def prefill_attention(
    *, num_kv_heads: int = 1, group: int = 4, head_dim: int = 128, block_size: int = 32, num_tokens: int = 512,
    dtype: str = "bfloat16", masked: bool = False, model: str = "",
) -> Case:  # fmt: skip
    """One prompt from its first token on."""
    part = None
    if num_kv_heads * group > 1 and not masked:
        small = prefill_attention(
            num_kv_heads=1, group=1, head_dim=head_dim, block_size=block_size, num_tokens=num_tokens, dtype=dtype
        )
        part = small, num_kv_heads * group
    rng = np.random.default_rng(0)
    num_blocks, num_tiles = num_tokens // block_size, num_tokens // PREFILL_TILE
    pool = _pool(rng, num_blocks, num_kv_heads, block_size, head_dim, dtype)
    q = _values(rng, (num_tokens, num_kv_heads * group, head_dim), dtype)
    table = 1 + np.arange(num_blocks, dtype=np.int32)[None]
    tiles = np.arange(num_tiles, dtype=np.int32)
    mask = np.ones((num_tiles, num_kv_heads * group, num_tiles), bool) if masked else None
    arrays = (q, pool, table, np.zeros_like(tiles), tiles * PREFILL_TILE, np.full_like(tiles, PREFILL_TILE), mask)
    return Case(
        operation="prefill_attention",
        shape=_shape(model, tokens=num_tokens, kv_heads=num_kv_heads, group=group, head_dim=head_dim,
                     block_size=block_size, dtype=dtype, masked=masked),
        arrays=arrays, fixed={"scale": head_dim**-0.5},
        bytes_minimum=pool[1:].nbytes + q.nbytes + q.size * 4, flops_minimum=2 * q.size * (num_tokens + 1),
        reread=True, part=part,
    )  # fmt: skip


def score_blocks(
    *, num_seqs: int = 2, num_kv_heads: int = 2, group: int = 4, head_dim: int = 128, max_blocks: int = 1024,
    dtype: str = "bfloat16", per_query_head: bool = False, model: str = "",
) -> Case:  # fmt: skip
    """Sequences as long as the table."""
    size: dict[str, Any] = {"group": group, "head_dim": head_dim, "max_blocks": max_blocks, "dtype": dtype}
    heads = math.gcd(num_kv_heads, 4)
    part = None
    if (num_seqs, num_kv_heads) != (1, heads):
        small = score_blocks(num_seqs=1, num_kv_heads=heads, per_query_head=per_query_head, **size)
        part = small, num_seqs * num_kv_heads // heads
    rng = np.random.default_rng(0)
    digests = _values(rng, (max_blocks + 1, num_kv_heads, 2, head_dim), dtype)
    q = _values(rng, (num_seqs, num_kv_heads * group, head_dim), dtype)
    table = np.tile(1 + np.arange(max_blocks, dtype=np.int32), (num_seqs, 1))
    counts = np.full(num_seqs, max_blocks, np.int32)
    select_heads = num_kv_heads * (group if per_query_head else 1)
    fixed = {
        "scale": head_dim**-0.5, "per_query_head": per_query_head, "num_sink_blocks": 1, "num_newest_blocks": 2
    }  # fmt: skip
    return Case(
        operation="score_blocks",
        shape=_shape(model, seqs=num_seqs, kv_heads=num_kv_heads, group=group, head_dim=head_dim, blocks=max_blocks,
                     dtype=dtype, per_query_head=per_query_head),
        arrays=(q, digests, table, counts), fixed=fixed,
        bytes_minimum=num_seqs * digests[1:].nbytes + q.nbytes + num_seqs * select_heads * max_blocks * 4,
        flops_minimum=4 * q.size * max_blocks, part=part,
    )  # fmt: skip


def select_blocks(
    *, num_seqs: int = 2, num_kv_heads: int = 2, max_blocks: int, num_selected: int, model: str = ""
) -> Case:
    """Ranks without ties."""
    part = None
    if num_seqs * num_kv_heads > 1:
        small = select_blocks(num_seqs=1, num_kv_heads=1, max_blocks=max_blocks, num_selected=num_selected)
        part = small, num_seqs * num_kv_heads
    ranks = np.random.default_rng(0).random((num_seqs, num_kv_heads, max_blocks)).astype(np.float32)
    return Case(
        operation="select_blocks",
        shape=_shape(model, seqs=num_seqs, kv_heads=num_kv_heads, blocks=max_blocks, selected=num_selected),
        arrays=(ranks,), fixed={"num_selected": num_selected},
        bytes_minimum=ranks.nbytes + num_seqs * num_kv_heads * num_selected * 4, part=part,
    )  # fmt: skip


def match_slots(
    *, num_seqs: int = 2, num_kv_heads: int = 2, num_selected: int, num_slots: int, max_blocks: int = 4096,
    model: str = "",
) -> Case:  # fmt: skip
    """About half of the selected blocks are resident."""
    part = None
    if num_seqs * num_kv_heads > 1:
        small = match_slots(num_seqs=1, num_kv_heads=1, num_selected=num_selected, num_slots=num_slots)
        part = small, num_seqs * num_kv_heads
    rng = np.random.default_rng(0)
    resident = np.full((num_seqs, num_kv_heads, num_slots), -1, np.int32)
    selected = np.zeros((num_seqs, num_kv_heads, num_selected), np.int32)
    for lane in np.ndindex(num_seqs, num_kv_heads):
        blocks = rng.permutation(max_blocks)
        resident[lane] = blocks[:num_slots]
        hits = num_selected // 2
        selected[lane] = np.sort(np.concatenate([blocks[:hits], blocks[-(num_selected - hits) :]]))
    last = rng.integers(0, 1000, (num_seqs, num_kv_heads, max_blocks)).astype(np.int32)
    return Case(
        operation="match_slots",
        shape=_shape(model, seqs=num_seqs, kv_heads=num_kv_heads, selected=num_selected, slots=num_slots),
        arrays=(selected, resident, last, np.full(num_seqs, num_slots, np.int32)),
        bytes_minimum=2 * selected.nbytes + selected.size + 3 * resident.nbytes, part=part,
    )  # fmt: skip


def append_tokens(
    *, num_seqs: int = 2, num_kv_heads: int = 2, head_dim: int = 128, block_size: int = 32, dtype: str = "bfloat16",
    method: str | None = "cuboid-mean", model: str = "",
) -> Case:  # fmt: skip
    """The last token of a block; `method` None = a dense layer, without digests."""
    size: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "dtype": dtype, "method": method}
    part = None
    if num_seqs * num_kv_heads > 1:
        part = append_tokens(num_seqs=1, num_kv_heads=1, **size), num_seqs * num_kv_heads
    rng = np.random.default_rng(0)
    pool = _pool(rng, num_seqs, num_kv_heads, block_size, head_dim, dtype)
    digests = None if method is None else _values(rng, (num_seqs + 1, num_kv_heads, 2, head_dim), dtype)
    k, v = (_values(rng, (num_seqs, num_kv_heads, head_dim), dtype) for _ in range(2))
    rows = 1 + np.arange(num_seqs, dtype=np.int32)
    ids = np.repeat(rows[:, None], num_kv_heads, axis=1)
    arrays = (pool, digests, k, v, ids, np.full_like(rows, block_size), rows)
    minimum = 4 * k.nbytes + (0 if digests is None else digests[1:].nbytes + pool[1:, :, 0].nbytes - k.nbytes)
    return Case(
        operation="append_tokens",
        shape=_shape(model, seqs=num_seqs, kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
                     dtype=dtype, digests=method or "none"),
        arrays=arrays, fixed={"method": method or "quest"}, in_place=(0,) if digests is None else (0, 1),
        bytes_minimum=minimum, part=part,
    )  # fmt: skip


def append_blocks(
    *, num_new: int = 8, num_kv_heads: int = 2, head_dim: int = 128, block_size: int = 32, dtype: str = "bfloat16",
    method: str | None = "cuboid-mean", model: str = "",
) -> Case:  # fmt: skip
    """Full blocks of a prompt."""
    size: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "dtype": dtype, "method": method}
    part = None
    if num_new * num_kv_heads > 1:
        part = append_blocks(num_new=1, num_kv_heads=1, **size), num_new * num_kv_heads
    rng = np.random.default_rng(0)
    pool = _pool(rng, num_new, num_kv_heads, block_size, head_dim, dtype)
    digests = None if method is None else _values(rng, (num_new + 1, num_kv_heads, 2, head_dim), dtype)
    rows = 1 + np.arange(num_new, dtype=np.int32)
    arrays = (pool, digests, pool[1:].copy(), rows, np.full_like(rows, block_size), rows)
    return Case(
        operation="append_blocks",
        shape=_shape(model, blocks=num_new, kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size,
                     dtype=dtype, digests=method or "none"),
        arrays=arrays, fixed={"method": method or "quest"}, in_place=(0,) if digests is None else (0, 1),
        bytes_minimum=2 * pool[1:].nbytes + (0 if digests is None else digests[1:].nbytes), part=part,
    )  # fmt: skip


def transfers(
    *, num_seqs: int = 2, num_kv_heads: int = 2, head_dim: int = 128, block_size: int = 32, num_selected: int = 16,
    dtype: str = "bfloat16", model: str = "",
) -> Iterator[Case]:  # fmt: skip
    """FlashH2D with every other block missing, whole blocks in, whole blocks and pieces out."""
    rng = np.random.default_rng(0)
    size: dict[str, Any] = {"head_dim": head_dim, "block_size": block_size, "dtype": dtype}
    times = num_seqs * num_kv_heads
    parts: dict[str, Case] = {}
    if times > 1:
        small = transfers(num_seqs=1, num_kv_heads=1, num_selected=num_selected, **size)
        parts = {case.operation: case for case in small}
    per_seq = (num_seqs, num_kv_heads, num_selected)
    host = _pool(rng, num_seqs * num_selected, num_kv_heads, block_size, head_dim, dtype)
    device = _pool(rng, num_seqs * num_selected, num_kv_heads, block_size, head_dim, dtype)
    ids = 1 + np.arange(num_seqs * num_selected, dtype=np.int32)
    slots = np.broadcast_to(ids.reshape(num_seqs, 1, num_selected), per_seq).copy()
    missing = np.broadcast_to(np.arange(num_selected) % 2 == 0, per_seq).copy()
    by_head = np.repeat(ids[:, None], num_kv_heads, axis=1)
    operations: dict[str, tuple[tuple[Any, ...], int, int]] = {  # arguments, which lies in host memory, pieces moved
        "flash_h2d": ((device, host, slots, slots, missing), 1, int(missing.sum())),
        "load_blocks": ((device, host, ids, ids), 1, ids.size * num_kv_heads),
        "save_blocks": ((host, device[1:].copy(), ids), 0, ids.size * num_kv_heads),
        "save_pieces": ((host, device, by_head, ids), 0, ids.size * num_kv_heads),
    }
    for operation, (arrays, in_host_memory, pieces) in operations.items():
        moved = pieces * host[0, 0].nbytes
        more: dict[str, Any] = {"missing": "half"} if operation == "flash_h2d" else {}
        yield Case(
            operation=operation,
            shape=_shape(model, seqs=num_seqs, kv_heads=num_kv_heads, **size, blocks=num_selected, **more),
            arrays=arrays, in_place=(0,), in_host_memory=(in_host_memory,),
            bytes_minimum=moved, pcie_bytes_minimum=moved,
            part=(parts[operation], times) if parts else None,
        )  # fmt: skip


def _values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def _pool(
    rng: np.random.Generator, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: str
) -> np.ndarray:
    shape = (num_blocks + 1, num_kv_heads, 2, block_size, head_dim)
    return rng.integers(-127, 128, shape, np.int8) if dtype == "int8" else _values(rng, shape, dtype)


def _shape(model: str, **sizes: Any) -> str:
    """`name=value` of all sizes; flags by their name alone, and only when they are set."""
    said = [name if value is True else f"{name}={value}" for name, value in sizes.items() if value is not False]
    return " ".join([model, *said] if model else said)

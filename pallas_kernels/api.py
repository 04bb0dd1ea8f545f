"""The one dispatch table: `get_kernels(implementation, platform)` gives the operations the model calls.

Every implementation has the signatures and the meaning of `pallas_kernels.reference` (transfers: of `host_offload`);
one conformance suite (tests/pallas_kernels) holds them to it. There is no silent fallback: what is not here is refused
by name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from host_offload import flash_d2h, flash_h2d
from pallas_kernels import linear, pointwise, reference
from pallas_kernels.select_key_tiles import select_key_tiles
from pallas_kernels.support import check_supported


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The operations of one implementation. Hashable, so it can be a static argument of a jitted function."""

    name: str
    append_blocks: Callable[..., tuple[Array, Array | None, Array | None]]
    append_tokens: Callable[..., tuple[Array, Array | None, Array | None]]
    score_blocks: Callable[..., Array]
    select_blocks: Callable[..., Array]
    union_over_group: Callable[..., tuple[Array, Array]]
    match_slots: Callable[..., tuple[Array, Array, Array]]
    decode_attention: Callable[..., Array]
    prefill_attention: Callable[..., Array]
    select_key_tiles: Callable[..., Array]
    flash_h2d: Callable[..., Array]
    load_blocks: Callable[..., Array]
    save_blocks: Callable[..., Array]
    save_pieces: Callable[..., Array]
    rms_norm: Callable[..., Array]
    split_and_rotate: Callable[..., tuple[Array, Array, Array]]
    make_blocks: Callable[..., Array]
    zeros: Callable[..., Array]
    """(shape, dtype) -> an array to hold KV blocks."""
    prepare_weights: Callable[[object], int]
    """Called once with the tree of all weights; returns how many of their bytes now lie in huge pages."""
    linear: Callable[..., Array]
    interpreted: bool = False
    """Run by Pallas' interpreter, not compiled: right everywhere, and slow."""
    variant: str = ""
    """The instruction set that native kernels were compiled for."""

    def describe(self) -> str:
        """The name, as printed at start."""
        if self.interpreted:
            return f"{self.name}, interpreted (slow: for tests)"
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def require(
        self, *, head_dim: int, block_size: int, dtype: str, group: int, tiered: bool, platform: str,
        kv_dtype: str | None = None, weight_dtype: str | None = None,
    ) -> None:  # fmt: skip
        """Refuses a model or a configuration that these kernels cannot serve, before anything is loaded.

        Args:
            kv_dtype: "int8", or None: KV is stored in `dtype`.
            group: query heads of one KV head.
            tiered: KV lies in pinned host memory.
            weight_dtype: of weight matrices, if not `dtype`.

        Raises:
            NotImplementedError: names the value, what is supported and the remedy.
        """
        if self.name == "pallas":
            if weight_dtype is not None:
                raise NotImplementedError(
                    f"implementation='pallas' has no products with weight_dtype={weight_dtype!r}; supported: None "
                    "(weights in dtype), or implementation='cpu' or 'reference' on a CPU"
                )
            for operation in ("decode_attention", "prefill_attention"):
                check_supported(
                    operation, head_dim=head_dim, block_size=block_size, dtype=jnp.dtype(dtype), group=group
                )
            if kv_dtype is not None:
                raise NotImplementedError(
                    f"implementation='pallas' does not append to KV of {kv_dtype}; use implementation='cpu' or "
                    "'reference', or kv_dtype=None"
                )
        elif tiered and platform == "gpu":
            raise NotImplementedError(
                f"implementation={self.name!r} has no KV tiers on a GPU: XLA compiles no gather from host memory "
                "there; use implementation='pallas' or kv_tiers='unified'"
            )

    def require_sizes(self, *, budget_blocks: int, max_blocks: int, num_selected: int, num_slots: int) -> None:
        """Refuses a KV layout that is too large for these kernels.

        Args:
            budget_blocks: that one head chooses, of `max_blocks` of the longest sequence.
            num_selected: that all query heads of a KV head choose together.
            num_slots: of the largest grant; 0 without KV tiers.

        Raises:
            NotImplementedError: names the value, the bound and the settings that it comes from.
        """
        if self.name != "pallas":
            return
        from pallas_kernels import match_slots, select_blocks

        settings = "lower sparse_budget_tokens or raise block_size"
        for what, value, most, remedy in (
            ("selected blocks", num_selected if num_slots else 0, match_slots.MAX_SELECTED, settings),
            ("slots of a grant", num_slots, match_slots.MAX_SLOTS, f"lower max_grant_factor, {settings}"),
            (
                f"blocks chosen of {max_blocks}", budget_blocks if max_blocks > select_blocks.CHUNK else 0,
                select_blocks.MAX_CHUNKED_SELECTION, f"lower max_model_len, {settings}",
            ),
        ):  # fmt: skip
            if value > most:
                raise NotImplementedError(
                    f"no Pallas kernel for {value} {what}; supported: up to {most}. {remedy[0].upper()}{remedy[1:]}"
                )


def _leave_weights(weights: object) -> int:
    return 0


_REFERENCE = Kernels(
    name="reference",
    append_blocks=reference.append_blocks,
    append_tokens=reference.append_tokens,
    score_blocks=reference.score_blocks,
    select_blocks=reference.select_blocks,
    union_over_group=reference.union_over_group,
    match_slots=reference.match_slots,
    decode_attention=reference.decode_attention,
    prefill_attention=reference.prefill_attention,
    select_key_tiles=select_key_tiles,
    flash_h2d=flash_h2d.flash_h2d,
    load_blocks=flash_h2d.load_blocks,
    save_blocks=flash_d2h.save_blocks,
    save_pieces=flash_d2h.save_pieces,
    rms_norm=pointwise.rms_norm,
    split_and_rotate=pointwise.split_and_rotate,
    make_blocks=pointwise.make_blocks,
    zeros=jnp.zeros,
    prepare_weights=_leave_weights,
    linear=linear.linear,
)


@functools.cache
def _pallas(interpret: bool) -> Kernels:
    # Imported here: who runs on a CPU need not wait for Pallas.
    from pallas_kernels import (
        append,
        decode_attention,
        flash_d2h,
        flash_h2d,
        match_slots,
        prefill_attention,
        score_blocks,
        select_blocks,
    )

    fixed = functools.partial(functools.partial, interpret=interpret)
    # Products, norms and the like are left to XLA on a GPU.
    return dataclasses.replace(
        _REFERENCE,
        name="pallas",
        interpreted=interpret,
        append_blocks=fixed(append.append_blocks),
        append_tokens=fixed(append.append_tokens),
        score_blocks=fixed(score_blocks.score_blocks),
        select_blocks=fixed(select_blocks.select_blocks),
        match_slots=fixed(match_slots.match_slots),
        decode_attention=fixed(decode_attention.decode_attention),
        prefill_attention=fixed(prefill_attention.prefill_attention),
        flash_h2d=fixed(flash_h2d.flash_h2d),
        load_blocks=fixed(flash_h2d.load_blocks),
        save_blocks=fixed(flash_d2h.save_blocks),
        save_pieces=fixed(flash_d2h.save_pieces),
    )


@functools.cache
def _cpu() -> Kernels:
    # Imported here: loads and registers a shared library.
    from cpu_kernels import huge_pages, linear, loader, ops, pointwise, prefill_attention
    from cpu_kernels import select_key_tiles as native_selection

    variant = loader.in_force().variant
    return Kernels(
        name="cpu",
        variant=variant,
        append_blocks=ops.append_blocks,
        append_tokens=ops.append_tokens,
        score_blocks=ops.score_blocks,
        select_blocks=ops.select_blocks,
        union_over_group=ops.union_over_group,
        match_slots=ops.match_slots,
        decode_attention=ops.decode_attention,
        prefill_attention=prefill_attention.prefill_attention,
        select_key_tiles=native_selection.select_key_tiles,
        flash_h2d=ops.flash_h2d,
        load_blocks=ops.load_blocks,
        save_blocks=ops.save_blocks,
        save_pieces=ops.save_pieces,
        rms_norm=pointwise.rms_norm,
        split_and_rotate=pointwise.split_and_rotate,
        make_blocks=pointwise.make_blocks,
        zeros=ops.zeros,
        prepare_weights=huge_pages.collapse,
        linear=linear.linear,
    )


IMPLEMENTATIONS = ("pallas", "cpu", "reference")


def _by_platform(platform: str) -> str:
    """What "auto" means: native kernels where they are, else plain XLA."""
    if platform == "gpu":
        return "pallas"
    from cpu_kernels import loader

    return "cpu" if platform == "cpu" and loader.is_there() else "reference"


def get_kernels(implementation: str, platform: str) -> Kernels:
    """The kernels named, or for "auto" those of the platform ("cpu", "gpu").

    On the CPU "pallas" is interpreted: right, and far too slow to serve.

    Raises:
        NotImplementedError: no such implementation (names those that exist), or no native library for this CPU (says
            why and what to do).
    """
    name = _by_platform(platform) if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise NotImplementedError(f"kernel implementation {name!r}; available: {', '.join(IMPLEMENTATIONS)}")
    if name == "cpu":
        if platform != "cpu":
            raise NotImplementedError(f"implementation='cpu' runs on CPUs, not on {platform!r}; use 'auto'")
        return _cpu()
    return _pallas(interpret=platform == "cpu") if name == "pallas" else _REFERENCE

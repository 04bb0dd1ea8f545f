"""The one dispatch table: `get_kernels(implementation)` gives the operations the model calls.

Every implementation has the signatures and the meaning of `pallas_kernels.reference`; one conformance suite
(tests/pallas_kernels) holds them to it. There is no silent fallback: what is not here is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jaxtyping import Array

from pallas_kernels import reference


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The operations of one implementation. Hashable, so it can be a static argument of a jitted function."""

    name: str
    append_blocks: Callable[..., Array]
    append_tokens: Callable[..., Array]
    block_digests: Callable[..., Array]
    score_blocks: Callable[..., Array]
    select_blocks: Callable[..., Array]
    match_slots: Callable[..., tuple[Array, Array, Array]]
    decode_attention: Callable[..., Array]
    prefill_attention: Callable[..., Array]


_REFERENCE = Kernels(
    name="reference",
    append_blocks=reference.append_blocks,
    append_tokens=reference.append_tokens,
    block_digests=reference.block_digests,
    score_blocks=reference.score_blocks,
    select_blocks=reference.select_blocks,
    match_slots=reference.match_slots,
    decode_attention=reference.decode_attention,
    prefill_attention=reference.prefill_attention,
)
_IMPLEMENTATIONS = {"reference": _REFERENCE}
_BY_PLATFORM = {"cpu": "reference", "gpu": "reference"}


def get_kernels(implementation: str, platform: str) -> Kernels:
    """The kernels named, or for "auto" those of the platform ("cpu", "gpu").

    Raises:
        NotImplementedError: no such implementation; names those that exist.
    """
    name = _BY_PLATFORM.get(platform, "reference") if implementation == "auto" else implementation
    if name not in _IMPLEMENTATIONS:
        raise NotImplementedError(f"kernel implementation {name!r}; available: {', '.join(sorted(_IMPLEMENTATIONS))}")
    return _IMPLEMENTATIONS[name]

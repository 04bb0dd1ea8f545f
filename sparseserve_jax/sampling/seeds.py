"""Seeds: from what a user gives (or does not) to the key data of the sampler. No JAX here."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int | None, engine_seed: int, request_number: int, index: int = 0) -> tuple[int, int]:
    """Two 32-bit words that key all draws of one continuation.

    Hashed (BLAKE2b), so that neighbouring seeds, a request's own seed and the engine's never share a stream, and any
    Python integer is welcome.

    Args:
        seed: the request's own seed (may be negative); the words then depend on nothing else but `index`.
        engine_seed: used with `request_number` where the request brings no seed.
        request_number: how many requests came before it.
        index: which of the request's n continuations.
    """
    source = f"engine:{engine_seed}:{request_number}" if seed is None else f"request:{seed}"
    digest = hashlib.blake2b(f"{source}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

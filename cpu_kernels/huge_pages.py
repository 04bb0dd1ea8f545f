"""Weights in huge pages: a step streams through all of them, and small pages end hardware prefetching every 4 KiB.

Pools of KV get theirs as they are made (src/zeros.cc). Weights come from the loader in many arrays, each smaller than a
few huge pages; Linux joins those that lie next to each other.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import jax

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
_PAGE = 4096


def collapse(tree: Any) -> int:
    """Asks Linux (6.1 or later) to put a tree of CPU arrays into huge pages, in place; returns the bytes that are.

    Elsewhere, and where the system grants none, nothing changes and the result is 0.
    """
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    done = 0
    for start, end in _runs(jax.block_until_ready(jax.tree.leaves(tree))):
        first, last = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
        for place in range(first, last, HUGE_PAGE):  # one by one: a page that cannot be joined does not stop the rest
            done += HUGE_PAGE * (madvise(place, HUGE_PAGE, _MADV_COLLAPSE) == 0)
    return done


def _runs(arrays: list[jax.Array]) -> list[tuple[int, int]]:
    """Address ranges of the arrays' pages, neighbours joined."""
    places = sorted((array.unsafe_buffer_pointer(), array.nbytes) for array in arrays)
    runs: list[tuple[int, int]] = []
    for start, size in places:
        first, last = start // _PAGE * _PAGE, -(-(start + size) // _PAGE) * _PAGE
        if runs and first <= runs[-1][1] + _PAGE:
            runs[-1] = (runs[-1][0], max(runs[-1][1], last))
        else:
            runs.append((first, last))
    return runs

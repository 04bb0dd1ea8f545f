"""What recorded selections say about caching: overlap with the past, working sets, hits of an LRU cache. No JAX here.

All functions take one request's block ids `[steps, layers, heads, selection]` (-1 = unused) and give means over layers,
heads and the steps from `first_step` on, so that every step counted has the past that is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


def window_overlap(selected: np.ndarray, windows: Sequence[int], first_step: int) -> np.ndarray:
    """Share of a step's blocks that are in the union of the selections of the last w steps, for each w (figure 8).

    Raises:
        ValueError: there are no steps from `first_step` on, or a window reaches back before the first step.
    """
    if max(windows) > first_step:
        raise ValueError(f"a window of {max(windows)} steps needs first_step={first_step} to be at least that")
    shares = []
    for ids, ages in _steps(selected, first_step):
        used, age = _of_selected(ids, ages)
        shares.append([(used & (age <= window)).sum() / used.sum() for window in windows])
    return np.mean(shares, axis=0)


def working_set_blocks(selected: np.ndarray, window: int, first_step: int) -> float:
    """Blocks of a layer and head in the union of the last `window` selections, the step's own included.

    Raises:
        ValueError: there are no steps from `first_step` on.
    """
    counts = []
    for ids, ages in _steps(selected, first_step):
        recent = ages <= window - 1
        layer, head, place = np.nonzero(ids >= 0)
        recent[layer, head, ids[layer, head, place]] = True
        counts.append(recent.sum(-1).mean())
    return float(np.mean(counts))


def lru_hit_rates(selected: np.ndarray, slots: Sequence[int], first_step: int) -> np.ndarray:
    """Share of selected blocks that a cache of so many slots a layer and head already holds, for each size.

    The cache drops the least recently selected blocks, as the engine's grants do (which of several that were last
    selected at the same step is arbitrary: here the highest ids go). A block that begins with the step's own token is a
    hit: there is nothing to load.

    Raises:
        ValueError: a size cannot hold one selection, or there are no steps from `first_step` on.
    """
    largest = int((selected >= 0).sum(-1).max())
    if min(slots) < largest:
        raise ValueError(f"slots={min(slots)} cannot hold a selection of {largest} blocks; give at least that")
    shares = []
    for ids, ages in _steps(selected, first_step):
        used, age = _of_selected(ids, ages)
        by_recency = np.argsort(ages, axis=-1, kind="stable")
        rank = np.argsort(by_recency, axis=-1, kind="stable")
        _, held_rank = _of_selected(ids, rank)
        begins = np.isinf(age) & (ids == ids.max())
        held = np.isfinite(age)
        shares.append([(used & (begins | (held & (held_rank < size)))).sum() / used.sum() for size in slots])
    return np.mean(shares, axis=0)


def _steps(selected: np.ndarray, first_step: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each step's ids, and for every block `[layers, heads, blocks]` the steps since it was selected (inf: never)."""
    if len(selected) <= first_step:
        raise ValueError(f"a recording of {len(selected)} steps has none from first_step={first_step} on; record more")
    last = np.full((*selected.shape[1:3], int(selected.max()) + 1), -np.inf)
    for step, ids in enumerate(selected):
        if step >= first_step:
            yield ids, step - last
        layer, head, place = np.nonzero(ids >= 0)
        last[layer, head, ids[layer, head, place]] = step


def _of_selected(ids: np.ndarray, of_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which entries of `ids` are used, and each one's value in `of_blocks` `[layers, heads, blocks]`."""
    return ids >= 0, np.take_along_axis(of_blocks, np.maximum(ids, 0).astype(np.int64), axis=-1)

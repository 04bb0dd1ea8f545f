from __future__ import annotations

import collections

import numpy as np
import pytest

from sparseserve_jax.simulator.residency import ResidencyModel
from sparseserve_jax.simulator.selection_study import lru_hit_rates, window_overlap, working_set_blocks

SELECTED = np.array([[0, 1, 5], [0, 2, 5], [0, 1, 5], [0, 3, 5], [0, 1, -1]], np.int16)[:, None, None, :]
"""Five steps of one layer and head, by hand."""


def random_selections(seed: int, steps: int = 40, blocks: int = 30, size: int = 6) -> np.ndarray:
    rng = np.random.default_rng(seed)
    heat = rng.random((2, 3, blocks)) ** 3
    rows = [[[rng.choice(blocks, size, replace=False, p=h / h.sum()) for h in layer] for layer in heat]
            for _ in range(steps)]  # fmt: skip
    return np.sort(np.array(rows, np.int16), axis=-1)


def test_overlap_by_hand():
    # step 2: {0, 5} after one step, all after two; step 3: {0, 5}; step 4: {0}, then {0, 1} by the last two
    np.testing.assert_allclose(window_overlap(SELECTED, [1, 2], 2), [(2 / 3 + 2 / 3 + 1 / 2) / 3, (1 + 2 / 3 + 1) / 3])


def test_working_set_by_hand():
    assert working_set_blocks(SELECTED, 1, 2) == pytest.approx((3 + 3 + 2) / 3)
    assert working_set_blocks(SELECTED, 2, 2) == pytest.approx((4 + 4 + 4) / 3)
    assert working_set_blocks(SELECTED, 3, 2) == pytest.approx((4 + 5 + 4) / 3)


@pytest.mark.parametrize("seed", range(3))
def test_hits_are_those_of_an_lru_cache(seed):
    """Against a cache that is really kept, one a layer and head."""
    selected, sizes, first = random_selections(seed), (7, 9, 14, 31), 8
    newest = np.full((*selected.shape[:3], 1), 30, np.int16)  # selected at every step
    selected = np.concatenate([selected, newest], axis=-1)
    for size, rate in zip(sizes, lru_hit_rates(selected, sizes, first), strict=True):
        hits = total = 0
        for layer in range(2):
            for head in range(3):
                cache: collections.OrderedDict[int, None] = collections.OrderedDict()
                for step, ids in enumerate(selected[:, layer, head].tolist()):
                    if step >= first:
                        hits += sum(block in cache for block in ids)
                        total += len(ids)
                    for block in reversed(ids):  # the lowest ids stay longest
                        cache[block] = None
                        cache.move_to_end(block)
                    while len(cache) > size:
                        cache.popitem(last=False)
        assert rate == pytest.approx(hits / total, abs=1e-12), size


def test_a_beginning_block_is_no_miss():
    grows = np.array([[0, 1], [0, 2], [0, 3]], np.int16)[:, None, None, :]
    np.testing.assert_array_equal(lru_hit_rates(grows, [2], 1), [1.0])


def test_more_past_never_overlaps_less():
    selected = random_selections(7)
    overlaps = window_overlap(selected, range(1, 33), 32)
    assert (np.diff(overlaps) >= 0).all() and overlaps[-1] <= 1
    assert (np.diff(lru_hit_rates(selected, range(6, 30), 32)) >= 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: window_overlap(SELECTED, [3], 2), "window of 3 steps needs first_step=2"),
        (lambda: window_overlap(SELECTED, [3], 5), "5 steps has none from first_step=5"),
        (lambda: lru_hit_rates(SELECTED, [2], 2), "slots=2 cannot hold a selection of 3"),
    ],
)
def test_what_cannot_be_asked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_residency_of_a_recording():
    selected = random_selections(3)
    model = ResidencyModel.measured([selected, selected], window=12)
    assert model.step_overlap == pytest.approx(window_overlap(selected, [1], 12)[0])
    assert model.step_overlap + model.window_gain == pytest.approx(window_overlap(selected, [12], 12)[0])
    assert model.working_set_selections == pytest.approx(working_set_blocks(selected, 12, 12) / 6)
    assert model.miss_share(slots=28, selection_blocks=6, context_blocks=30) <= 1 - model.step_overlap

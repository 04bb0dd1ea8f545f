"""From measured working sets to slots."""

import pytest

from sparseserve_jax.scheduler.working_set import WorkingSetEstimator
from tests.scheduler.layouts import make_layout


def estimator(margin=0.0, **changes):
    return WorkingSetEstimator(make_layout(tiered=True, **changes), margin)


def test_before_the_first_step_two_selections():
    assert estimator().need("a", context_blocks=30) == 8


@pytest.mark.parametrize(
    ("measured", "margin", "expected"),
    [(6, 0.0, 6), (6, 0.1, 7), (10, 0.1, 11), (10, 0.5, 15), (2, 0.0, 4), (40, 0.0, 16)],
)
def test_measured_plus_margin_between_selection_and_bound(measured, margin, expected):
    e = estimator(margin)
    e.observe("a", measured)
    assert e.need("a", context_blocks=30) == expected


def test_the_last_measurement_counts_and_ends_with_the_request():
    e = estimator()
    e.observe("a", 12)
    e.observe("a", 9)
    e.observe("b", 5)
    assert (e.need("a", 30), e.need("b", 30)) == (9, 5)
    e.forget("a")
    e.forget("never seen")
    assert e.need("a", 30) == 8


@pytest.mark.parametrize(("blocks", "expected"), [(1, 2), (2, 3), (3, 4), (5, 6), (7, 8), (20, 8)])
def test_never_more_than_the_context_and_one_to_grow(blocks, expected):
    assert estimator().need("a", blocks) == expected


@pytest.mark.parametrize(("blocks", "expected"), [(1, 2), (3, 4), (4, 4), (30, 4)])
def test_minimum(blocks, expected):
    assert estimator().minimum(blocks) == expected


def test_never_more_than_the_device_has():
    e = estimator(num_slots=6)
    e.observe("a", 16)
    assert e.need("a", 30) == 6


def test_dense_models_need_no_slots():
    e = estimator(selection_blocks=0, min_grant_slots=0, max_grant_slots=0, num_slots=0)
    assert e.need("a", 30) == e.minimum(30) == 0

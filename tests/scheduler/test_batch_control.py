"""Algorithm 1 word for word, and the batch without control."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseserve_jax.scheduler.batch_control import Candidate, admit_without_control, admit_working_sets


def candidates(*needs, minimum=2, dense=0):
    return [
        Candidate(request_id=str(i), need_slots=n, min_slots=min(n, minimum), dense_blocks=dense)
        for i, n in enumerate(needs)
    ]


def slots(shares):
    return {share.request_id: share.slots for share in shares}


def paper_algorithm_1(needs, available):
    """The paper's listing, on plain numbers."""
    used, admitted = 0, []
    for request, need in enumerate(needs):
        if used + need <= available:
            used += need
            admitted.append(str(request))
    return admitted


def test_a_working_set_that_does_not_fit_is_skipped_and_the_next_one_is_tried():
    shares = admit_working_sets(candidates(5, 6, 4, 2, 1), num_slots=10, num_dense_blocks=0)
    assert slots(shares) == {"0": 5, "2": 4, "4": 1}


def test_exactly_full_is_admitted():
    assert slots(admit_working_sets(candidates(5, 5), num_slots=10, num_dense_blocks=0)) == {"0": 5, "1": 5}
    assert slots(admit_working_sets(candidates(5, 6), num_slots=10, num_dense_blocks=0)) == {"0": 5}


def test_dense_blocks_count_as_well():
    batch = [
        Candidate(request_id="long", need_slots=1, min_slots=1, dense_blocks=7),
        Candidate(request_id="longer", need_slots=1, min_slots=1, dense_blocks=8),
        Candidate(request_id="short", need_slots=1, min_slots=1, dense_blocks=3),
    ]
    shares = admit_working_sets(batch, num_slots=99, num_dense_blocks=10)
    assert [(s.request_id, s.dense_blocks) for s in shares] == [("long", 7), ("short", 3)]


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(0, 60))
def test_equals_the_listing(needs, available):
    shares = admit_working_sets(candidates(*needs), num_slots=available, num_dense_blocks=0)
    assert [s.request_id for s in shares] == paper_algorithm_1(needs, available)
    assert [s.slots for s in shares] == [needs[int(s.request_id)] for s in shares]


@pytest.mark.parametrize(
    ("needs", "num_slots", "expected"),
    [
        ((8, 8), 16, {"0": 8, "1": 8}),  # room for all: as with control
        ((8, 8, 8, 8), 16, {"0": 4, "1": 4, "2": 4, "3": 4}),  # equal shares
        ((8, 8, 8), 16, {"0": 5, "1": 5, "2": 5}),  # equal, the odd slot stays free
        ((3, 8, 8), 16, {"0": 3, "1": 6, "2": 6}),  # what one does not need goes to the others
        ((8,) * 9, 16, {str(i): 2 for i in range(8)}),  # the minimum bounds the batch
    ],
)
def test_without_control(needs, num_slots, expected):
    assert slots(admit_without_control(candidates(*needs), num_slots=num_slots, num_dense_blocks=0)) == expected


def test_without_control_different_minima():
    batch = [
        Candidate(request_id="a", need_slots=12, min_slots=10, dense_blocks=0),
        Candidate(request_id="b", need_slots=12, min_slots=2, dense_blocks=0),
    ]
    assert slots(admit_without_control(batch, num_slots=13, num_dense_blocks=0)) == {"a": 10, "b": 3}


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(0, 60))
def test_without_control_fits_and_leaves_out_nobody_who_would(needs, available):
    batch = candidates(*needs)
    shares = admit_without_control(batch, num_slots=available, num_dense_blocks=0)
    assert sum(s.slots for s in shares) <= available
    for share in shares:
        candidate = batch[int(share.request_id)]
        assert candidate.min_slots <= share.slots <= candidate.need_slots
    admitted = {share.request_id for share in shares}
    smallest = sum(c.min_slots for c in batch if c.request_id in admitted)
    assert all(smallest + c.min_slots > available for c in batch if c.request_id not in admitted)

"""Sizes and order of a request."""

import pytest

from sparseserve_jax.scheduler.request_state import RequestState
from tests.scheduler.layouts import make_request


def test_order_is_priority_then_arrival_then_number():
    requests = [
        make_request("late", arrival_s=2.0),
        make_request("second", arrival_s=1.0),
        make_request("first", arrival_s=1.0),
        make_request("urgent", arrival_s=9.0, priority=-1),
    ]
    for number, request in zip((0, 2, 1, 3), requests, strict=True):
        request.arrival_idx = number
    assert [r.request_id for r in sorted(requests, key=lambda r: r.order)] == ["urgent", "first", "second", "late"]


def test_sizes():
    request = make_request("a", prompt=100, new=8)
    assert (request.max_tokens, request.context_tokens) == (108, 100)
    request.num_generated = 3
    assert request.context_tokens == 103
    assert not request.is_decoding
    request.state = RequestState.PARKED
    assert request.is_decoding


@pytest.mark.parametrize("sizes", [{"prompt": 0}, {"new": 0}])
def test_empty_is_an_error(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        make_request("a", **sizes)

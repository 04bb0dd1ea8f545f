import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseserve_jax.text.stop import StopChecker


def oracle(text, stop, include):
    """(shown text, matched): cut at the first place where some stop string ends, the longest if several do."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return (text[:end] if include else text[: end - len(longest)]), longest
    return text, None


def stream(deltas, stop, include=False):
    """(shown deltas, matched), flushed at the end."""
    checker, shown = StopChecker(tuple(stop), include), []
    for delta in deltas:
        emitted, matched = checker.feed(delta)
        shown.append(emitted)
        assert matched == checker.matched
        if matched is not None:
            break
    return [*shown, checker.flush()], checker.matched


@settings(max_examples=500, deadline=None)
@given(
    deltas=st.lists(st.text("ab,", max_size=5), max_size=12),
    stop=st.lists(st.text("ab,", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
def test_any_chopping_equals_the_oracle(deltas, stop, include):
    expected, matched = oracle("".join(deltas), stop, include)
    shown, got = stream(deltas, stop, include)
    assert ("".join(shown), got) == (expected, matched)


@settings(max_examples=300, deadline=None)
@given(
    deltas=st.lists(st.text("ab", max_size=4), max_size=8),
    stop=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
)
def test_nothing_more_than_necessary_is_held_back(deltas, stop):
    checker, text, shown = StopChecker(tuple(stop)), "", ""
    for delta in deltas:
        emitted, matched = checker.feed(delta)
        if matched is not None:
            return
        text, shown = text + delta, shown + emitted
        held = text[len(shown) :]
        possible = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stop)]
        assert len(held) == max(possible)


def test_stop_string_over_token_borders():
    assert stream(["a", ",b", ",c", ",d"], ["b,c"]) == (["a", ",", "", ""], "b,c")
    assert stream(["a", ",b", ",c", ",d"], ["b,c"], include=True) == (["a", ",", "b,c", ""], "b,c")


def test_a_stop_that_is_a_prefix_of_another_ends_the_text_first():
    assert stream(["xab", "c"], ["abc", "ab"]) == (["x", ""], "ab")


def test_of_two_stops_with_one_end_the_longer_counts():
    assert stream(["xabc"], ["bc", "abc"]) == (["x", ""], "abc")


def test_a_stop_inside_another_does_not_wait_for_it():
    assert stream(["xab", "cd"], ["abcd", "bc"]) == (["x", "a", ""], "bc")


def test_near_match_at_the_end_is_released():
    assert stream(["hello", " wor"], ["world"]) == (["hello", " ", "wor"], None)


def test_first_characters_are_the_stop():
    assert stream(["E", "ND", "more"], ["END"]) == (["", "", ""], "END")


def test_text_after_the_match_is_dropped_in_both_modes():
    for include, expected in ((False, "x"), (True, "xSTOP")):
        checker = StopChecker(("STOP",), include)
        assert checker.feed("xSTOPyz") == (expected, "STOP")
        assert checker.feed("more") == ("", "STOP")
        assert checker.flush() == ""


def test_no_stops_hold_nothing():
    assert stream(["a", "", "b"], []) == (["a", "", "b", ""], None)


@pytest.mark.parametrize("stop", [("a" * 500 + "b",), tuple("a" * n + "b" for n in range(1, 64))])
def test_cost_is_linear(stop):
    """A text that almost matches everywhere: eight times the text costs about eight times the time, not 64."""

    def cost(length):
        checker = StopChecker(stop)
        start = time.process_time()
        for _ in range(length):
            checker.feed("a")
        return time.process_time() - start

    cost(1000)
    assert min(cost(40_000) for _ in range(3)) < 30 * min(cost(5_000) for _ in range(3))

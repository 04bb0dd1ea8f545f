import fractions
import math

import numpy as np
import pytest

from sparseserve_jax.request import MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_TOKENS_NAMED, SamplingParams

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("n", "top_k", "min_tokens", "max_tokens", "logprobs", "seed")
NOT_NUMBERS = (math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000, "hot", True, [1], {}, 1j,
               np.float32("nan"), np.bool_(True))  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [*NOT_NUMBERS, None, -3], ids=lambda v: type(v).__name__)
def test_bad_numbers(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 1.0, "1", True, math.nan, [1], np.float32(1), np.bool_(True)])
def test_bad_integers(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0), ("n", 10**6), ("n", None), ("n", 10**5000),
        ("top_p", 0), ("top_p", 1.0001), ("min_p", -0.1), ("min_p", 1.1),
        ("top_k", -2), ("top_k", None),
        ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("min_tokens", 17), ("min_tokens", 10**5000),
        ("logprobs", -1), ("logprobs", 21), ("seed", 2**63), ("seed", -(2**63) - 1),
        ("repetition_penalty", 0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("stop", ("a", "")), ("stop", ""), ("stop", 5), ("stop", b"x"), ("stop", (5,)), ("stop", {"a": 1}),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)), ("stop", ("x" * MAX_STOP_CHARS, "y")),
        ("stop_token_ids", (-1,)), ("stop_token_ids", (1.0,)), ("stop_token_ids", (True,)), ("stop_token_ids", 5),
        ("stop_token_ids", "5"), ("stop_token_ids", range(MAX_TOKENS_NAMED + 1)),
        ("logit_bias", {"5": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: True}), ("logit_bias", {True: 1}), ("logit_bias", {1: 10**400}), ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {i: 1.0 for i in range(MAX_TOKENS_NAMED + 1)}),
        ("ignore_eos", 1), ("include_stop_str_in_output", "yes"), ("skip_special_tokens", None),
    ],
    ids=lambda v: v if isinstance(v, str) and len(v) > 2 else type(v).__name__,
)  # fmt: skip
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "x" * 10**6), ("max_tokens", [1] * 10**6)], ids=["text", "list"]
)
def test_messages_are_short(name, value):
    with pytest.raises(ValueError) as info:
        SamplingParams(**{name: value})
    assert len(str(info.value)) < 400


def test_edges_are_allowed():
    SamplingParams(
        n=64, temperature=0, top_p=1, min_p=1, repetition_penalty=1e-300, presence_penalty=-2, frequency_penalty=2,
        seed=-(2**63), logprobs=20, min_tokens=16, logit_bias={0: -100, 1: 100}, top_k=10**30,
        stop=("x",) * MAX_STOP_STRINGS,
    )  # fmt: skip
    SamplingParams(temperature=1e308, max_tokens=None, min_tokens=10**9, seed=None, logprobs=None)


def test_numpy_and_other_scalars_become_plain_ones():
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=fractions.Fraction(1, 2), n=np.int64(2), top_k=np.uint8(3),
        seed=np.int32(-1), stop_token_ids=np.array([4, 5]), logit_bias={np.int64(1): np.float16(2)},
        presence_penalty=1,
    )  # fmt: skip
    assert params == SamplingParams(
        temperature=0.5, top_p=0.5, n=2, top_k=3, seed=-1, stop_token_ids=(4, 5), logit_bias={1: 2.0},
        presence_penalty=1.0,
    )  # fmt: skip
    values = (params.temperature, params.top_p, params.presence_penalty, *params.logit_bias.values())
    assert {type(value) for value in values} == {float}
    assert {type(value) for value in (params.n, params.top_k, params.seed, *params.stop_token_ids)} == {int}
    assert {type(token) for token in params.logit_bias} == {int}


def test_one_stop_string_and_absent_lists():
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    empty = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None)  # type: ignore[arg-type]
    assert (empty.stop, empty.stop_token_ids, empty.logit_bias) == ((), (), {})


def test_the_bias_is_a_copy():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1000.0
    assert params.logit_bias == {1: 2.0}


def test_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy

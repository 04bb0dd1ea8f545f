import numpy as np
import pytest

from sparseserve_jax.request import SamplingParams
from sparseserve_jax.validation import RequestError, validate_request


def check(ids, *, vocab_size=50, max_model_len=16, **sampling):
    return validate_request(ids, SamplingParams(**sampling), vocab_size=vocab_size, max_model_len=max_model_len)


def refused(param, ids, **sampling):
    with pytest.raises(RequestError) as info:
        check(ids, **sampling)
    assert info.value.param == param
    return str(info.value)


@pytest.mark.parametrize("ids", [[], (), np.zeros(0, np.int32)])
def test_empty_prompt(ids):
    refused("prompt", ids, max_tokens=1)


@pytest.mark.parametrize(
    "bad", [-1, 50, 10**30, 10**5000, True, 1.0, "1", None, [1], np.int64(50)], ids=lambda v: type(v).__name__
)
def test_bad_token_ids(bad):
    assert "token 1 " in refused("prompt", [3, bad], max_tokens=1)


def test_numpy_ids_are_fine():
    check([np.int32(3), 4], max_tokens=1)
    check(np.array([3, 4]), max_tokens=1)


def test_length_boundary():
    assert check([1] * 15, max_tokens=1).max_tokens == 1
    assert check([1] * 8, max_tokens=8).max_tokens == 8
    for length in (16, 17):
        message = refused("prompt", [1] * length, max_tokens=1)
        assert f"{length} tokens" in message and "max_model_len=16" in message and "at most 15" in message
    message = refused("max_tokens", [1] * 8, max_tokens=16)
    for part in ("8 tokens", "max_tokens=16", "max_model_len=16", "lower max_tokens to at most 8"):
        assert part in message


def test_open_max_tokens_is_resolved():
    assert check([1] * 6, max_tokens=None).max_tokens == 10
    refused("prompt", [1] * 16, max_tokens=None)
    assert "at most 10" in refused("min_tokens", [1] * 6, max_tokens=None, min_tokens=11)


def test_other_parameters_are_kept():
    params = check([1], max_tokens=None, seed=3, stop=("x",), logit_bias={1: 2.0})
    assert (params.seed, params.stop, params.logit_bias) == (3, ("x",), {1: 2.0})


def test_ids_outside_the_vocabulary():
    refused("stop_token_ids", [1], max_tokens=1, stop_token_ids=(50,))
    refused("logit_bias", [1], max_tokens=1, logit_bias={50: 1.0})
    refused("logit_bias", [1], max_tokens=1, logit_bias={10**5000: 1.0})
    check([1], max_tokens=1, stop_token_ids=(49,), logit_bias={49: 1.0})


def test_huge_max_tokens():
    refused("max_tokens", [1], max_tokens=10**5000)
    refused("min_tokens", [1], max_tokens=None, min_tokens=10**5000)


def test_a_request_error_is_a_value_error_and_may_name_nothing():
    error = RequestError("no")
    assert isinstance(error, ValueError) and error.param is None

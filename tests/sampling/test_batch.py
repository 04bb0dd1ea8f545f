import numpy as np
import pytest

from sparseserve_jax.request import SamplingParams
from sparseserve_jax.sampling.batch import BIAS_CHUNK, SamplingBatch, SamplingRow, build_batch, uses_penalties
from sparseserve_jax.sampling.penalties import PADDING_ROW

GREEDY = SamplingParams(temperature=0)


def row(params, position=0, **kw):
    return SamplingRow(params=params, seed=(1, 2), position=position, **kw)


def build(*rows, num_seqs=4, eos=(3,)):
    return build_batch(rows, num_seqs=num_seqs, vocab_size=100, eos_token_ids=eos)


def test_greedy_needs_nothing():
    assert build(row(GREEDY), row(SamplingParams(temperature=1e-9, top_p=0.5))) == SamplingBatch()
    assert build() == SamplingBatch()


def test_parts_appear_only_where_needed():
    assert build(row(GREEDY), row(SamplingParams())).random is not None
    assert build(row(SamplingParams(temperature=0, presence_penalty=0.1))).penalties is not None
    assert build(row(SamplingParams(temperature=0, logprobs=0))).wants_logprobs


def test_padding_is_neutral():
    batch = build(row(SamplingParams(top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=2.0), penalty_row=1))
    assert batch.random is not None and batch.penalties is not None
    assert batch.random.temperature.tolist() == [1, 0, 0, 0]
    assert batch.random.top_p.tolist() == [0.5, 1, 1, 1]
    assert batch.penalties.rows.tolist() == [1] + [PADDING_ROW] * 3
    assert batch.penalties.repetition.tolist() == [2, 1, 1, 1]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e300, top_k=10**30, repetition_penalty=1e300),
        SamplingParams(temperature=1.0, repetition_penalty=1e-300, top_p=1e-300, min_p=1e-300),
    ],
)
def test_extreme_values_stay_finite(params):
    batch = build(row(params))
    assert batch.random is not None and batch.penalties is not None
    assert np.isfinite(batch.random.temperature).all() and batch.random.top_k.tolist() == [0] * 4
    assert np.isfinite(batch.penalties.repetition).all() and (batch.penalties.repetition > 0).all()


def test_min_tokens_masks_eos_and_stop_ids_until_reached():
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(7,), logit_bias={3: 50.0})

    def banned(batch):
        entries = zip(batch.bias[0].token_ids[0].tolist(), batch.bias[0].values[0].tolist(), strict=True)
        return {token for token, value in entries if value == -np.inf}

    assert banned(build(row(params, 0))) == banned(build(row(params, 1))) == {3, 7}
    assert banned(build(row(params, 2))) == set()
    ignoring = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(7,), ignore_eos=True)
    assert banned(build(row(ignoring, 0))) == {7}


def test_bias_comes_in_chunks_of_one_shape():
    many = SamplingParams(temperature=0, logit_bias={token: 1.0 for token in range(BIAS_CHUNK + 1)})
    batch = build(row(GREEDY), row(many))
    assert [chunk.token_ids.shape for chunk in batch.bias] == [(4, BIAS_CHUNK)] * 2
    used = np.concatenate([chunk.token_ids[1] for chunk in batch.bias])
    assert sorted(used[used < 100]) == list(range(BIAS_CHUNK + 1))
    assert all((chunk.token_ids[[0, 2, 3]] == 100).all() for chunk in batch.bias)


def test_eos_ids_outside_the_vocabulary_are_left_out():
    batch = build(row(SamplingParams(temperature=0, min_tokens=1)), eos=(-1, 100, 2**40))
    assert all((chunk.token_ids == 100).all() for chunk in batch.bias)


def test_uses_penalties():
    assert not uses_penalties(SamplingParams())
    assert uses_penalties(SamplingParams(repetition_penalty=1.1))
    assert uses_penalties(SamplingParams(frequency_penalty=-0.1))

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sparseserve_jax.request import SamplingParams
from sparseserve_jax.sampling import sampler
from sparseserve_jax.sampling.batch import SamplingBatch, SamplingRow, build_batch
from sparseserve_jax.sampling.penalties import allocate_penalty_state, count_tokens, set_row
from sparseserve_jax.sampling.sampler import NO_TOKEN, filter_logits, gather_logprobs, sample, token_logprobs
from sparseserve_jax.sampling.seeds import derive_seed

VOCAB = 33
filtered = jax.jit(filter_logits)


def rows_of(params, position=0):
    return [SamplingRow(params=p, seed=derive_seed(p.seed, 0, i), position=position) for i, p in enumerate(params)]


def run(logits, params, *, position=0, num_seqs=None, eos=(), state=None):
    logits = np.asarray(logits, np.float32)
    num_seqs = num_seqs or max(8, len(logits))  # few shapes: each is compiled
    padded = np.full((num_seqs, logits.shape[1]), np.nan, np.float32)
    padded[: len(logits)] = logits
    batch = build_batch(rows_of(params, position), num_seqs=num_seqs, vocab_size=logits.shape[1], eos_token_ids=eos)
    got = sample(jnp.asarray(padded), batch, state)
    return jax.tree.map(lambda array: array[: len(logits)], jax.device_get(got))


def random_logits(num_rows, seed=0, vocab=VOCAB):
    return np.random.default_rng(seed).normal(size=(num_rows, vocab)).astype(np.float32) * 3


# --- cuts ------------------------------------------------------------------------------------------------------------


def sort_oracle(scaled, top_p, top_k, min_p):
    """Kept ids by sorting, in float64; None where a rounding error decides."""
    with np.errstate(divide="ignore"):
        x = np.where(scaled < np.log(np.float32(min_p)), -np.inf, scaled).astype(np.float64)
    if 0 < top_k < len(x):
        x = np.where(x < np.sort(x)[::-1][top_k - 1], -np.inf, x)
    kept = x > -np.inf
    if top_p < 1:
        weights = np.exp(x)
        levels = np.unique(x[kept])[::-1]
        share = np.array([weights[x > level].sum() for level in levels]) / weights.sum()
        if np.abs(share - np.float32(top_p)).min() < 1e-6:
            return None
        kept = x >= levels[share < np.float32(top_p)][-1]
    return set(np.flatnonzero(kept).tolist())


value = st.one_of(
    st.floats(-30, 0, width=32, allow_subnormal=False), st.sampled_from([0.0, -0.0, -1.0, -2.0, -np.inf, -1e-30, -3e38])
)


@settings(max_examples=150, deadline=None)
@given(
    values=arrays(np.float32, VOCAB, elements=value),
    best=st.integers(0, VOCAB - 1),
    top_p=st.one_of(st.just(1.0), st.floats(2**-10, 1.0, width=32)),
    top_k=st.one_of(st.just(0), st.integers(1, 2 * VOCAB)),
    min_p=st.one_of(st.just(0.0), st.floats(2**-20, 1.0, width=32)),
)
def test_cuts_match_the_sort_oracle(values, best, top_p, top_k, min_p):
    values[best] = 0.0
    if min_p and np.abs(values - np.log(min_p)).min() < 1e-5:
        return  # the last bit of log decides
    expected = sort_oracle(values, top_p, top_k, min_p)
    if expected is None:
        return
    args = [np.array([number, neutral], dtype) for number, neutral, dtype in
            ((top_p, 1, np.float32), (top_k, 0, np.int32), (min_p, 0, np.float32))]  # fmt: skip
    got = np.asarray(filtered(np.stack([values, values]), *args))
    kept = got[0] > -np.inf
    assert set(np.flatnonzero(kept).tolist()) == expected
    np.testing.assert_array_equal(got[0][kept], values[kept])
    np.testing.assert_array_equal(got[1], values)  # the neutral row beside it


def test_cuts_match_transformers():
    logits = random_logits(1)
    logits -= logits.max()
    for top_p, top_k, min_p in ((0.8, 0, 0.0), (1.0, 5, 0.0), (1.0, 0, 0.05), (0.7, 9, 0.01)):
        scores = torch.tensor(logits)
        for warper in (
            *([MinPLogitsWarper(min_p)] if min_p else []),
            *([TopKLogitsWarper(top_k)] if top_k else []),
            *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
        ):
            scores = warper(torch.zeros((1, 1), dtype=torch.long), scores)
        got = filtered(logits, np.float32([top_p]), np.int32([top_k]), np.float32([min_p]))
        np.testing.assert_array_equal(np.asarray(got), scores.numpy())


@pytest.mark.parametrize("top_p", [1e-38, 1e-7])
def test_the_best_token_survives_the_smallest_top_p(top_p):
    logits = random_logits(3)
    logits -= logits.max(axis=1, keepdims=True)
    got = filtered(logits, np.full(3, top_p, np.float32), np.zeros(3, np.int32), np.zeros(3, np.float32))
    assert (np.asarray(got) > -np.inf).sum(axis=1).tolist() == [1, 1, 1]


def test_equal_logits_are_kept_together():
    got = filtered(
        np.zeros((1, VOCAB), np.float32), np.float32([0.1]), np.int32([2]), np.float32([1.0])
    )  # fmt: skip
    assert (np.asarray(got) == 0).all()


def test_a_large_vocabulary_is_cut_exactly():
    x = np.random.default_rng(3).normal(size=(2, 49_152)).astype(np.float32) * 2
    x -= x.max(axis=1, keepdims=True)
    got = filtered(x, np.float32([1.0, 0.9]), np.int32([50, 0]), np.float32([0, 0]))
    assert set(np.flatnonzero(np.asarray(got)[0] > -np.inf)) == sort_oracle(x[0], 1.0, 50, 0.0)
    kept = np.asarray(got)[1] > -np.inf
    share = np.exp(x[1].astype(np.float64))
    share /= share.sum()
    assert share[kept].sum() >= 0.9 - 1e-5 and share[kept].sum() - share[kept].min() < 0.9 + 1e-5
    assert x[1][kept].min() > x[1][~kept].max()


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_best_and_the_first_of_equals():
    logits = random_logits(4)
    logits[2, [5, 9]] = 50.0
    got = run(logits, [SamplingParams(temperature=0)] * 4)
    assert got.token_ids.tolist() == logits.argmax(axis=1).tolist()
    assert got.ok.all() and got.logprobs is None


def test_greedy_runs_one_program(monkeypatch):
    for name in ("add_bias", "apply_penalties", "draw_tokens", "gather_logprobs"):
        monkeypatch.setattr(sampler, name, None)
    assert sample(jnp.asarray(random_logits(2)), SamplingBatch()).ok.all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unsound_rows_are_flagged_alone(temperature):
    logits = random_logits(5)
    logits[0, 7] = np.nan
    logits[1] = -np.inf
    logits[2, 3] = np.inf
    logits[3, 0] = -np.inf
    got = run(logits, [SamplingParams(temperature=temperature, top_p=0.9, top_k=5)] * 5)  # beside padding of NaN
    assert got.ok.tolist()[:5] == [False, False, False, True, True]
    assert got.token_ids.tolist()[:3] == [NO_TOKEN] * 3
    assert min(got.token_ids.tolist()[3:5]) >= 0


@pytest.mark.parametrize("vocab", [VOCAB, 49_152])
def test_a_nan_anywhere_is_found(vocab):
    """In a large vocabulary the CPU backend's vectorised maximum skips NaN."""
    places = [0, 1, 7, vocab // 2, vocab - 1]
    logits = random_logits(len(places) + 1, vocab=vocab)
    logits[range(len(places)), places] = np.nan
    got = run(logits, [SamplingParams(temperature=0)] * len(logits))
    assert got.ok.tolist() == [False] * len(places) + [True]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_random_rows_that_can_only_be_greedy(params):
    logits = random_logits(4)
    got = run(logits, [SamplingParams(seed=i, **params) for i in range(4)])
    assert got.token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1e300])
def test_draws_follow_the_softmax(temperature):
    num, logits = 8192, np.float32([0.0, 1.0, 2.0, -1.0, -np.inf])
    got = run(np.tile(logits, (num, 1)), [SamplingParams(temperature=temperature, seed=i) for i in range(num)])
    expected = np.exp(logits.astype(np.float64) / temperature)
    expected /= expected.sum()
    share = np.bincount(np.asarray(got.token_ids), minlength=5) / num
    assert share[4] == 0
    assert (np.abs(share - expected) < 4.5 * np.sqrt(expected * (1 - expected) / num) + 1e-9).all()


def test_positions_and_indices_draw_afresh():
    logits = np.zeros((1, VOCAB), np.float32)
    tokens = [run(logits, [SamplingParams(seed=5)], position=p).token_ids[0].item() for p in range(12)]
    assert len(set(tokens)) > 4
    again = [run(logits, [SamplingParams(seed=5)], position=p).token_ids[0].item() for p in range(12)]
    assert tokens == again


MATES = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=7, seed=1),
    SamplingParams(temperature=1.3, min_p=0.1, seed=2),
    SamplingParams(temperature=0.7, logprobs=3, seed=3),
    SamplingParams(temperature=1.0, logit_bias={1: 2.0}, seed=4),
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=0.9, top_p=0.5, seed=6),
)


@pytest.mark.parametrize("vocab", [VOCAB, 49_152])
def test_a_row_depends_on_itself_only(vocab):
    """The same token alone, among mates that switch every part on, in any place, at any batch size."""
    num = len(MATES)
    logits = random_logits(num, seed=9, vocab=vocab)
    alone = [run(logits[i : i + 1], [p], position=3, num_seqs=1).token_ids[0].item() for i, p in enumerate(MATES)]
    assert run(logits, MATES, position=3, num_seqs=num).token_ids.tolist() == alone
    order = np.random.default_rng(0).permutation(num)
    mixed = run(logits[order], [MATES[i] for i in order], position=3, num_seqs=8).token_ids.tolist()
    assert mixed == [alone[i] for i in order]


def test_min_tokens_and_bias_change_the_choice():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 4] = 10.0
    params = [
        SamplingParams(temperature=0, min_tokens=1),
        SamplingParams(temperature=0, logit_bias={4: -100, 8: 3}),
        SamplingParams(temperature=0, min_tokens=1, logit_bias={4: 100, 2: 1}),
    ]
    assert run(logits, params, eos=(4,)).token_ids.tolist() == [0, 8, 2]
    assert run(logits, params, eos=(4,), position=1).token_ids.tolist() == [4, 8, 4]


def test_everything_banned_is_unsound():
    got = run(random_logits(1, vocab=2), [SamplingParams(temperature=0, min_tokens=1)], eos=(0, 1))
    assert not got.ok[0] and got.token_ids[0] == NO_TOKEN


def test_penalties_come_before_the_choice():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 4], logits[0, 5] = 10.0, 9.0
    state = set_row(allocate_penalty_state(2, VOCAB), np.int32(1), *count_tokens([4], [], VOCAB))
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    rows = [SamplingRow(params=params, seed=(0, 0), position=0, penalty_row=1)]
    batch = build_batch(rows, num_seqs=1, vocab_size=VOCAB)
    assert sample(jnp.asarray(logits), batch, state).token_ids.tolist() == [5]


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_natural_and_before_temperature():
    logits = random_logits(2)
    got = run(logits, [SamplingParams(temperature=5.0, top_k=3, logprobs=4, seed=i) for i in range(2)])
    assert got.logprobs is not None
    host = got.logprobs
    expected = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=1).numpy()
    for row in range(2):
        token = got.token_ids[row].item()
        candidates = token_logprobs(host, row, token, 4)
        assert candidates[0].token_id == token and len(candidates) in (4, 5)
        order = np.argsort(-expected[row], kind="stable")
        for c in candidates:
            assert c.logprob == pytest.approx(expected[row, c.token_id], abs=1e-5)
            assert order[c.rank - 1] == c.token_id
        assert [c.token_id for c in token_logprobs(host, row, token, 0)] == [token]


def test_ranks_of_equals_agree_with_the_list():
    logprobs = jax.device_get(gather_logprobs(jnp.zeros((3, VOCAB)), jnp.array([0, 4, 30])))
    assert logprobs.chosen_rank.tolist() == [1, 5, 31]
    assert [c.rank for c in token_logprobs(logprobs, 1, 4, 6)] == [5, 1, 2, 3, 4, 6]


def test_bias_shows_in_logprobs_and_banned_tokens_do_not():
    logits = np.zeros((1, 4), np.float32)
    params = SamplingParams(temperature=0, min_tokens=1, logit_bias={1: 1.0}, logprobs=20)
    got = run(logits, [params], eos=(3,))
    assert got.logprobs is not None
    candidates = token_logprobs(got.logprobs, 0, 1, 20)
    assert [(c.token_id, c.rank) for c in candidates] == [(1, 1), (0, 2), (2, 3)]
    total = np.log(np.e + 2)
    assert [c.logprob for c in candidates] == pytest.approx([1 - total, -total, -total], abs=1e-6)

import dataclasses

import jax.numpy as jnp
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from sparseserve_jax.sampling.penalties import (
    PADDING_ROW,
    PenaltyParams,
    add_tokens,
    allocate_penalty_state,
    apply_penalties,
    count_tokens,
    set_row,
)

VOCAB = 17


def params(rows, repetition, presence, frequency):
    return PenaltyParams(
        rows=np.array(rows, np.int32),
        repetition=np.array(repetition, np.float32),
        presence=np.array(presence, np.float32),
        frequency=np.array(frequency, np.float32),
    )


def filled_state(rows):
    state = allocate_penalty_state(4, VOCAB)
    for row, (prompt, output) in rows.items():
        state = set_row(state, np.int32(row), *count_tokens(prompt, output, VOCAB))
    return state


def test_repetition_matches_transformers():
    logits = np.random.default_rng(0).normal(size=(1, VOCAB)).astype(np.float32)
    state = filled_state({2: ([1, 2, 2], [5, 6, 5])})
    got = apply_penalties(jnp.asarray(logits), state, params([2], [1.3], [0.0], [0.0]))
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[1, 2, 2, 5, 6, 5]]), torch.tensor(logits))
    np.testing.assert_allclose(np.asarray(got), expected.numpy(), rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1)),
    output=st.lists(st.integers(0, VOCAB - 1)),
    repetition=st.floats(0.1, 5),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_order_and_values(prompt, output, repetition, presence, frequency):
    logits = np.linspace(-4, 4, VOCAB).astype(np.float32)
    expected = logits.astype(np.float64).copy()
    for token in range(VOCAB):
        if token in prompt or token in output:
            expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
        expected[token] -= frequency * output.count(token) + presence * (token in output)
    state = filled_state({0: (prompt, output)})
    got = apply_penalties(jnp.asarray(logits)[None], state, params([0], [repetition], [presence], [frequency]))
    np.testing.assert_allclose(np.asarray(got)[0], expected, rtol=1e-4, atol=1e-4)


def test_neutral_and_padding_rows_are_untouched_bit_for_bit():
    logits = np.random.default_rng(1).normal(size=(3, VOCAB)).astype(np.float32)
    state = filled_state({0: ([1, 2], [3, 3]), 1: (range(VOCAB), range(VOCAB)), 3: (range(VOCAB), range(VOCAB))})
    batch = params([0, 1, PADDING_ROW], [1.7, 1.0, 1.0], [0.5, 0.0, 0.0], [0.5, 0.0, 0.0])
    got = np.asarray(apply_penalties(jnp.asarray(logits), state, batch))
    np.testing.assert_array_equal(got[1:], logits[1:])
    assert not np.array_equal(got[0], logits[0])


def test_banned_tokens_stay_banned():
    logits = jnp.full((1, VOCAB), -jnp.inf).at[0, 3].set(1.0)
    state = filled_state({0: (range(VOCAB), range(VOCAB))})
    got = np.asarray(apply_penalties(logits, state, params([0], [0.5], [-2.0], [-2.0])))
    assert np.isneginf(np.delete(got[0], 3)).all() and np.isfinite(got[0, 3])


def test_added_tokens_equal_a_recount_and_padding_is_dropped():
    state = filled_state({1: ([4], [])})
    for token in (5, 5, 6, -1):
        state = add_tokens(state, np.array([1, PADDING_ROW, 4], np.int32), np.array([token, 7, 8], np.int32))
    recounted = filled_state({1: ([4], [5, 5, 6])})
    for field in dataclasses.fields(state):
        np.testing.assert_array_equal(getattr(state, field.name), getattr(recounted, field.name))


def test_a_row_is_replaced_whole():
    state = filled_state({1: ([4], [5])})
    state = set_row(state, np.int32(1), *count_tokens([6], [], VOCAB))
    assert np.flatnonzero(state.prompt_mask[1]).tolist() == [6]
    assert not np.asarray(state.output_counts).any()

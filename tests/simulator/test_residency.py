"""More slots, fewer misses."""

import pytest

from sparseserve_jax.simulator.residency import ResidencyModel

MODEL = ResidencyModel(step_overlap=0.8, window_gain=0.1, working_set_selections=2.0)


@pytest.mark.parametrize(
    ("slots", "misses"), [(64, 0.2), (96, 0.15), (128, 0.1), (200, 0.1), (500, 0.0), (501, 0.0), (10, 0.2)]
)
def test_miss_share(slots, misses):
    assert MODEL.miss_share(slots=slots, selection_blocks=64, context_blocks=500) == pytest.approx(misses)


def test_a_short_context_is_wholly_resident():
    assert MODEL.miss_share(slots=30, selection_blocks=64, context_blocks=30) == 0.0


def test_working_set_is_at_most_the_context():
    assert MODEL.working_set_slots(64, 1000) == 128
    assert MODEL.working_set_slots(64, 100) == 100

"""Intervals of a request's work."""

from __future__ import annotations

from sparseserve_jax.plan import PrefillItem, PrefillSegment, StepPlan
from sparseserve_jax.timeline import Interval, Timeline


def _step(timeline, number, *, loaded=(), saved=(), prefill=(), arrivals=(("a", 1.0), ("b", 2.0))):
    timeline.note_step(
        StepPlan(step=number, prefill=prefill), start_s=10.0 + number, end_s=11.0 + number, loaded=dict(loaded),
        saved=dict(saved), arrivals_s=dict(arrivals),
    )  # fmt: skip


def test_moves_of_steps_in_a_row_are_one_interval():
    timeline = Timeline()
    for number, loaded in enumerate(({"a": 5}, {"a": 7, "b": 1}, {"a": 0, "b": 2}, {"a": 3})):
        _step(timeline, number, loaded=loaded)
    assert timeline.pop("a") == [
        Interval(kind="load", start_s=9.0, end_s=11.0, amount=12, num_steps=2),
        Interval(kind="load", start_s=12.0, end_s=13.0, amount=3),
    ]
    assert timeline.pop("b") == [Interval(kind="load", start_s=9.0, end_s=11.0, amount=3, num_steps=2)]


def test_loads_and_saves_are_apart():
    timeline = Timeline()
    _step(timeline, 0, loaded={"a": 5}, saved={"a": 4})
    _step(timeline, 1, saved={"a": 4})
    intervals = {interval.kind: interval for interval in timeline.pop("a")}
    assert (intervals["load"].num_steps, intervals["save"].num_steps, intervals["save"].amount) == (1, 2, 8)


def test_every_prefill_segment_is_one():
    timeline = Timeline()
    for number, layers in enumerate(((0, 3), (3, 6))):
        segment = PrefillSegment(
            items=(PrefillItem(request_id="a", start=0, end=40), PrefillItem(request_id="gone", start=0, end=9)),
            layer_start=layers[0], layer_end=layers[1],
        )  # fmt: skip
        _step(timeline, number, prefill=(segment,))
    intervals = timeline.pop("a")
    assert [(i.kind, i.amount, i.layers) for i in intervals] == [("prefill", 40, (0, 3)), ("prefill", 40, (3, 6))]
    assert timeline.pop("gone") == []


def test_who_ended_is_forgotten():
    timeline = Timeline()
    _step(timeline, 0, loaded={"a": 5})
    timeline.pop("a")
    _step(timeline, 1, loaded={"a": 5}, arrivals={"b": 2.0}.items())
    assert timeline.pop("a") == []

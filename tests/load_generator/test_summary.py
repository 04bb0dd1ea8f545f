from __future__ import annotations

from typing import Any

import pytest

from sparseserve_jax.load_generator.records import RequestRecord
from sparseserve_jax.load_generator.report import remarks, summary_tables, to_json
from sparseserve_jax.load_generator.summary import keeps, max_in_flight, parse_slos, summarize


def record(index: int, arrival_s: float, sent_s: float, text_s: list[float], **more: Any) -> RequestRecord:
    given: dict[str, Any] = {
        "text_s": {0: text_s} if text_s else {}, "end_s": text_s[-1] if text_s else sent_s, "input_tokens": 10,
        "output_tokens": len(text_s), "usage_from": "server", "done_marker": True, "finish_reason": "stop",
    }  # fmt: skip
    return RequestRecord(index=index, arrival_s=arrival_s, sent_s=sent_s, **(given | more))


RECORDS = [
    record(0, 0.0, 0.0, [1.0, 1.5, 2.5]),
    record(1, 1.0, 3.0, [3.5, 4.0], output_tokens=3),
    record(2, 2.0, 4.0, [], status="http_429", error="[full]", end_s=4.5),
    record(3, 2.0, 5.0, [6.0], status="disconnect", error="broke", end_s=10.0),
]


def test_figures_by_hand() -> None:
    found = summarize(RECORDS)
    assert (found["requests"], found["completed"], found["failed"]) == (4, 2, 2)
    assert found["failures"] == {"disconnect": 1, "http_429": 1}
    assert found["failure_examples"] == {"disconnect": "broke", "http_429": "[full]"}
    assert found["duration_s"] == 10.0 and found["requests_per_s"] == 0.2
    assert (found["input_tokens"], found["output_tokens"]) == (20, 6)
    assert (found["input_tokens_per_s"], found["output_tokens_per_s"]) == (2.0, 0.6)
    assert found["ttft_s"] | {"count": 2, "mean": 0.75, "min": 0.5, "max": 1.0} == found["ttft_s"]
    assert found["ttft_s"]["p50"] == 0.75 and found["ttft_s"]["p99"] == pytest.approx(0.995)
    assert found["ttft_from_arrival_s"]["max"] == 2.5 and found["e2e_from_arrival_s"]["max"] == 3.0
    assert found["tbt_s"]["count"] == 3 and found["tbt_s"]["max"] == 1.0
    assert found["tpot_s"]["mean"] == pytest.approx((0.75 + 0.25) / 2)
    assert found["queue_s"]["count"] == 4 and found["queue_s"]["max"] == 3.0
    assert found["failure_after_s"]["max"] == 5.0
    assert "goodput" not in found


def test_requests_under_way() -> None:
    assert max_in_flight(RECORDS) == 1  # the third is sent when the second ends
    assert max_in_flight([*RECORDS, record(4, 0.0, 4.2, [6.0])]) == 2
    assert max_in_flight([record(index, 0.0, index * 0.1, [1.0]) for index in range(5)]) == 5


def test_goodput_counts_from_both_times() -> None:
    found = summarize(RECORDS, {"ttft": 2.0})["goodput"]
    assert found["slos_s"] == {"ttft": 2.0}
    assert found["from_arrival"] == {"requests": 1, "share": 0.25, "requests_per_s": 0.1}
    assert found["from_sending"] == {"requests": 2, "share": 0.5, "requests_per_s": 0.2}


@pytest.mark.parametrize(
    ("slos", "kept"),
    [({"tbt": 0.99}, False), ({"tbt": 1.0}, True), ({"tpot": 0.74}, False), ({"tpot": 0.76}, True),
     ({"e2e": 2.4}, False), ({"e2e": 2.5, "ttft": 0.9}, False), ({"e2e": 2.5, "ttft": 1.0, "tbt": 1.0}, True)],
)  # fmt: skip
def test_objectives(slos: dict[str, float], kept: bool) -> None:
    assert keeps(RECORDS[0], slos, from_arrival=False) is kept
    assert not keeps(RECORDS[3], {"ttft": 9.0}, from_arrival=False)


def test_slos() -> None:
    assert parse_slos("ttft:2.0, itl:0.1,e2el:30") == {"ttft": 2.0, "tbt": 0.1, "e2e": 30.0}


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "ttft:-1", "ttft:nan", "tfft:1", "ttft:1,ttft:2", "ttft:1,"])
def test_what_is_no_objective(text: str) -> None:
    with pytest.raises(ValueError, match="is no objective"):
        parse_slos(text)


def test_nothing_succeeded() -> None:
    found = summarize(RECORDS[2:3])
    assert found["ttft_s"] is None and found["requests_per_s"] == 0
    assert len(summary_tables(found)) == 2
    with pytest.raises(ValueError, match="no requests"):
        summarize([])


def test_remarks_name_what_makes_figures_doubtful() -> None:
    odd = [record(0, 0.0, 0.5, [1.0], usage_from="estimate", done_marker=False), record(1, 0.0, 0.0, [])]
    said = " ".join(remarks(summarize(odd), max_concurrency=None))
    for part in ("without usage", "without [DONE]", "no text", "sent up to 0.50 s late"):
        assert part in said
    assert "late" not in " ".join(remarks(summarize(odd), max_concurrency=1))
    assert remarks(summarize([record(0, 0.0, 0.0, [1.0])]), max_concurrency=None) == []


def test_json_has_every_request() -> None:
    content = to_json({"seed": 0}, {"model": "m"}, summarize(RECORDS), RECORDS)
    assert content["environment"]["commit"] is None or len(content["environment"]["commit"]) == 40
    assert content["requests"][0] | {"ttft_s": 1.0, "text_s": {"0": [1.0, 1.5, 2.5]}} == content["requests"][0]
    assert content["requests"][2]["status"] == "http_429" and content["requests"][2]["ttft_s"] is None

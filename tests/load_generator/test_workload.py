from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sparseserve_jax.load_generator.lengths import parse_lengths
from sparseserve_jax.load_generator.records import PlannedRequest
from sparseserve_jax.load_generator.workload import Workload, make_plan


def workload(**settings: Any) -> Workload:
    given = {"num_prompts": 6, "input_lengths": parse_lengths("10-20"), "output_lengths": parse_lengths("4-8")}
    return Workload(**(given | settings))


def plan(endpoint: Any = "completions", **settings: Any) -> list[PlannedRequest]:
    return asyncio.run(make_plan(workload(**settings), model="m", endpoint=endpoint))


def bodies(requests: list[PlannedRequest]) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in requests]


def test_random_words() -> None:
    requests = plan(rate_rps=2.0)
    assert [request.index for request in requests] == list(range(6))
    assert requests[0].arrival_s == 0 and requests[5].arrival_s > requests[4].arrival_s
    for request, body in zip(requests, bodies(requests), strict=True):
        assert len(body["prompt"].split()) == request.input_tokens
        assert 10 <= request.input_tokens <= 20 and 4 <= body["max_tokens"] == request.max_tokens <= 8
        assert (body["model"], body["stream"], body["temperature"]) == ("m", True, 0)
        assert body["stream_options"] == {"include_usage": True} and "ignore_eos" not in body
    assert len({body["prompt"] for body in bodies(requests)}) == 6
    assert plan(rate_rps=2.0) == requests != plan(rate_rps=2.0, seed=1)


def test_the_rate_changes_no_prompt() -> None:
    assert bodies(plan(rate_rps=2.0)) == bodies(plan(rate_rps=9.0, arrival="burst")) == bodies(plan())


def test_bodies_for_chat_and_of_the_users_own_fields() -> None:
    body = bodies(plan("chat", ignore_eos=True, extra_body={"top_p": 0.5, "temperature": None, "max_tokens": 3}))[0]
    assert body["messages"][0]["role"] == "user" and "prompt" not in body
    assert (body["ignore_eos"], body["top_p"], body["max_tokens"]) == (True, 0.5, 3)
    assert "temperature" not in body


def test_caps() -> None:
    body = bodies(plan(max_input_tokens=5, max_output_tokens=2))[0]
    assert len(body["prompt"].split()) == 5 and body["max_tokens"] == 2


def trace_file(tmp_path: Path) -> Path:
    rows = [(0, 1100, [7, 8, 9]), (1000, 1200, [7, 8, 10]), (4000, 600, [7, 11]), (4000, 100, [])]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(
        json.dumps({"timestamp": at, "input_length": length, "output_length": 3, "hash_ids": hashes})
        for at, length, hashes in rows
    ))  # fmt: skip
    return path


def test_a_trace_keeps_its_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    requests = plan(trace=trace_file(tmp_path), time_scale=0.5)
    assert [request.arrival_s for request in requests] == [0, 0.5, 2.0, 2.0]
    prompts = [body["prompt"].split() for body in bodies(requests)]
    assert [len(prompt) for prompt in prompts] == [1100, 1200, 600, 100]
    assert prompts[0][:1024] == prompts[1][:1024] and prompts[0][1024:1034] != prompts[1][1024:1034]
    assert prompts[0][:512] == prompts[2][:512] and prompts[0][512:522] != prompts[2][512:522]
    assert prompts[3][:10] != prompts[0][:10]


def test_a_block_of_a_trace_has_its_tokens_whatever_a_word_costs(tmp_path: Path) -> None:
    async def count(text: str) -> int:
        return 2 * len(text.split())

    made = make_plan(workload(trace=trace_file(tmp_path)), model="m", endpoint="completions", count_tokens=count)
    requests = asyncio.run(made)
    assert [request.input_tokens for request in requests] == [1100, 1200, 600, 100]
    prompts = [body["prompt"].split() for body in bodies(requests)]
    assert prompts[0][:512] == prompts[1][:512] and prompts[0][512:522] != prompts[1][512:522]  # 1,024 tokens


def test_a_trace_may_come_at_a_rate_of_its_own_and_be_cut(tmp_path: Path) -> None:
    requests = plan(trace=trace_file(tmp_path), num_prompts=2, rate_rps=5.0, arrival="constant", max_input_tokens=512)
    assert [request.arrival_s for request in requests] == [0, 0.2]
    prompts = [body["prompt"].split() for body in bodies(requests)]
    assert len(prompts[0]) == 512 and prompts[0] == prompts[1]


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello", "max_tokens": 2}\n{"prompt": "you"}\n')
    found = bodies(plan(prompts=path, num_prompts=3))
    assert [body["prompt"] for body in found] == ["hello", "you", "hello"]
    assert found[0]["max_tokens"] == 2 and 4 <= found[1]["max_tokens"] <= 8
    path.write_text('{"messages": [{"role": "system", "content": "x"}]}\n')
    assert bodies(plan("chat", prompts=path))[0]["messages"] == [{"role": "system", "content": "x"}]


def test_messages_are_for_chat(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": []}\n{"messages": []}\n')
    with pytest.raises(ValueError, match="give --endpoint chat"):
        plan(prompts=path)


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Some text. " * 100)
    requests = plan(prompts=path)
    assert all(body["prompt"] in path.read_text() for body in bodies(requests))
    assert [len(body["prompt"]) for body in bodies(requests)] == [4 * (r.input_tokens or 0) for r in requests]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_prompts": 0}, "num_prompts=0 must be at least 1"),
        ({"time_scale": 0}, "time_scale=0 must be above 0"),
        ({"max_input_tokens": 0}, "max_input_tokens=0 must be at least 1"),
        ({"trace": Path("a"), "prompts": Path("b")}, "exclude each other"),
        ({"arrival": "at-once", "rate_rps": 1.0}, "leave out --rate 1"),
        ({"extra_body": {"stream": False}}, "extra_body must leave stream"),
    ],
)
def test_what_makes_no_load(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(**settings)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "needs one of prompt and messages"),
        ('{"prompt": 3}', "prompt must be a string"),
        ('{"messages": "a"}', "messages must be a list"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens=0 must be"),
        ("nothing", "line 1: not JSON"),
        ("3", "line 1: not a JSON object"),
        ("", "has no prompts"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        plan(prompts=path)

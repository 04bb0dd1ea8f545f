"""The whole command against a stub."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sparseserve_jax import cli
from tests.load_generator.stub_server import (
    DONE,
    HEAD,
    Exchange,
    Packets,
    StubServer,
    chunked,
    piece,
    refusing,
    streaming,
    usage,
    whole,
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


async def words(exchange: Exchange) -> Packets:
    """As many words as were asked for, 5 ms each."""
    count = exchange.content["max_tokens"]
    yield HEAD
    for _ in range(count):
        await asyncio.sleep(0.005)
        yield chunked(piece(" word"))
    yield chunked(piece("", finish_reason="length") + usage(len(exchange.content["prompt"].split()), count) + DONE)
    yield b"0\r\n\r\n"


def test_all_at_once_with_json_and_picture(tmp_path: Path) -> None:
    with StubServer(words, tokenize=True, tokens_per_word=2.0).running() as server:
        result = run(
            "--url", server.url, "--num-prompts", "8", "--input-len", "40", "--output-len", "3-5", "--ignore-eos",
            "--goodput", "ttft:5,tbt:5", "--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png"),
            "--api-key", "sk-secret", "--extra-body", '{"top_p": 0.9}', "--num-warmups", "2",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    for part in ("8 of 8 completed", "time to first token", "counted by the server", "goodput from intended arrival"):
        assert part in result.stderr
    content = json.loads((tmp_path / "r.json").read_text())
    assert "sk-secret" not in (tmp_path / "r.json").read_text()
    assert (content["server"]["model"], content["settings"]["pattern"]) == ("stub", "at-once")
    summary = content["summary"]
    assert summary["completed"] == summary["usage_from_server"] == len(content["requests"]) == 8
    assert summary["output_tokens"] == sum(request["output_tokens"] for request in content["requests"])
    assert summary["input_tokens"] == 8 * 20  # two tokens each, as /tokenize counts; the stub's usage counts words
    assert summary["tbt_s"]["p50"] >= 0.004 and summary["goodput"]["from_arrival"]["share"] == 1
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    bodies = [exchange.content for exchange in server.completions]
    assert len(bodies) == 10 and all(body["ignore_eos"] and body["top_p"] == 0.9 for body in bodies)
    warm, measured = {body["prompt"] for body in bodies[:2]}, {body["prompt"] for body in bodies[2:]}
    assert not warm & measured


def test_concurrency_is_limited_and_the_wait_is_shown() -> None:
    under_way = most = 0

    async def answer(exchange: Exchange) -> Packets:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        async for packet in streaming(piece("a"), piece("b", finish_reason="stop"), pause_s=0.03)(exchange):
            yield packet
        under_way -= 1

    with StubServer(answer).running() as server:
        result = run("--url", server.url, "--num-prompts", "6", "--max-concurrency", "2", "--json", "-")
    summary = json.loads(result.stdout)["summary"]
    assert most == 2 and summary["max_in_flight"] == 2
    assert summary["queue_s"]["max"] >= 0.1  # two rounds before the last
    assert summary["ttft_from_arrival_s"]["max"] - summary["ttft_s"]["max"] >= 0.08
    assert summary["without_done_marker"] == 6 and "6 streams ended without [DONE]" in result.stderr


def test_requests_leave_at_their_times() -> None:
    with StubServer(streaming(piece("a", finish_reason="stop"), DONE, pause_s=0.2)).running() as server:
        result = run(
            "--url", server.url, "--num-prompts", "4", "--rate", "20", "--arrival", "constant", "--json", "-"
        )  # fmt: skip
    requests = json.loads(result.stdout)["requests"]
    assert [request["arrival_s"] for request in requests] == [0, 0.05, 0.1, 0.15]
    assert all(0 <= request["queue_s"] < 0.15 for request in requests)  # it waits for no answer, which take 0.2 s


def test_some_are_refused() -> None:
    seen = 0

    async def answer(exchange: Exchange) -> Packets:
        nonlocal seen
        seen += 1
        if seen % 2:
            yield whole(429, {"error": {"message": "[full]", "code": 429}}, headers="Retry-After: 1\r\n")
        else:
            async for packet in words(exchange):
                yield packet

    with StubServer(answer).running() as server:
        result = run(
            "--url", server.url, "--num-prompts", "6", "--output-len", "2", "--goodput", "e2e:9", "--json", "-"
        )
    assert result.exit_code == 0
    summary = json.loads(result.stdout)["summary"]
    assert (summary["completed"], summary["failures"]) == (3, {"http_429": 3})
    assert summary["goodput"]["from_sending"]["share"] == 0.5
    assert "http_429" in result.stderr and "[full]" in result.stderr


def test_all_failed_is_exit_code_1(tmp_path: Path) -> None:
    with StubServer(refusing(500, {"error": {"message": "broken"}})).running() as server:
        result = run("--url", server.url, "--num-prompts", "2", "--json", "-", "--png", str(tmp_path / "r.png"))
        warm = run("--url", server.url, "--num-prompts", "2", "--num-warmups", "1")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["summary"]["failures"] == {"http_500": 2}
    assert warm.exit_code == 2 and "no warm-up request was answered: http_500, broken" in warm.stderr


def test_a_trace_and_chat(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row: dict[str, Any] = {"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps(row | {"timestamp": at}) + "\n" for at in (0, 100, 200)))
    with StubServer(streaming(piece("a", finish_reason="stop"), DONE)).running() as server:
        result = run("--url", server.url, "--trace", str(trace), "--endpoint", "chat", "--time-scale", "0.1",
                     "--json", "-")  # fmt: skip
    content = json.loads(result.stdout)
    assert content["settings"]["pattern"] == "trace"
    assert [request["arrival_s"] for request in content["requests"]] == [0, 0.01, 0.02]
    assert {exchange.path for exchange in server.completions} == {"/v1/chat/completions"}
    assert "estimates: it has no /tokenize" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "localhost"], "must be an HTTP address"),
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9/v1/models: ConnectError"),
        (["--url", "STUB", "--model", "gpt"], "the server has no model 'gpt'; it has stub"),
        (["--url", "STUB", "--arrival", "often"], "arrival='often' is not known"),
        (["--url", "STUB", "--arrival", "poisson"], "needs a rate"),
        (["--url", "STUB", "--endpoint", "embeddings"], "endpoint='embeddings' is not known"),
        (["--url", "STUB", "--extra-body", "{"], "--extra-body is not JSON"),
        (["--url", "STUB", "--extra-body", "[]"], "--extra-body must be a JSON object"),
        (["--url", "STUB", "--goodput", "ttft"], "is no objective"),
        (["--url", "STUB", "--max-concurrency", "0"], "max_concurrency=0 must be at least 1"),
        (["--url", "STUB", "--trace", "/nowhere"], "/nowhere"),
        (["--url", "STUB", "--json", "/nowhere/r.json"], "/nowhere/r.json: its directory does not exist"),
        (["--url", "STUB", "--num-warmups", "-1"], "num_warmups=-1 must be at least 0"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    with StubServer(words).running() as server:
        result = run(*(server.url if argument == "STUB" else argument for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run("--url", "http://a", "--png", "r.png")
    assert result.exit_code == 2 and "httpx, matplotlib is not installed" in result.stderr

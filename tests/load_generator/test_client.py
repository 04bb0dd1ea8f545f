from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from sparseserve_jax.load_generator.client import Endpoint, OpenAIClient, base_url
from sparseserve_jax.load_generator.records import PlannedRequest, RequestRecord
from tests.load_generator.stub_server import (
    DONE,
    HEAD,
    PAUSE_S,
    Exchange,
    Packets,
    StubServer,
    chunked,
    event,
    piece,
    refusing,
    streaming,
    usage,
    whole,
)


def planned(**body: Any) -> PlannedRequest:
    return PlannedRequest(
        index=0, arrival_s=0.0, body=json.dumps({"prompt": "a b"} | body).encode(), input_tokens=2, max_tokens=4
    )


def send(
    answer: Callable[[Exchange], Packets], *, endpoint: Endpoint = "completions", timeout_s: float = 20.0
) -> RequestRecord:
    """One request to a stub; its record."""

    async def run(url: str) -> RequestRecord:
        async with OpenAIClient(url, endpoint=endpoint, timeout_s=timeout_s) as client:
            started_s = time.perf_counter()
            return await client.send(planned(), lambda: time.perf_counter() - started_s)

    with StubServer(answer).running() as server:
        return asyncio.run(run(server.url))


# --- answers that are whole ------------------------------------------------------------------------------------------


def test_times_and_counts() -> None:
    record = send(streaming(piece("a"), piece("b"), piece("c", finish_reason="stop"), usage(7, 3), DONE))
    assert (record.status, record.finish_reason, record.done_marker) == ("ok", "stop", True)
    assert (record.input_tokens, record.output_tokens, record.usage_from) == (7, 3, "server")
    assert record.ttft_s is not None and record.ttft_s >= PAUSE_S
    assert len(record.tbt_s) == 2 and min(record.tbt_s) >= PAUSE_S / 2
    assert record.tpot_s == pytest.approx(sum(record.tbt_s) / 2)
    assert record.e2e_s == pytest.approx(record.ttft_s + sum(record.tbt_s))  # not the usage, not [DONE]


def test_odd_framing_changes_nothing() -> None:
    """Keep-alive comments, events cut in the middle of a line and of a character, CRLF, two events in one packet."""
    emoji = event({"choices": [{"index": 0, "text": "😀"}]}).replace(b"\\ud83d\\ude00", "😀".encode())
    middle = emoji.index("😀".encode()) + 2
    packets = [
        b": keep-alive\n\n", b"da", b"ta: ", piece("a")[6:], emoji[:middle], emoji[middle:], b":\r\n\r\n",
        event({"choices": [{"index": 0, "text": "c"}]}, end="\r\n\r\n") + piece("d"),
        piece("", finish_reason="length"), usage(2, 4), DONE,
    ]  # fmt: skip
    record = send(streaming(*packets))
    assert record.status == "ok"
    assert [len(times) for times in record.text_s.values()] == [4]
    assert min(record.tbt_s) == 0.0  # the two that came together
    assert record.ttft_s is not None and record.ttft_s >= 3 * PAUSE_S  # not the comment, not the half


def test_chat_begins_with_a_role_and_may_reason() -> None:
    def delta(content: Any, finish_reason: str | None = None) -> bytes:
        return event({"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]})

    packets = [
        delta({"role": "assistant", "content": ""}), delta({"reasoning_content": "hm"}), delta({"content": None}),
        delta({"content": "a"}), delta({}, "stop"), DONE,
    ]  # fmt: skip
    record = send(streaming(*packets), endpoint="chat")
    assert record.status == "ok" and len(record.text_s[0]) == 2
    assert record.ttft_s is not None and record.ttft_s >= 2 * PAUSE_S
    assert (record.output_tokens, record.usage_from, record.input_tokens) == (2, "estimate", 2)


def test_choices_have_gaps_of_their_own() -> None:
    packets = [piece("a", index=1), piece("b", index=0), piece("c", index=1), piece("d", index=0)]
    ends = [piece("", index=0, finish_reason="stop"), piece("", index=1, finish_reason="length")]
    record = send(streaming(*packets, *ends, usage(2, 4), DONE))
    assert sorted(record.text_s) == [0, 1]
    assert len(record.tbt_s) == 2 and min(record.tbt_s) >= 1.5 * PAUSE_S  # two packets apart


def test_empty_pieces_are_no_tokens() -> None:
    record = send(streaming(piece(""), piece("a"), piece(""), piece("", finish_reason="stop"), DONE))
    assert [len(times) for times in record.text_s.values()] == [1]
    assert record.tbt_s == [] and record.tpot_s is None


def test_usage_in_every_piece_counts_once() -> None:
    counts = {"usage": {"prompt_tokens": 2, "completion_tokens": 2}}
    record = send(streaming(piece("a", usage={"prompt_tokens": 2, "completion_tokens": 1}), piece("b", **counts), DONE))
    assert record.output_tokens == 2


def test_done_may_be_missing() -> None:
    record = send(streaming(piece("a", finish_reason="stop")))
    assert (record.status, record.done_marker) == ("ok", False)


def test_done_may_lack_its_end_of_line() -> None:
    record = send(streaming(piece("a"), b"data: [DONE]"))
    assert (record.status, record.done_marker) == ("ok", True)


def test_a_stream_left_open_after_done_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseserve_jax.load_generator import client

    monkeypatch.setattr(client, "AFTER_DONE_S", 0.1)

    async def answer(exchange: Exchange) -> Packets:
        yield HEAD + chunked(piece("a", finish_reason="stop") + DONE)
        await asyncio.sleep(30)

    started_s = time.perf_counter()
    assert send(answer).status == "ok"
    assert time.perf_counter() - started_s < 10


def test_no_text_at_all() -> None:
    record = send(streaming(piece("", finish_reason="stop"), usage(2, 1), DONE))
    assert (record.status, record.ttft_s, record.tpot_s, record.output_tokens) == ("ok", None, None, 1)


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (refusing(429, {"error": {"message": "queue full"}}, "Retry-After: 1\r\n"), "http_429", "queue full"),
        (refusing(503, b"gateway"), "http_503", "gateway"),
        (refusing(422, {"detail": [{"msg": "bad"}]}), "http_422", "bad"),
        (refusing(200, {"choices": [{"text": "a"}]}), "not_streamed", "choices"),
        (refusing(200, {"hello": 1}), "bad_response", "hello"),
        (streaming(piece("a"), event({"error": {"message": "out of memory"}}), DONE), "stream_error", "out of memory"),
        (streaming(piece("a"), event({"object": "error", "message": "late"})), "stream_error", "late"),
        (streaming(piece("a"), b"event: error\ndata: {}\n\n"), "stream_error", ""),
        (streaming(piece("a")), "truncated", "without a finish reason"),
        (streaming(piece("a"), end=False), "disconnect", "RemoteProtocolError"),
        (streaming(event("{")), "bad_response", "JSONDecodeError"),
        (streaming(event("3")), "bad_response", "no object"),
        (streaming(event({"choices": 3})), "bad_response", "no list"),
        (streaming(event("[" * 100_000)), "bad_response", "RecursionError"),
    ],
)
def test_failures_have_names(answer: Callable[[Exchange], Packets], status: str, said: str) -> None:
    record = send(answer)
    assert record.status == status
    assert record.error is not None and said in record.error
    assert record.end_s >= record.sent_s and not record.ok


def test_a_broken_connection_keeps_what_came() -> None:
    record = send(streaming(piece("a"), piece("b"), end=False))
    assert (record.status, record.output_tokens) == ("disconnect", 2)


def test_timeout() -> None:
    record = send(streaming(piece("a"), piece("b"), DONE, pause_s=0.4), timeout_s=0.6)
    assert (record.status, record.error) == ("timeout", "not finished after 0.6 s")
    assert 0.5 < record.e2e_s < 5


def test_nobody_listens() -> None:
    with StubServer(streaming(DONE)).running() as server:
        url = server.url

    async def run() -> RequestRecord:
        async with OpenAIClient(url, endpoint="completions") as client:
            return await client.send(planned(), time.perf_counter)

    assert asyncio.run(run()).status == "connect"


# --- before the clock runs -------------------------------------------------------------------------------------------


def test_key_and_path() -> None:
    async def run(url: str) -> None:
        async with OpenAIClient(url + "/v1/", endpoint="chat", api_key="sk-1") as client:
            await client.send(planned(), time.perf_counter)

    with StubServer(streaming(DONE)).running() as server:
        asyncio.run(run(server.url))
    (exchange,) = server.completions
    assert exchange.path == "/v1/chat/completions"
    assert exchange.headers["authorization"] == "Bearer sk-1"
    assert exchange.headers["accept-encoding"] == "identity"


def test_tokenize_where_there_is_one() -> None:
    async def run(url: str) -> tuple[Any, Any]:
        async with OpenAIClient(url, endpoint="completions") as client:
            return await client.models(), await client.count_tokens("a b c", "stub")

    for tokenize, count in ((True, 3), (False, None)):
        with StubServer(streaming(DONE), tokenize=tokenize).running() as server:
            models, found = asyncio.run(run(server.url))
        assert [model["id"] for model in models] == ["stub"]
        assert found == count


def test_no_openai_server_at_this_url() -> None:
    async def answer(exchange: Exchange) -> Packets:
        yield whole(200, {})

    async def run(url: str) -> None:
        async with OpenAIClient(url + "/elsewhere", endpoint="completions") as client:
            await client.models()

    with (
        StubServer(answer).running() as server,
        pytest.raises(ValueError, match="/elsewhere/v1/models answered 404: Not Found"),
    ):
        asyncio.run(run(server.url))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://me:pw@a", "http://a?b=c", ""])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|HTTP address|no query"):
        base_url(url)


def test_addresses() -> None:
    for given in ("http://a:1", "http://a:1/", "http://a:1/v1", " http://a:1/v1/ "):
        assert base_url(given) == "http://a:1"
    assert base_url("https://a/proxy/v1") == "https://a/proxy"


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(ValueError, match="API key") as error:
        OpenAIClient("http://a", endpoint="completions", api_key=key)
    assert key not in str(error.value)

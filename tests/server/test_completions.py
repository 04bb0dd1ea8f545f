"""Completions and chats: forms of prompts, shapes of answers, streams that equal plain answers (L03, L04, L07)."""

from __future__ import annotations

import concurrent.futures
import json
import random
import re
from typing import Any

import pytest

from tests.server.running_server import RunningServer, error_of

pytestmark = pytest.mark.usefixtures("idle_afterwards")

HELLO = [{"role": "user", "content": "hello"}]


def stream(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, without `[DONE]`, which must be the last."""
    events = []
    with server.client.stream("POST", path, json={"temperature": 0, "stream": True} | fields) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        events.append(json.loads(line[6:]))
    return events


def texts(events: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
        found[choice["index"]] = found.get(choice["index"], "") + new
    return found


def test_prompts_in_all_forms_give_the_same(server):
    ids = server.client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    outputs = [
        [choice["text"] for choice in server.complete(prompt=prompt, max_tokens=6)["choices"]]
        for prompt in ("hello", ["hello"], ids, [ids], ["hello", "hello"])
    ]
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3] and outputs[4] == outputs[0] * 2


def test_choices_are_numbered_by_prompt_and_continuation(server):
    response = server.complete(prompt=["one", "two", "three"], n=2, max_tokens=3, temperature=1, seed=5)
    assert [choice["index"] for choice in response["choices"]] == list(range(6))
    prompt_tokens = sum(
        server.client.post("/tokenize", json={"prompt": p}).json()["count"] for p in ("one", "two", "three")
    )
    assert response["usage"] == {
        "prompt_tokens": prompt_tokens, "completion_tokens": 18, "total_tokens": prompt_tokens + 18
    }  # fmt: skip
    assert (
        server.complete(prompt=["one", "two", "three"], n=2, max_tokens=3, temperature=1, seed=5)["choices"]
        == (response["choices"])
    )


def test_usage_comes_once_and_last_when_asked_for(server):
    plain = server.complete(prompt="hello", max_tokens=4)
    events = stream(server, prompt="hello", max_tokens=4, stream_options={"include_usage": True})
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == [] and events[-1]["usage"] == plain["usage"]
    assert all("usage" not in event for event in stream(server, prompt="hello", max_tokens=4))


def test_chats(server):
    response = server.client.post("/v1/chat/completions", json={"messages": HELLO, "temperature": 0, "max_tokens": 5})
    content = response.json()
    assert content["object"] == "chat.completion" and content["choices"][0]["message"]["role"] == "assistant"
    events = stream(server, "/v1/chat/completions", messages=HELLO, max_completion_tokens=5)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts(events)[0] == content["choices"][0]["message"]["content"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    again = server.client.post("/v1/chat/completions", json={"messages": parts, "temperature": 0, "max_tokens": 5})
    assert again.json()["choices"] == content["choices"]


def test_exactly_one_bos_in_chats(server):
    ids = server.client.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert ids[0] == 259 and ids.count(259) == 1


def test_logprobs_of_completions(server):
    plain = server.complete(prompt="hello", max_tokens=6, logprobs=3)["choices"][0]
    found = plain["logprobs"]
    assert [len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [6] * 4
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert value <= 0 and top[token] == value == max(top.values()), "greedy: the token is the best"
        assert 1 <= len(top) <= 3, "tokens of the same text count once"
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0
    merged: dict[str, list[Any]] = {name: [] for name in found}
    for event in stream(server, prompt="hello", max_tokens=6, logprobs=3):
        for name, values in (event["choices"][0]["logprobs"] or {}).items():
            merged[name] += values
    assert merged == found


def test_logprobs_of_chats(server):
    fields = {"messages": HELLO, "temperature": 0, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    found = server.client.post("/v1/chat/completions", json=fields).json()["choices"][0]["logprobs"]["content"]
    assert len(found) == 4
    for entry in found:
        assert len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["token"] == entry["token"]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    without = server.client.post("/v1/chat/completions", json=fields | {"top_logprobs": None}).json()
    assert [e["top_logprobs"] for e in without["choices"][0]["logprobs"]["content"]] == [[]] * 4


def test_echo(server):
    plain = server.complete(prompt="hello", max_tokens=4)["choices"][0]["text"]
    assert server.complete(prompt="hello", max_tokens=4, echo=True)["choices"][0]["text"] == "hello" + plain
    assert texts(stream(server, prompt="hello", max_tokens=4, echo=True)) == {0: "hello" + plain}


def test_logprobs_of_prompts(server):
    """Scoring, as evaluation harnesses do it: echo, and no new token."""
    ids = server.client.post("/tokenize", json={"prompt": "hello"}).json()["tokens"]
    scored = server.complete(prompt="hello", max_tokens=0, echo=True, logprobs=2)
    choice = scored["choices"][0]
    assert choice["text"] == "hello" and scored["usage"]["completion_tokens"] == 0
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(ids) and found["token_logprobs"][0] is None
    assert all(value < 0 for value in found["token_logprobs"][1:])
    longer = server.complete(prompt="hello", max_tokens=3, echo=True, logprobs=2)["choices"][0]["logprobs"]
    assert longer["token_logprobs"][: len(ids)] == found["token_logprobs"] and len(longer["tokens"]) == len(ids) + 3
    ours = server.complete(prompt="hello", max_tokens=1, prompt_logprobs=1)["choices"][0]["prompt_logprobs"]
    assert ours[0] is None
    assert [entry[str(i)]["logprob"] for entry, i in zip(ours[1:], ids[1:], strict=True)] == found["token_logprobs"][1:]


UNICODE = "(\N{GRINNING FACE}|\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}|\u0e44\u0e21\u0e49|\u4e2da|\u00e9){4,20}"


def random_cases(number: int) -> list[dict[str, Any]]:
    """Texts of valid characters (by a grammar) and of random bytes, cut anywhere, with stops of all kinds."""
    rng = random.Random(number)
    stops = ["\u4e2d", "a\U0001f600", "\u200d", "\u0e44\u0e21\u0e49\u0e44", "\ufffd\ufffd", "aa", "\u00e9", "a", "e"]
    cases = []
    for seed in range(24):
        fields: dict[str, Any] = {"prompt": "x", "max_tokens": rng.randint(1, 40), "temperature": 1.0, "seed": seed}
        if rng.random() < 0.6:
            fields["guided_regex"] = UNICODE
        if rng.random() < 0.7:
            fields["stop"] = rng.sample(stops, rng.randint(1, 3))
            fields["include_stop_str_in_output"] = rng.random() < 0.3
        cases.append(fields)
    return cases


def test_streams_equal_plain_texts(server):
    cases = random_cases(0)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        plain = list(pool.map(lambda fields: server.complete(**fields), cases))
        streams = list(pool.map(lambda fields: stream(server, **fields), cases))
    reasons = set()
    for fields, whole, events in zip(cases, plain, streams, strict=True):
        choice = whole["choices"][0]
        assert texts(events)[0] == choice["text"], fields
        last = [e for e in events if e["choices"] and e["choices"][0]["finish_reason"]]
        assert len(last) == 1 and last[0]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert last[0]["choices"][0]["stop_reason"] == choice["stop_reason"]
        reasons.add((choice["finish_reason"], choice["stop_reason"] is not None))
        if "guided_regex" in fields and choice["finish_reason"] == "stop" and "stop" not in fields:
            assert re.fullmatch(UNICODE, choice["text"])
        if "guided_regex" in fields:
            assert "\ufffd" not in choice["text"][:-1], "only a cut last character may be incomplete"
        for stop in fields.get("stop", []):
            if not fields["include_stop_str_in_output"]:
                assert stop not in choice["text"]
    assert {("stop", True), ("length", False)} <= reasons, "the cases are too tame"


def test_stops(server):
    """L04: over token borders (every character is a token), prefixes of each other, near-matches."""

    def run(stop: list[str], **fields: Any) -> tuple[str, str, Any]:
        request = {"prompt": "x", "guided_regex": "ab,cd,cxy,c", "max_tokens": 40, "stop": stop} | fields
        choice = server.complete(**request)["choices"][0]
        assert texts(stream(server, **request))[0] == choice["text"]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    assert run(["b,c"]) == ("a", "stop", "b,c")
    assert run(["b,c"], include_stop_str_in_output=True) == ("ab,c", "stop", "b,c")
    assert run(["ab", "ab,c"]) == ("", "stop", "ab")
    assert run(["cx", "d,cx"]) == ("ab,c", "stop", "d,cx"), "completed by the same character: the longer"
    assert run(["y,cd"]) == ("ab,cd,cxy,c", "stop", None), "a near-match at the end is shown"
    token = server.client.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()["tokens"][0]
    assert run([], stop_token_ids=[token]) == ("ab,cd,c", "stop", token)


def test_eos_ends_a_text_and_is_not_shown(server):
    choice = server.complete(prompt="x", max_tokens=5, logit_bias={"260": 100})["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)
    response = server.complete(prompt="x", max_tokens=5, logit_bias={"260": 100}, ignore_eos=True)
    assert response["choices"][0]["finish_reason"] == "length" and response["usage"]["completion_tokens"] == 5


BOOLEAN = {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False
}  # fmt: skip


@pytest.mark.parametrize("form", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": BOOLEAN}}},
    {"guided_json": BOOLEAN}, {"guided_json": json.dumps(BOOLEAN)},
    {"response_format": {"type": "regex", "regex": '\\{"a":(true|false)\\}'}},
    {"guided_regex": '\\{"a":(true|false)\\}'},
])  # fmt: skip
def test_structured_output(server, form):
    response = server.client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 50} | form)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert isinstance(json.loads(choice["message"]["content"])["a"], bool) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize("form, param", [
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "regex", "regex": "("}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"guided_json": "{"}, "guided_json"), ({"guided_json": {"type": "nope"}}, "guided_json"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_json"), ({"guided_regex": "a", "min_tokens": 2}, "min_tokens"),
])  # fmt: skip
def test_structured_output_that_is_impossible(server, form, param):
    error = error_of(server.client.post("/v1/chat/completions", json={"messages": HELLO} | form), 400)
    assert error["param"] == param


def test_a_grammar_that_takes_too_long_is_refused(server, monkeypatch):
    import time

    from sparseserve_jax.text.grammar import GrammarCompiler

    real = GrammarCompiler.compile
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *args: time.sleep(1) or real(*args))
    service = server.service.grammars()
    monkeypatch.setattr(service, "_timeout_s", 0.1)
    fields = {"prompt": "x", "guided_regex": "slow[0-9]"}
    error = error_of(server.client.post("/v1/completions", json=fields), 400)
    assert error["param"] == "guided_regex" and "0.1 s" in error["message"]


def test_tokens_there_and_back(server):
    text = "na\u00efve \U0001f600"
    tokens = server.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == 512
    assert server.client.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_information(server):
    models = server.client.get("/v1/models").json()
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("tiny", 512)]
    assert server.client.get("/v1/models/tiny").json() == models["data"][0]
    assert server.client.get("/health").json() == {"status": "ready"}
    assert "version" in server.client.get("/version").json()
    response = server.client.get("/health", headers={"X-Request-Id": "mine-1"})
    assert response.headers["X-Request-Id"] == "mine-1"
    assert server.client.get("/health", headers={"X-Request-Id": "a b"}).headers["X-Request-Id"] != "a b"

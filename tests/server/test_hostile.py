"""What must be refused, with an error in OpenAI's shape and nothing left behind (L01, L02, L05, L06, L11)."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from typing import Any

import httpx
import pytest

from sparseserve_jax.server.settings import ServerSettings
from tests.server.running_server import MODEL, RunningServer, error_of

pytestmark = pytest.mark.usefixtures("idle_afterwards")


def post(server: RunningServer, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return server.client.post(path, json=fields)


def raw(server: RunningServer, body: str | bytes, content_type: str = "application/json") -> httpx.Response:
    return server.client.post("/v1/completions", content=body, headers={"content-type": content_type})


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", []], [[65], "a"], [65, "a"], None, 5, {"a": 1}, [[65], []], [[[65]]]]
)
def test_no_prompt(server, prompt):
    error = error_of(post(server, prompt=prompt), 400)
    assert error["param"] == "prompt"
    assert server.complete(prompt="a", max_tokens=1)["choices"]


def test_an_empty_text_is_bos_alone(server):
    """This tokenizer has a BOS; without one it would be 400."""
    for prompt, number in (("", 1), ([""], 1), (["a", ""], 2)):
        response = server.complete(prompt=prompt, max_tokens=2)
        assert len(response["choices"]) == number
    ids = server.client.post("/tokenize", json={"prompt": "", "add_special_tokens": False}).json()
    assert ids["count"] == 0


def test_no_messages(server):
    assert error_of(post(server, "/v1/chat/completions", messages=[]), 400)["param"] == "messages"
    assert error_of(post(server, "/v1/chat/completions"), 400)["param"] == "messages"
    assert error_of(post(server, "/v1/chat/completions", messages=[{"role": "user"}]), 400)["param"] == "messages"
    empty = post(server, "/v1/chat/completions", messages=[{"role": "user", "content": ""}], max_tokens=1)
    assert empty.status_code == 200


def test_the_limit_on_length(server):
    limit = server.client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert server.complete(prompt=[65] * (limit - 1), max_tokens=1)["usage"]["prompt_tokens"] == limit - 1
    for num_tokens, max_tokens in ((limit, 1), (limit + 1, 1), (limit // 2, limit)):
        error = error_of(post(server, prompt=[65] * num_tokens, max_tokens=max_tokens), 400)
        assert str(limit) in error["message"] and str(num_tokens) in error["message"]
        assert error["code"] == "context_length_exceeded"
    whole = server.complete(prompt="a", max_tokens=None, ignore_eos=True, stop_token_ids=[])
    assert whole["usage"]["completion_tokens"] == 16, "null is OpenAI's default"


BAD_FIELDS: list[tuple[str, str]] = [
    ("temperature", "NaN"), ("temperature", "1e400"), ("temperature", "-1"), ("temperature", '"hot"'),
    ("temperature", "true"), ("top_p", "0"), ("top_p", "1.1"), ("top_k", "-2"), ("top_k", "1.5"), ("n", "0"),
    ("n", "1000000"), ("max_tokens", "0"), ("max_tokens", "-1"), ("max_tokens", "1.5"), ("max_tokens", "1000000000000"),
    ("max_tokens", '"5"'), ("stop", '[""]'), ("stop", '""'), ("stop", json.dumps(["x"] * 1000)), ("stop", "5"),
    ("logit_bias", '{"x": 1}'), ("logit_bias", '{"-1": 1}'), ("logit_bias", '{"1": 1000}'), ("logit_bias", "[1]"),
    ("logit_bias", '{"99999": 1}'), ("seed", "1e3"), ("seed", "99999999999999999999"), ("logprobs", "100"),
    ("presence_penalty", "3"), ("repetition_penalty", "0"), ("min_p", "2"), ("min_tokens", "500"),
    ("stop_token_ids", "[-1]"), ("stream", '"yes"'), ("stream_options", '{"include_usage": true}'),
    ("prompt", "[[-1]]"), ("prompt", "[99999]"), ("prompt", "[1.5]"), ("prompt", "[true]"), ("priority", "0.5"),
    ("sparse_budget_tokens", "7"), ("tools", '[{"type": "function"}]'), ("suffix", '"x"'), ("best_of", "3"),
    ("user", '"a", "user": "b"'), ("prompt", '"\\ud800"'), ("seed", "1" * 5000), ("echo", "2"),
    ("structured_outputs", '{"choice": ["a"]}'), ("allowed_token_ids", "[5]"), ("bad_words", '["a"]'),
    ("prompt_logprobs", "-1"),
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD_FIELDS, ids=[f"{n}={v[:24]}" for n, v in BAD_FIELDS])
def test_bad_values(server, name, value):
    fields = {"prompt": '"a"', "max_tokens": "4"} | {name: value}
    body = "{" + ", ".join(f'"{key}": {item}' for key, item in fields.items()) + "}"
    error = error_of(raw(server, body), 400)
    assert name in error["message"] or error["param"] == name or "JSON" in error["message"]


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b'"a"', b'{"prompt": "a"', b"\xff\xfe", b'{"prompt": Infinity}', b"[" * 100_000,
    b'{"prompt": "a", "prompt": "b"}', b'{"a":' * 50_000,
])  # fmt: skip
def test_bodies_that_are_no_json_object(server, body):
    assert error_of(raw(server, body), 400)["type"] == "invalid_request_error"


def test_other_errors_have_the_same_shape(server):
    error_of(raw(server, b"prompt=a", "application/x-www-form-urlencoded"), 415)
    error_of(server.client.get("/nope"), 404)
    error_of(server.client.get("/v1/completions"), 405)
    error = error_of(post(server, prompt="a", model="gpt-5"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found") and MODEL in error["message"]
    error_of(server.client.get("/v1/models/gpt-5"), 404)
    error_of(raw(server, '{"prompt": "a", "model": "\\ud800"}'), 404)


@pytest.mark.parametrize("fields, param, words", [
    ({"prompt": "a", "stop": [5]}, "stop", "stop.0: "),
    ({"prompt": "a", "sparse_budget_tokens": "dense"}, "sparse_budget_tokens", "sparse_budget_tokens=dense "),
    ({"prompt": ["a"] * 4000}, "prompt", "4000 continuations"),
    ({"prompt": "a", "n": 4000}, "n", "n=4000"),
    ({"messages": [{"role": "user", "content": "a"}], "modalities": ["text", "audio"]}, "modalities", "only modality"),
    ({"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo", "not echoed"),
])  # fmt: skip
def test_errors_name_what_is_wrong(server, fields, param, words):
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    error = error_of(server.client.post(path, json=fields), 400)
    assert error["param"] == param and words in error["message"]


def test_numbers_with_thousands_of_digits(server):
    error = error_of(raw(server, '{"prompt": "a", "max_tokens": ' + "1" * 5000 + "}"), 400)
    assert "more than 100 digits" in error["message"] and "sys." not in error["message"]


def test_fields_that_are_unknown_are_accepted(server):
    assert post(server, prompt="a", max_tokens=1, user="me", something_new=[1]).status_code == 200


def test_large_bodies(server):
    """50 MB, declared and not; in both cases the client gets to see the answer."""
    blob = b'{"prompt": "' + b"a" * (50 * 2**20) + b'"}'
    assert error_of(raw(server, blob), 413)["code"] == "request_too_large"
    parts = (blob[start : start + 2**20] for start in range(0, len(blob), 2**20))
    response = server.client.post("/v1/completions", content=parts, headers={"content-type": "application/json"})
    error_of(response, 413)
    assert server.complete(prompt="a", max_tokens=1)["choices"]


def test_a_request_may_not_choose_a_template(server, engine):
    messages = [{"role": "user", "content": "x"}]
    fields = {"messages": messages, "chat_template": "{{ messages[0].content }}", "max_tokens": 1}
    assert error_of(post(server, "/v1/chat/completions", **fields), 400)["param"] == "chat_template"
    with RunningServer(engine, ServerSettings(trust_request_chat_template=True)) as trusting:
        trusting.wait_ready()
        assert post(trusting, "/v1/chat/completions", **fields).status_code == 200
        for template, reason in (
            ("{{ ''.__class__.__mro__ }}", "sandbox"), ("{% for i in range(10**9) %}{% endfor %}", "template"),
            ("{{ raise_exception('no system role') }}", "no system role"), ("{{", "template"),
        ):  # fmt: skip
            started_s = time.monotonic()
            response = post(trusting, "/v1/chat/completions", **fields | {"chat_template": template})
            assert reason in error_of(response, 400)["message"]
            assert time.monotonic() - started_s < 5


def test_overload(engine):
    """200 at once and a prompt of 5 MB, with room for 8 + 8: the rest get 429 at once, `/health` answers throughout."""
    with RunningServer(engine, ServerSettings(max_waiting=8)) as server:
        server.wait_ready()
        delays: list[float] = []
        done = threading.Event()

        def poll() -> None:
            with httpx.Client(base_url=server.url, timeout=10) as client:
                while not done.is_set():
                    started_s = time.monotonic()
                    assert client.get("/health").status_code == 200
                    delays.append(time.monotonic() - started_s)
                    time.sleep(0.05)

        async def ask(client: httpx.AsyncClient, number: int) -> tuple[int, dict[str, Any], str | None]:
            prompt = "a" * 5_000_000 if number == 100 else f"request {number}"
            fields = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            response = await client.post("/v1/completions", json=fields)
            return response.status_code, response.json(), response.headers.get("retry-after")

        async def ask_all() -> list[tuple[int, dict[str, Any], str | None]]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
                return await asyncio.gather(*(ask(client, number) for number in range(200)))

        poller = threading.Thread(target=poll)
        poller.start()
        answers = asyncio.run(ask_all())
        done.set()
        poller.join()
        assert max(delays) < 1.0
        statuses = [answer[0] for answer in answers]
        assert set(statuses) <= {200, 400, 429} and statuses.count(200) >= 16 and statuses.count(429) > 16
        assert statuses[100] in (400, 429)
        for status, content, retry_after in answers:
            if status == 200:
                assert content["usage"]["completion_tokens"] == 32
            if status == 429:
                assert int(retry_after or 0) >= 1 and content["error"]["type"] == "rate_limit_error"
        server.assert_idle()
        assert server.gauges()['admission_rejections_total{model_name="tiny",reason="overload"}'] == (
            statuses.count(429)
        )


def test_a_request_for_more_than_ever_fits_is_told_so(engine):
    with RunningServer(engine, ServerSettings(max_waiting=2)) as server:
        server.wait_ready()
        error = error_of(server.client.post("/v1/completions", json={"prompt": "a", "n": 64}), 400)
        assert "64" in error["message"] and "--max-waiting" in error["message"] and error["param"] == "n"


def test_headers_that_are_no_http(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", "/v1/completions", skip_accept_encoding=True)
    connection.putheader("Content-Length", "-5")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()

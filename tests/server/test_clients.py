"""Real clients: OpenAI's Python package, and schemathesis with whatever the OpenAPI document allows."""

from __future__ import annotations

import json

import pytest

from tests.server.running_server import MODEL

pytestmark = [
    pytest.mark.usefixtures("idle_afterwards"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the clients' own making
]


@pytest.fixture(scope="module")
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions(client):
    whole = client.completions.create(model=MODEL, prompt="hello", max_tokens=5, temperature=0, logprobs=2)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 5
    assert len(whole.choices[0].logprobs.tokens) == 5
    parts = client.completions.create(model=MODEL, prompt="hello", max_tokens=5, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_chats(client):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=5, temperature=0)
    parts = list(
        client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=5, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole.choices[0].message.content
    assert parts[-1].usage == whole.usage


def test_a_json_schema(client):
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"],
              "additionalProperties": False}  # fmt: skip
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "size?"}], max_completion_tokens=400, seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "size", "schema": schema, "strict": True}},
        extra_body={"top_k": 3},
    )  # fmt: skip
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content)["size"], int)
    else:
        assert answer.choices[0].message.content.startswith('{"size":')


def test_errors_are_the_clients_own(client):
    import openai

    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature") as error:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert error.value.param == "temperature"
    assert [model.id for model in client.models.list()] == [MODEL]


def test_no_request_that_the_document_allows_breaks_the_server(server):
    schemathesis = pytest.importorskip("schemathesis")
    import hypothesis
    import requests

    document = server.client.get("/openapi.json").json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health"} <= set(document["paths"])
    schema = schemathesis.openapi.from_dict(document)
    statuses: set[int] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=15, deadline=None, database=None, derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        def run(case) -> None:
            response = case.call(base_url=server.url, timeout=60)
            statuses.add(response.status_code)
            assert response.status_code < 500, (case.as_curl_command(), response.text)
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        run()
    assert 200 in statuses and 400 in statuses
    assert requests.get(server.url + "/health", timeout=10).status_code == 200

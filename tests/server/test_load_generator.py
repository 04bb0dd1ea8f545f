"""`sparseserve bench` against our own server: both sides count the same."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from sparseserve_jax import cli
from tests.server.running_server import RunningServer


def bench(server: RunningServer, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["bench", "--url", server.url, "--ignore-eos", "--json", "-", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_both_sides_count_the_same(server: RunningServer, idle_afterwards: None) -> None:
    before = server.gauges()
    content = bench(server, "--num-prompts", "6", "--rate", "20", "--input-len", "60-90", "--output-len", "5-9")
    counted = {name: value - before.get(name, 0) for name, value in server.gauges().items()}
    summary = content["summary"]
    assert content["server"]["counts_tokens"] and content["server"]["info"]["config"]["sparse_budget_tokens"] == 128
    assert summary["completed"] == summary["usage_from_server"] == 6 and summary["without_done_marker"] == 0
    assert summary["input_tokens"] == counted["prompt_tokens_total"]
    assert summary["output_tokens"] == counted["generation_tokens_total"]
    assert counted["time_to_first_token_seconds_count"] == 6
    assert summary["ttft_s"]["mean"] >= counted["time_to_first_token_seconds_sum"] / 6  # the client sees it later
    for request in content["requests"]:
        assert 5 <= request["output_tokens"] <= 9 and request["finish_reason"] == "length"
        assert 55 <= request["input_tokens"] <= 95


def test_several_choices(server: RunningServer, idle_afterwards: None) -> None:
    content = bench(
        server, "--num-prompts", "1", "--input-len", "20", "--output-len", "6",
        "--extra-body", '{"n": 2, "temperature": 1.0, "seed": 3}',
    )  # fmt: skip
    (request,) = content["requests"]
    assert request["output_tokens"] == 12 and set(request["text_s"]) == {"0", "1"}

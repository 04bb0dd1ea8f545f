from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from sparseserve_jax import cli
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.request import RequestMetrics, RequestOutput
from sparseserve_jax.selection_record import SelectionRecord
from tests.tiny_model import write_sharp_model


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


class FakeEngine:
    """Answers every prompt with "<its last word>!" in two snapshots, the last request first."""

    made: list[FakeEngine] = []  # noqa: RUF012

    def __init__(self, model: str | None, config: EngineConfig) -> None:
        self.model, self.config, self.requests, self.sampling = model, config, [], []
        self.info = SimpleNamespace(lines=lambda: ["backend fake"], to_dict=lambda: {"backend": "fake"})
        FakeEngine.made.append(self)

    def generate(self, requests: list[Any], sampling: list[Any], on_output: Any = None) -> list[RequestOutput]:
        self.requests, self.sampling = requests, sampling
        finals = []
        for index, request in reversed(list(enumerate(requests))):
            prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[0]["content"]
            word = prompt.split()[-1]
            for text, reason in ((word, None), (word + "!", "stop")):
                output = RequestOutput(
                    request_id=f"request-{index}", prompt_token_ids=[1, 2], text=text, token_ids=[3],
                    finish_reason=reason,
                    metrics=RequestMetrics(ttft_s=0.5, tbt_s=[0.25], blocks_selected=4, blocks_hit=3),
                )  # fmt: skip
                if on_output is not None:
                    on_output(output)
            finals.append(output)
        return finals[::-1]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    monkeypatch.setattr(cli, "Engine", FakeEngine)
    monkeypatch.setattr(FakeEngine, "made", [])
    return FakeEngine.made


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1048576", 2**20), ("1_000", 1000), ("256MiB", 2**28), ("1.5G", 3 * 2**29), ("2kb", 2000),
     ("2 KiB", 2048), (f"{2**60}", 2**60), ("7B", 7)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert cli.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "3x", "1.2.3G", "one"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        cli.parse_bytes(text)


def test_every_field_of_the_config_is_an_option_with_its_help(engines: list[FakeEngine]) -> None:
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    documented = {part for name in cli.field_help() for part in name.split(" / ")}
    assert documented == names
    assert run("generate", "hi").exit_code == 0
    assert engines[0].config == EngineConfig()


def test_options_reach_the_config(engines: list[FakeEngine]) -> None:
    result = run(
        "generate", "hi", "--kv-tiers", "tiered", "--device-kv-bytes", "96MiB", "--host-kv-bytes", "1GiB",
        "--sparse-budget-tokens", "1024", "--working-set-margin", "0.5", "--max-model-len", "4096", "--deterministic",
        "--prefill", "chunked", "--compilation-cache-dir", "",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert engines[0].config == EngineConfig(
        kv_tiers="tiered", device_kv_bytes=96 * 2**20, host_kv_bytes=2**30, sparse_budget_tokens=1024,
        working_set_margin=0.5, max_model_len=4096, deterministic=True, prefill="chunked", compilation_cache_dir="",
    )  # fmt: skip


def test_dense_attention_has_a_word(engines: list[FakeEngine]) -> None:
    assert run("generate", "hi", "--sparse-budget-tokens", "dense").exit_code == 0
    assert engines[0].config.sparse_budget_tokens is None


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--block-size", "7"], "block_size=7 is not supported; choose one of 16, 32, 64"),
        (["info", "--block-size", "many"], "--block-size: 'many' is not a number"),
        (["info", "--device-kv-bytes", "3x"], "--device-kv-bytes: '3x' is not a size"),
        (["info", "--host-kv-bytes", "1G"], "host_kv_bytes needs kv_tiers='tiered'"),
        (["info", "--model", "/nowhere/model.gguf"], "/nowhere/model.gguf does not exist"),
        (["generate", "hi", "--max-tokens", "0"], "max_tokens=0 must be an integer"),
        (["generate", "hi", "--file", "/nowhere/text"], "/nowhere/text"),
        (["generate"], "no prompt"),
        (["convert", "/nowhere", "/nowhere/out"], "/nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("sparseserve-jax ")


# --- generate --------------------------------------------------------------------------------------------------------


def test_concurrent_texts_are_shown_in_order(engines: list[FakeEngine]) -> None:
    result = run("generate", "say one", "say two")
    assert result.stdout == "[0] one!\n[1] two!\n"
    assert result.stderr == "backend fake\n"
    assert engines[0].requests[0].prompt == [{"role": "user", "content": "say one"}]


def test_one_text_has_no_number_and_quiet_is_quiet(engines: list[FakeEngine]) -> None:
    result = run("generate", "say one", "--quiet", "--no-stream", "--no-chat")
    assert (result.stdout, result.stderr) == ("one!\n", "")
    assert engines[0].requests[0].prompt == "say one"


def test_files_go_before_prompts(engines: list[FakeEngine], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("A long text.")
    assert run("generate", "--no-chat", "--file", str(tmp_path / "text"), "first?", "second?").exit_code == 0
    assert [r.prompt for r in engines[0].requests] == ["A long text.\n\nfirst?", "A long text.\n\nsecond?"]


def test_standard_input(engines: list[FakeEngine]) -> None:
    assert run("generate", "--no-chat", stdin="from a pipe").exit_code == 0
    assert run("generate", "--no-chat", "--file", "-", "why?", stdin="from a pipe").exit_code == 0
    assert [e.requests[0].prompt for e in engines] == ["from a pipe", "from a pipe\n\nwhy?"]


def test_sampling_options(engines: list[FakeEngine]) -> None:
    run("generate", "hi", "--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "4", "--stop", "x")
    sampling = engines[0].sampling[0]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (7, 0.5, 0.9, 4)
    assert sampling.stop == ("x",)


def test_json_and_metrics(engines: list[FakeEngine], tmp_path: Path) -> None:
    result = run("generate", "say one", "--json", str(tmp_path / "out.json"), "--metrics")
    assert "75.0" in result.stderr  # the hit rate
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["engine"] == {"backend": "fake"}
    assert written["outputs"][0]["text"] == "one!"
    assert written["outputs"][0]["metrics"]["blocks_hit"] == 3


def test_json_on_stdout_is_all_there_is(engines: list[FakeEngine]) -> None:
    assert json.loads(run("generate", "say one", "--json", "-").stdout)["outputs"][0]["text"] == "one!"


def test_a_recording_needs_a_folder(engines: list[FakeEngine]) -> None:
    result = run("generate", "hi", "--record-selection", "/nowhere/file.npz")
    assert (result.exit_code, engines) == (2, [])
    assert "/nowhere" in result.stderr


# --- with real engines -----------------------------------------------------------------------------------------------


def test_convert_then_generate(tmp_path: Path) -> None:
    model = str(write_sharp_model(tmp_path / "model"))
    result = run("convert", model, str(tmp_path / "orbax"), "--dtype", "float32")
    assert result.exit_code == 0, result.output
    arguments = ("--no-chat", "--max-tokens", "3", "--max-model-len", "256", "--max-num-seqs", "2", "--json", "-")
    texts = []
    for path in (model, str(tmp_path / "orbax")):
        result = run("generate", "hello there", "--model", path, "--dtype", "float32", *arguments)
        assert result.exit_code == 0, result.output
        texts.append(json.loads(result.stdout)["outputs"][0]["token_ids"])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3


def test_selections_are_recorded(tmp_path: Path) -> None:
    model, file = str(write_sharp_model(tmp_path / "model")), tmp_path / "selected.npz"
    result = run(
        "generate", "a" * 200, "b" * 300, "--model", model, "--dtype", "float32", "--no-chat", "--max-tokens", "5",
        "--max-model-len", "512", "--max-num-seqs", "2", "--block-size", "16", "--sparse-budget-tokens", "96",
        "--record-selection", str(file), "--json", "-", "--quiet",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [o["metrics"]["selected_block_ids"] for o in json.loads(result.stdout)["outputs"]] == [[], []]
    record = SelectionRecord.load(file)
    assert (record.block_size, record.layers) == (16, (2, 3))
    assert [request.prompt_tokens for request in record.requests] == [201, 301]
    for request in record.requests:
        assert request.selected.shape == (4, 2, 2, 6)
        newest = (request.prompt_tokens + np.arange(4)) // 16
        np.testing.assert_array_equal(request.selected.max(-1), np.broadcast_to(newest[:, None, None], (4, 2, 2)))
        assert (request.selected[..., 0] == 0).all()  # the sink


def test_info_of_the_embedded_model() -> None:
    result = run(
        "info", "--max-model-len", "512", "--max-num-seqs", "2", "--sparse-budget-tokens", "256", "--json", "-"
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["model"].startswith("SmolLM2-135M-Instruct")
    assert facts["layout"]["max_model_len"] == 512
    assert facts["layout"]["dense_layers"] == [7, 18], "those that retrieve"
    assert facts["device_kv_bytes"] == facts["layout"]["device_bytes"]


@pytest.mark.parametrize("text, layers", [("7,18", (7, 18)), (" 18, 7,", (7, 18)), ("", ())])
def test_layers_as_text(text, layers) -> None:
    assert EngineConfig(dense_layers=cli._parse("dense_layers", text)).dense_layers == layers


@pytest.mark.parametrize("text", ["7,x", "1.5", "7 18", "7;18"])
def test_layers_that_are_none(text) -> None:
    result = run("info", "--dense-layers", text)
    assert result.exit_code == 2 and f"--dense-layers: '{text}' is not a list of layers such as 7,18" in result.stderr


def test_every_setting_is_documented_with_its_default() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    for field in dataclasses.fields(EngineConfig):
        assert f"| `{field.name}` |" in text
        line = next(line for line in text.splitlines() if line.startswith(f"| `{field.name}` |"))
        assert f"| `{field.default}` |" in line, f"docs/configuration.md has another default of {field.name}"

"""Evaluations with an engine: figures are those of requests of their own, a killed run ends with the same files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from sparseserve_jax.evaluation import evaluate as evaluate_module
from sparseserve_jax.evaluation import run as run_module
from sparseserve_jax.evaluation.evaluate import engine_config, predictions
from sparseserve_jax.evaluation.example import Example, Task
from sparseserve_jax.evaluation.prompts import PromptEncoder
from sparseserve_jax.evaluation.run import Evaluation, run_evaluation
from sparseserve_jax.evaluation.settings import Setting, parse_settings
from tests.tiny_model import write_sharp_model

CONFIG = EngineConfig(
    dtype="float32", block_size=16, num_dense_layers=1, max_num_batched_tokens=256, max_model_len=512, max_num_seqs=4
)  # fmt: skip
SETTINGS = parse_settings("dense,64,128", "cuboid-mean,quest:64")
TASKS = (
    Task(name="first", metric="found", max_tokens=12),
    Task(name="second", metric="code_similarity", max_tokens=5, chat=False),
)
WORDS = "The quick brown fox jumps over the lazy dog and runs away from the angry bear. "


def make_examples() -> list[Example]:
    return [
        Example(task=task, row_id=str(n), prompt=f"{n} {WORDS * n}", answers=("dog", f"{n} bears"), length=n, depth=0.5)
        for task in TASKS
        for n in (1, 3, 2)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model, engine_config(CONFIG, SETTINGS))


@pytest.fixture(scope="module")
def prepared(model):
    return PromptEncoder(model).prepare(make_examples(), max_prompt_tokens=300, max_model_len=512)


@pytest.fixture(scope="module")
def everything(engine, prepared):
    """(index, setting) -> prediction."""
    found = {(i, s): p for i, s, p in predictions(engine, prepared, dict.fromkeys(range(6), SETTINGS))}
    assert len(found) == 6 * len(SETTINGS)
    return found


def test_an_engine_has_what_its_settings_need():
    config = engine_config(CONFIG, SETTINGS)
    assert (config.sparse_budget_tokens, config.selection) == (128, "cuboid-mean")
    assert set(config.extra_decode_settings) == {(64, "cuboid-mean"), (64, "quest"), (None, "cuboid-mean")}
    assert config.deterministic and config.max_num_seqs == 4
    dense = engine_config(CONFIG, [Setting(kv_dtype="int8", prefill_sparsity=0.9)])
    assert (dense.sparse_budget_tokens, dense.extra_decode_settings) == (None, ())
    assert (dense.kv_dtype, dense.prefill_sparsity) == ("int8", 0.9)


def test_answers_are_those_of_requests_of_their_own(engine, prepared, everything):
    """Also the first token, which a decode step makes; likelihoods are those of the whole prompt with the answer."""
    for (index, setting), got in everything.items():
        item = prepared[index]
        last = item.token_ids[-1]
        sampling = SamplingParams(
            temperature=0, max_tokens=1 + item.example.task.max_tokens, forced_token_ids=(last,), logprobs=1
        )
        own = Request(
            prompt=item.token_ids[:-1], sampling=sampling, sparse_budget_tokens=setting.budget_tokens,
            selection=setting.method,
        )  # fmt: skip
        (output,) = engine.generate([own])
        assert output.token_ids == [last, *got.token_ids]
        assert got.finish_reason == output.finish_reason
        assert got.text == engine.tokenizer.decode(got.token_ids, skip_special_tokens=True)
        assert got.num_prompt_tokens == len(item.token_ids) and got.depth == 0.5
        assert len(got.greedy_token_ids) == len(item.reference)
        assert got.nll is not None and got.nll > 0
        if got.token_ids[0] == item.reference[0]:
            assert got.greedy_token_ids[0] == item.reference[0]
        assert got.greedy_token_ids[0] == got.token_ids[0]


def test_budgets_make_a_difference_and_a_covering_one_none(everything):
    """In the long prompts; the short ones are within the budgets."""
    dense, sparse = SETTINGS[0], SETTINGS[1]
    assert sparse.budget_tokens == 64
    long = [index for index in range(6) if index % 3 == 1]
    assert any(everything[i, dense].nll != everything[i, sparse].nll for i in long)


def test_likelihood_of_the_greedy_answer_is_the_highest(engine, prepared, everything):
    """An example whose reference is what greedy decoding says: every token agrees, and the likelihood is its own."""
    item, dense = prepared[1], SETTINGS[0]
    answer = everything[1, dense].token_ids
    told = dataclasses.replace(item, reference=answer)
    ((_, _, got),) = predictions(engine, [told], {0: [dense]})
    assert got.greedy_token_ids == answer
    assert got.nll < everything[1, dense].nll


def test_an_example_without_reference_has_no_likelihood(engine, prepared):
    bare = dataclasses.replace(prepared[0], reference=[])
    found = list(predictions(engine, [bare], {0: SETTINGS[:2]}))
    assert [p.nll for _, _, p in found] == [None, None] and len(found) == 2


# --- whole runs ------------------------------------------------------------------------------------------------------


def evaluation(model: Path, out: Path, **changed) -> Evaluation:
    values = {
        "suite": "needles", "model": str(model), "config": CONFIG, "examples": make_examples(), "settings": SETTINGS,
        "sources": {"data_seed": 0}, "out": out, "max_prompt_tokens": 300,
    }  # fmt: skip
    return Evaluation(**values | changed)


class KilledError(Exception):
    pass


@pytest.fixture
def one_engine(monkeypatch, engine):
    """Runs take the module's engine instead of making their own."""
    made = []

    def make(model, config):
        assert config == engine.config
        made.append(config)
        return engine

    monkeypatch.setattr(run_module, "Engine", make)
    return made


def test_a_killed_run_ends_with_the_same_files(model, one_engine, engine, tmp_path, monkeypatch):
    encoder = PromptEncoder(model)
    report = run_evaluation(evaluation(model, tmp_path / "whole"), encoder)
    assert (report["predictions_made"], report["predictions_found"]) == (24, 0)

    note = run_module.ProgressBar.note

    def die_after_ten(self, *arguments):
        note(self, *arguments)
        if self.num_made == 10:
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(run_module.ProgressBar, "note", die_after_ten)
        with pytest.raises(KilledError):
            run_evaluation(evaluation(model, tmp_path / "killed"), encoder)
    assert not engine.has_unfinished()
    again = run_evaluation(evaluation(model, tmp_path / "killed"), encoder)
    assert again["predictions_found"] > 0
    assert again["predictions_found"] + again["predictions_made"] == 24
    for path in (tmp_path / "whole").glob("*.jsonl"):
        assert (tmp_path / "killed" / path.name).read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "whole").glob("*.jsonl"))) == len(SETTINGS)
    assert again["settings"] == report["settings"]

    num_engines = len(one_engine)
    finished = run_evaluation(evaluation(model, tmp_path / "killed"), encoder)
    assert (finished["predictions_made"], len(one_engine)) == (0, num_engines)


def test_a_report_has_what_others_read(model, one_engine, tmp_path):
    run_evaluation(evaluation(model, tmp_path / "out", json_file=tmp_path / "r.json"), PromptEncoder(model))
    report = json.loads((tmp_path / "r.json").read_text())
    assert report == json.loads((tmp_path / "out/report.json").read_text())
    assert [entry["name"] for entry in report["settings"]] == ["dense", "cuboid-mean 64", "cuboid-mean 128", "quest 64"]
    entry = report["settings"][2]
    assert (entry["budget_tokens"], entry["budget_blocks"], entry["method"]) == (128, 8, "cuboid-mean")
    assert {"score", "nll", "rows", "failures"} <= entry["tasks"]["first"].keys()
    assert {"average", "retention", "nll_rise"} <= entry.keys()
    assert report["data_seed"] == 0 and report["max_prompt_tokens"] == 300
    assert (tmp_path / "out/length_by_depth.png").read_bytes().startswith(b"\x89PNG")
    assert "### first, quest 64" in (tmp_path / "out/table.md").read_text()


@pytest.mark.slow
def test_an_engine_for_each_prefill_and_kv(model, monkeypatch, tmp_path):
    """What does not belong to decode makes an engine of its own; the reference is the plain one."""
    made = []

    def make(name, config):
        made.append((config.prefill_sparsity, config.sparse_budget_tokens))
        return Engine(name, config)

    monkeypatch.setattr(run_module, "Engine", make)
    settings = parse_settings("dense,64", "mean", "dense,0.8")
    report = run_evaluation(
        evaluation(model, tmp_path, settings=settings, examples=make_examples()[:2], suite="longbench"),
        PromptEncoder(model),
    )
    assert made == [(None, 64), (0.8, 64)]
    assert [entry["name"] for entry in report["settings"]] == [s.name for s in settings]
    assert report["settings"][0]["nll_rise"] == 0.0
    assert all(entry["nll_rise"] is not None for entry in report["settings"])
    assert (tmp_path / "score_by_budget.png").exists()


def test_nothing_to_do_and_no_room_are_errors(model, tmp_path):
    encoder = PromptEncoder(model)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        run_evaluation(evaluation(model, tmp_path, examples=[]), encoder)
    with pytest.raises(ValueError, match="max_model_len=512 leaves no prompt beside 692 tokens"):
        run_evaluation(evaluation(model, tmp_path, max_prompt_tokens=None), encoder)


def test_errors_of_the_engine_are_failures(prepared, monkeypatch):
    output = evaluate_module.RequestOutput(
        request_id="0", prompt_token_ids=[], token_ids=[1], finish_reason="error", error="not finite"
    )
    item = dataclasses.replace(prepared[0], reference=[])
    made = evaluate_module._prediction(item, output, None, PromptEncoder(None).tokenizer)
    assert (made.score, made.failed, made.nll, made.text) == (0.0, True, None, "")

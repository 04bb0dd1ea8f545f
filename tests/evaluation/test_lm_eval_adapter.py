"""The harness itself asks the engine. Runs where lm_eval is installed."""

from __future__ import annotations

import json

import pytest

from tests.tiny_model import write_sharp_model

lm_eval = pytest.importorskip("lm_eval")

TASK = {
    "dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}", "metric_list": [{"metric": "acc"}],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from sparseserve_jax.evaluation.lm_eval_adapter import SparseServeLM

    directory = write_sharp_model(tmp_path_factory.mktemp("sharp"))
    return SparseServeLM(
        str(directory), dtype="float32", sparse_budget_tokens="dense", max_model_len=256, max_num_seqs=4,
        deterministic=True, implementation="reference", batch_size=1, device="cpu",
    )  # fmt: skip


def test_the_harness_runs(model, tmp_path):
    """Answers are what the model itself says, so that all of them must be right."""
    texts = ["first question", "second question, a little longer", "x" * 300]
    answers = model.generate_until([_Instance((text, {"until": ["\n"], "max_gen_toks": 6})) for text in texts])
    rows = [{"text": text, "choices": [answer, answer[::-1] + "?"], "answer": answer}
            for text, answer in zip(texts, answers, strict=True)]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    generates = TASK | data | {
        "task": "generates", "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}], "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
    }  # fmt: skip
    results = lm_eval.simple_evaluate(model, tasks=[generates], bootstrap_iters=0, log_samples=False)["results"]
    assert results["generates"]["exact_match,none"] == 1.0


def test_likelihood_of_a_long_text_is_that_of_its_windows(model):
    text = "The harness asks for whole texts. " * 12
    (rolled,) = model.loglikelihood_rolling([_Instance((text,))])
    tokens = model.tok_encode(text, False)
    assert len(tokens) > 256
    whole = model._loglikelihood_tokens([(None, [model.prefix_token_id], tokens[:255])])[0][0]
    rest = rolled - whole
    assert whole < 0 and rest < 0
    (short,) = model.loglikelihood([_Instance((text[:100], text[100:120]))])
    assert short[0] < 0 and short[1] is False


@pytest.mark.parametrize(
    ("options", "message"), [({"beams": 2}, "beams"), ({"max_gen_toks": 256}, "leaves no room for a prompt")]
)
def test_unknown_options_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate_until([_Instance(("hi", options))])


def test_unknown_fields_are_refused():
    from sparseserve_jax.evaluation.lm_eval_adapter import SparseServeLM

    with pytest.raises(ValueError, match=r"--model_args: .*budget"):
        SparseServeLM(budget=3)


class _Instance:
    """What the harness hands over, as far as a model looks at it."""

    def __init__(self, args: tuple[object, ...]) -> None:
        self.args = args

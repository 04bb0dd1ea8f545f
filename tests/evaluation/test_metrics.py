"""Every metric against values worked out by hand from the rules, and none breaks on odd predictions."""

# ruff: noqa: RUF001 (full-width characters are what is tested)

from __future__ import annotations

import string

import hypothesis
import pytest
from hypothesis import strategies as st

from sparseserve_jax.evaluation import longbench, metrics, needles
from sparseserve_jax.evaluation.example import Example, Task

LABELS = ("Food", "Fast food", "Individual", "Group of individuals", "Date")


def example(metric: str, *answers: str, classes: tuple[str, ...] = (), first_line: bool = False) -> Example:
    task = Task(name="task", metric=metric, max_tokens=8, first_line=first_line)
    return Example(task=task, row_id="1", prompt="", answers=answers, classes=classes)


# --- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("The Cat, sat!", "a cat sat", 1.0),
        ("cat", "cat sat on mat", 2 * (1 / 1) * (1 / 4) / (1 + 1 / 4)),
        ("no no yes", "no no no", 2 / 3),  # multisets: two in common of three and three
        ("U.S.A.", "usa", 1.0),
        ("theatre", "atre", 0.0),  # articles go as words only
        ("the", "the", 0.0),  # nothing is left of either
        ("well-known", "well known", 0.0),  # punctuation goes without a blank
        ("", "x", 0.0),
    ],
)
def test_qa_f1(prediction, answer, expected):
    assert metrics.qa_f1(prediction, answer) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("北京。", "北京", 1.0),
        ("我爱北京", "北京", 2 * (1 / 3) * 1 / (1 / 3 + 1)),  # 我 / 爱 / 北京
        ("ABC，", "abc", 1.0),
        ("。", "北京", 0.0),
        ("《北京", "北京", 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # the opening bracket is not in the list, the closing is
        ("北京》", "北京", 1.0),
    ],
)
def test_qa_f1_zh(prediction, answer, expected):
    assert metrics.qa_f1_zh(prediction, answer) == pytest.approx(expected)


def test_chinese_punctuation():
    assert (
        set("！？｡。＂（），－／：；［］｛｝～｢｣､、〃》「」『』【】〔〕〖〗〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏")
        <= metrics.CHINESE_PUNCTUATION
    )
    assert not metrics.CHINESE_PUNCTUATION & set("．《〈〉〒〓‚" + string.ascii_letters + "中")
    assert len(metrics.CHINESE_PUNCTUATION) == 74


def test_rouge_l():
    """By the longest common subsequence of each sentence, words counted once: 'rouge' 1.0.1."""
    f = metrics.rouge_l("the cat sat on the mat", "the cat lay on the mat")
    assert f == pytest.approx(4 / 5, abs=1e-6)  # the, cat, on, mat in common; 5 different words each
    f = metrics.rouge_l("a b", "a b c d")
    assert f == pytest.approx(2 * 1 * 0.5 / 1.5, abs=1e-6)
    assert metrics.rouge_l("x y", "a b") == 0.0
    assert metrics.rouge_l("b a", "a b") == pytest.approx(1 / 2, abs=1e-6)  # order counts


def test_rouge_l_zh():
    assert metrics.rouge_l_zh("我爱北京", "我爱北京") == pytest.approx(1.0, abs=1e-6)
    assert metrics.rouge_l_zh("我爱北京", "北京") == pytest.approx(2 * (1 / 3) / (4 / 3), abs=1e-6)


@pytest.mark.parametrize("prediction", ["", ".", "..."])
@pytest.mark.parametrize("metric", ["rouge_l", "rouge_l_zh"])
def test_empty_summaries_are_failures(metric, prediction):
    assert metrics.score(example(metric, "a b"), prediction) == metrics.Score(0.0, failed=True)


def test_a_summary_beyond_the_recursion_is_a_failure():
    long = " ".join(f"word{index}" for index in range(3000))
    assert metrics.score(example("rouge_l", "word0 word2999"), long) == metrics.Score(0.0, failed=True)


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Date", "Date", 1.0),
        ("Date or Individual", "Date", 1 / 2),
        ("nothing of these", "Date", 0.0),
        ("Food", "Date", 0.0),
        # "Fast food" contains no "Food" (case), so nothing is dropped
        ("Fast food", "Fast food", 1.0),
    ],
)
def test_classification(prediction, answer, expected):
    assert metrics.classification(prediction, answer, LABELS) == expected


def test_classification_skips_the_neighbour_of_a_dropped_class():
    classes = ("a", "b", "c", "abc")
    # all four occur; "a" goes, "b" is passed over, "c" goes: left are "b" and "abc"
    assert metrics.classification("abc", "abc", classes) == 1 / 2
    assert metrics.classification("abc", "abc", ("a", "x", "abc")) == 1.0


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ("Paragraph 7", "Paragraph 7", 1.0),
        ("7, 8, 7", "Paragraph 7", 2 / 3),
        ("07", "Paragraph 7", 0.0),
        ("seven", "Paragraph 7", 0.0),
        ("段落12", "段落12", 1.0),
        ("", "段落12", 0.0),
    ],
)
def test_retrieval(prediction, answer, expected):
    assert metrics.retrieval(prediction, answer) == pytest.approx(expected)


def test_count():
    assert metrics.count("There are 11, maybe 12.", "11") == 1 / 2
    assert metrics.count("none", "11") == 0.0


def test_code_similarity():
    answer = "x = 1"
    assert metrics.code_similarity("\n\nx = 1\nrest", answer) == 1.0
    assert metrics.code_similarity("```python\n# set x\n// set x\nx = 1", answer) == 1.0
    # rapidfuzz: 1 - (insertions + deletions) / (len + len); "x = 2": one of each
    assert metrics.code_similarity("x = 2", answer) == pytest.approx(1 - 2 / 10)
    assert metrics.code_similarity("# only comments", answer) == 0.0


def test_found_wants_all():
    wanted = example("found", "123", "Abc")
    assert metrics.score(wanted, "ABC and 123") == metrics.Score(1.0)
    assert metrics.score(wanted, "0123") == metrics.Score(0.5)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("Kitchen.", 1.0),
        ("in the kitchen\noffice", 1.0),
        ("kitchen or office", 0.0),
        ("office", 0.0),
        ("kitchens", 0.0),
    ],
)
def test_label(prediction, expected):
    assert metrics.label(prediction, "kitchen", ("kitchen", "office")) == expected


def test_the_best_reference_counts():
    assert metrics.score(example("qa_f1", "red", "blue", "green"), "blue") == metrics.Score(1.0)


def test_only_the_first_line_counts_where_the_task_says_so():
    assert metrics.score(example("qa_f1", "blue", first_line=True), "\n\nblue\nQuestion: red") == metrics.Score(1.0)
    assert metrics.score(example("qa_f1", "blue"), "blue\nred").value == pytest.approx(2 / 3)


def test_a_reference_that_names_no_paragraph_is_an_error():
    with pytest.raises(ValueError, match="'7' names no paragraph"):
        metrics.retrieval("7", "7")


def test_a_missing_library_is_named(monkeypatch):
    def refuse(name, *rest, **named):
        raise ImportError(name)

    monkeypatch.setattr(metrics.importlib, "import_module", refuse)
    with pytest.raises(ImportError, match=r"needs 'rapidfuzz': pip install 'sparseserve-jax\[eval\]'"):
        metrics.code_similarity("x", "x")


# --- odd predictions -------------------------------------------------------------------------------------------------

ODD = st.one_of(
    st.text(max_size=60),
    st.sampled_from(["", ".", "..", "\n", "\n\n.", "\x00", "a" * 5000, "word " * 3000, "字" * 2000, "7 " * 1000]),
    st.text(alphabet="ـَאבגकखกข็한글ひらがな🙂\u200d\ufeff。，, .\n#/`07", max_size=80),
)
ANSWERS = {"retrieval": ("Paragraph 7",), "count": ("7",), "classification": ("Date",), "label": ("Date",)}


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(prediction=ODD)
@pytest.mark.parametrize("metric", [*metrics.METRICS, "found"])
def test_odd_predictions_have_a_score(metric, prediction):
    got = metrics.score(example(metric, *ANSWERS.get(metric, ("a b. c", "北京")), classes=LABELS), prediction)
    assert 0.0 <= got.value <= 1.0
    assert not got.failed or metric.startswith("rouge")


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(words=st.lists(st.sampled_from(["red", "blue", "green", "7"]), min_size=1, max_size=12))
@pytest.mark.parametrize("metric", ["qa_f1", "qa_f1_zh", "rouge_l", "rouge_l_zh", "code_similarity"])
def test_the_answer_itself_is_right(metric, words):
    text = " ".join(words)
    assert metrics.score(example(metric, text), text).value == pytest.approx(1.0, abs=1e-6)


def test_every_task_has_a_metric():
    for task in [*longbench.TASKS.values(), *needles.TASKS.values()]:
        assert task.metric in metrics.METRICS or task.metric == "found"

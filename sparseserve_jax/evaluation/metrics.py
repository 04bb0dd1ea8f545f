"""The scores: LongBench v1's metrics to the letter (also where the letter is odd), and those of synthetic tasks.

Bai et al., LongBench, arXiv 2308.14508. Every metric takes a prediction, one reference and the classes, and gives a
share in [0, 1]; a prediction's score is its best over the references.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import logging
import re
import string
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparseserve_jax.evaluation.example import Example

_CHINESE_PUNCTUATION_RANGES = (
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003), (0x300B, 0x3011),
    (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F), (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F),
    (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
)  # fmt: skip
CHINESE_PUNCTUATION = frozenset(chr(code) for low, high in _CHINESE_PUNCTUATION_RANGES for code in range(low, high + 1))
"""LongBench's list, which lacks the full-width full stop and opening angle brackets."""


class UnscorableError(ValueError):
    """The metric has no value for this prediction; it counts as 0, and as a failure."""


@dataclasses.dataclass(frozen=True)
class Score:
    """A prediction's score in [0, 1], and whether the metric failed on it (then 0)."""

    value: float
    failed: bool = False


def score(example: Example, prediction: str) -> Score:
    """The best of the prediction's scores over the references; "found" is the share of references in it."""
    task = example.task
    if task.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if task.metric == "found":
        return Score(found(prediction, example.answers))
    best, failed = 0.0, False
    for answer in example.answers:
        try:
            best = max(best, METRICS[task.metric](prediction, answer, example.classes))
        except UnscorableError:
            failed = True
    return Score(best, failed)


# --- words in common -------------------------------------------------------------------------------------------------


def qa_f1(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of words as multisets: lower case, no ASCII punctuation, no articles."""
    return _f1(_english_words(prediction), _english_words(answer))


def qa_f1_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F1 of jieba's words: lower case, no ASCII or Chinese punctuation, no blanks."""
    return _f1(_chinese_words(prediction), _chinese_words(answer))


def _english_words(text: str) -> list[str]:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def _chinese_words(text: str) -> list[str]:
    dropped = CHINESE_PUNCTUATION | set(string.punctuation)
    words = ("".join(c for c in word.lower() if c not in dropped and not c.isspace()) for word in segment(text))
    return [word for word in words if word]


def _f1(predicted: list[str], wanted: list[str]) -> float:
    same = sum((collections.Counter(predicted) & collections.Counter(wanted)).values())
    if not same:
        return 0.0
    precision, recall = same / len(predicted), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


# --- summaries -------------------------------------------------------------------------------------------------------


def rouge_l(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """F of ROUGE-L as PyPI's `rouge` 1.0.1 has it.

    Raises:
        UnscorableError: the prediction is empty to `rouge` (""," ...") or too long for its recursion.
    """
    try:
        return _rouge().get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
    except (ValueError, RecursionError) as error:
        raise UnscorableError(str(error)) from error


def rouge_l_zh(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """The same over jieba's words.

    Raises:
        UnscorableError: as `rouge_l`.
    """
    return rouge_l(" ".join(segment(prediction)), " ".join(segment(answer)))


# --- labels and numbers ----------------------------------------------------------------------------------------------


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / n if the answer is among the n class names that occur in the prediction, else 0.

    Names that are a part of the answer do not count. The original deletes them from the list it walks over, so that
    the name after a deleted one is not looked at; so does this.
    """
    named = [name for name in classes if name in prediction]
    place = 0
    while place < len(named):
        if named[place] in answer and named[place] != answer:
            named.remove(named[place])
        place += 1
    return 1 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that are the N of the answer "Paragraph N" or "段落N"."""
    number = re.search(r"(?:Paragraph |段落)(\d+)", answer)
    if number is None:
        raise ValueError(f"the reference {answer!r} names no paragraph; 'Paragraph N' or '段落N' is expected")
    return count(prediction, number[1])


def count(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that are the answer, as text; 0 if there is none."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


# --- code ------------------------------------------------------------------------------------------------------------


def code_similarity(prediction: str, answer: str, classes: Sequence[str] = ()) -> float:
    """rapidfuzz's ratio of the answer and the first line without a backquote, "#" or "//" (a comment, or prose)."""
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return _extra("rapidfuzz.fuzz").ratio(code, answer) / 100


# --- synthetic tasks -------------------------------------------------------------------------------------------------


def found(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, whatever the case (RULER's "string match all")."""
    text = prediction.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)


def label(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 if the first sentence names the answer and no other class, as words (BABILong's rule)."""
    words = set(re.findall(r"\w+", re.split(r"[.\n]", prediction.strip())[0].lower()))
    return float({name for name in classes if name.lower() in words} == {answer})


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "qa_f1": qa_f1,
    "qa_f1_zh": qa_f1_zh,
    "rouge_l": rouge_l,
    "rouge_l_zh": rouge_l_zh,
    "classification": classification,
    "retrieval": retrieval,
    "count": count,
    "code_similarity": code_similarity,
    "label": label,
}
"""By name. "found" is not here: it wants all answers, not the best."""


# --- libraries of the extra "eval" -----------------------------------------------------------------------------------


def load_libraries(metric_names: Iterable[str]) -> None:
    """Loads what these metrics need, so that what is missing is found before anything is served.

    Raises:
        ImportError: a library is not installed; says how to.
    """
    for name in metric_names:
        if name.startswith("rouge"):
            _rouge()
        if name.endswith("_zh"):
            _jieba()
        if name == "code_similarity":
            _extra("rapidfuzz.fuzz")


def segment(text: str) -> list[str]:
    """jieba's words of a text, punctuation and blanks among them."""
    return list(_jieba().cut(text, cut_all=False))


@functools.cache
def _jieba() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in its source, pkg_resources
        jieba = _extra("jieba")
        jieba.setLogLevel(logging.WARNING)
        jieba.initialize()
    return jieba


@functools.cache
def _rouge() -> Any:
    return _extra("rouge").Rouge(metrics=["rouge-l"])


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this metric needs {module.partition('.')[0]!r}: pip install 'sparseserve-jax[eval]'"
        ) from error

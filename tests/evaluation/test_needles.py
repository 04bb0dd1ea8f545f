"""Made tasks hold what is asked for, where they say, in the length that they say, the same for the same seed."""

from __future__ import annotations

import collections
import re

import pytest

from sparseserve_jax.evaluation import metrics, needles
from sparseserve_jax.evaluation.haystack import Haystack

LENGTHS = (512, 2000)
DEPTHS = (0.05, 0.5, 0.95)


@pytest.fixture(scope="module")
def haystack(encoder):
    return Haystack(encoder.tokenizer)


@pytest.fixture(scope="module")
def examples(encoder, haystack):
    return needles.make_examples(encoder.tokenizer, haystack, list(needles.TASKS), LENGTHS, depths=DEPTHS, samples=2)


def of(examples, task):
    return [example for example in examples if example.task.name == task]


def test_all_are_there_once(examples):
    assert len(examples) == len(needles.TASKS) * len(LENGTHS) * len(DEPTHS) * 2
    assert len({(example.task.name, example.row_id) for example in examples}) == len(examples)
    for example in examples:
        assert (example.depth is None) == (example.task.name not in needles.PLACED)


def test_prompts_are_as_long_as_they_say(encoder, examples):
    for example in examples:
        total = len(encoder.encode(example.prompt, chat=True)) + max(example.task.max_tokens, 64)
        assert example.length - 180 <= total <= example.length, example.task.name


def test_a_prompt_that_gives_all_answers_has_them(examples):
    """Each answer occurs in the text; the text itself, as a prediction, is right."""
    for example in examples:
        assert metrics.score(example, example.prompt).value == 1.0
        assert metrics.score(example, "nothing of the kind").value == 0.0
        assert metrics.score(example, example.reference).value == 1.0


@pytest.mark.parametrize("task", needles.PLACED)
def test_a_needle_lies_at_its_depth(examples, task):
    for example in of(examples, task):
        place = example.prompt.index(example.answers[0]) / len(example.prompt)
        assert abs(place - example.depth) < 0.25
        assert example.prompt.count(example.answers[0]) == 1


def test_one_key_of_several(examples):
    for example in of(examples, "multi_key"):
        codes = dict(re.findall(r"The passcode of the (\w+) is (\d{5})\. Remember it\.", example.prompt))
        asked = re.search(r"What is the passcode of the (\w+)\?", example.prompt)
        assert len(codes) == len(needles.VAULTS) and codes[asked[1]] == example.answers[0]


def test_variables_hold_the_value(examples):
    for example in of(examples, "variable_tracing"):
        value = re.search(r"assigned the value (\d{5})", example.prompt)[1]
        held: dict[str, str] = {}
        for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", example.prompt, re.MULTILINE):
            held[name] = held.get(source, source)  # in the order of the text
        assert {name for name, content in held.items() if content == value} == set(example.answers)


def test_common_words_are_the_most_common(examples):
    for example in of(examples, "common_words"):
        counts = collections.Counter(re.findall(r"^\d+\. (\w+)$", example.prompt, re.MULTILINE))
        ranked = counts.most_common()
        assert {word for word, _ in ranked[:5]} == set(example.answers)
        assert ranked[4][1] >= 2 * ranked[5][1]


def test_a_seed_decides(encoder, haystack, examples):
    again = needles.make_examples(encoder.tokenizer, haystack, list(needles.TASKS), LENGTHS, depths=DEPTHS, samples=2)
    assert again == examples
    other = needles.make_examples(encoder.tokenizer, haystack, ["single"], LENGTHS, depths=DEPTHS, samples=2, seed=1)
    assert not {e.answers for e in other} & {e.answers for e in of(examples, "single")}


def test_a_short_haystack_is_repeated(encoder, tmp_path):
    path = tmp_path / "text"
    path.write_text("all work and no play\n")
    haystack = Haystack(encoder.tokenizer, path)
    lines = haystack.lines(300)
    assert len(encoder.tokenizer.encode("\n".join(lines))) == pytest.approx(300, abs=2)
    assert haystack.words() == ["play", "work"]


def test_lines_do_not_depend_on_what_was_asked_before(encoder, haystack):
    haystack.lines(5000)
    fresh = Haystack(encoder.tokenizer)
    for num_tokens in (100, 700, 120, 1500, 1000):
        assert fresh.lines(num_tokens) == haystack.lines(num_tokens)


@pytest.mark.parametrize(
    ("tasks", "lengths", "depths", "message"),
    [
        (["double"], [512], [0.5], "'double' is no task; there are single, multi_key"),
        (["single"], [100], [0.5], "length=100 tokens leave no room for a text; give at least 512"),
        (["single"], [512], [1.5], r"depth=1.5 must lie in \[0, 1\]"),
    ],
)
def test_mistakes_are_named(encoder, haystack, tasks, lengths, depths, message):
    with pytest.raises(ValueError, match=message):
        needles.make_examples(encoder.tokenizer, haystack, tasks, lengths, depths=depths)


def test_an_empty_haystack_is_refused(encoder, tmp_path):
    (tmp_path / "text").write_text(" \n")
    with pytest.raises(ValueError, match="is empty; give a file with text"):
        Haystack(encoder.tokenizer, tmp_path / "text")

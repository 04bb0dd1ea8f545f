"""Prompts lose their middle before the chat template goes around them, and leave room for an answer."""

from __future__ import annotations

import pytest

from sparseserve_jax.evaluation.example import Example, Task
from sparseserve_jax.evaluation.truncation import MAX_REFERENCE_TOKENS, cut_middle, fit_prompt, reference_tokens

CHAT = Task(name="qa", metric="qa_f1", max_tokens=32)
PLAIN = Task(name="lcc", metric="code_similarity", max_tokens=100, chat=False)
TEXT = " ".join(f"word{index}" for index in range(600))


def example(task: Task, prompt: str = TEXT, answer: str = "yes") -> Example:
    return Example(task=task, row_id="1", prompt=prompt, answers=(answer,))


def test_the_middle_goes():
    assert cut_middle(range(10), 4) == [0, 1, 8, 9]
    assert cut_middle(range(10), 5) == [0, 1, 7, 8, 9]
    assert cut_middle(range(3), 3) == [0, 1, 2]


def test_a_short_prompt_stays(encoder):
    (item,) = encoder.prepare([example(PLAIN, "def f():")], max_prompt_tokens=500, max_model_len=2048)
    assert encoder.tokenizer.decode(item.token_ids) == "def f():" and item.num_cut_tokens == 0


def test_first_and_last_half_are_kept(encoder):
    (item,) = encoder.prepare([example(PLAIN)], max_prompt_tokens=501, max_model_len=2048)
    ids = encoder.tokenizer.encode(TEXT)
    assert item.token_ids == ids[:250] + ids[-251:]
    assert item.num_cut_tokens == len(ids) - 501


def test_the_template_goes_around_what_is_left(encoder):
    (item,) = encoder.prepare([example(CHAT)], max_prompt_tokens=200, max_model_len=2048)
    text = encoder.tokenizer.decode(item.token_ids, skip_special_tokens=False)
    assert text.endswith("word599<|im_end|>\n<|im_start|>assistant\n")
    assert "<|im_start|>user\nword0 word1 " in text


@pytest.mark.parametrize("task", [CHAT, PLAIN], ids=["chat", "plain"])
@pytest.mark.parametrize("max_model_len", [256, 300, 511])
def test_prompt_and_answer_fit(encoder, task, max_model_len):
    """Whatever the template adds."""
    (item,) = encoder.prepare([example(task)], max_prompt_tokens=10**6, max_model_len=max_model_len)
    room = max_model_len - max(task.max_tokens, MAX_REFERENCE_TOKENS)
    assert room - 8 <= len(item.token_ids) <= room


def test_halves_of_a_character_are_encoded_anew(encoder):
    """The ends of the halves are replacement characters, which are longer; still everything fits."""
    item = fit_prompt(example(PLAIN, "🙂" * 400), encoder.tokenizer, encoder.encode, max_prompt_tokens=10**6, limit=301)
    assert len(item.token_ids) <= 301 and item.num_cut_tokens > 0


def test_no_room_is_an_error(encoder):
    with pytest.raises(ValueError, match="a prompt of at most 12 tokens has no room for its text; raise max_model_len"):
        encoder.prepare([example(CHAT)], max_prompt_tokens=100, max_model_len=76)


def test_references(encoder):
    ids = reference_tokens(example(CHAT, answer=" yes indeed "), encoder.tokenizer)
    assert encoder.tokenizer.decode(ids) == " yes indeed"
    for task, expected in ((CHAT, "yes"), (PLAIN, " yes")):
        (item,) = encoder.prepare([example(task, "x")], max_prompt_tokens=10, max_model_len=256)
        assert encoder.tokenizer.decode(item.reference) == expected
    assert len(reference_tokens(example(CHAT, answer=TEXT), encoder.tokenizer)) == MAX_REFERENCE_TOKENS
    wanted = Example(task=Task(name="n", metric="found", max_tokens=8), row_id="1", prompt="", answers=("1", "2"))
    assert encoder.tokenizer.decode(reference_tokens(wanted, encoder.tokenizer)) == " 1, 2"


def test_a_newline_ends_a_line(encoder):
    task = Task(name="samsum", metric="rouge_l", max_tokens=8, stops_at_newline=True, chat=False)
    (item,) = encoder.prepare([example(task, "x")], max_prompt_tokens=10, max_model_len=128)
    assert item.sampling.min_tokens == 1
    assert encoder.tokenizer.decode(item.sampling.stop_token_ids) == "\n"


def test_a_model_is_named_without_its_folder(encoder):
    assert "SmolLM2-135M-Instruct" in encoder.model_name and "/site-packages" not in encoder.model_name
    assert encoder.max_model_len == 8192 and encoder.has_chat_template

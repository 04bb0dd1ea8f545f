"""Grammars: what they allow, and what the engine makes of them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from sparseserve_jax import Engine, EngineConfig, Request, RequestError, SamplingParams
from sparseserve_jax.text.grammar import MAX_GRAMMAR_CHARS, GrammarCompiler, GrammarError
from tests.tiny_model import random_prompt, write_sharp_model

SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"},
    "kind": {"enum": ["x", "y"]}}, "required": ["name", "kind"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    config = EngineConfig(
        dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, max_num_batched_tokens=256,
        max_model_len=256, max_num_seqs=4, device_kv_bytes=4_000_000,
    )  # fmt: skip
    return Engine(write_sharp_model(tmp_path_factory.mktemp("sharp")), config)


@pytest.fixture(scope="module")
def compiler(engine):
    return GrammarCompiler(engine.tokenizer)


def allowed(matcher, vocab_size: int) -> set[int]:
    bits = np.unpackbits(matcher.allowed_tokens().view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def test_masks_follow_the_text(engine, compiler):
    tokenizer = engine.tokenizer
    matcher = compiler.compile("regex", "ab?c").start()
    eos = set(tokenizer.eos_token_ids)
    ids = {char: tokenizer.encode(char, add_special_tokens=False)[0] for char in "abc"}
    assert allowed(matcher, tokenizer.vocab_size) == {ids["a"]}
    assert matcher.accept(ids["a"]) is None
    assert allowed(matcher, tokenizer.vocab_size) == {ids["b"], ids["c"]}
    assert matcher.accept(ids["c"]) is None and matcher.is_complete
    assert allowed(matcher, tokenizer.vocab_size) == eos


def test_a_token_that_does_not_fit_is_a_problem_not_a_crash(engine, compiler):
    matcher = compiler.compile("regex", "a").start()
    assert matcher.accept(engine.tokenizer.encode("z", add_special_tokens=False)[0])


@pytest.mark.parametrize("kind, content", [
    ("regex", "("), ("json_schema", {"type": "nope"}), ("json_schema", "not json"), ("regex", "a" * 100_001),
    ("json_schema", {"$ref": "http://127.0.0.1:1/x"}),
])  # fmt: skip
def test_what_cannot_be_compiled_says_why(compiler, kind, content):
    assert MAX_GRAMMAR_CHARS == 100_000
    with pytest.raises(GrammarError, match=kind):
        compiler.compile(kind, content)


def test_texts_follow_their_grammars_and_others_are_untouched(engine, compiler):
    free = [Request(prompt=random_prompt(30, i), sampling=SamplingParams(temperature=0, max_tokens=40)) for i in (0, 1)]
    alone = [output.token_ids for output in engine.generate(free)]
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=200, n=2)
    bound = [
        Request(prompt=random_prompt(30, 2), sampling=sampling, grammar=compiler.compile("json_schema", SCHEMA)),
        Request(prompt=random_prompt(30, 3), sampling=sampling, grammar=compiler.compile("regex", "[a-c]{3}-[0-9]{2}")),
    ]
    outputs = engine.generate([free[0], bound[0], free[1], bound[1]])
    assert [outputs[0].token_ids, outputs[3].token_ids] == alone
    for output in outputs[1:3]:
        content = json.loads(output.text)
        assert set(content) <= {"name", "size", "kind"} and content["kind"] in ("x", "y") and len(content["name"]) <= 6
        assert output.finish_reason == "stop"
    for output in outputs[4:]:
        assert re.fullmatch("[a-c]{3}-[0-9]{2}", output.text) and output.finish_reason == "stop"
        assert len(output.token_ids) == 6, "it ends where the grammar ends"
    assert not engine._matchers


@pytest.mark.parametrize("wrong", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_a_grammar_decides_where_the_text_ends(engine, compiler, wrong):
    request = Request(prompt=[1], sampling=SamplingParams(**wrong), grammar=compiler.compile("regex", "a"))
    with pytest.raises(RequestError, match="grammar"):
        engine.add_request(request)

from __future__ import annotations

import pytest

from sparseserve_jax.evaluation.settings import Setting, by_engine, parse_settings


def names(*arguments: str) -> list[str]:
    return [setting.name for setting in parse_settings(*arguments)]


def test_combinations():
    assert names("dense,512,2048", "cuboid-mean,quest") == [
        "dense", "cuboid-mean 512", "cuboid-mean 2048", "quest 512", "quest 2048"
    ]  # fmt: skip
    assert names("512,dense", "mean") == ["dense", "mean 512"]
    assert names("512", "mean,mean") == ["mean 512"]


def test_a_method_with_budgets_of_its_own():
    assert names("dense, 512", "cuboid-mean, quest:1024+2048") == [
        "dense", "cuboid-mean 512", "quest 1024", "quest 2048"
    ]  # fmt: skip


def test_what_belongs_to_a_whole_engine():
    settings = parse_settings("dense,512", "quest", "dense,0.995", "default,int8")
    assert [setting.name for setting in settings] == [
        "dense", "quest 512", "dense, int8 KV", "quest 512, int8 KV",
        "dense, prefill 0.995", "quest 512, prefill 0.995",
        "dense, prefill 0.995, int8 KV", "quest 512, prefill 0.995, int8 KV",
    ]  # fmt: skip
    assert [len(group) for group in by_engine(settings)] == [2, 2, 2, 2]
    assert [setting.is_reference for setting in settings] == [True] + [False] * 7
    assert len({setting.file_stem for setting in settings}) == 8
    assert settings[-1].file_stem == "quest-512_prefill-0.995_int8-KV"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "mean"), "budgets: nothing is given"),
        (("many", "mean"), "budgets: 'many' is neither a number of tokens nor 'dense'"),
        (("0", "mean"), "budgets: '0' is neither"),
        (("512", "best"), "methods: 'best' is not one of cuboid-mean, quest, mean"),
        (("512", "mean:x"), "methods: mean: 'x' is neither"),
        (("512", "mean", "some"), "prefill_sparsity: 'some' is neither"),
        (("512", "mean", "dense", "int4"), "kv_dtype: 'int4' is not one of default, int8"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse_settings(*arguments)


def test_dense_has_neither_budget_nor_method():
    assert Setting().name == "dense" and Setting().is_reference

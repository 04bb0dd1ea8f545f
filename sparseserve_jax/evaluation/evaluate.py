"""Serves the examples under every setting. An engine prefills a prompt once, and all its settings continue from there.

The last token of a prompt goes in by a decode step, so that also an answer's first token comes from the attention that
is evaluated (when serving it comes from the prefill).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from sparseserve_jax.config import EngineConfig, SelectionMethod
from sparseserve_jax.engine import Engine
from sparseserve_jax.evaluation import metrics
from sparseserve_jax.evaluation.predictions import Prediction, PredictionStore
from sparseserve_jax.evaluation.prompts import PreparedExample
from sparseserve_jax.evaluation.settings import Setting, by_engine
from sparseserve_jax.request import Request, RequestOutput, SamplingParams, Variant
from sparseserve_jax.text.tokenizer import Tokenizer

Kind = Literal["answer", "reference"]
Note = Callable[[int, Setting, Prediction], None]


def evaluate(
    make_engine: Callable[[EngineConfig], Engine],
    config: EngineConfig,
    prepared: Sequence[PreparedExample],
    settings: Sequence[Setting],
    store: PredictionStore,
    note: Note,
) -> None:
    """Adds to the store what is missing in it; with one engine after the other if prefills or KV differ.

    Args:
        config: of all engines; what belongs to settings is replaced.
        note: called with the place of its example and its setting for every new prediction.

    Raises:
        ValueError: a setting does not fit the config or the model.
    """
    for group in by_engine(settings):
        todo = {index: store.missing(index, group) for index in range(len(prepared))}
        if any(todo.values()):
            # No name for the engine: it is gone before the next one is made.
            for index, setting, prediction in predictions(make_engine(engine_config(config, group)), prepared, todo):
                store.add(index, setting, prediction)
                note(index, setting, prediction)


def engine_config(config: EngineConfig, group: Sequence[Setting]) -> EngineConfig:
    """The config of an engine that serves all settings of a group, each as by an engine of its own.

    Decode steps keep to one setting, so that batches stay full. The engine's own budget, up to which sparse prefill
    stays dense, is the group's largest. It is deterministic: an answer does not depend on what else is evaluated, so a
    resumed run gives the same.
    """
    pairs: list[tuple[int | None, SelectionMethod]] = [(s.budget_tokens, s.method or config.selection) for s in group]
    budget, method = max(pairs, key=lambda pair: pair[0] or 0)
    extra = [pair for pair in pairs if pair != (budget, method)]
    return dataclasses.replace(
        config, sparse_budget_tokens=budget, selection=method, extra_decode_settings=tuple(extra),
        prefill_sparsity=group[0].prefill_sparsity, kv_dtype=group[0].kv_dtype, deterministic=True,
        decode_groups="one" if config.kv_tiers == "unified" else "all",
    )  # fmt: skip


def predictions(
    engine: Engine, prepared: Sequence[PreparedExample], todo: dict[int, list[Setting]]
) -> Iterator[tuple[int, Setting, Prediction]]:
    """Serves examples, each under the settings that are named for its place; predictions as they come."""
    plans: dict[str, list[tuple[Setting, Kind]]] = {
        str(index): [(setting, kind) for setting in settings for kind in _kinds(prepared[index])]
        for index, settings in todo.items()
        if settings
    }
    requests = [_request(name, prepared[int(name)], plan) for name, plan in plans.items()]
    ended: dict[str, dict[tuple[Setting, Kind], RequestOutput]] = {name: {} for name in plans}
    for output in engine.stream(requests):
        if output.finish_reason is None:
            continue
        name = output.request_id
        setting, kind = plans[name][output.index]
        ended[name][setting, kind] = output
        index = int(name)
        if all((setting, needed) in ended[name] for needed in _kinds(prepared[index])):
            answer, reference = ended[name][setting, "answer"], ended[name].get((setting, "reference"))
            yield index, setting, _prediction(prepared[index], answer, reference, engine.tokenizer)


def _kinds(item: PreparedExample) -> tuple[Kind, ...]:
    return ("answer", "reference") if item.reference else ("answer",)


def _request(name: str, item: PreparedExample, plan: Sequence[tuple[Setting, Kind]]) -> Request:
    last = item.token_ids[-1]
    answer = dataclasses.replace(
        item.sampling, forced_token_ids=(last,), max_tokens=1 + (item.sampling.max_tokens or 0),
        min_tokens=1 + item.sampling.min_tokens,
    )  # fmt: skip
    forced = (last, *item.reference)
    reference = SamplingParams(temperature=0.0, forced_token_ids=forced, max_tokens=len(forced), logprobs=1)
    variants = tuple(
        Variant(
            sampling=answer if kind == "answer" else reference,
            sparse_budget_tokens=setting.budget_tokens,
            selection=setting.method,
        )
        for setting, kind in plan
    )
    return Request(prompt=item.token_ids[:-1], request_id=name, variants=variants)


def _prediction(
    item: PreparedExample, answer: RequestOutput, reference: RequestOutput | None, tokenizer: Tokenizer
) -> Prediction:
    token_ids = answer.token_ids[1:]  # the first is the prompt's last
    ends_it = answer.finish_reason == "stop"  # an EOS or stop token, which leaves no text
    text = tokenizer.decode(token_ids[:-1] if ends_it else token_ids)
    has_error = "error" in (answer.finish_reason, reference and reference.finish_reason)
    score = metrics.Score(0.0, failed=True) if has_error else metrics.score(item.example, text)
    likelihoods = [] if reference is None or has_error else (reference.logprobs or [])[1:]
    assert answer.finish_reason is not None
    return Prediction(
        task=item.example.task.name,
        row_id=item.example.row_id,
        num_prompt_tokens=len(item.token_ids),
        num_cut_tokens=item.num_cut_tokens,
        text=text,
        token_ids=token_ids,
        finish_reason=answer.finish_reason,
        score=score.value,
        failed=score.failed,
        nll=-sum(candidates[0].logprob for candidates in likelihoods) / len(likelihoods) if likelihoods else None,
        greedy_token_ids=[next(c.token_id for c in candidates if c.rank == 1) for candidates in likelihoods],
        length=item.example.length,
        depth=item.example.depth,
    )

"""`sparseserve eval longbench`, `needles` and `babilong` as functions, whose parameters are the options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparseserve_jax.config import EngineConfig
from sparseserve_jax.evaluation import needles as needle_tasks
from sparseserve_jax.evaluation.babilong import load_babilong
from sparseserve_jax.evaluation.haystack import Haystack
from sparseserve_jax.evaluation.hub import download_longbench
from sparseserve_jax.evaluation.longbench import load_longbench
from sparseserve_jax.evaluation.prompts import PromptEncoder
from sparseserve_jax.evaluation.run import Evaluation, run_evaluation
from sparseserve_jax.evaluation.settings import parse_settings

SETTING_FIELDS = (
    "sparse_budget_tokens", "selection", "extra_decode_settings", "prefill_sparsity", "kv_dtype", "deterministic",
    "record_selection", "record_timeline", "decode_groups",
)  # fmt: skip
"""Fields of `EngineConfig` that these commands choose themselves."""

Model = Annotated[
    str | None, typer.Option(help="A GGUF file, a Hugging Face or an Orbax directory; none = the embedded model.")
]
Budgets = Annotated[str, typer.Option(help="Tokens that a decode step attends to, or `dense`; by comma.")]
Methods = Annotated[
    str, typer.Option(help="How blocks are selected, by comma; with budgets of its own as in `quest:1024+2048`.")
]
PrefillSparsity = Annotated[str, typer.Option(help="Attention that a prefill keeps, or `dense`; by comma.")]
KVDTypes = Annotated[str, typer.Option("--kv-dtype", help="`default` or `int8`, by comma.")]
Out = Annotated[Path, typer.Option(help="Folder of predictions, report, table and pictures; resumed if it has some.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the report here, too.")]
Limit = Annotated[int | None, typer.Option(help="Rows of each file, from the start; none = all.")]
MaxPromptTokens = Annotated[
    int | None, typer.Option(help="Longer prompts lose their middle; none = 692 below the model's length.")
]


def longbench(
    config: EngineConfig,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="LongBench v1: <task>.jsonl and dataset2prompt.json; none = from the Hugging Face hub."),
    ] = None,
    templates: Annotated[Path | None, typer.Option(help="dataset2prompt.json, if it is elsewhere.")] = None,
    tasks: Annotated[str | None, typer.Option(help="By comma; none = all that the folder has.")] = None,
    limit: Limit = None,
    budgets: Budgets = "dense,512,1024,1536,2048",
    methods: Methods = "cuboid-mean",
    prefill_sparsity: PrefillSparsity = "dense",
    kv_dtype: KVDTypes = "default",
    max_prompt_tokens: MaxPromptTokens = None,
    model: Model = None,
    out: Out = Path("longbench"),
    json_file: JsonFile = None,
) -> None:
    """LongBench v1: scores, likelihood of the reference answers and agreement with dense, by budget and method."""
    settings = parse_settings(budgets, methods, prefill_sparsity, kv_dtype)
    if data_dir is None:
        data_dir, templates = download_longbench(templates)
    data = load_longbench(data_dir, _names(tasks), limit, templates=templates)
    _run(
        Evaluation(
            suite="longbench", model=model, config=config, examples=data.examples,
            settings=settings,
            sources={"limit": limit, "template_sha256": data.template_sha256, "data_sha256": data.data_sha256},
            max_prompt_tokens=max_prompt_tokens, out=out, json_file=json_file,
        ),
        PromptEncoder(model),
    )  # fmt: skip


def needles(
    config: EngineConfig,
    tasks: Annotated[str, typer.Option(help="By comma.")] = ",".join(needle_tasks.TASKS),
    lengths: Annotated[str, typer.Option(help="Of prompt and answer, tokens, by comma.")] = "1024,2048,4096,8192",
    depths: Annotated[int, typer.Option(help="Depths, evenly spread; as many prompts where a task has no depth.")] = 10,
    samples: Annotated[int, typer.Option(help="Prompts at each depth.")] = 1,
    data_seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    haystack: Annotated[Path | None, typer.Option(help="A text file; none = Python's language reference.")] = None,
    budgets: Budgets = "dense,1024,2048",
    methods: Methods = "cuboid-mean",
    prefill_sparsity: PrefillSparsity = "dense",
    kv_dtype: KVDTypes = "default",
    model: Model = None,
    out: Out = Path("needles"),
    json_file: JsonFile = None,
) -> None:
    """Needles in a haystack and other retrieval tasks after RULER, made from a seed; a heat map of length by depth."""
    settings = parse_settings(budgets, methods, prefill_sparsity, kv_dtype)
    encoder = PromptEncoder(model)
    text = Haystack(encoder.tokenizer, haystack)
    if depths < 1 or samples < 1:
        raise ValueError(f"--depths {depths} and --samples {samples} must be at least 1")
    asked = _numbers("lengths", lengths) or []
    max_model_len = min(config.max_model_len or encoder.max_model_len, encoder.max_model_len)
    if max(asked, default=0) > max_model_len:
        raise ValueError(f"--lengths: {max(asked)} tokens exceed max_model_len={max_model_len}; leave that out")
    examples = needle_tasks.make_examples(
        encoder.tokenizer, text, _names(tasks) or (), asked,
        depths=[(place + 0.5) / depths for place in range(depths)], samples=samples, seed=data_seed,
    )  # fmt: skip
    _run(
        Evaluation(
            suite="needles", model=model, config=config, examples=examples,
            settings=settings,
            sources={"data_seed": data_seed, "lengths": lengths, "depths": depths, "samples": samples,
                     "haystack_sha256": text.sha256},
            max_prompt_tokens=encoder.max_model_len, out=out, json_file=json_file,
        ),
        encoder,
    )  # fmt: skip


def babilong(
    config: EngineConfig,
    data_dir: Annotated[Path, typer.Option(help="BABILong's rows: <N>k_qa1.jsonl.")],
    lengths: Annotated[str | None, typer.Option(help="In thousands of tokens, by comma; none = all.")] = None,
    limit: Limit = None,
    budgets: Budgets = "dense,1024,2048",
    methods: Methods = "cuboid-mean",
    prefill_sparsity: PrefillSparsity = "dense",
    kv_dtype: KVDTypes = "default",
    max_prompt_tokens: MaxPromptTokens = None,
    model: Model = None,
    out: Out = Path("babilong"),
    json_file: JsonFile = None,
) -> None:
    """BABILong: facts hidden in books, by length."""
    settings = parse_settings(budgets, methods, prefill_sparsity, kv_dtype)
    examples, hashes = load_babilong(data_dir, _numbers("lengths", lengths), limit)
    _run(
        Evaluation(
            suite="babilong", model=model, config=config, examples=examples,
            settings=settings,
            sources={"limit": limit, "data_sha256": hashes},
            max_prompt_tokens=max_prompt_tokens, out=out, json_file=json_file,
        ),
        PromptEncoder(model),
    )  # fmt: skip


def _run(evaluation: Evaluation, encoder: PromptEncoder) -> None:
    report = run_evaluation(evaluation, encoder)
    typer.echo((evaluation.out / "table.md").read_text(encoding="utf-8"))
    made, found = report["predictions_made"], report["predictions_found"]
    typer.echo(f"{made} predictions made in {report['seconds']:.0f} s, {found} found in {evaluation.out}", err=True)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _numbers(what: str, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise ValueError(f"--{what}: {text!r} is not a list of whole numbers") from error

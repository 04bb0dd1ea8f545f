"""`sparseserve bench`: options in, table, JSON and picture out."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

ARRIVALS = ("poisson", "constant", "burst", "at-once")
ENDPOINTS = ("completions", "chat")
_LENGTH = "N, LOW-HIGH (uniform) or lognormal:MEAN,SIGMA."


def bench(
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server, with or without /v1.")],
    num_prompts: Annotated[int, typer.Option(help="Requests to send.")] = 100,
    rate: Annotated[float | None, typer.Option(help="Requests a second on average; none = all at once.")] = None,
    arrival: Annotated[
        str | None,
        typer.Option(metavar="poisson|constant|burst|at-once", help="How they come; with a rate Poisson by default."),
    ] = None,
    burst_size: Annotated[int, typer.Option(help="Requests of a burst; a burst comes every BURST_SIZE / RATE s.")] = 8,
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines of timestamp (ms), input_length, output_length, hash_ids.")
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Times of the trace times this: 0.5 = twice as fast.")] = 1.0,
    prompts: Annotated[
        Path | None, typer.Option(help="A .jsonl file of prompts or messages, or a text to cut them from.")
    ] = None,
    input_len: Annotated[str, typer.Option(help="Tokens of a prompt: " + _LENGTH)] = "512",
    output_len: Annotated[str, typer.Option(help="Tokens of an answer: " + _LENGTH)] = "128",
    max_input_len: Annotated[int | None, typer.Option(help="Longer prompts are cut to this many tokens.")] = None,
    max_output_len: Annotated[int | None, typer.Option(help="Longer answers are cut to this many tokens.")] = None,
    max_concurrency: Annotated[int | None, typer.Option(help="Requests under way at most.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Ask for answers of full length.")] = False,
    endpoint: Annotated[str, typer.Option(metavar="completions|chat", help="Where requests go.")] = "completions",
    model: Annotated[str | None, typer.Option(help="Model name; none = the first that the server lists.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SPARSESERVE_API_KEY", help="Sent as a bearer token; never written.")
    ] = None,
    extra_body: Annotated[
        str | None, typer.Option(metavar="JSON", help="Added to every request's body; null takes a field out.")
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(metavar="NAME:SECONDS,...", help="Objectives out of ttft, tbt, tpot, e2e: ttft:2.0,tbt:0.1."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take.")] = 600.0,
    num_warmups: Annotated[int, typer.Option(help="Requests sent before, all at once, that do not count.")] = 0,
    seed: Annotated[int, typer.Option(help="Of times, lengths and prompts.")] = 0,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Everything as JSON; - = stdout.")
    ] = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Time line and distributions as a picture.")
    ] = None,
    show_progress: Annotated[bool, typer.Option("--progress/--no-progress", help="Show how far it is.")] = True,
) -> None:
    """Load an OpenAI-compatible server and show what its clients see."""
    _check_packages(png=png_file is not None)
    from sparseserve_jax.load_generator.lengths import parse_lengths
    from sparseserve_jax.load_generator.measurement import Measurement
    from sparseserve_jax.load_generator.summary import parse_slos
    from sparseserve_jax.load_generator.workload import Workload

    workload = Workload(
        num_prompts=num_prompts, seed=seed, arrival=_choice("arrival", arrival, ARRIVALS), rate_rps=rate,
        burst_size=burst_size, input_lengths=parse_lengths(input_len), output_lengths=parse_lengths(output_len),
        trace=trace, time_scale=time_scale, prompts=prompts, max_input_tokens=max_input_len,
        max_output_tokens=max_output_len, ignore_eos=ignore_eos, extra_body=_json_object(extra_body),
    )  # fmt: skip
    measurement = Measurement(
        url=url, endpoint=_choice("endpoint", endpoint, ENDPOINTS), model=model, api_key=api_key, timeout_s=timeout,
        workload=workload, num_warmups=num_warmups, max_concurrency=max_concurrency,
        slos=parse_slos(goodput) if goodput is not None else {}, show_progress=show_progress and sys.stderr.isatty(),
    )  # fmt: skip
    for path in (png_file, None if json_file in (None, "-") else Path(json_file or "")):
        if path is not None and not path.parent.is_dir():  # before an hour of measuring, not after
            raise ValueError(f"{path}: its directory does not exist")
    result, records = asyncio.run(measurement.run())
    if png_file is not None:
        from sparseserve_jax.load_generator.plot import draw

        draw(records, png_file, f"{result['server']['model']} at {result['settings']['url']}")
    if json_file is not None:
        text = json.dumps(result, indent=1) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text, encoding="utf-8")
    if result["summary"]["completed"] == 0:
        raise typer.Exit(1)


def _check_packages(*, png: bool) -> None:
    missing = [name for name in ("httpx", *(["matplotlib"] if png else [])) if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not installed: pip install 'sparseserve-jax[bench]'")


def _choice(name: str, value: str | None, choices: tuple[str, ...]) -> Any:
    if value is not None and value not in choices:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(choices)}")
    return value


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError("--extra-body must be a JSON object")
    return content

"""The command line: `sparseserve generate`, `serve`, `bench`, `convert`, `info` and `eval`.

Every field of `EngineConfig` is an option of the commands that build an engine: names and defaults come from the
fields, help texts from the docstring, and the checks are those of `EngineConfig` itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import rich.box
import rich.console
import rich.table
import typer

from sparseserve_jax.checkpoint.convert import convert as convert_checkpoint
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.evaluation import commands as evaluation
from sparseserve_jax.load_generator.command import bench
from sparseserve_jax.provenance import package_version
from sparseserve_jax.request import Request, RequestOutput, SamplingParams
from sparseserve_jax.selection_record import SelectionRecord

BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
              "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
              "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip

MIN_TABLE_WIDTH = 100

app = typer.Typer(
    help="Serve long-context LLMs with block-sparse attention and a tiered KV cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The console script."""
    app()


# --- options ---------------------------------------------------------------------------------------------------------


MAX_SIZE_DIGITS = 20


def parse_bytes(text: str) -> int:
    """A number of bytes: `1048576`, `1MiB`, `1.5G` (K, M, G, T and KiB... are powers of 1024, KB... of 1000).

    Raises:
        ValueError: neither a number nor a number with a known unit.
    """
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in BYTE_UNITS:
        raise ValueError(
            f"{text!r} is not a size; give bytes or a number with KiB, MiB, GiB, KB, MB or GB, e.g. 256MiB"
        )
    number, unit = match[1].replace("_", ""), BYTE_UNITS[match[2].lower()]
    if len(number) > MAX_SIZE_DIGITS:
        raise ValueError(f"a size of {len(number)} digits is out of range; give at most {MAX_SIZE_DIGITS}")
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def parse_decode_settings(text: str) -> tuple[tuple[int | None, Any], ...]:
    """`512:cuboid-mean,dense:mean` as `EngineConfig.extra_decode_settings`; nothing = none.

    Raises:
        ValueError: not of this form (which methods there are, `EngineConfig` knows).
    """
    settings = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        budget, colon, method = part.partition(":")
        if not colon or not (budget == "dense" or budget.isdecimal()):
            raise ValueError(
                f"--extra-decode-settings: {part!r} is not BUDGET:METHOD; give such as 512:cuboid-mean,dense:mean"
            )
        settings.append((None if budget == "dense" else int(budget), method))
    return tuple(settings)


def engine_options(command: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """Replaces a command's parameter `config` by one option for each field of `EngineConfig`.

    Errors of the user's making (ValueError, OSError, NotImplementedError) and missing libraries become one line on
    stderr and exit code 2.

    Args:
        without: fields that get no option and keep their defaults.
    """
    signature = inspect.signature(command, eval_str=True)
    options = [_option(field) for field in dataclasses.fields(EngineConfig) if field.name not in without]
    names = [option.name for option in options]
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "config"]

    def call(**values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        config = EngineConfig(**{name: _parse(name, value) for name, value in given.items()})
        command(**values, config=config)

    return _as_command(command, call, [*own, *options])


def user_errors(command: Callable[..., None]) -> Callable[..., None]:
    """One line on stderr and exit code 2 for errors of the user's making and missing libraries."""
    return _as_command(command, command, list(inspect.signature(command, eval_str=True).parameters.values()))


def _as_command(
    command: Callable[..., None], call: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        try:
            call(**values)
        except (ValueError, OSError, NotImplementedError, ImportError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error

    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def _option(field: dataclasses.Field[Any]) -> inspect.Parameter:
    """The option of one field: flags for bools, text for everything else, parsed by `_parse`."""
    flag = "--" + field.name.replace("_", "-")
    info: dict[str, Any] = {"help": field_help()[field.name], "rich_help_panel": "Engine"}
    if isinstance(field.default, bool):
        kind, default = bool, typer.Option(field.default, f"{flag}/--no-{flag[2:]}", **info)
    else:
        shown = None if field.default is None else "" if field.default == () else str(field.default)
        kind = str | None if shown is None else str
        default = typer.Option(shown, flag, metavar=_metavar(field.name), **info)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


@functools.cache
def _field_types() -> dict[str, Any]:
    return typing.get_type_hints(EngineConfig)


@functools.cache
def field_help() -> dict[str, str]:
    """Field of `EngineConfig` -> what its docstring says of it."""
    lines = inspect.cleandoc(EngineConfig.__doc__ or "").partition("Attributes:\n")[2].splitlines()
    help_texts: dict[str, str] = {}
    name = ""
    for line in lines:
        entry = re.match(r" {4}(\w+): (.*)", line)
        if entry:
            name = entry[1]
            help_texts[name] = entry[2]
        elif line.startswith(" " * 8):
            help_texts[name] += " " + line.strip()
    return help_texts


def _metavar(name: str) -> str:
    kind = _field_types()[name]
    choices = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(map(str, choices))
    if name.endswith("_bytes"):
        return "SIZE"
    if name == "sparse_budget_tokens":
        return "INTEGER|dense"
    if name == "rope_scaling":
        return "JSON"
    if name == "extra_decode_settings":
        return "BUDGET:METHOD,..."
    if name == "dense_layers":
        return "INTEGER,..."
    number = next((part for part in choices or (kind,) if part in (int, float)), None)
    return {int: "INTEGER", float: "FLOAT", None: "TEXT"}[number]


def _parse(name: str, value: Any) -> Any:
    """An option's text as the field's value; bools and None stay."""
    if not isinstance(value, str):
        return value
    if name == "sparse_budget_tokens" and value in ("dense", "none"):
        return None
    if name == "extra_decode_settings":
        return parse_decode_settings(value)
    kind = _field_types()[name]
    parts = typing.get_args(kind) or (kind,)
    flag = "--" + name.replace("_", "-")
    try:
        if name.endswith("_bytes"):
            return parse_bytes(value)
        if name == "rope_scaling":
            return json.loads(value)
        if name == "dense_layers":
            return tuple(int(part) for part in value.split(",") if part.strip())
        for number in (int, float):
            if number in parts:
                return number(value)
    except ValueError as error:
        kind = {"rope_scaling": "JSON", "dense_layers": "a list of layers such as 7,18"}.get(name, "a number")
        reason = str(error) if name.endswith("_bytes") else f"{value!r} is not {kind}"
        raise ValueError(f"{flag}: {reason}") from error
    return value


_MODEL_HELP = "A GGUF file, a Hugging Face or an Orbax directory; none = the embedded SmolLM2-135M-Instruct."
_FILE_HELP = "A text file that goes before each PROMPT (repeatable); alone it is the prompt. - = standard input."


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparseserve-jax {package_version() or '(not installed: run from its sources)'}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- commands --------------------------------------------------------------------------------------------------------


@app.command()
@functools.partial(engine_options, without=("record_selection",))
def generate(
    config: EngineConfig,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Served together.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help=_FILE_HELP)] = None,
    model: Annotated[str | None, typer.Option(help=_MODEL_HELP)] = None,
    chat: Annotated[bool, typer.Option(help="Render prompts with the model's chat template.")] = True,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Smallest set of tokens whose probability reaches this.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Tokens kept; 0 = all.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text (repeatable).")] = None,
    stream: Annotated[bool, typer.Option(help="Show text as it comes.")] = True,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Outputs as JSON; - = stdout.")
    ] = None,
    record_selection: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the blocks that every decode step selected (.npz).")
    ] = None,
    metrics: Annotated[bool, typer.Option(help="Show a table of figures at the end.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not print what is in force.")] = False,
) -> None:
    """Continue prompts: arguments, a file, or standard input."""
    check_json_path(json_file)
    texts = read_prompts(prompts or [], file or [])
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=tuple(stop or ())
    )
    requests = [Request(prompt=[{"role": "user", "content": text}] if chat else text) for text in texts]
    if record_selection is not None:
        record_selection.parent.resolve(strict=True)  # not only after all the work
        config = dataclasses.replace(config, record_selection=True)
    engine = Engine(model, config)
    if not quiet:
        print_info(engine)
    to_stdout = json_file == "-"
    printer = OrderedPrinter(len(requests), stream=stream)
    outputs = engine.generate(
        requests, [sampling] * len(requests), on_output=None if to_stdout else printer.note
    )  # fmt: skip
    if metrics:
        wide_console(stderr=True).print(metrics_table(outputs))
    if record_selection is not None:
        SelectionRecord.of_outputs(
            outputs, block_size=engine.layout.block_size, layers=engine.layout.sparse_layers
        ).save(record_selection)
        outputs = [
            dataclasses.replace(o, metrics=dataclasses.replace(o.metrics, selected_block_ids=[])) for o in outputs
        ]
    if json_file is not None:
        write_json(json_file, {"engine": engine.info.to_dict(), "outputs": [output_dict(o) for o in outputs]})


@app.command()
@engine_options
def serve(
    config: EngineConfig,
    model_argument: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    model: Annotated[str | None, typer.Option(help=_MODEL_HELP)] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 = all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 = any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that opens the server (repeatable).")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with keys, one a line.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="A name for requests to use (repeatable); none = the model's own.")
    ] = None,
    max_waiting: Annotated[int, typer.Option(help="Continuations that may wait; more get 429.")] = 256,
    max_body_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Larger bodies get 413.")] = "16MiB",
    request_timeout_s: Annotated[float, typer.Option(help="Limit on a request's time; inf = none.")] = 600.0,
    drain_timeout_s: Annotated[float, typer.Option(help="Time that requests get to finish after SIGTERM.")] = 30.0,
    grammar_timeout_s: Annotated[float, typer.Option(help="Limit on compiling a schema or expression.")] = 5.0,
    metrics_prefix: Annotated[str, typer.Option(help="Prefix of metrics, e.g. vllm.")] = "sparseserve",
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="An origin whose pages may call the server (repeatable).")
    ] = None,
    trust_request_chat_template: Annotated[bool, typer.Option(help="Requests may bring a chat template.")] = False,
    log_format: Annotated[str, typer.Option(metavar="text|json", help="Shape of the log on stderr.")] = "text",
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Where traces go, e.g. http://localhost:4318/v1/traces; none = no traces.")
    ] = None,
    warm_up: Annotated[bool, typer.Option(help="Compile everything before the first request.")] = True,
) -> None:
    """Serve a model over HTTP, by OpenAI's API."""
    try:
        from sparseserve_jax.server.auth import read_key_file
        from sparseserve_jax.server.run import run_server
        from sparseserve_jax.server.settings import ServerSettings
    except ImportError as error:
        raise ValueError(f"serving needs more packages ({error}): pip install 'sparseserve-jax[server]'") from error
    if model_argument is not None and model is not None:
        raise ValueError("give the model once: as argument or by --model")
    if log_format not in ("text", "json"):
        raise ValueError(f"--log-format: {log_format!r} is not supported; choose text or json")
    keys = [*(api_key or ()), *(read_key_file(_read_text(api_key_file)) if api_key_file else ())]
    if api_key_file is not None and not keys:
        raise ValueError(f"--api-key-file: {api_key_file} holds no key")
    settings = ServerSettings(
        served_model_names=tuple(served_model_name or ()), api_keys=tuple(keys), max_waiting=max_waiting,
        max_body_bytes=parse_bytes(max_body_bytes), request_timeout_s=request_timeout_s,
        drain_timeout_s=drain_timeout_s, grammar_timeout_s=grammar_timeout_s, metrics_prefix=metrics_prefix,
        cors_origins=tuple(cors_origin or ()), trust_request_chat_template=trust_request_chat_template,
    )  # fmt: skip
    succeeded = run_server(
        model_argument or model, config, settings, host=host, port=port, log_format=log_format,
        otlp_endpoint=otlp_endpoint, warm_up=warm_up,
    )  # fmt: skip
    if not succeeded:
        raise typer.Exit(1)


@app.command()
@user_errors
def convert(
    model: Annotated[str, typer.Argument(help="A GGUF file or a checkpoint's directory; `embedded` = the default.")],
    out: Annotated[Path, typer.Argument(help="The directory to write; it must not exist or be empty.")],
    format: Annotated[str, typer.Option(metavar="orbax|huggingface", help="What to write.")] = "orbax",
    dtype: Annotated[str, typer.Option(metavar="bfloat16|float32", help="dtype of the written tensors.")] = "bfloat16",
) -> None:
    """Write a checkpoint in another format."""
    source = open_checkpoint(None if model == "embedded" else model)
    written = convert_checkpoint(source, out, format=typing.cast(Any, format), dtype=typing.cast(Any, dtype))
    typer.echo(f"{source.describe()} -> {written}")


@app.command()
@engine_options
def info(
    config: EngineConfig,
    model: Annotated[str | None, typer.Option(help=_MODEL_HELP)] = None,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write JSON; - = stdout.")] = None,
) -> None:
    """Print what would be in force: backend, kernels, tiers in bytes and blocks, budgets."""
    check_json_path(json_file)
    engine = Engine(model, config)
    if json_file != "-":
        for line in engine.info.lines():
            typer.echo(line)
    if json_file is not None:
        write_json(json_file, engine.info.to_dict())


evaluate = typer.Typer(help="Does sparse attention change the answers? Compares settings.", no_args_is_help=True)
app.add_typer(evaluate, name="eval")
for _command in (evaluation.longbench, evaluation.needles, evaluation.babilong):
    evaluate.command()(engine_options(_command, without=evaluation.SETTING_FIELDS))

app.command()(user_errors(bench))


# --- in and out ------------------------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}") from error


def read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[str]:
    """The prompts that arguments, files and standard input make up.

    Raises:
        ValueError: there is none, or a file is not text.
        OSError: a file cannot be read.
    """
    context = "\n\n".join(sys.stdin.read() if str(path) == "-" else _read_text(path) for path in files)
    if prompts:
        return [f"{context}\n\n{prompt}" if context else prompt for prompt in prompts]
    if not files and not sys.stdin.isatty():
        context = sys.stdin.read()
    if not context.strip():
        raise ValueError("no prompt; give one as argument, by --file, or on standard input")
    return [context]


class OrderedPrinter:
    """Shows the texts of concurrent requests one after the other, each as soon as those before it are complete.

    Args:
        stream: show the growing text of the request whose turn it is; else only complete texts.
    """

    def __init__(self, num_requests: int, *, stream: bool) -> None:
        self._num_requests, self._stream = num_requests, stream
        self._latest: dict[str, RequestOutput] = {}
        self._order: list[str] = []
        self._turn = 0
        self._shown = 0  # characters of the text whose turn it is

    def note(self, output: RequestOutput) -> None:
        """Takes a snapshot and writes what can be shown."""
        if output.request_id not in self._latest:
            self._order.append(output.request_id)
            self._order.sort(key=_request_number)
        self._latest[output.request_id] = output
        while self._turn < len(self._order) and _request_number(self._order[self._turn]) == self._turn:
            current = self._latest[self._order[self._turn]]
            ended = current.finish_reason is not None
            if self._stream or ended:
                self._show(current)
            if not ended:
                return
            sys.stdout.write("\n")
            if current.error:
                typer.echo(f"error: {current.error}", err=True)
            self._turn, self._shown = self._turn + 1, 0

    def _show(self, output: RequestOutput) -> None:
        if self._shown == 0 and self._num_requests > 1 and output.text:
            sys.stdout.write(f"[{self._turn}] ")
        sys.stdout.write(output.text[self._shown :])
        sys.stdout.flush()
        self._shown = len(output.text)


def _request_number(request_id: str) -> int:
    """`request-3` -> 3: a fresh engine numbers its requests in order."""
    return int(request_id.rpartition("-")[2])


def print_info(engine: Engine) -> None:
    """What is in force, on stderr."""
    for line in engine.info.lines():
        typer.echo(line, err=True)


def output_dict(output: RequestOutput) -> dict[str, Any]:
    """An output as plain data; selections of `record_selection` are lists."""
    selected = [getattr(ids, "tolist", lambda ids=ids: ids)() for ids in output.metrics.selected_block_ids]
    plain = dataclasses.replace(output, metrics=dataclasses.replace(output.metrics, selected_block_ids=selected))
    return dataclasses.asdict(plain)


def check_json_path(path: str | None) -> None:
    """Says before all the work that a file cannot be written after it.

    Raises:
        ValueError: its directory does not exist.
    """
    if path is not None and path != "-" and not Path(path).parent.is_dir():
        raise ValueError(f"--json {path}: its directory does not exist")


def write_json(path: str, content: object) -> None:
    """Writes JSON to a file, or to stdout for `-`."""
    text = json.dumps(content, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def metrics_table(outputs: Iterable[RequestOutput]) -> rich.table.Table:
    """A row of figures for each output; print it on a `wide_console`."""
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("request", no_wrap=True)
    for column in ("prompt", "new", "TTFT s", "TBT ms", "hit %", "loaded", "MiB in", "MiB out", "set", "parks"):
        table.add_column(column, justify="right", no_wrap=True)
    for output in outputs:
        m = output.metrics
        tbt = f"{1e3 * sum(m.tbt_s) / len(m.tbt_s):.0f}" if m.tbt_s else "-"
        hits = f"{100 * m.blocks_hit / m.blocks_selected:.1f}" if m.blocks_selected else "-"
        table.add_row(
            output.request_id, str(len(output.prompt_token_ids)), str(len(output.token_ids)),
            "-" if m.ttft_s is None else f"{m.ttft_s:.1f}", tbt, hits, str(m.blocks_loaded),
            f"{m.bytes_loaded / 2**20:.1f}", f"{m.bytes_saved / 2**20:.1f}", str(m.working_set_slots), str(m.num_parks),
        )  # fmt: skip
    table.caption = "set = working set in slots; MiB in = loaded from the host, out = saved to it"
    return table


def wide_console(*, stderr: bool = False) -> rich.console.Console:
    """A console on which the table fits, also where the output goes to a file."""
    console = rich.console.Console(stderr=stderr)
    console.width = max(console.width, MIN_TABLE_WIDTH)
    return console


if __name__ == "__main__":
    main()

"""Chat messages to prompt text through a model's Jinja template, in a sandbox with bounds on work and size.

The environment is that of transformers' `apply_chat_template` (utils/chat_template_utils.py). Templates are foreign
code, so beyond Jinja's sandbox (no access to Python internals) every loop iteration and macro call counts as a step:
the template's syntax tree is rewritten so that each begins with a call of a counter, which stops at a number of steps
or at a CPU time. Text and lists that operators build are bounded as well. What one built-in filter does in a single
call is bounded only by the sizes of its arguments.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_STEPS = 1_000_000
MAX_CPU_S = 2.0
MAX_NUMBER = 100_000
"""Largest integer a filter, a string method, a repetition or an exponent may be given."""
MIN_TEXT_CHARS = 1_000_000
"""Text that a template builds is bounded by this plus 4 times the text of the messages."""


class ChatTemplateError(ValueError):
    """The messages cannot be rendered; the message says why and can be shown to the one who sent them."""


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> str:
    """Renders `messages` once. `ChatTemplate` does the same and compiles only once.

    Raises:
        ChatTemplateError: no template, invalid messages, or an error or an excess in the template.
    """
    return ChatTemplate(template, bos_token=bos_token, eos_token=eos_token).render(
        messages, add_generation_prompt=add_generation_prompt
    )


class ChatTemplate:
    """A compiled chat template. Threads may share it; they render one after another.

    Args:
        template: Jinja source as in `chat_template.jinja`; None = the model has none.
        bos_token, eos_token: what the template's variables of these names hold; None = "".

    Raises:
        ChatTemplateError: no template, or a syntax error.
    """

    def __init__(self, template: str | None, *, bos_token: str | None = None, eos_token: str | None = None) -> None:
        if template is None:
            raise ChatTemplateError(
                "the model has no chat template; send a plain prompt, or put a chat_template.jinja beside its files"
            )
        self._lock = threading.Lock()
        self._environment = _Environment()
        self._variables = {"bos_token": bos_token or "", "eos_token": eos_token or "", "tools": None, "documents": None}
        try:
            self._template = self._environment.compile_bounded(template)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ChatTemplateError("chat template: expressions are nested too deeply") from error

    def render(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text. `content` is text or a list of `{"type": "text", "text": ...}` (joined by line breaks).

        Raises:
            ChatTemplateError: invalid messages, or an error or an excess in the template.
        """
        checked = check_messages(messages)
        num_chars = sum(_num_chars(message) for message in checked)
        with self._lock:
            self._environment.budget = _Budget(max_chars=MIN_TEXT_CHARS + 4 * num_chars)
            try:
                return self._template.render(
                    **self._variables, messages=checked, add_generation_prompt=add_generation_prompt
                )
            except ChatTemplateError:
                raise
            except jinja2.exceptions.SecurityError as error:
                raise ChatTemplateError(f"chat template: not allowed in the sandbox: {error}") from error
            except jinja2.TemplateError as error:
                raise ChatTemplateError(f"chat template: {error.message or type(error).__name__}") from error
            except RecursionError as error:
                raise ChatTemplateError("chat template: macros call each other too deeply") from error
            except Exception as error:  # whatever foreign code makes of its input
                raise ChatTemplateError(f"chat template: {type(error).__name__}: {error}") from error


def check_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Plain copies of the messages, with list content joined to text (by line breaks, as vLLM and llama.cpp do).

    Raises:
        ChatTemplateError: no messages, no role or content, content that is not text, values that are not JSON's.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise ChatTemplateError(f"messages must be a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ChatTemplateError("messages is empty; at least one message is needed")
    return [_check_message(index, message) for index, message in enumerate(messages)]


def _check_message(index: int, message: object) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where}.role must be non-empty text, got {role!r}")
    if message.get("content") is None:
        raise ChatTemplateError(f"{where}.content is missing")
    content = message["content"]
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        content = "\n".join(_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content))
    if not isinstance(content, str):
        raise ChatTemplateError(f"{where}.content must be text or a list of text parts, got {type(content).__name__}")
    rest = {key: _plain(f"{where}.{key}", value) for key, value in message.items() if value is not None}
    return {**rest, "role": role, "content": str(content)}


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ChatTemplateError(f'{where} must be {{"type": "text", "text": ...}}; other content is not supported')
    return str(part["text"])


def _plain(where: str, value: object) -> Any:
    """JSON values only: methods of other objects would be open to the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{where}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(f"{where}[{i}]", item) for i, item in enumerate(value)]
    raise ChatTemplateError(f"{where} holds a {type(value).__name__}; only JSON values are allowed")


def _num_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_num_chars(item) for item in value.values())
    return sum(_num_chars(item) for item in value) if isinstance(value, list) else 8


@dataclasses.dataclass(kw_only=True)
class _Budget:
    """What one rendering may still use. CPU time of the thread, so that a loaded machine rejects no honest template."""

    max_chars: int
    num_steps: int = 0
    deadline_s: float = dataclasses.field(default_factory=lambda: time.thread_time() + MAX_CPU_S)

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise ChatTemplateError(f"chat template: more than {MAX_STEPS} loop steps; its loops are too long")
        if time.thread_time() > self.deadline_s:
            raise ChatTemplateError(f"chat template: more than {MAX_CPU_S:g} s of CPU time; its loops are too long")

    def check_size(self, size: int) -> None:
        if size > self.max_chars:
            raise ChatTemplateError(f"chat template: builds {size} characters or items, more than {self.max_chars}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks assistant text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountSteps(jinja2.visitor.NodeTransformer):
    """Puts a call of `environment.step` at the start of loop and macro bodies, and bounds the `~` operator."""

    def _with_step(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_call("step", [], node.lineno), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _with_step

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return _call("join_text", node.nodes, node.lineno)


def _call(attribute: str, args: list[Any], lineno: int) -> jinja2.nodes.Call:
    target = jinja2.nodes.EnvironmentAttribute(attribute, lineno=lineno)
    return jinja2.nodes.Call(target, args, [], None, None, lineno=lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=self._shown,
        )  # fmt: skip
        self.budget = _Budget(max_chars=0)
        self.filters["tojson"] = _tojson
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        # Block assignments, macros and the whole output are put together with this.
        self.concat = self._join  # type: ignore[assignment]

    def compile_bounded(self, source: str) -> jinja2.Template:
        tree = _CountSteps().visit(self.parse(source))
        tree.set_environment(self)
        return jinja2.Template.from_code(self, self.compile(tree), self.make_globals(None))

    def step(self) -> str:
        self.budget.step()
        return ""

    def _shown(self, value: Any) -> Any:
        """Every value that is put out passes here before it becomes text."""
        self.budget.check_size(_extent(value, self.budget.max_chars))
        return value

    def join_text(self, *parts: object) -> str:
        self.budget.check_size(_extent(parts, self.budget.max_chars))
        return self._join(map(str, parts))

    def _join(self, parts: Any) -> str:
        texts, size = [], 0
        for text in parts:
            size += len(text)
            self.budget.check_size(size)
            texts.append(text)
        return "".join(texts)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps the marks of jinja2.pass_context and its like
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.budget.step()
            _check_numbers((*args[1:], *kwargs.values()))
            self.budget.check_size(_extent([arg for arg in args if isinstance(arg, (str, list, tuple))],
                                              self.budget.max_chars))  # fmt: skip
            if name == "format":
                _check_format(args[0])
            result = function(*args, **kwargs)
            if isinstance(result, (str, list, tuple)):
                self.budget.check_size(len(result))
            return result

        return bounded

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes)):
            _check_numbers((*args, *kwargs.values()))
            if method.__name__ in ("format", "format_map"):
                _check_format(owner)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sized = [len(side) for side in (left, right) if isinstance(side, (str, bytes, list, tuple))]
        numbers = [side for side in (left, right) if isinstance(side, int)]
        if operator == "+" and sized:
            self.budget.check_size(sum(sized))
        elif operator == "*" and sized and numbers:
            repeated = left if sized and not isinstance(left, int) else right
            self.budget.check_size(_extent(repeated, self.budget.max_chars) * max(numbers[0], 0))
        elif operator == "%" and isinstance(left, (str, bytes)):
            _check_format(left)
            _check_numbers(right if isinstance(right, tuple) else (right,))
        elif operator in ("*", "**") and len(numbers) == 2:
            _check_numbers((right,) if operator == "**" else ())
            size = abs(left).bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            self.budget.check_size(size)
        return super().call_binop(context, operator, left, right)


def _extent(value: Any, at_most: int) -> int:
    """Characters that a value holds, those of nested lists included; stops counting beyond `at_most`.

    Lists may hold one another many times over, so that their text is far larger than they are.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if not isinstance(value, (list, tuple)):
        return 0
    count = 0
    for part in value:
        count += 1 + _extent(part, at_most - count)
        if count > at_most:
            break
    return count


def _check_numbers(values: Any) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise ChatTemplateError(f"chat template: the number {value} is larger than {MAX_NUMBER}")


def _check_format(text: str | bytes) -> None:
    """Field widths of `%` and `format` are written inside the text."""
    found = re.search(r"\d{6,}", str(text))
    if found:
        raise ChatTemplateError(f"chat template: field width in {found.group()[:20]!r} is larger than {MAX_NUMBER}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

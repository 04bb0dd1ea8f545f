"""Structured output: the grammar that a request asks for, compiled off the event loop, with a time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from typing import Any

from sparseserve_jax.request import Grammar
from sparseserve_jax.server.errors import APIError
from sparseserve_jax.server.protocol import GenerationFields
from sparseserve_jax.text.grammar import GrammarCompiler, GrammarError, GrammarKind
from sparseserve_jax.text.tokenizer import Tokenizer

NUM_THREADS = 2
MAX_CACHED = 64


class GrammarService:
    """Compiles grammars in threads of its own, each once, and keeps the newest. One event loop uses it."""

    def __init__(self, tokenizer: Tokenizer, timeout_s: float) -> None:
        self._tokenizer, self._timeout_s = tokenizer, timeout_s
        self._compiler: GrammarCompiler | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(NUM_THREADS, "grammar")
        self._pending: dict[str, asyncio.Future[Grammar]] = {}
        self._cached: dict[str, Grammar] = {}

    async def grammar_for(self, fields: GenerationFields) -> Grammar | None:
        """The grammar of a request; None if its text is free.

        Raises:
            APIError: 400: it cannot be compiled, or not in time.
        """
        wanted = _wanted(fields)
        if wanted is None:
            return None
        param, kind, content = wanted
        key = json.dumps([kind, content])
        if key in self._cached:
            return self._cached[key]
        work = self._pending.get(key)
        if work is None:
            work = asyncio.wrap_future(self._threads.submit(self._compile, kind, content))
            self._pending[key] = work
            work.add_done_callback(lambda done: self._note_done(key, done))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(work)
        except TimeoutError as error:
            raise APIError(
                400, f"{param} was not compiled within {self._timeout_s:g} s; simplify it", param=param
            ) from error
        except GrammarError as error:
            raise APIError(400, str(error), param=param) from error

    def _note_done(self, key: str, work: asyncio.Future[Grammar]) -> None:
        del self._pending[key]
        if work.cancelled() or work.exception() is not None:
            return
        self._cached[key] = work.result()
        if len(self._cached) > MAX_CACHED:
            del self._cached[next(iter(self._cached))]

    def _compile(self, kind: GrammarKind, content: Any) -> Grammar:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer)
        return self._compiler.compile(kind, content)

    def close(self) -> None:
        """Gives the threads up."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _wanted(fields: GenerationFields) -> tuple[str, GrammarKind, Any] | None:
    """The field, the kind and the content of the grammar that a request asks for."""
    found: list[tuple[str, GrammarKind, Any]] = []
    form = fields.response_format
    if form is not None and form.type == "json_object":
        found.append(("response_format", "json_object", None))
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise APIError(400, "response_format.json_schema.schema is missing", param="response_format")
        found.append(("response_format", "json_schema", form.json_schema.schema_))
    elif form is not None and form.type == "regex":
        if form.regex is None:
            raise APIError(400, "response_format.regex is missing", param="response_format")
        found.append(("response_format", "regex", form.regex))
    if fields.guided_regex is not None:
        found.append(("guided_regex", "regex", fields.guided_regex))
    if fields.guided_json is not None:
        found.append(("guided_json", "json_schema", fields.guided_json))
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise APIError(400, f"{names} exclude each other; give one of them", param=found[1][0])
    return found[0] if found else None

"""The web application: routes, middlewares, the OpenAPI document."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import prometheus_client
from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from sparseserve_jax.provenance import package_version
from sparseserve_jax.server.auth import KeyMiddleware
from sparseserve_jax.server.body import read_body
from sparseserve_jax.server.chat import Chat
from sparseserve_jax.server.completions import Completion
from sparseserve_jax.server.context import ContextMiddleware
from sparseserve_jax.server.errors import APIError, add_handlers, json_response
from sparseserve_jax.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sparseserve_jax.server.service import Service
from sparseserve_jax.server.tracing import RequestTracer

BODIES = (CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest)
STATUS_PAGE = Path(__file__).parent / "static" / "index.html"
SOURCE_VERSION = "0+source"
"""Where the package is not installed."""
_REF = "#/components/schemas/{model}"


def make_app(
    service: Service,
    *,
    tracer: RequestTracer | None = None,
    on_dead: Callable[[BaseException], None] | None = None,
) -> FastAPI:
    """The application around a service, which lives as long as the application does.

    Args:
        on_dead: told when the engine cannot be loaded, or dies.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start(on_dead)
        yield
        await service.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(
        title="SparseServe-JAX",
        version=package_version() or SOURCE_VERSION,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    add_handlers(app)
    _add_generation(app, service, tracer)
    _add_tokens(app, service)
    _add_information(app, service)
    _describe(app)
    settings = service.settings
    if settings.api_keys:  # what is added last comes first
        app.add_middleware(KeyMiddleware, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )  # fmt: skip
    app.add_middleware(ContextMiddleware)
    return app


def _add_generation(app: FastAPI, service: Service, tracer: RequestTracer | None) -> None:
    limit = service.settings.max_body_bytes

    @app.post("/v1/completions", openapi_extra=_body_of(CompletionRequest), responses=_errors())
    async def completions(request: Request) -> Response:
        """Continues prompts."""
        service.engine  # noqa: B018 (503 comes before everything else)
        fields = await read_body(request, CompletionRequest, max_bytes=limit)
        with _counting_rejections(service):
            return await Completion(service, fields, tracer).respond(request)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(ChatCompletionRequest), responses=_errors())
    async def chat_completions(request: Request) -> Response:
        """The next message of a chat."""
        service.engine  # noqa: B018
        fields = await read_body(request, ChatCompletionRequest, max_bytes=limit)
        with _counting_rejections(service):
            return await Chat(service, fields, tracer).respond(request)


@contextlib.contextmanager
def _counting_rejections(service: Service) -> Any:
    try:
        yield
    except APIError as error:
        if error.status in (400, 404):
            service.metrics.note_rejected("invalid")
        raise


def _add_tokens(app: FastAPI, service: Service) -> None:
    limit = service.settings.max_body_bytes

    @app.post("/tokenize", openapi_extra=_body_of(TokenizeRequest), responses=_errors())
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        engine = service.engine
        fields = await read_body(request, TokenizeRequest, max_bytes=limit)
        service.check_model(fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise APIError(400, "give either prompt or messages", param="prompt")
        tokenizer, prompt = engine.tokenizer, fields.prompt
        try:
            if prompt is not None:
                ids = await service.in_thread(lambda: tokenizer.encode(prompt, fields.add_special_tokens))
            else:
                messages = fields.messages or []
                ids = (await service.in_thread(lambda: engine.encode(messages)))[1]
        except ValueError as error:
            raise APIError(400, str(error), param="prompt" if prompt is not None else "messages") from error
        content: dict[str, Any] = {
            "count": len(ids), "max_model_len": engine.layout.max_model_len, "tokens": ids, "token_strs": None,
        }  # fmt: skip
        if fields.return_token_strs:
            content["token_strs"] = [tokenizer.id_to_token(i) for i in ids]
        return json_response(content)

    @app.post("/detokenize", openapi_extra=_body_of(DetokenizeRequest), responses=_errors())
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        engine = service.engine
        fields = await read_body(request, DetokenizeRequest, max_bytes=limit)
        service.check_model(fields.model)
        try:
            text = await service.in_thread(lambda: engine.tokenizer.decode(fields.tokens, skip_special_tokens=False))
        except ValueError as error:
            raise APIError(400, str(error), param="tokens") from error
        return json_response({"prompt": text})


def _add_information(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=_errors())
    async def models() -> Response:
        """The names that the model is served by."""
        return json_response({"object": "list", "data": [_model(service, name) for name in service.model_names]})

    @app.get("/v1/models/{name:path}", responses=_errors())
    async def model(name: str) -> Response:
        """One of the names."""
        return json_response(_model(service, service.check_model(name)))

    @app.get("/health", responses={503: {"description": "The engine is loading, dead, or shutting down."}})
    async def health() -> Response:
        """Whether requests are served."""
        status = service.status
        if status in ("ready", "draining"):
            return json_response({"status": status})
        return json_response({"status": status}, 503, {"Retry-After": "5"})

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.render(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST})

    @app.get("/info", responses=_errors())
    async def info() -> Response:
        """What is in force, as `sparseserve info --json` writes it: model, backend, kernels, tiers, budget."""
        return json_response(service.engine.info.to_dict())

    @app.get("/version")
    async def version() -> Response:
        """The server's version."""
        return json_response({"version": package_version() or SOURCE_VERSION})

    if STATUS_PAGE.is_file():
        page = STATUS_PAGE.read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": content_security_policy(page), "X-Content-Type-Options": "nosniff",
                   "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}  # fmt: skip

        @app.get("/", include_in_schema=False)
        async def status_page() -> Response:
            """The status page."""
            return Response(page, headers=headers, media_type="text/html")


def content_security_policy(page: str) -> str:
    """Lets a page run the scripts that are in it, by their hashes, and talk to this server; nothing else."""
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _model(service: Service, name: str) -> dict[str, Any]:
    engine = service.engine
    return {"id": name, "object": "model", "created": service.created_s, "owned_by": "sparseserve",
            "root": service.model_names[0], "max_model_len": engine.layout.max_model_len}  # fmt: skip


# --- the OpenAPI document --------------------------------------------------------------------------------------------


def _body_of(model: type) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _errors() -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    descriptions = {
        400: "A field is not acceptable.", 401: "A key is needed.", 404: "No such model.", 408: "It took too long.",
        413: "The body is too large.", 415: "Not JSON.", 429: "The queue is full.", 500: "This request failed.",
        503: "The engine is loading, dead, or shutting down.",
    }  # fmt: skip
    return {status: {"description": text, "content": content} for status, text in descriptions.items()}


def _describe(app: FastAPI) -> None:
    """The bodies are read by hand (up to a limit), so the document is told of their models here."""
    made = app.openapi
    error = {"type": "object", "required": ["message", "type", "param", "code"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "null"]}}}  # fmt: skip

    def openapi() -> dict[str, Any]:
        document = made()
        _, definitions = models_json_schema([(model, "validation") for model in BODIES], ref_template=_REF)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= definitions["$defs"]
        schemas["Error"] = {"type": "object", "required": ["error"], "properties": {"error": error}}
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi

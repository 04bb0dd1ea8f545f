"""What requests hold: pydantic models of OpenAI's fields and of those that vLLM and we add.

Values are checked where they mean something (`SamplingParams`); here it is types, and fields that this server cannot
honour and must not ignore.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, WithJsonSchema

from sparseserve_jax.request import short_repr
from sparseserve_jax.server.errors import APIError

logger = logging.getLogger("sparseserve.server")

TokenIds = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Text = {"type": "string", "minLength": 1}
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [Text, TokenIds, {"type": "array", "items": Text, "minItems": 1},
                   {"type": "array", "items": TokenIds, "minItems": 1}]}
    ),
]  # fmt: skip

MEANINGFUL = {
    "tools": "tools are not supported; leave them out",
    "functions": "functions are not supported; leave them out",
    "suffix": "a suffix is not supported; leave it out",
    "truncate_prompt_tokens": "prompts are not truncated; shorten the prompt",
    "continue_final_message": "the final message cannot be continued; leave it out",
    "add_generation_prompt": "the generation prompt is always added; leave it out",
    "chat_template_kwargs": "variables of the chat template cannot be set; leave them out",
    "documents": "documents are not supported; put them into the messages",
    "audio": "audio is not supported; leave it out",
    "modalities": "text is the only modality; leave modalities out",
    "echo": "a chat is not echoed; leave it out",
    "best_of": "best_of is not supported for chats; use n",
    "web_search_options": "web search is not supported; leave it out",
    "use_beam_search": "beam search is not supported; leave it out",
    "logits_processors": "logits processors are not supported; leave them out",
    "guided_choice": "guided_choice is not supported; give the choices as guided_regex, e.g. 'yes|no'",
    "guided_grammar": "guided_grammar is not supported; use response_format or guided_regex",
    "structured_outputs": "structured_outputs is not supported; use response_format or guided_regex",
    "allowed_token_ids": "allowed_token_ids is not supported; use logit_bias, or guided_regex",
    "bad_words": "bad_words is not supported; use logit_bias on their tokens",
    "length_penalty": "beam search is not supported; leave length_penalty out",
    "prompt_embeds": "embeddings as prompt are not supported; send text or token ids",
}
"""Fields that would change the answer: refused, not ignored. Nothing is refused that asks for what happens anyway."""
HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,), "modalities": (["text"],), "best_of": (1,),
}  # fmt: skip
KNOWN_AND_WITHOUT_EFFECT = frozenset(
    ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
     "spaces_between_special_tokens", "request_id", "return_tokens_as_token_ids")
)  # fmt: skip


class Fields(pydantic.BaseModel):
    """Strict types (no numbers in quotes), and unknown fields kept, to be reported."""

    model_config = pydantic.ConfigDict(strict=True, extra="allow", protected_namespaces=())

    def check_extra(self) -> None:
        """Refuses fields that would change the answer, and logs those that are unknown.

        Raises:
            APIError: 400.
        """
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in MEANINGFUL and value and value not in HARMLESS_VALUES.get(name, ()):
                raise APIError(400, MEANINGFUL[name], param=name, code="unsupported_parameter")
        if extra.get("add_generation_prompt") is False:
            raise APIError(400, MEANINGFUL["add_generation_prompt"], param="add_generation_prompt")
        if extra.get("tool_choice") not in (None, "none", "auto"):
            raise APIError(400, MEANINGFUL["tools"], param="tool_choice", code="unsupported_parameter")
        unknown = [name for name in extra if name not in MEANINGFUL and name not in KNOWN_AND_WITHOUT_EFFECT]
        if unknown:
            logger.warning("fields that are not known here have no effect: %s", short_repr(unknown[:8]))


class StreamOptions(Fields):
    """How to stream."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Fields):
    """A named schema."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchemaFormat | None = None
    regex: str | None = None


class GenerationFields(Fields):
    """What completions and chats have in common. Null is the same as nothing."""

    model: str | None = None
    max_tokens: int | None = Field(None, description="Tokens to generate at most.")
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    # beyond OpenAI's
    top_k: int | None = Field(None, description="0 and -1 = all.")
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    guided_regex: str | None = Field(None, description="The text must match this regular expression.")
    guided_json: dict[str, Any] | str | None = Field(None, description="The text must follow this JSON schema.")
    priority: int | None = Field(None, description="Lower is served first.")
    sparse_budget_tokens: int | Literal["dense"] | None = Field(
        None, description="Tokens a decode step may attend to; one of the budgets that the server was started with."
    )


class CompletionRequest(GenerationFields):
    """`POST /v1/completions`."""

    prompt: PromptField = Field(description="Text, token ids, or a list of either.")
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatCompletionRequest(GenerationFields):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template: str | None = Field(None, description="Refused, unless the server allows it.")


class TokenizeRequest(Fields):
    """`POST /tokenize`: of `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def as_prompts(prompt: object) -> list[str | list[int]]:
    """The prompts that the field `prompt` holds.

    Raises:
        APIError: 400; empty, or neither text nor token ids nor a list of either.
    """
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if not prompt:
            raise APIError(400, "prompt is empty; give text, token ids, or a list of either", param="prompt")
        kinds = set(map(type, prompt))
        if kinds == {int}:
            return [prompt]
        if kinds == {str}:
            return list(prompt)
        if kinds == {list}:
            for place, ids in enumerate(prompt):
                if set(map(type, ids)) - {int}:
                    raise APIError(400, f"prompt[{place}] must hold token ids only", param="prompt")
            return list(prompt)
    raise APIError(400, "prompt must be text, token ids, or a list of either (not mixed)", param="prompt")

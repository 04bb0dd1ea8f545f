"""`PromptEncoder`: a checkpoint's tokenizer and chat template, without the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.evaluation.example import Example
from sparseserve_jax.evaluation.truncation import MAX_REFERENCE_TOKENS, fit_prompt, newline_token, reference_tokens
from sparseserve_jax.models.rope import max_supported_len
from sparseserve_jax.request import SamplingParams
from sparseserve_jax.text.chat_template import ChatTemplate
from sparseserve_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedExample:
    """An example as it is served.

    Attributes:
        token_ids: of the whole prompt.
        num_cut_tokens: that its middle lost.
        reference: token ids whose likelihood is asked for; may be empty.
        sampling: of the greedy answer.
    """

    example: Example
    token_ids: list[int]
    num_cut_tokens: int
    reference: list[int]
    sampling: SamplingParams


class PromptEncoder:
    """Turns examples into token ids.

    Args:
        model: as for `Engine`.

    Attributes:
        tokenizer: the model's.
        max_model_len: the longest sequence that the model supports, tokens.
        model_name: what the checkpoint says of itself, without its folder.
        has_chat_template: without one every prompt is plain text.
    """

    def __init__(self, model: str | Path | None) -> None:
        source = open_checkpoint(model)
        config = source.config
        self.tokenizer = Tokenizer(
            source.tokenizer_json,
            bos_token_id=config.bos_token_id,
            eos_token_ids=config.eos_token_ids,
            vocab_size=config.vocab_size,
        )
        self.max_model_len = max_supported_len(config)
        self.model_name = source.describe().replace(str(source.path), source.path.name)
        self.has_chat_template = source.chat_template is not None
        self._template = None
        if source.chat_template is not None:
            special = source.special
            self._template = ChatTemplate(
                source.chat_template, bos_token=special.bos_token, eos_token=special.eos_token
            )

    def encode(self, text: str, chat: bool) -> list[int]:
        """Token ids of a text, as the user's message of a chat if asked for and the model has a template."""
        if not chat or self._template is None:
            return self.tokenizer.encode(text)
        return self.tokenizer.encode_chat(self._template.render([{"role": "user", "content": text}]))

    def prepare(
        self, examples: Sequence[Example], *, max_prompt_tokens: int, max_model_len: int
    ) -> list[PreparedExample]:
        """Examples whose prompts leave room for their answers.

        Raises:
            ValueError: there is no room; see `fit_prompt`.
        """
        return [self._prepare(example, max_prompt_tokens, max_model_len) for example in examples]

    def _prepare(self, example: Example, max_prompt_tokens: int, max_model_len: int) -> PreparedExample:
        task = example.task
        limit = max_model_len - max(task.max_tokens, MAX_REFERENCE_TOKENS)
        fitted = fit_prompt(example, self.tokenizer, self.encode, max_prompt_tokens=max_prompt_tokens, limit=limit)
        return PreparedExample(
            example=example,
            token_ids=fitted.token_ids,
            num_cut_tokens=fitted.num_cut_tokens,
            reference=reference_tokens(example, self.tokenizer, chat=task.chat and self.has_chat_template),
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=task.max_tokens,
                min_tokens=1 if task.stops_at_newline else 0,
                stop_token_ids=(newline_token(self.tokenizer),) if task.stops_at_newline else (),
            ),
        )

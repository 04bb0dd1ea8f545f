"""The engine as a model of EleutherAI's lm-evaluation-harness (lm_eval 0.4.9 or newer).

    python -m sparseserve_jax.evaluation.lm_eval_adapter --model sparseserve \\
        --model_args sparse_budget_tokens=1024,max_model_len=8192 --tasks ... --include_path ...

is lm_eval's own command line with this model added. In Python: `lm_eval.simple_evaluate(SparseServeLM(...), ...)`.
Model arguments are `model` (a checkpoint; none = the embedded one), `max_gen_toks`, and fields of `EngineConfig`;
`sparse_budget_tokens=dense` is dense attention.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from tqdm import tqdm
except ImportError as error:
    raise ImportError("the adapter needs lm-evaluation-harness; install it: pip install 'lm-eval>=0.4.9'") from error

from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.engine import Engine
from sparseserve_jax.evaluation.likelihood import continuation_likelihoods, rolling_windows
from sparseserve_jax.request import Request, RequestOutput, SamplingParams
from sparseserve_jax.text.chat_template import ChatTemplate

SAMPLING_NAMES = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed",
    "repetition_penalty": "repetition_penalty",
}  # fmt: skip
IGNORED_NAMES = {"until", "do_sample", "max_gen_toks", "max_new_tokens", "max_tokens", "max_length"}


@register_model("sparseserve")
class SparseServeLM(TemplateLM):
    """`lm_eval`'s three questions, all requests of a task served together.

    Likelihoods are those of decoding (see `continuation_likelihoods`), so they are measured under the engine's budget;
    rolling ones, too, a decode step for each token.

    Args:
        model: a checkpoint; None = the embedded SmolLM2-135M-Instruct.
        max_gen_toks: tokens to generate where a task names no number.
        batch_size / max_batch_size / device: what lm_eval always passes; the engine batches by itself
            (`max_num_seqs`), on JAX's device.
        engine: fields of `EngineConfig`.

    Raises:
        ValueError: a field does not exist or has an impossible value.
    """

    def __init__(
        self,
        model: str | None = None,
        max_gen_toks: int = 256,
        batch_size: object = None,
        max_batch_size: object = None,
        device: object = None,
        **engine: Any,
    ) -> None:
        super().__init__()
        if engine.get("sparse_budget_tokens") == "dense":
            engine["sparse_budget_tokens"] = None
        try:
            config = EngineConfig(**engine)
        except TypeError as error:
            raise ValueError(f"--model_args: {error}; see docs/configuration.md for the fields") from error
        self.engine = Engine(model, config)
        self.max_gen_toks = max_gen_toks
        self._source = open_checkpoint(model)

    # --- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The model's first EOS token.

        Raises:
            ValueError: it has none.
        """
        ids = self.engine.model_config.eos_token_ids
        if not ids:
            raise ValueError(f"model {self.engine.model_config.name!r} has no EOS token to begin a text with")
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context: BOS, else EOS."""
        bos = self.engine.model_config.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; with `add_special_tokens=None` as the model's tokenizer does it."""
        return self.engine.tokenizer.encode(string, add_special_tokens is not False)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A chat as text by the model's template.

        Raises:
            ValueError: a history that ends with the assistant, which is to be continued.
        """
        if not add_generation_prompt:
            raise ValueError("continuing the assistant's last message is not supported; leave fewshot_as_multiturn out")
        return self._template.render(chat_history)

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        special = self._source.special
        return ChatTemplate(self._source.chat_template, bos_token=special.bos_token, eos_token=special.eos_token)

    @property
    def tokenizer_name(self) -> str:
        """By which lm_eval tells cached requests apart."""
        return self.engine.model_config.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The template's source, by which lm_eval tells cached requests apart."""
        return self._source.chat_template or ""

    # --- questions ---------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = continuation_likelihoods(self.engine, [(context, rest) for _, context, rest in requests])
        return [(one.logprob, one.is_greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text."""
        length = self.engine.layout.max_model_len
        windows = [
            list(rolling_windows(self.tok_encode(request.args[0], False), self.prefix_token_id, length))
            for request in requests
        ]
        found = iter(continuation_likelihoods(self.engine, [pair for pairs in windows for pair in pairs]))
        return [sum(next(found).logprob for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to a stop string; greedy unless the task samples. A context too long loses its beginning."""
        asked = [self._to_request(*request.args) for request in requests]
        with tqdm(total=len(asked), desc="generate_until", disable=disable_tqdm) as bar:

            def note(output: RequestOutput) -> None:
                bar.update(output.finish_reason is not None)

            outputs = self.engine.generate(asked, on_output=note)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
        return [output.text for output in outputs]

    def _to_request(self, context: str, options: dict[str, Any]) -> Request:
        unknown = set(options) - set(SAMPLING_NAMES) - IGNORED_NAMES
        if unknown:
            raise ValueError(f"generation_kwargs {sorted(unknown)} are not supported; known: {sorted(SAMPLING_NAMES)}")
        until = options.get("until") or ()
        lengths = [options[name] for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in options]
        new_tokens = int(lengths[0] if lengths else self.max_gen_toks)
        chosen = {name: options[name] for name in SAMPLING_NAMES if options.get(name) is not None}
        if not options.get("do_sample", chosen.get("temperature", 0.0) > 0.0):
            chosen["temperature"] = 0.0
        params = SamplingParams(
            stop=(until,) if isinstance(until, str) else tuple(text for text in until if text), max_tokens=new_tokens,
            **chosen,
        )  # fmt: skip
        room = self.engine.layout.max_model_len - new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks={new_tokens} leaves no room for a prompt in max_model_len="
                f"{self.engine.layout.max_model_len}; lower it"
            )
        return Request(prompt=self.tok_encode(context)[-room:], sampling=params)


def main() -> None:
    """lm_eval's command line, which now knows `--model sparseserve`."""
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()


if __name__ == "__main__":
    main()

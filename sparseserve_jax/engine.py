"""`Engine`: requests in, outputs out. One `step()` = schedule, hand to the device, process what the last step gave.

The host is one step ahead: tokens of a step are looked at while the device already works on the next. So a request that
ends by what it says (EOS, a stop string) decodes once more, into KV that is its own; nobody sees that token.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np

from host_offload.memory import physical_memory_bytes
from pallas_kernels.api import get_kernels
from sparseserve_jax.cache.layout import plan_layout
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.compilation_cache import use_compilation_cache
from sparseserve_jax.config import DecodeSetting, EngineConfig
from sparseserve_jax.info import EngineInfo, describe_engine
from sparseserve_jax.models.rope import max_supported_len
from sparseserve_jax.models.weights import load_params
from sparseserve_jax.output import OutputProcessor
from sparseserve_jax.plan import DecodeStats, StepPlan, StepResult
from sparseserve_jax.request import MAX_VARIANTS, Request, RequestOutput, SamplingParams, TokenLogprob, Variant
from sparseserve_jax.runner.model_runner import ModelRunner, RunnerResult, RunningStep
from sparseserve_jax.runner.sequences import Sequence as RunnerSequence
from sparseserve_jax.sampling.seeds import derive_seed
from sparseserve_jax.scheduler.request_state import SchedulerRequest
from sparseserve_jax.scheduler.scheduler import Scheduler
from sparseserve_jax.text.chat_template import ChatTemplate, ChatTemplateError
from sparseserve_jax.text.detokenizer import IncrementalDetokenizer
from sparseserve_jax.text.tokenizer import Tokenizer
from sparseserve_jax.validation import RequestError, choose_decode_setting, validate_request

logger = logging.getLogger("sparseserve")

MEMORY_SHARE = 0.4
"""Share of free memory that KV may take where no budget is set (on the CPU both tiers are the same memory)."""


class Engine:
    """Serves requests on one device. One thread calls it.

    Args:
        model: a GGUF file, a Hugging Face or an Orbax directory; None = the embedded SmolLM2-135M-Instruct.
        config: see `EngineConfig`.
        clock: seconds, monotonic.

    Attributes:
        info: what is in force (also logged at start, and by `sparseserve info`).

    Raises:
        ValueError: a budget is too small, a setting does not fit the model, or the model cannot be read.
        FileNotFoundError: no such model.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = config or EngineConfig()
        self.config, self._clock = config, clock
        cache = use_compilation_cache(config.compilation_cache_dir)
        source = open_checkpoint(model)
        self.model_config = source.config
        device = jax.devices()[0]
        kernels = get_kernels(config.implementation, device.platform)
        kernels.require(
            head_dim=source.config.head_dim, block_size=config.block_size, dtype=config.dtype,
            group=source.config.group_size, tiered=config.kv_tiers == "tiered", platform=device.platform,
            kv_dtype=config.kv_dtype, weight_dtype=config.weight_dtype,
        )  # fmt: skip
        free_device, free_host = physical_memory_bytes(device)
        self.layout = plan_layout(
            config,
            source.config.kv_shape,
            model_max_len=max_supported_len(source.config),
            available_device_bytes=int(MEMORY_SHARE * free_device),
            available_host_bytes=int(MEMORY_SHARE * free_host),
        )
        budgets = [setting.sparse_budget_tokens or 0 for setting in config.decode_settings]
        kernels.require_sizes(
            budget_blocks=max(budgets) // config.block_size, max_blocks=self.layout.max_blocks_per_seq,
            num_selected=self.layout.selection_blocks,
            num_slots=self.layout.max_grant_slots if self.layout.tiered else 0,
        )  # fmt: skip
        self.tokenizer = Tokenizer(
            source.tokenizer_json,
            bos_token_id=source.config.bos_token_id,
            eos_token_ids=source.config.eos_token_ids,
            vocab_size=source.config.vocab_size,
        )
        self._template_source, self._special = source.chat_template, source.special
        self._template: ChatTemplate | None = None
        params = load_params(source.config, source.tensor, config.dtype, config.weight_dtype)
        self.runner = ModelRunner(params, source.config, config, self.layout, kernels, device)
        self.scheduler = Scheduler(config, self.layout)
        self.info: EngineInfo = describe_engine(
            config,
            source.describe(),
            source.config,
            kernels.describe(),
            str(cache) if cache else None,
            device,
            self.runner,
        )
        for line in self.info.lines():
            logger.info(line)
        self._processors: dict[str, OutputProcessor] = {}  # by continuation, which scheduler and runner know
        self._children: dict[str, list[str]] = {}  # by request
        self._ended: list[RequestOutput] = []  # to be reported by the next step: aborted, or passed over by a stream
        self._num_requests = 0
        self._running: RunningStep | None = None  # dispatched, not looked at yet
        self._failure: Exception | None = None

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, default_sampling: SamplingParams | None = None) -> str:
        """Queues a request and returns its id.

        Raises:
            RequestError: it can never be served; it is not queued, and nobody else is affected.
        """
        return self._queue_all([request], [default_sampling])[0]

    def abort(self, request_id: str) -> bool:
        """Ends a request at once, whatever it is doing; False if there is no such live request."""
        children = self._children.pop(request_id, None)
        if children is None:
            return False
        for child in children:
            processor = self._processors.pop(child, None)
            if processor is not None:
                self.scheduler.abort(child)
                processor.abort()
                self._ended.append(processor.take_output(final=True))
        return True

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._processors or self._ended)

    def warm_up(self) -> Iterator[str]:
        """Compiles (or loads from the cache) every program that serving can need; yields what comes next."""
        yield from self.runner.warm_up()

    def step(self) -> list[RequestOutput]:
        """One iteration: hands the work of one plan to the device and takes in the tokens of the last one.

        Returns a snapshot of every request that got a token. The first step of all gives none.

        Raises:
            RuntimeError: a step failed on the device (now, or before: its KV was given away, so nothing can go on).
        """
        if self._failure is not None:
            raise RuntimeError("an earlier step failed, and its KV is lost; make a new Engine") from self._failure
        plan = self.scheduler.schedule(self._clock())
        outputs, self._ended = self._ended, []
        if plan.is_empty and self._running is None:
            assert outputs or not self._processors, "requests are waiting, but the scheduler has no work for them"
            return outputs
        try:
            outputs += self._advance(plan)
        except Exception as error:
            self._failure = error
            raise
        if not self._processors:
            self._release()
        return outputs

    def _advance(self, plan: StepPlan) -> list[RequestOutput]:
        """Dispatches the plan; between its decode step and its prefill work, tokens of the step before come out."""
        started = self._clock()
        for segment in plan.prefill:
            for item in segment.items:
                self._processors[item.request_id].note_started(started)
        for restart in plan.restarts:
            self._processors[restart.request_id].note_restarted(started)
        before, self._running = self._running, None if plan.is_empty else self.runner.begin(plan)
        outputs, stats = ([], {}) if before is None else self._process(before.plan, before.fetch())
        if self._running is not None:
            self.runner.run_prefill(self._running)
            restarted = (restart.request_id for restart in plan.restarts)
            sampled = (*restarted, *plan.decode, *plan.completes_prefill)
            self.scheduler.update(plan, StepResult(step=plan.step, sampled=sampled, stats=stats))
        return outputs

    # --- the whole way -----------------------------------------------------------------------------------------------

    def stream(
        self, requests: Sequence[Request], sampling_params: Sequence[SamplingParams | None] | None = None
    ) -> Iterator[RequestOutput]:
        """Queues requests now and yields a snapshot whenever one grows. All are checked before any is queued.

        Closing the iterator aborts what is unfinished. Snapshots of other requests are kept for the next `step`, or the
        next iterator that they belong to.

        Raises:
            RequestError: one of them can never be served; names it by its place. None is queued.
        """
        return self._run(self._queue_all(requests, sampling_params))

    def generate(
        self,
        requests: Sequence[Request],
        sampling_params: Sequence[SamplingParams | None] | None = None,
        *,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Serves requests to their end; outputs in order (n of them next to each other for a request with n > 1).

        Args:
            on_output: called with every snapshot on the way.

        Raises:
            RequestError: as `stream`.
        """
        ids = self._queue_all(requests, sampling_params)
        last: dict[str, dict[int, RequestOutput]] = {request_id: {} for request_id in ids}
        for output in self._run(ids):
            last[output.request_id][output.index] = output
            if on_output is not None:
                on_output(output)
        return [outputs[index] for outputs in last.values() for index in sorted(outputs)]

    def _queue_all(
        self, requests: Sequence[Request], sampling_params: Sequence[SamplingParams | None] | None
    ) -> list[str]:
        defaults = sampling_params or [None] * len(requests)
        prepared = []
        for place, (request, default) in enumerate(zip(requests, defaults, strict=True)):
            if not isinstance(request, Request):
                raise RequestError(f"request {place} is a {type(request).__name__}; give Request(prompt=...)", "prompt")
            try:
                prepared.append(self._prepare(request, default))
            except RequestError as error:
                where = f"request {place}: " if len(requests) > 1 else ""
                raise RequestError(f"{where}{error}", error.param) from error
        named = [request.request_id for request in requests if request.request_id is not None]
        taken = [name for place, name in enumerate(named) if name in named[:place] or name in self._children]
        if taken:
            raise RequestError(f"request_id={taken[0]!r} is in use by another request; choose another", "request_id")
        return [self._queue(item) for item in prepared]

    def _run(self, ids: list[str]) -> Iterator[RequestOutput]:
        mine = set(ids)
        try:
            while any(r in self._children for r in ids) or any(o.request_id in mine for o in self._ended):
                outputs = self.step()
                self._ended += [output for output in outputs if output.request_id not in mine]  # for whoever asks next
                yield from (output for output in outputs if output.request_id in mine)
        finally:
            for request_id in ids:
                self.abort(request_id)
            self._ended = [output for output in self._ended if output.request_id not in mine]
            if not self._processors and self._failure is None:
                self._release()

    # --- parts -------------------------------------------------------------------------------------------------------

    def _prepare(self, request: Request, default_sampling: SamplingParams | None) -> _Prepared:
        variants = request.variants or (
            Variant(
                sampling=request.sampling or default_sampling or SamplingParams(),
                sparse_budget_tokens=request.sparse_budget_tokens,
                selection=request.selection,
            ),
        )
        _check_fields(request, variants)
        text, token_ids = self._encode(request.prompt)
        continuations = []
        for variant in variants:
            params = validate_request(
                token_ids, variant.sampling,
                vocab_size=self.model_config.vocab_size, max_model_len=self.layout.max_model_len,
            )  # fmt: skip
            setting = choose_decode_setting(self.config, variant.sparse_budget_tokens, variant.selection)
            continuations.append(_Continuation(params, setting))
        prepared = _Prepared(request, text, np.asarray(token_ids, np.int32), tuple(continuations))
        try:
            self.scheduler.check(prepared.to_schedule([str(index) for index in range(len(variants))], 0.0))
        except ValueError as error:
            raise RequestError(str(error), "max_tokens") from error
        return prepared

    def _encode(self, prompt: object) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt (chat messages give the rendered template)."""
        if isinstance(prompt, str):
            try:
                return prompt, self.tokenizer.encode(prompt)
            except ValueError as error:
                raise RequestError(f"prompt: {error}", "prompt") from error
        if isinstance(prompt, Sequence) and prompt and all(isinstance(part, dict) for part in prompt):
            try:
                if self._template is None:
                    self._template = ChatTemplate(
                        self._template_source, bos_token=self._special.bos_token, eos_token=self._special.eos_token
                    )
                rendered = self._template.render(prompt)
            except ChatTemplateError as error:
                raise RequestError(str(error), "messages") from error
            return rendered, self.tokenizer.encode_chat(rendered)
        if isinstance(prompt, (Sequence, np.ndarray)) and not isinstance(prompt, (bytes, bytearray)):
            return None, list(prompt)
        raise RequestError(f"prompt is a {type(prompt).__name__}; give text, token ids or chat messages", "prompt")

    def _queue(self, prepared: _Prepared) -> str:
        request, variants = prepared.request, prepared.continuations
        request_id = request.request_id or self._new_id()
        now = self._clock()
        continuations = variants if request.variants else variants * variants[0].sampling.n
        children = [f"{self._num_requests}.{index}" for index in range(len(continuations))]
        prompt_token_ids = prepared.token_ids.tolist()
        wanted = [c.sampling.prompt_logprobs for c in continuations if c.sampling.prompt_logprobs is not None]
        shared: list[list[TokenLogprob] | None] = [None]  # of the first token there is nothing to say
        for index, (child, continuation) in enumerate(zip(children, continuations, strict=True)):
            params = continuation.sampling
            self._processors[child] = OutputProcessor(
                request_id=request_id, index=index, prompt=prepared.text, prompt_token_ids=prompt_token_ids,
                sampling=params, eos_token_ids=self.model_config.eos_token_ids, arrival_s=now,
                detokenizer=IncrementalDetokenizer(self.tokenizer, params.skip_special_tokens),
                prompt_logprobs=shared if request.variants else [None],
            )  # fmt: skip
            # The draws of a variant are those of a request of its own.
            seed = derive_seed(params.seed, self.config.seed, self._num_requests, 0 if request.variants else index)
            sequence = RunnerSequence(child, prepared.token_ids, params, seed, continuation.setting)
            sequence.num_prompt_logprobs = max(wanted, default=None)
            sequence.has_successor = bool(request.variants) and index + 1 < len(children)
            self.runner.add_sequence(sequence)
        for one_after_another in [children] if request.variants else [[child] for child in children]:
            self.scheduler.add_request(prepared.to_schedule(one_after_another, now))
        self._children[request_id] = children
        self._num_requests += 1
        return request_id

    def _new_id(self) -> str:
        number = self._num_requests
        while f"request-{number}" in self._children:  # a caller's own name
            number += 1
        return f"request-{number}"

    def _process(self, plan: StepPlan, result: RunnerResult) -> tuple[list[RequestOutput], dict[str, DecodeStats]]:
        """Gives tokens and figures to the processors, ends requests, takes snapshots; who was aborted since is gone."""
        now = self._clock()
        for child in plan.parks:
            if child in self._processors:
                self._processors[child].metrics.num_parks += 1
        self._note_figures(result)
        for child, entries in result.prompt_logprobs.items():
            if child in self._processors:
                self._processors[child].prompt_logprobs.extend(entries)
        grown = []
        for child, token in result.tokens.items():
            processor = self._processors.get(child)
            if processor is None:
                continue
            if token.ok:
                processor.append(token.token_id, token.logprobs, now)
            else:
                processor.fail("the model's logits are not finite for this request")
            if processor.is_finished:
                self.scheduler.finish(child)  # unless it knows: the number of tokens
                self._forget(child)
            grown.append(processor.take_output())
        return grown, result.stats

    def _note_figures(self, result: RunnerResult) -> None:
        for child, stats in result.stats.items():
            if child not in self._processors:
                continue
            metrics = self._processors[child].metrics
            metrics.blocks_selected += stats.blocks_selected
            metrics.blocks_hit += stats.blocks_hit
            metrics.blocks_loaded += stats.blocks_loaded
            metrics.working_set_blocks = stats.working_set_blocks
            metrics.working_set_slots = stats.working_set_slots
        for child, selected in result.selected.items():
            if child in self._processors:
                self._processors[child].metrics.selected_block_ids.append(selected)
        for child, num_bytes in result.bytes_loaded.items():
            if child in self._processors:
                self._processors[child].metrics.bytes_loaded += num_bytes
        for child, num_bytes in result.bytes_saved.items():
            if child in self._processors:
                self._processors[child].metrics.bytes_saved += num_bytes

    def _forget(self, child: str) -> None:
        processor = self._processors.pop(child)
        siblings = self._children.get(processor.request_id, [])
        if not any(sibling in self._processors for sibling in siblings):
            self._children.pop(processor.request_id, None)

    def _release(self) -> None:
        """Nobody is left: lets the runner forget the last ones, too, and what they would still have got."""
        self._running = None
        plan = self.scheduler.schedule(self._clock())
        if not plan.is_empty:
            self.runner.execute(plan)
            self.scheduler.update(plan, StepResult(step=plan.step, sampled=()))


def _check_fields(request: Request, variants: Sequence[Variant]) -> None:
    """Types that nothing later would question."""
    if request.variants:
        _check_variants(request)
    for variant in variants:
        params = variant.sampling
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling is a {type(params).__name__}; give SamplingParams(...)", "sampling")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        raise RequestError(f"priority={request.priority!r} must be an integer; lower is served first", "priority")
    if request.request_id is not None and not isinstance(request.request_id, str):
        raise RequestError(f"request_id={request.request_id!r} must be text, or None to have one made", "request_id")


def _check_variants(request: Request) -> None:
    if not isinstance(request.variants, (tuple, list)) or not all(isinstance(v, Variant) for v in request.variants):
        raise RequestError("variants must be a tuple of Variant(sampling=...)", "variants")
    if len(request.variants) > MAX_VARIANTS:
        raise RequestError(f"{len(request.variants)} variants; at most {MAX_VARIANTS} are allowed", "variants")
    if (request.sampling, request.sparse_budget_tokens, request.selection) != (None, "default", None):
        raise RequestError(
            "sampling, sparse_budget_tokens and selection belong to each of the variants; leave those of the request "
            "as they are",
            "variants",
        )
    for place, variant in enumerate(request.variants):
        if isinstance(variant.sampling, SamplingParams) and variant.sampling.n != 1:
            raise RequestError(
                f"variant {place} has n={variant.sampling.n}; a variant is one continuation, give it n times",
                "variants",
            )


@dataclasses.dataclass(frozen=True)
class _Continuation:
    """How to continue a prompt; `max_tokens` is resolved."""

    sampling: SamplingParams
    setting: DecodeSetting


@dataclasses.dataclass(frozen=True)
class _Prepared:
    """A request that passed every check; `continuations` are its variants, or how all n of it go on."""

    request: Request
    text: str | None
    token_ids: np.ndarray
    continuations: tuple[_Continuation, ...]

    def to_schedule(self, children: Sequence[str], arrival_s: float) -> SchedulerRequest:
        """The scheduler's view of continuations that follow one another."""
        first: SchedulerRequest | None = None
        for child, continuation in reversed(list(zip(children, self.continuations, strict=False))):
            assert continuation.sampling.max_tokens is not None
            first = SchedulerRequest(
                request_id=child,
                arrival_s=arrival_s,
                priority=self.request.priority,
                num_prompt_tokens=len(self.token_ids),
                max_new_tokens=continuation.sampling.max_tokens,
                successor=first,
            )
        assert first is not None
        return first

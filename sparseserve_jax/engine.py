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
from sparseserve_jax.models.rope import max_supported_len, with_rope_scaling
from sparseserve_jax.models.weights import load_params
from sparseserve_jax.output import OutputProcessor
from sparseserve_jax.plan import DecodeStats, StepPlan, StepResult
from sparseserve_jax.recovery import Quarantine
from sparseserve_jax.request import (
    MAX_VARIANTS,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    TokenMatcher,
    Variant,
)
from sparseserve_jax.runner.model_runner import ModelRunner, RunnerResult, RunningStep
from sparseserve_jax.runner.sequences import Sequence as RunnerSequence
from sparseserve_jax.sampling.seeds import derive_seed
from sparseserve_jax.scheduler.request_state import SchedulerRequest
from sparseserve_jax.scheduler.scheduler import Scheduler
from sparseserve_jax.text.chat_template import ChatTemplate, ChatTemplateError
from sparseserve_jax.text.detokenizer import IncrementalDetokenizer
from sparseserve_jax.text.tokenizer import Tokenizer
from sparseserve_jax.timeline import Timeline
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
        num_prefill_segments / num_failed_steps: so far.

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
        if config.rope_scaling is not None:
            self.model_config = with_rope_scaling(source.config, config.rope_scaling)
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
            model_max_len=max_supported_len(self.model_config),
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
        self.runner = ModelRunner(params, self.model_config, config, self.layout, kernels, device)
        self.scheduler = Scheduler(config, self.layout)
        self.info: EngineInfo = describe_engine(
            config,
            source.describe(),
            self.model_config,
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
        self._running_since_s = 0.0
        self._timeline = Timeline() if config.record_timeline else None
        self._failure: BaseException | None = None
        self._live: dict[str, _Live] = {}  # by continuation
        self._matchers: dict[str, TokenMatcher] = {}  # by continuation that has a grammar
        self._held: list[str] = []  # continuations that wait for the end of a quarantine
        self._quarantine = Quarantine()
        self._suspects: list[str] = []
        self.num_prefill_segments = 0
        self.num_failed_steps = 0

    # --- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request, default_sampling: SamplingParams | None = None) -> str:
        """Queues a request and returns its id.

        Raises:
            RequestError: it can never be served; it is not queued, and nobody else is affected.
        """
        return self._queue_all([request], [default_sampling])[0]

    def prepare(self, request: Request, default_sampling: SamplingParams | None = None) -> PreparedRequest:
        """Tokenises and checks a request, all that takes time; any thread may call it, beside `step`.

        Raises:
            RequestError: it can never be served.
        """
        variants = request.variants or (
            Variant(
                sampling=request.sampling or default_sampling or SamplingParams(),
                sparse_budget_tokens=request.sparse_budget_tokens,
                selection=request.selection,
            ),
        )
        _check_fields(request, variants)
        text, token_ids = self.encode(request.prompt)
        continuations = []
        for variant in variants:
            params = validate_request(
                token_ids, variant.sampling,
                vocab_size=self.model_config.vocab_size, max_model_len=self.layout.max_model_len,
            )  # fmt: skip
            setting = choose_decode_setting(self.config, variant.sparse_budget_tokens, variant.selection)
            continuations.append(_Continuation(params, setting))
        prepared = PreparedRequest(request, text, np.asarray(token_ids, np.int32), tuple(continuations))
        try:
            self.scheduler.check(prepared.to_schedule([(str(i), c, 0) for i, c in enumerate(continuations)], 0.0))
        except ValueError as error:
            raise RequestError(str(error), "max_tokens") from error
        return prepared

    def add_prepared(self, prepared: PreparedRequest) -> str:
        """Queues what `prepare` gave and returns its id.

        Raises:
            RequestError: its `request_id` is in use.
        """
        if prepared.request.request_id in self._children:
            raise _id_in_use(prepared.request.request_id)
        return self._queue(prepared)

    def abort(self, request_id: str) -> bool:
        """Ends a request at once, whatever it is doing; False if there is no such live request."""
        children = self._children.pop(request_id, None)
        if children is None:
            return False
        for child in children:
            processor = self._processors.get(child)
            if processor is not None:
                processor.abort()
                self._end(child)
                self._ended.append(processor.take_output(final=True))
        return True

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._processors or self._ended)

    @property
    def num_unfinished(self) -> int:
        """Continuations that have not ended."""
        return len(self._processors)

    def working_set_blocks(self) -> int:
        """Pieces in the working sets of all continuations, as of their last decode steps."""
        return sum(processor.metrics.working_set_blocks for processor in self._processors.values())

    def warm_up(self) -> Iterator[str]:
        """Compiles (or loads from the cache) every program that serving can need; yields what comes next."""
        yield from self.runner.warm_up()

    def step(self) -> list[RequestOutput]:
        """One iteration: hands the work of one plan to the device and takes in the tokens of the last one.

        Returns a snapshot of every request that got a token. The first step of all gives none.

        Raises:
            RuntimeError: a step failed before, and its KV was given away: call `recover`, or make a new Engine.
            Exception: whatever makes this step fail.
        """
        if self._failure is not None:
            raise RuntimeError(
                "an earlier step failed or was interrupted, and its KV is lost; call recover(), or make a new Engine"
            ) from self._failure
        self._release_held()
        outputs, self._ended = self._ended, []
        plan = StepPlan(step=-1)
        running = self._running
        try:
            plan = self.scheduler.schedule(self._clock())
            if plan.is_empty and running is None:
                assert outputs or not self._processors, "requests are waiting, but the scheduler has no work for them"
                return outputs
            self._advance(plan, outputs)
            if not self._processors:
                self._release()
        except BaseException as error:  # Ctrl-C, too, cuts a step in the middle
            self._failure, self._ended = error, outputs  # what came out before is reported by the next step
            self._suspects = list(dict.fromkeys((*_members(plan), *_members(running.plan if running else plan))))
            raise
        return outputs

    def recover(self) -> None:
        """Makes a failed engine work again: empties it, and starts its requests over from the tokens that they have.

        All requests of the failed step are suspects and run alone, half of them at a time, until it is clear which of
        them makes steps fail; that one ends with "error" (`Quarantine`). The others notice nothing but the time; their
        keys and values are computed anew, by prefill, so to the last bit they may differ from those of decoding.

        Raises:
            Exception: the memory for KV is not to be had again, or nothing works at all.
        """
        assert self._failure is not None, "nothing failed"
        reason, self._failure, self._running = self._failure, None, None
        self.num_failed_steps += 1
        self.runner.reset()
        self.scheduler = Scheduler(self.config, self.layout)
        num_tokens = {child: len(processor.token_ids) for child, processor in self._processors.items()}
        for child in self._quarantine.note_failure(self._suspects, num_tokens):
            processor = self._processors[child]
            processor.fail(f"the request made two steps of the engine fail: {type(reason).__name__}: {reason}")
            self._end(child)
            self._forget_request(processor.request_id)
            self._ended.append(processor.take_output(final=True))
        for child, processor in self._processors.items():
            if len(processor.prompt_logprobs) < len(self._live[child].prepared.token_ids):
                processor.prompt_logprobs = [None]  # its prompt begins anew, and alone
        self._held = list(self._processors)

    def _release_held(self) -> None:
        """Queues those whom a quarantine lets run."""
        if not self._held:
            return
        num_tokens = {child: len(processor.token_ids) for child, processor in self._processors.items()}
        released = self._quarantine.release(num_tokens)
        if released is None and not self._quarantine.is_active:
            released = self._held
        for child in released or ():
            self._schedule([child])
        self._held = [child for child in self._held if child not in (released or ())]

    def _advance(self, plan: StepPlan, outputs: list[RequestOutput]) -> None:
        """Dispatches the plan; between its decode step and its prefill work, tokens of the step before come out.

        Where a grammar has a say in decoded tokens, they are chosen after that: the device meanwhile computes logits.
        """
        started = self._clock()
        for segment in plan.prefill:
            for item in segment.items:
                self._processors[item.request_id].note_started(started)
        for restart in plan.restarts:
            self._processors[restart.request_id].note_restarted(started)
        self.num_prefill_segments += len(plan.prefill)
        is_free = not any(child in self._matchers for child in plan.decode)
        before, self._running = self._running, None if plan.is_empty else self.runner.begin(plan, sample=is_free)
        before_since_s, self._running_since_s = self._running_since_s, started
        stats = {} if before is None else self._process(before.plan, before.fetch(), before_since_s, outputs)
        if self._running is not None:
            restarted = (restart.request_id for restart in plan.restarts)
            sampled = (*restarted, *plan.decode, *plan.completes_prefill)
            allowed = {c: self._matchers[c].allowed_tokens() for c in sampled if c in self._matchers}
            if not is_free:
                self.runner.sample_decoded(self._running, allowed)
            self.runner.run_prefill(self._running, allowed)
            self.scheduler.update(plan, StepResult(step=plan.step, sampled=sampled, stats=stats))

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
                prepared.append(self.prepare(request, default))
            except RequestError as error:
                where = f"request {place}: " if len(requests) > 1 else ""
                raise RequestError(f"{where}{error}", error.param) from error
        named = [request.request_id for request in requests if request.request_id is not None]
        taken = [name for place, name in enumerate(named) if name in named[:place] or name in self._children]
        if taken:
            raise _id_in_use(taken[0])
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

    def encode(self, prompt: object) -> tuple[str | None, list[int]]:
        """Text and token ids of a prompt (chat messages give the rendered template); any thread may call it.

        Raises:
            RequestError: it cannot be tokenised, or the template cannot be rendered.
        """
        if isinstance(prompt, str):
            try:
                return prompt, self.tokenizer.encode(prompt)
            except ValueError as error:
                raise RequestError(f"prompt: {error}", "prompt") from error
        if isinstance(prompt, Sequence) and prompt and all(isinstance(part, dict) for part in prompt):
            try:
                if self._template is None:
                    self._template = self.chat_template(self._template_source)
                rendered = self._template.render(prompt)
            except ChatTemplateError as error:
                raise RequestError(str(error), "messages") from error
            return rendered, self.tokenizer.encode_chat(rendered)
        if isinstance(prompt, (Sequence, np.ndarray)) and not isinstance(prompt, (bytes, bytearray)):
            return None, list(prompt)
        raise RequestError(f"prompt is a {type(prompt).__name__}; give text, token ids or chat messages", "prompt")

    def chat_template(self, source: str | None) -> ChatTemplate:
        """A template with the model's BOS and EOS.

        Raises:
            ChatTemplateError: no template, or a syntax error.
        """
        return ChatTemplate(source, bos_token=self._special.bos_token, eos_token=self._special.eos_token)

    def _queue(self, prepared: PreparedRequest) -> str:
        request, variants = prepared.request, prepared.continuations
        request_id = request.request_id or self._new_id()
        now = self._clock()
        continuations = variants if request.variants else variants * variants[0].sampling.n
        children = [f"{self._num_requests}.{index}" for index in range(len(continuations))]
        prompt_token_ids = prepared.token_ids.tolist()
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
            self._live[child] = _Live(prepared, continuation, seed)
            if request.grammar is not None:
                self._matchers[child] = request.grammar.start()
        if self._quarantine.is_active:
            self._held += children
        else:
            for chain in [children] if request.variants else [[child] for child in children]:
                self._schedule(chain)
        self._children[request_id] = children
        self._num_requests += 1
        return request_id

    def _schedule(self, chain: Sequence[str]) -> None:
        """Makes continuations that follow one another known to runner and scheduler.

        After a failed step each comes alone; what it has generated is prompt to them.
        """
        prepared, items = self._live[chain[0]].prepared, []
        wanted = [self._live[child].continuation.sampling.prompt_logprobs for child in chain]
        for place, child in enumerate(chain):
            processor, live = self._processors[child], self._live[child]
            generated = processor.token_ids
            sequence = RunnerSequence(
                child, np.concatenate([prepared.token_ids, np.asarray(generated, np.int32)]),
                live.continuation.sampling, live.seed, live.continuation.setting, num_resumed=len(generated),
                has_successor=place + 1 < len(chain),
            )  # fmt: skip
            if place == 0 and len(processor.prompt_logprobs) < len(prepared.token_ids):
                sequence.num_prompt_logprobs = max((k for k in wanted if k is not None), default=None)
            self.runner.add_sequence(sequence)
            items.append((child, live.continuation, len(generated)))
        self.scheduler.add_request(prepared.to_schedule(items, self._processors[chain[0]].arrival_s))

    def _new_id(self) -> str:
        number = self._num_requests
        while f"request-{number}" in self._children:  # a caller's own name
            number += 1
        return f"request-{number}"

    def _process(
        self, plan: StepPlan, result: RunnerResult, since_s: float, outputs: list[RequestOutput]
    ) -> dict[str, DecodeStats]:
        """Gives tokens and figures to the processors, ends requests, takes snapshots; who was aborted since is gone."""
        now = self._clock()
        if self._timeline is not None:
            self._timeline.note_step(
                plan, start_s=since_s, end_s=now, loaded=result.bytes_loaded, saved=result.bytes_saved,
                arrivals_s={c: p.arrival_s for c, p in self._processors.items()},
            )  # fmt: skip
        for child in plan.parks:
            if child in self._processors:
                self._processors[child].metrics.num_parks += 1
        self._note_figures(result)
        for child, entries in result.prompt_logprobs.items():
            if child in self._processors:
                self._processors[child].prompt_logprobs.extend(entries)
        for child, token in result.tokens.items():
            processor = self._processors.get(child)
            if processor is None:
                continue
            if token.ok:
                processor.append(token.token_id, token.logprobs, now)
                if child in self._matchers and not processor.is_finished:
                    self._follow_grammar(child, token.token_id)
            else:
                processor.fail("the model's logits are not finite for this request")
            if processor.is_finished:
                self.scheduler.finish(child)  # unless it knows: the number of tokens
                self._end(child)
                self._forget_request(processor.request_id)
            outputs.append(processor.take_output())
        return result.stats

    def _follow_grammar(self, child: str, token_id: int) -> None:
        matcher, processor = self._matchers[child], self._processors[child]
        problem = matcher.accept(token_id)
        if problem is not None:
            processor.fail(f"the grammar of the request cannot go on: {problem}")
        elif matcher.is_complete:
            processor.complete()

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

    def _end(self, child: str) -> None:
        """A continuation has ended: nobody works on it any more."""
        self.scheduler.abort(child)  # unless it knows: by the number of tokens, or is not told of it (held)
        if self._timeline is not None:
            self._processors[child].metrics.timeline = self._timeline.pop(child)
        del self._processors[child], self._live[child]
        self._matchers.pop(child, None)
        if child in self._held:
            self._held.remove(child)

    def _forget_request(self, request_id: str) -> None:
        """Forgets a request whose continuations have all ended."""
        if not any(sibling in self._processors for sibling in self._children.get(request_id, [])):
            self._children.pop(request_id, None)

    def _release(self) -> None:
        """Nobody is left: lets the runner forget the last ones, too, and what they would still have got."""
        self._running = None
        plan = self.scheduler.schedule(self._clock())
        if not plan.is_empty:
            self.runner.execute(plan)
            self.scheduler.update(plan, StepResult(step=plan.step, sampled=()))


def _id_in_use(request_id: str | None) -> RequestError:
    return RequestError(f"request_id={request_id!r} is in use by another request; choose another", "request_id")


def _check_fields(request: Request, variants: Sequence[Variant]) -> None:
    """Types that nothing later would question."""
    if request.variants:
        _check_variants(request)
    for variant in variants:
        params = variant.sampling
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling is a {type(params).__name__}; give SamplingParams(...)", "sampling")
        if request.grammar is not None and (params.min_tokens or params.ignore_eos):
            raise RequestError("a grammar says where the text ends; leave out min_tokens and ignore_eos", "min_tokens")
    if request.grammar is not None and request.variants:
        raise RequestError("grammar and variants exclude each other; leave one of them out", "grammar")
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
class PreparedRequest:
    """A request that passed every check; `continuations` are its variants, or how all n of it go on."""

    request: Request
    text: str | None
    token_ids: np.ndarray
    continuations: tuple[_Continuation, ...]

    @property
    def num_continuations(self) -> int:
        """Outputs that it will have."""
        return len(self.continuations) if self.request.variants else self.continuations[0].sampling.n

    def to_schedule(self, chain: Sequence[tuple[str, _Continuation, int]], arrival_s: float) -> SchedulerRequest:
        """The scheduler's view of continuations that follow one another.

        Args:
            chain: their names, how they go on, and how many of their tokens were generated before a failed step.
        """
        first: SchedulerRequest | None = None
        for child, continuation, num_generated in reversed(chain):
            assert continuation.sampling.max_tokens is not None
            first = SchedulerRequest(
                request_id=child,
                arrival_s=arrival_s,
                priority=self.request.priority,
                setting=continuation.setting,
                num_prompt_tokens=len(self.token_ids) + num_generated,
                max_new_tokens=continuation.sampling.max_tokens - num_generated,
                successor=first,
            )
        assert first is not None
        return first


@dataclasses.dataclass(frozen=True)
class _Live:
    """What it takes to start a continuation (again)."""

    prepared: PreparedRequest
    continuation: _Continuation
    seed: tuple[int, int]


def _members(plan: StepPlan) -> list[str]:
    """The continuations that a plan works on."""
    prefilling = [item.request_id for segment in plan.prefill for item in segment.items]
    return [*(restart.request_id for restart in plan.restarts), *plan.decode, *prefilling]

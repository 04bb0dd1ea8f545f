"""Logits of every token of a prompt, by the runner's own prefill; serving computes those of the last one only."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels.api import Kernels
from sparseserve_jax import Engine, SamplingParams
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.llama import unembed
from sparseserve_jax.plan import Admission, PrefillItem, PrefillSegment, StepPlan
from sparseserve_jax.runner.sequences import Sequence as RunnerSequence

ROWS = 512
"""Tokens of one part: logits of a large vocabulary are the largest array of all."""


def prompt_logits(engine: Engine, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
    """Logits float32 `[up to ROWS, vocab]` of a prompt, part by part, on an engine that does nothing else.

    Each chunk of `max_num_batched_tokens` goes through the layers as when serving; its last layer's output is kept.
    """
    runner, num_layers, chunk = engine.runner, engine.layout.num_layers, engine.config.max_num_batched_tokens
    sequence = RunnerSequence(
        "probe", np.asarray(token_ids, np.int32), SamplingParams(temperature=0, max_tokens=1), (0, 0)
    )
    runner.add_sequence(sequence)
    blocks = tuple(range(1, 1 + engine.layout.blocks_for(len(token_ids))))
    runner.execute(StepPlan(step=0, admissions=(Admission(request_id="probe", row=0, block_ids=blocks),)))
    for start in range(0, len(token_ids), chunk):
        item = PrefillItem(request_id="probe", start=start, end=min(start + chunk, len(token_ids)))
        segment = PrefillSegment(items=(item,), layer_start=0, layer_end=num_layers - 1)
        runner.execute(StepPlan(step=0, prefill=(segment,)))
        call = runner._calls["probe", start]
        runner._prefill_layer(call, num_layers - 1)
        assert call.hidden is not None
        for first in range(0, item.end - start, ROWS):
            rows = call.hidden[first : first + ROWS]  # a whole part: calls are padded to powers of two
            logits = _unembed(runner.params, rows, config=engine.model_config, kernels=runner.spec.kernels)
            yield np.asarray(logits)[: item.end - start - first]
    runner.execute(StepPlan(step=0, finished=("probe",)))


@functools.partial(jax.jit, static_argnames=("config", "kernels"))
def _unembed(params: Any, hidden: jax.Array, *, config: ModelConfig, kernels: Kernels) -> jax.Array:
    return unembed(config, params, hidden, kernels=kernels)

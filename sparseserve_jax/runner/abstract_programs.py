"""The programs that `ModelRunner` runs, with shapes in place of arrays: to compile them for a device that is not here.

Built by the same functions that build a runner's state and inputs, so what is compiled is what runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.memory import PINNED_HOST, abstract
from pallas_kernels.api import get_kernels
from pallas_kernels.storage import storage_dtype
from sparseserve_jax.cache.layout import KVLayout, plan_layout
from sparseserve_jax.config import EngineConfig
from sparseserve_jax.models.config import ModelConfig
from sparseserve_jax.models.decode import DecodeInputs, decode_step
from sparseserve_jax.models.kv_state import allocate_kv_state, make_spec, pool_shape
from sparseserve_jax.models.llama import abstract_params
from sparseserve_jax.models.prefill import prefill_layer
from sparseserve_jax.models.rope import max_supported_len
from sparseserve_jax.runner import buckets, transfers
from sparseserve_jax.runner.prefill_calls import OpenCall
from sparseserve_jax.runner.sequences import SequenceTables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A jitted function and what to lower it with: `function.lower(*args, **kwargs)`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class AbstractRunner:
    """Shapes of everything a `ModelRunner` of this configuration would hold on `platform`.

    Args:
        device_bytes / host_bytes: memory for KV where the config names no budget.
        platform: "cpu" or "gpu": what the programs are to be compiled for.

    Raises:
        ValueError: a budget is too small (see `plan_layout`).
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, *, device_bytes: int, host_bytes: int, platform: str
    ) -> None:
        self.config = config
        self.layout: KVLayout = plan_layout(
            config, model.kv_shape, model_max_len=max_supported_len(model),
            available_device_bytes=device_bytes, available_host_bytes=host_bytes,
        )  # fmt: skip
        self.spec = make_spec(config, model, self.layout, get_kernels(config.implementation, platform))
        self.params = abstract(abstract_params(model, config.dtype, config.weight_dtype))
        self.state = abstract(
            jax.eval_shape(lambda: allocate_kv_state(self.layout, config, self.spec.kernels, platform))
        )
        self._stored = storage_dtype(jnp.dtype(config.dtype), platform)
        self._tables = SequenceTables(self.layout)

    @property
    def host_pools(self) -> tuple[Any, ...]:
        """The pinned pools, one a layer; none when unified."""
        if not self.layout.tiered:
            return ()
        pool = jax.ShapeDtypeStruct(pool_shape(self.layout, self.layout.num_blocks), self._stored)
        return tuple(abstract([pool] * self.layout.num_layers, PINNED_HOST))

    def decode_step(self, num_seqs: int, context_tokens: int) -> Program:
        """A decode step of `num_seqs` sequences whose longest has `context_tokens` tokens."""
        layout = self.layout
        widths = buckets.table_buckets(layout.max_blocks_per_seq, deterministic=self.config.deterministic)
        width = buckets.bucket_for(layout.blocks_for(context_tokens), widths)
        inputs = self._tables.decode_tables(np.full(num_seqs, self._tables.padding_row, np.int32), width)
        inputs["positions"] = np.zeros(num_seqs, np.int32)
        inputs["newest_tokens"] = np.zeros(layout.max_num_seqs + 1, np.int32)
        args = (self.params, self.state, self.host_pools, DecodeInputs(**abstract(inputs)))
        return Program(function=decode_step, args=args, kwargs={"spec": self.spec})

    def prefill_layer(self, num_tokens: int, *, layer: int | None = None, end: int | None = None) -> Program:
        """A layer over a call of `num_tokens` tokens of one prompt, of which `end` are there then.

        Args:
            layer: by default the last one that is not dense in decoding, if there is any.
            end: by default as many as a sequence can have.
        """
        layout = self.layout
        if layer is None:
            layer = layout.sparse_layers[-1] if layout.sparse_layers else layout.num_layers - 1
        call = OpenCall(
            (), {}, block_size=layout.block_size, token_buckets=(num_tokens,), staged=layout.tiered,
            max_blocks=layout.num_staging_blocks if layout.tiered else layout.max_blocks_per_seq,
        )  # fmt: skip
        hidden = jax.ShapeDtypeStruct((num_tokens, self.spec.model.hidden_size), jnp.float32)
        staging = jax.ShapeDtypeStruct(pool_shape(layout, layout.num_staging_blocks), self._stored)
        pool = staging if layout.tiered else self.state.pools[layer]
        digests = () if layer in layout.dense_layers else self.state.digests[-1:]
        scales = self.state.scales[layer] if self.state.scales else None
        angles = jax.ShapeDtypeStruct((num_tokens, layout.head_dim), jnp.float32)
        hidden, rope, pool = abstract((hidden, (angles, angles), pool))
        args = (self.params["layers"][layer], hidden, rope, pool, digests, scales, abstract(call.call))
        sparse = self.spec.prefills_sparsely(layer, layout.max_model_len if end is None else end)
        kwargs = {"spec": self.spec, "single_prompt": True, "sparse": sparse}
        return Program(function=prefill_layer, args=args, kwargs=kwargs)

    def save_newest(self, num_seqs: int) -> Program:
        """FlashD2H of the blocks that filled in a decode step, all layers."""
        layout, zeros = self.layout, np.zeros(num_seqs, np.int32)
        slots = np.zeros((num_seqs, layout.max_grant_slots), np.int32)
        args = (self.host_pools, self.state.pools, self.state.resident, *abstract([zeros] * 4), abstract(slots))
        kwargs = {"dense_layers": layout.dense_layers, "kernels": self.spec.kernels}
        return Program(function=transfers.save_newest, args=args, kwargs=kwargs)

    def save_layer(self, num_tokens: int) -> Program:
        """FlashD2H of one layer of a prefill call."""
        layout = self.layout
        num_blocks = num_tokens // layout.block_size
        blocks = jax.ShapeDtypeStruct((num_blocks, *pool_shape(layout, 0)[1:]), self._stored)
        ids = np.zeros(num_blocks, np.int32)
        args = (self.host_pools[-1], *abstract((blocks, ids)))
        return Program(function=transfers.save_layer, args=args, kwargs={"kernels": self.spec.kernels})

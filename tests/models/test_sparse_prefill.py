"""Sparse prefill in the model: threshold 1 is dense, and of real attention a threshold keeps what it promises."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.reference import PREFILL_TILE
from pallas_kernels.select_key_tiles import select_key_tiles
from pallas_kernels.storage import to_storage
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.models.llama import embed, run_layer
from sparseserve_jax.models.rope import rope_cos_sin, rope_frequencies
from sparseserve_jax.models.weights import load_params
from sparseserve_jax.text.tokenizer import Tokenizer
from tests.real_text import real_text
from tests.tiny_model import random_prompt, write_sharp_model

BASE = EngineConfig(
    dtype="float32", block_size=16, sparse_budget_tokens=128, num_dense_layers=1, max_num_batched_tokens=512,
    max_model_len=1024, max_num_seqs=4, deterministic=True,
)  # fmt: skip
BLOCK, NUM_TOKENS = 32, 4096


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def requests():
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [Request(prompt=random_prompt(n, n), sampling=params) for n in (900, 300, 60)]


def tokens_of(model, requests, **changes):
    engine = Engine(model, dataclasses.replace(BASE, **changes))
    ids = [engine.add_request(request) for request in requests]
    last = {}
    while engine.has_unfinished():
        last |= {output.request_id: output.token_ids for output in engine.step()}
    return [last[request_id] for request_id in ids]


MODES = {
    "layer": {},
    "chunked": {"prefill": "chunked", "max_inject_tokens": 4 * 256},
    "packed": {"deterministic": False},
    "tiered": {"kv_tiers": "tiered"},
    "dense decode": {"sparse_budget_tokens": None},
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_threshold_one_gives_the_tokens_of_dense_prefill(model, requests, mode):
    dense = tokens_of(model, requests, **mode)
    assert tokens_of(model, requests, prefill_sparsity=1.0, **mode) == dense


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_low_threshold_shows(model, requests, mode):
    """Only in prompts that are longer than what is dense anyway."""
    dense = tokens_of(model, requests, **mode)
    sparse = tokens_of(model, requests, prefill_sparsity=0.02, **mode)
    assert sparse[0] != dense[0]
    assert sparse[2] == dense[2]


def test_how_the_prompt_is_cut_does_not_show(model, requests):
    """Chunks of whole tiles select what the whole prompt selects."""
    whole = tokens_of(model, requests, prefill_sparsity=0.3)
    for name in ("chunked", "tiered"):
        assert tokens_of(model, requests, prefill_sparsity=0.3, **MODES[name]) == whole


def test_it_is_printed(model):
    lines = Engine(model, dataclasses.replace(BASE, prefill_sparsity=0.9)).info.lines()
    assert any("attention to 0.9 of its estimated mass, dense in 1 layers and up to 128 tokens" in x for x in lines)


# --- real attention --------------------------------------------------------------------------------------------------


def causal_weights(q, k, scale):
    """Of one head, in float64."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T * scale
    scores[np.triu_indices(len(scores), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@functools.cache
def real_queries_and_keys(layers):
    """Of the embedded model, for a prompt of real text: {layer: (q, k, v)} in float32, [tokens, heads, head_dim]."""
    source = open_checkpoint(None)
    config, params = source.config, load_params(source.config, source.tensor, "float32")
    tokenizer = Tokenizer(source.tokenizer_json, bos_token_id=config.bos_token_id, vocab_size=config.vocab_size)
    ids = tokenizer.encode(real_text()[: 6 * NUM_TOKENS])[:NUM_TOKENS]
    cos, sin = rope_cos_sin(jnp.arange(NUM_TOKENS), *rope_frequencies(config))
    found = {}

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0], (q, k, v)

    run = jax.jit(lambda layer, hidden: run_layer(config, "float32", layer, hidden, cos, sin, attend))
    hidden = embed(params, jnp.asarray(ids, jnp.int32))
    for index in range(max(layers) + 1):
        hidden, extra = run(params["layers"][index], hidden)
        if index in layers:
            found[index] = jax.tree.map(np.asarray, extra)
    return config, found


@pytest.mark.slow
def test_real_attention_is_kept():
    """At the threshold that docs/configuration.md recommends: mean over heads and queries of each layer."""
    config, layers = real_queries_and_keys((2, 12, 25))
    scale, group = config.head_dim**-0.5, config.num_q_heads // config.num_kv_heads
    num_tiles = NUM_TOKENS // PREFILL_TILE
    first = np.arange(num_tiles, dtype=np.int32) * PREFILL_TILE
    for q, k, v in layers.values():
        blocks = np.stack([k, v], axis=1).reshape(-1, BLOCK, 2, config.num_kv_heads, config.head_dim)
        pool = to_storage(jnp.asarray(blocks.transpose(0, 3, 2, 1, 4)), jnp.dtype("uint16"))
        table = np.arange(len(blocks), dtype=np.int32)[None]
        where = (table, np.zeros(num_tiles, np.int32), first, np.full(num_tiles, PREFILL_TILE, np.int32))
        kept = np.asarray(jax.jit(functools.partial(select_key_tiles, scale=scale, threshold=0.9))(q, pool, *where))
        mass = []
        for head in range(0, config.num_q_heads, 2):
            weights = causal_weights(q[:, head], k[:, head // group], scale)
            tiles = weights.reshape(num_tiles, PREFILL_TILE, num_tiles, PREFILL_TILE).sum(axis=3)
            mass.append((tiles * kept[:, head, None]).sum(axis=2).mean())
        assert np.mean(mass) >= 0.98
        assert kept.sum() < 0.9 * config.num_q_heads * num_tiles * (num_tiles + 1) / 2

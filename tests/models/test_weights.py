"""int8 weights: what is stored, what is served, what is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cpu_kernels import loader
from pallas_kernels.api import get_kernels
from sparseserve_jax import Engine, EngineConfig, Request, SamplingParams
from sparseserve_jax.checkpoint.open import open_checkpoint
from sparseserve_jax.models.llama import abstract_params, embed, unembed
from sparseserve_jax.models.weights import load_params
from tests.tiny_model import random_prompt, write_sharp_model

INT8 = EngineConfig(
    weight_dtype="int8", implementation="reference", block_size=16, sparse_budget_tokens=64, num_dense_layers=1,
    max_model_len=192, max_num_seqs=2, max_num_batched_tokens=256, compilation_cache_dir="",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_sharp_model(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def source(model):
    return open_checkpoint(model)


def dequantized(params):
    """The same parameters with every int8 matrix multiplied out."""
    is_matrix = lambda node: isinstance(node, dict) and "weight" in node  # noqa: E731
    return jax.tree.map(
        lambda node: node["weight"].astype(jnp.float32) * node["scale"][:, None] if is_matrix(node) else node,
        params, is_leaf=is_matrix,
    )  # fmt: skip


def test_parameters_are_as_announced(source):
    for weight_dtype in (None, "int8"):
        params = load_params(source.config, source.tensor, "bfloat16", weight_dtype)
        announced = abstract_params(source.config, "bfloat16", weight_dtype)
        assert jax.tree.structure(params) == jax.tree.structure(announced)
        for leaf, shape in zip(jax.tree.leaves(params), jax.tree.leaves(announced), strict=True):
            assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)


def test_every_row_is_within_half_a_step(source):
    params = dequantized(load_params(source.config, source.tensor, "bfloat16", "int8"))
    exact = load_params(source.config, source.tensor, "float32")
    for ours, theirs in (
        (params["embed_tokens"], exact["embed_tokens"]),
        (params["layers"][1]["down_proj"], exact["layers"][1]["down_proj"]["weight"]),
        (params["layers"][0]["qkv_proj"], exact["layers"][0]["qkv_proj"]["weight"]),
    ):
        step = np.abs(theirs).max(axis=1, keepdims=True) / 127
        assert (np.abs(np.asarray(ours) - theirs) <= 0.501 * step).all()


def test_embedding_and_logits_take_the_scales(source):
    params = load_params(source.config, source.tensor, "bfloat16", "int8")
    table = np.asarray(dequantized(params)["embed_tokens"])
    hidden = embed(params, jnp.asarray([3, 70]))
    np.testing.assert_array_equal(hidden, table[[3, 70]])
    logits = unembed(source.config, params, hidden, kernels=get_kernels("reference", "cpu"))
    x = np.asarray(hidden) / np.sqrt(np.mean(np.square(hidden), axis=1, keepdims=True)) * params["norm"]["scale"]
    np.testing.assert_allclose(logits, x @ table.T, rtol=2e-2, atol=2e-2 * np.abs(logits).max())


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_int8_weights_serve(model, implementation):
    if implementation == "cpu" and not loader.is_there():
        pytest.skip("no native kernels were built for this CPU")
    engine = Engine(model, dataclasses.replace(INT8, implementation=implementation))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    outputs = engine.generate([Request(prompt=random_prompt(n, n), sampling=params) for n in (130, 40)])
    assert all(len(output.token_ids) == 4 for output in outputs)
    assert any("of weights in int8" in line for line in engine.info.lines())
    assert (
        engine.info.weight_bytes < 0.6 * Engine(model, dataclasses.replace(INT8, weight_dtype=None)).info.weight_bytes
    )


def test_what_has_no_int8_weights_is_refused(model):
    with pytest.raises(ValueError, match="weight_dtype='int8' needs dtype='bfloat16'"):
        dataclasses.replace(INT8, dtype="float32")
    with pytest.raises(ValueError, match="weight_dtype='int4' is not supported"):
        dataclasses.replace(INT8, weight_dtype="int4")
    with pytest.raises(NotImplementedError, match="implementation='pallas' has no products with weight_dtype='int8'"):
        Engine(model, dataclasses.replace(INT8, implementation="pallas"))

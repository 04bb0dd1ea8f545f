"""Which library serves, and what is said when none can."""

import jax
import jax.numpy as jnp
import pytest

from cpu_kernels import loader, ops
from pallas_kernels import reference
from pallas_kernels.api import get_kernels

needs_library = pytest.mark.skipif(not loader.available(), reason="no native kernels were built for this CPU")


@pytest.fixture
def forced(monkeypatch):
    """Sets the variable as if the process had begun with it."""

    def force(value):
        monkeypatch.setenv(loader.VARIABLE, value)
        loader.in_force.cache_clear()

    yield force
    loader.in_force.cache_clear()


def test_off_means_plain_xla(forced):
    forced("off")
    assert not loader.is_there()
    assert get_kernels("auto", "cpu").name == "reference"
    assert loader.describe() == "none: native CPU kernels are switched off by SPARSESERVE_CPU_KERNELS=off; unset it"


def test_an_unknown_variant_is_refused_by_name(forced):
    forced("neon")
    with pytest.raises(ValueError, match=r"SPARSESERVE_CPU_KERNELS='neon' must be one of avx512bf16, .*, off"):
        loader.in_force()


def test_without_a_library_the_remedy_is_named(forced, monkeypatch, tmp_path):
    forced("")
    monkeypatch.setattr(loader, "_path", lambda variant: tmp_path / variant)
    assert loader.available() == ()
    assert get_kernels("auto", "cpu").name == "reference"
    with pytest.raises(NotImplementedError, match=r"no native CPU kernels in .*; install a C\+\+17 compiler and run"):
        loader.in_force()
    with pytest.raises(NotImplementedError, match="was not built; install"):
        loader.load.__wrapped__("avx2")


@needs_library
def test_the_best_variant_serves_unless_one_is_forced(forced):
    forced("")
    assert loader.in_force().variant == loader.available()[0]
    for variant in loader.available():
        forced(variant)
        assert loader.describe() == variant


@needs_library
def test_a_variant_that_the_cpu_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(loader, "_can_run", lambda shared: False)
    with pytest.raises(NotImplementedError, match="this CPU lacks instructions that the variant"):
        loader.load.__wrapped__(loader.VARIANTS[-1])


def test_native_kernels_are_for_cpus():
    with pytest.raises(NotImplementedError, match="implementation='cpu' runs on CPUs, not on 'gpu'"):
        get_kernels("cpu", "gpu")


@needs_library
def test_signatures_are_those_of_the_reference():
    import inspect

    for name in (
        "append_blocks", "append_tokens", "score_blocks", "select_blocks", "union_over_group", "match_slots",
        "decode_attention",
    ):  # fmt: skip
        ours, theirs = (inspect.signature(getattr(module, name)) for module in (ops, reference))
        shared = [parameter for parameter in ours.parameters.values() if parameter.name != "allow_amx"]
        assert str(ours.replace(parameters=shared)) == str(theirs), name


@needs_library
def test_bad_shapes_are_errors_that_say_what_is_expected():
    q, ids = jnp.zeros((2, 3, 32)), jnp.ones((2, 2, 4), jnp.int32)
    pool = jnp.zeros((5, 2, 2, 16, 32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="query heads are a multiple of KV heads"):
        ops.decode_attention(q, pool, ids, ids, None, scale=1.0).block_until_ready()

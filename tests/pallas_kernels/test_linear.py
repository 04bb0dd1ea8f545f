"""The linear operation of every implementation against NumPy in float64: sizes, dtypes, what is added, refusals."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cpu_kernels import linear as native
from cpu_kernels import loader
from pallas_kernels.api import get_kernels
from pallas_kernels.linear import linear as reference
from pallas_kernels.linear import quantize_rows
from tests.pallas_kernels.test_conformance import IMPLEMENTATIONS, NO_LIBRARY, PLATFORM

WITHOUT_AMX = "cpu without AMX"
all_implementations = pytest.mark.parametrize(
    "implementation", [*(i for i in IMPLEMENTATIONS if i != "pallas"), pytest.param(WITHOUT_AMX, marks=NO_LIBRARY)]
)
all_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
SIZES = (  # rows, in, out
    (0, 64, 32),
    (1, 96, 64),
    (3, 33, 18),  # no whole tile
    (16, 64, 48),
    (37, 70, 100),
    (300, 40, 66),  # with AMX more rows than are few
    (259, 1056, 544),  # more weights than are packed at a time
    (1850, 32, 608),  # results larger than an L2 cache
)
all_sizes = pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
# Products of bfloat16 are exact in float32; only sums differ, by their order. Gated results are bfloat16.
TOLERANCE = 1e-5
TOLERANCE_OF_BF16 = 2.0**-8


def operation(implementation):
    if implementation == WITHOUT_AMX:
        return functools.partial(native.linear, allow_amx=False)
    return get_kernels(implementation, PLATFORM).linear


@functools.cache
def jitted(implementation, gated):
    return jax.jit(functools.partial(operation(implementation), gated=gated))


class Case:
    """Arguments of one call and, in float64, what it gives."""

    def __init__(self, size, dtype, *, bias=False, residual=False, seed=0):
        rows, width, out = size
        rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.x = rng.standard_normal((rows, width)).astype(np.float32)
        self.weight = jnp.asarray(rng.standard_normal((out, width)), jnp.float32)
        self.scales = None
        if dtype == "int8":
            self.weight, self.scales = quantize_rows(self.weight)
        else:
            self.weight = self.weight.astype(dtype)
        self.bias = rng.standard_normal(out).astype(np.float32) if bias else None
        self.residual = rng.standard_normal((rows, out)).astype(np.float32) if residual else None

    def run(self, implementation, gated=False):
        optional = {"scales": self.scales, "bias": self.bias, "residual": self.residual}
        return np.asarray(jitted(implementation, gated)(self.x, self.weight, **optional))

    def expected(self, gated=False):
        x = self.x if self.dtype == "float32" else self.x.astype(ml_dtypes.bfloat16)
        out = x.astype(np.float64) @ np.asarray(self.weight).astype(np.float64).T
        out = out if self.scales is None else out * np.asarray(self.scales, np.float64)
        out = out if self.bias is None else out + self.bias
        if gated:
            gate, up = np.split(out, 2, axis=1)
            out = gate / (1.0 + np.exp(np.minimum(-gate, 700.0))) * up
        return out if self.residual is None else out + self.residual


def assert_close(actual, expected, tolerance=TOLERANCE):
    magnitude = np.sqrt(np.mean(expected**2)) if expected.size else 1.0
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance * magnitude)


@all_implementations
@all_dtypes
@all_sizes
def test_products(implementation, dtype, size):
    case = Case(size, dtype)
    out = case.run(implementation)
    assert out.dtype == np.float32
    assert_close(out, case.expected())


@all_implementations
@all_dtypes
@all_sizes
@pytest.mark.parametrize(("bias", "residual"), [(True, False), (True, True)])
def test_bias_and_residual(implementation, dtype, size, bias, residual):
    case = Case(size, dtype, bias=bias, residual=residual, seed=1)
    assert_close(case.run(implementation), case.expected())


@all_implementations
@all_dtypes
@all_sizes
@pytest.mark.parametrize("bias", [False, True])
def test_gated(implementation, dtype, size, bias):
    case = Case((*size[:2], 2 * size[2]), dtype, bias=bias, seed=2)
    out = case.run(implementation, gated=True)
    assert out.shape == (size[0], size[2])
    assert out.dtype == (np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
    assert_close(out, case.expected(gated=True), TOLERANCE if dtype == "float32" else TOLERANCE_OF_BF16)


@all_implementations
@pytest.mark.parametrize("rows", [8, 300])
def test_large_gates_saturate(implementation, rows):
    case = Case((rows, 64, 96), "bfloat16", seed=3)
    case.x *= 100.0
    assert_close(case.run(implementation, gated=True), case.expected(gated=True), TOLERANCE_OF_BF16)


@all_implementations
@all_dtypes
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [(5, 33, 34), (40, 64, 64), (290, 33, 34), (1850, 32, 1216)], ids=str)
def test_nan_stays_in_its_row(implementation, dtype, size, gated):
    case = Case(size, dtype, seed=4)
    expected = case.expected(gated)
    bad = np.zeros(size[0], bool)
    bad[[1, -1]] = True
    case.x[bad] = np.nan
    out = case.run(implementation, gated)
    assert np.isnan(out[bad].astype(np.float32)).all()
    tolerance = TOLERANCE_OF_BF16 if gated and dtype != "float32" else TOLERANCE
    assert_close(out[~bad], expected[~bad], tolerance)


@all_implementations
def test_activations_may_come_rounded(implementation):
    case = Case((4, 64, 32), "bfloat16", seed=5)
    out = case.run(implementation)
    case.x = case.x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(case.run(implementation), out)


@all_implementations
@all_dtypes
def test_the_comparison_has_teeth(implementation, dtype):
    case = Case((20, 64, 64), dtype, bias=True, residual=True, seed=6)
    expected = case.expected()
    assert_close(case.run(implementation), expected)
    for change in ("bias", "residual", "scales"):
        wrong = Case((20, 64, 64), dtype, bias=True, residual=True, seed=6)
        if getattr(wrong, change) is None:
            continue
        setattr(wrong, change, np.asarray(getattr(wrong, change)) * 1.001)
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_close(wrong.run(implementation), expected)
    gated = Case((20, 64, 64), dtype, seed=6)
    swapped = Case((20, 64, 64), dtype, seed=6)
    swapped.weight = jnp.roll(swapped.weight, 32, axis=0)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_close(swapped.run(implementation, gated=True), gated.expected(gated=True), TOLERANCE_OF_BF16)


def test_quantized_rows_are_within_half_a_step():
    weight = np.random.default_rng(7).standard_normal((5, 40)).astype(np.float32)
    weight[2] = 0.0
    steps, scales = map(np.asarray, quantize_rows(jnp.asarray(weight)))
    assert steps.dtype == np.int8 and np.abs(steps).max() == 127
    np.testing.assert_allclose(scales, np.abs(weight).max(axis=1) / 127, rtol=1e-6)
    assert (np.abs(steps * scales[:, None] - weight) <= 0.5001 * scales[:, None]).all()


@all_implementations
def test_refusals(implementation):
    linear = operation(implementation)
    x, weight = jnp.zeros((2, 8)), jnp.zeros((4, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="float16; supported: bfloat16, float32, int8"):
        linear(x, weight.astype(jnp.float16))
    with pytest.raises(ValueError, match="int8 weights have scales"):
        linear(x, weight.astype(jnp.int8))
    with pytest.raises(ValueError, match="int8 weights have scales"):
        linear(x, weight, scales=jnp.ones(4))
    with pytest.raises(ValueError, match="takes no residual"):
        linear(x, weight, gated=True, residual=jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match="two of equal size"):
        linear(x, weight[:3], gated=True)


@pytest.mark.skipif(not loader.is_there(), reason="no native kernels here")
def test_float32_goes_to_xla_bit_for_bit():
    """Exactness tests rely on it: full precision, and one order of sums."""
    case = Case((9, 70, 50), "float32", bias=True, residual=True, seed=8)
    optional = {"bias": case.bias, "residual": case.residual}
    expected = jax.jit(reference)(case.x, case.weight, **optional)
    np.testing.assert_array_equal(case.run("cpu"), expected)

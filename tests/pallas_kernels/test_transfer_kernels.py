"""FlashH2D and FlashD2H kernels in interpret mode: every bit of what is named arrives, nothing else is touched or read.

Expected pools come from plain NumPy loops. Pools hold random bits; where a transfer has no business to read they hold
NaN (all ones), which no random piece is.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.memory import host_sharding
from pallas_kernels import flash_d2h, flash_h2d
from pallas_kernels.pieces import warps_for_piece

DEVICE = jax.devices()[0]
NUM_HEADS, BLOCK_SIZE, HEAD_DIM = 2, 16, 32
NUM_SEQS, NUM_SELECTED = 2, 3
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "uint16": np.uint16}
all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
few_examples = settings(max_examples=4, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)


@functools.cache
def in_place(op):
    """`op` in interpret mode, as the engine calls it: jitted, its first pool donated."""
    return jax.jit(functools.partial(op, interpret=True), donate_argnums=0)


def run(op, pool, *arrays):
    """The resulting pool's bits; `pool` and other arrays that are already placed stay where they are."""
    ready = [a.astype(np.int32) if isinstance(a, np.ndarray) and a.dtype == np.int64 else a for a in arrays]
    return bits(in_place(op)(pool, *ready))


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def finite_values(rng, num_blocks, dtype):
    shape = (num_blocks, NUM_HEADS, 2, BLOCK_SIZE, HEAD_DIM)
    if dtype == "uint16":
        return rng.integers(0, 2**16 - 1, shape, np.uint16)
    return rng.normal(size=shape).astype(DTYPES[dtype])


def all_nan(values):
    return np.full_like(bits(values), np.iinfo(bits(values).dtype).max).view(values.dtype)


def on_device(values):
    """A copy that the device owns alone, so that it can be donated."""
    return jax.jit(jnp.copy)(values).block_until_ready()


def on_host(values):
    return jax.device_put(on_device(values), host_sharding(DEVICE)).block_until_ready()


def ids_by_head(rng, num_blocks, *shape):
    """Block ids `[shape[0], heads, *shape[1:]]`: none twice in a head, none null."""
    count = int(np.prod(shape))
    return np.stack([1 + rng.permutation(num_blocks - 1)[:count].reshape(shape) for _ in range(NUM_HEADS)], axis=1)


# --- FlashH2D --------------------------------------------------------------------------------------------------------


def flash_h2d_case(rng, dtype, share_missing):
    """Host values only where something is missing; the ids of what is not missing point outside the pools."""
    shape = (NUM_SEQS, NUM_HEADS, NUM_SELECTED)
    device_values, host_values = finite_values(rng, 9, dtype), finite_values(rng, 11, dtype)
    slots, blocks = ids_by_head(rng, 9, NUM_SEQS, NUM_SELECTED), ids_by_head(rng, 11, NUM_SEQS, NUM_SELECTED)
    missing = rng.random(shape) < share_missing
    source, expected = all_nan(host_values), device_values.copy()
    for seq, head, index in np.argwhere(missing):
        slot, block = slots[seq, head, index], blocks[seq, head, index]
        source[block, head] = host_values[block, head]
        expected[slot, head] = host_values[block, head]
    slots[~missing], blocks[~missing] = rng.choice([-1, 10**6], (2, int((~missing).sum())))
    return device_values, source, slots, blocks, missing, bits(expected)


@all_dtypes
@few_examples
@given(seed=seeds, share_missing=st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_flash_h2d(dtype, seed, share_missing):
    rng = np.random.default_rng(seed)
    device_values, host_values, *entries, expected = flash_h2d_case(rng, dtype, share_missing)
    host_pool = on_host(host_values)
    out = run(flash_h2d.flash_h2d, on_device(device_values), host_pool, *entries)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(bits(host_pool), bits(host_values))


@all_dtypes
@pytest.mark.parametrize("share_missing", [0.0, 1.0])
def test_flash_h2d_of_nothing_and_of_everything(dtype, share_missing):
    rng = np.random.default_rng(0)
    device_values, host_values, *entries, expected = flash_h2d_case(rng, dtype, share_missing)
    out = run(flash_h2d.flash_h2d, on_device(device_values), on_host(host_values), *entries)
    np.testing.assert_array_equal(out, expected)
    changed = (out != bits(device_values)).any(axis=(2, 3, 4)).sum()
    assert changed == share_missing * NUM_SEQS * NUM_HEADS * NUM_SELECTED


@all_dtypes
@pytest.mark.parametrize("axis", [1, 2], ids=["heads", "k_and_v"])
def test_flash_h2d_tells_heads_and_halves_apart(dtype, axis):
    rng = np.random.default_rng(0)
    device_values, host_values, *entries, expected = flash_h2d_case(rng, dtype, 1.0)
    swapped = on_host(np.flip(host_values, axis))
    out = run(flash_h2d.flash_h2d, on_device(device_values), swapped, *entries)
    assert not np.array_equal(out, expected)


@all_dtypes
@few_examples
@given(seed=seeds, num_padding=st.integers(0, 4))
def test_load_blocks(dtype, seed, num_padding):
    rng = np.random.default_rng(seed)
    device_values, host_values = finite_values(rng, 7, dtype), finite_values(rng, 9, dtype)
    slots, blocks = 1 + rng.permutation(6)[:4], 1 + rng.permutation(8)[:4]
    slots[4 - num_padding :] = blocks[4 - num_padding :] = 0
    source, expected = all_nan(host_values), device_values.copy()
    for slot, block in zip(slots, blocks, strict=True):
        if block:  # the null block is NaN
            source[block] = host_values[block]
            expected[slot] = host_values[block]
    host_pool = on_host(source)
    out = run(flash_h2d.load_blocks, on_device(device_values), host_pool, slots, blocks)
    np.testing.assert_array_equal(out[1:], bits(expected)[1:])
    np.testing.assert_array_equal(bits(host_pool), bits(source))
    if num_padding < 4:
        swapped = on_host(source[:, :, ::-1])
        out = run(flash_h2d.load_blocks, on_device(device_values), swapped, slots, blocks)
        assert not np.array_equal(out[1:], bits(expected)[1:])


# --- FlashD2H --------------------------------------------------------------------------------------------------------


@all_dtypes
@few_examples
@given(seed=seeds, num_padding=st.integers(0, 4))
def test_save_blocks(dtype, seed, num_padding):
    rng = np.random.default_rng(seed)
    host_values, blocks = finite_values(rng, 9, dtype), finite_values(rng, 4, dtype)
    ids = 1 + rng.permutation(8)[:4]
    ids[4 - num_padding :] = 0
    blocks[ids == 0] = all_nan(blocks)[ids == 0]
    expected = host_values.copy()
    for row, block in enumerate(ids):
        expected[block] = blocks[row]
    out = run(flash_d2h.save_blocks, on_host(host_values), on_device(blocks), ids)
    np.testing.assert_array_equal(out[1:], bits(expected)[1:])
    if num_padding < 4:
        out = run(flash_d2h.save_blocks, on_host(host_values), on_device(blocks[:, :, ::-1]), ids)
        assert not np.array_equal(out[1:], bits(expected)[1:])


@all_dtypes
@few_examples
@given(seed=seeds, num_padding=st.integers(0, 4))
def test_save_pieces_takes_every_head_from_its_own_slot(dtype, seed, num_padding):
    rng = np.random.default_rng(seed)
    host_values, device_values = finite_values(rng, 9, dtype), finite_values(rng, 7, dtype)
    slots, ids = ids_by_head(rng, 7, 4), 1 + rng.permutation(8)[:4]
    slots[4 - num_padding :], ids[4 - num_padding :] = 0, 0
    source, expected = all_nan(device_values), host_values.copy()
    for row in range(4 - num_padding):
        for head in range(NUM_HEADS):
            source[slots[row, head], head] = device_values[slots[row, head], head]
            expected[ids[row], head] = device_values[slots[row, head], head]
    device_pool = on_device(source)
    out = run(flash_d2h.save_pieces, on_host(host_values), device_pool, slots, ids)
    np.testing.assert_array_equal(out[1:], bits(expected)[1:])
    np.testing.assert_array_equal(bits(device_pool), bits(source))
    if num_padding < 4:
        out = run(flash_d2h.save_pieces, on_host(host_values), on_device(source[:, :, ::-1]), slots, ids)
        assert not np.array_equal(out[1:], bits(expected)[1:])


def test_what_is_saved_comes_back():
    rng = np.random.default_rng(0)
    values = finite_values(rng, 9, "bfloat16")
    slots, ids = np.array([[3, 5], [8, 1]], np.int32), np.array([7, 4], np.int32)
    host_pool = on_host(np.zeros((10, *values.shape[1:]), values.dtype))
    host_pool = in_place(flash_d2h.save_pieces)(host_pool, on_device(values), slots, ids)
    assert host_pool.sharding.memory_kind == "pinned_host"
    entries = (slots.T[None], np.broadcast_to(ids[None, None], (1, NUM_HEADS, 2)), np.ones((1, NUM_HEADS, 2), bool))
    out = run(flash_h2d.flash_h2d, on_device(np.zeros_like(values)), host_pool, *entries)
    for head in range(NUM_HEADS):
        np.testing.assert_array_equal(out[slots[:, head], head], bits(values)[slots[:, head], head])


# --- what is supported -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_size", "head_dim", "dtype", "message"),
    [
        (8, 32, "float32", "block_size 8; supported: 16, 32, 64"),
        (16, 48, "float32", "head_dim 48; supported: 16, 32, 64, 128, 256"),
        (16, 32, "int8", "dtype int8; supported: bfloat16, float32"),
    ],
)
def test_other_shapes_are_refused_by_name(block_size, head_dim, dtype, message):
    pool = jnp.zeros((3, NUM_HEADS, 2, block_size, head_dim), dtype)
    row, by_head = jnp.zeros(2, jnp.int32), jnp.zeros((2, NUM_HEADS), jnp.int32)
    entries = jnp.zeros((1, NUM_HEADS, 2), jnp.int32)
    for op, *args in (
        (flash_h2d.flash_h2d, pool, pool, entries, entries, entries == 0),
        (flash_h2d.load_blocks, pool, pool, row, row),
        (flash_d2h.save_blocks, pool, pool[:2], row),
        (flash_d2h.save_pieces, pool, pool, by_head, row),
    ):
        with pytest.raises(NotImplementedError, match=f"{op.__name__}: no Pallas kernel for {message}"):
            op(*args, interpret=True)


def test_a_thread_moves_eight_vectors():
    """Unless the piece is smaller than a warp's, or larger than sixteen warps'."""
    bfloat16, float32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
    assert warps_for_piece((2, 32, 128), bfloat16) == 4
    assert warps_for_piece((2, 16, 64), bfloat16) == 1
    assert warps_for_piece((2, 16, 16), bfloat16) == 1
    assert warps_for_piece((2, 64, 128), float32) == 16
    assert warps_for_piece((2, 64, 256), float32) == 16

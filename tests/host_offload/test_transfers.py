"""Between the tiers every bit arrives, nothing else is touched, and pools stay where they are."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.flash_d2h import save_blocks, save_pieces
from host_offload.flash_h2d import CHUNK, flash_h2d, load_blocks
from host_offload.memory import allocate_host_pools, host_sharding, physical_memory_bytes, to_device

DEVICE = jax.devices()[0]
NUM_HEADS, BLOCK_SIZE, HEAD_DIM = 2, 16, 32
NUM_SEQS, NUM_SELECTED = 4, 13
NUM_PIECES = NUM_SEQS * NUM_HEADS * NUM_SELECTED
NUM_BLOCKS = NUM_SEQS * NUM_SELECTED + 5
all_dtypes = pytest.mark.parametrize("dtype", ["uint16", "float32"])

flash_h2d_in_place = jax.jit(flash_h2d, donate_argnums=0)
load_blocks_in_place = jax.jit(load_blocks, donate_argnums=0)
save_blocks_in_place = jax.jit(save_blocks, donate_argnums=0)
save_pieces_in_place = jax.jit(save_pieces, donate_argnums=0)


def random_bits(rng, num_blocks, dtype):
    """A pool of any bits at all: NaN payloads and denormals too."""
    shape = (num_blocks, NUM_HEADS, 2, BLOCK_SIZE, HEAD_DIM)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)


def on_device(values):
    """A copy that the device owns alone, so that it can be donated."""
    return jax.jit(jnp.copy)(values).block_until_ready()


def on_host(values):
    return jax.device_put(on_device(values), host_sharding(DEVICE)).block_until_ready()


def fake_device(platform):
    device = mock.Mock(spec=jax.Device)
    device.platform = platform
    return device


def bits(array):
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def run_in_place(function, pool, *args):
    """The result, after checking that it took the place of `pool`."""
    address, kind = pool.unsafe_buffer_pointer(), pool.sharding.memory_kind
    out = function(pool, *args).block_until_ready()
    assert pool.is_deleted()
    assert out.unsafe_buffer_pointer() == address
    assert out.sharding.memory_kind == kind
    return out


def pieces_of_all_sequences(rng):
    """Slots and blocks of every selected entry: no slot twice in a head, none of them null."""
    shape = (NUM_SEQS, NUM_SELECTED)
    slots, blocks = (
        np.stack([1 + rng.permutation(NUM_BLOCKS - 1)[: np.prod(shape)].reshape(shape) for _ in range(NUM_HEADS)], 1)
        for _ in range(2)
    )
    return slots.astype(np.int32), blocks.astype(np.int32)


# --- FlashH2D --------------------------------------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, NUM_PIECES])
def test_flash_h2d_moves_what_is_missing_and_nothing_else(dtype, count):
    rng = np.random.default_rng(count)
    device_values, host_values = random_bits(rng, NUM_BLOCKS, dtype), random_bits(rng, NUM_BLOCKS + 3, dtype)
    slots, blocks = pieces_of_all_sequences(rng)
    missing = (rng.permutation(NUM_PIECES) < count).reshape(slots.shape)
    expected = bits(device_values).copy()
    for seq, head, index in np.argwhere(missing):
        expected[slots[seq, head, index], head] = bits(host_values)[blocks[seq, head, index], head]
    slots[~missing] = rng.choice([-1, 10**6], (~missing).sum())  # not to be looked at
    blocks[~missing] = rng.choice([-1, 10**6], (~missing).sum())
    host_pool = on_host(host_values)
    out = run_in_place(flash_h2d_in_place, on_device(device_values), host_pool, slots, blocks, missing)
    np.testing.assert_array_equal(bits(out)[1:], expected[1:])  # slot 0 is null
    assert not host_pool.is_deleted()
    np.testing.assert_array_equal(bits(host_pool), bits(host_values))


def test_flash_h2d_with_less_than_a_chunk_in_all():
    rng = np.random.default_rng(0)
    device_values, host_values = random_bits(rng, 4, "float32"), random_bits(rng, 4, "float32")
    slots, blocks = np.array([[[2], [3]]], np.int32), np.array([[[1], [3]]], np.int32)
    args = (on_host(host_values), slots, blocks, np.array([[[True], [True]]]))
    out = bits(run_in_place(flash_h2d_in_place, on_device(device_values), *args))
    expected = bits(device_values).copy()
    expected[2, 0], expected[3, 1] = bits(host_values)[1, 0], bits(host_values)[3, 1]
    np.testing.assert_array_equal(out[1:], expected[1:])


@all_dtypes
@pytest.mark.parametrize("num_padding", [0, 3, 6])
def test_load_blocks(dtype, num_padding):
    rng = np.random.default_rng(num_padding)
    device_values, host_values = random_bits(rng, 12, dtype), random_bits(rng, 20, dtype)
    slots, blocks = 1 + rng.permutation(11)[:6], 1 + rng.permutation(19)[:6]
    slots[6 - num_padding :] = blocks[6 - num_padding :] = 0
    host_pool = on_host(host_values)
    ids = (slots.astype(np.int32), blocks.astype(np.int32))
    out = run_in_place(load_blocks_in_place, on_device(device_values), host_pool, *ids)
    expected = bits(device_values).copy()
    expected[slots] = bits(host_values)[blocks]
    np.testing.assert_array_equal(bits(out)[1:], expected[1:])
    np.testing.assert_array_equal(bits(host_pool), bits(host_values))


# --- FlashD2H --------------------------------------------------------------------------------------------------------


@all_dtypes
@pytest.mark.parametrize("num_padding", [0, 2, 5])
def test_save_blocks(dtype, num_padding):
    rng = np.random.default_rng(num_padding)
    host_values, blocks = random_bits(rng, 20, dtype), random_bits(rng, 5, dtype)
    ids = 1 + rng.permutation(19)[:5]
    ids[5 - num_padding :] = 0
    out = run_in_place(save_blocks_in_place, on_host(host_values), on_device(blocks), ids.astype(np.int32))
    expected = bits(host_values).copy()
    expected[ids] = bits(blocks)
    assert out.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(bits(out)[1:], expected[1:])


@all_dtypes
def test_save_pieces_gathers_heads_from_their_own_slots(dtype):
    rng = np.random.default_rng(0)
    host_values, device_values = random_bits(rng, 20, dtype), random_bits(rng, 9, dtype)
    slots = np.stack([1 + rng.permutation(8)[:4] for _ in range(NUM_HEADS)], axis=1)
    ids = 1 + rng.permutation(19)[:4]
    slots[3], ids[3] = 0, 0  # padding
    device_pool = on_device(device_values)
    args = (device_pool, slots.astype(np.int32), ids.astype(np.int32))
    out = run_in_place(save_pieces_in_place, on_host(host_values), *args)
    expected = bits(host_values).copy()
    for row in range(4):
        for head in range(NUM_HEADS):
            expected[ids[row], head] = bits(device_values)[slots[row, head], head]
    assert out.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(bits(out)[1:], expected[1:])
    np.testing.assert_array_equal(bits(device_pool), bits(device_values))


def test_what_is_saved_comes_back():
    rng = np.random.default_rng(0)
    values = random_bits(rng, 9, "uint16")
    slots, ids = np.array([[3, 5], [8, 1]], np.int32), np.array([7, 4], np.int32)
    (host_pool,) = allocate_host_pools(1, (10, *values.shape[1:]), jnp.dtype(jnp.uint16), DEVICE)
    host_pool = run_in_place(save_pieces_in_place, host_pool, on_device(values), slots, ids)
    empty = on_device(np.zeros_like(values))
    blocks = np.broadcast_to(ids[None, None], (1, NUM_HEADS, 2))
    out = bits(
        run_in_place(flash_h2d_in_place, empty, host_pool, slots.T[None], blocks, np.ones((1, NUM_HEADS, 2), bool))
    )
    for head in range(NUM_HEADS):
        np.testing.assert_array_equal(out[slots[:, head], head], values[slots[:, head], head])


# --- memory ----------------------------------------------------------------------------------------------------------


@all_dtypes
def test_allocate_host_pools(dtype):
    pools = allocate_host_pools(3, (4, 2, 2, 16, 32), jnp.dtype(dtype), DEVICE)
    assert len(pools) == 3
    assert len({pool.block_until_ready().unsafe_buffer_pointer() for pool in pools}) == 3
    for pool in pools:
        assert (pool.shape, pool.dtype) == ((4, 2, 2, 16, 32), jnp.dtype(dtype))
        assert pool.sharding.memory_kind == "pinned_host"
        assert not np.asarray(pool).any()


def test_a_backend_without_pinned_memory_is_told_what_to_do():
    device = fake_device(platform="tpu")
    device.addressable_memories.return_value = [mock.Mock(kind="device"), mock.Mock(kind="unpinned_host")]
    with pytest.raises(
        RuntimeError, match=r"'pinned_host', but tpu offers \['device', 'unpinned_host'\]; use kv_tiers"
    ):
        host_sharding(device)
    with pytest.raises(RuntimeError, match="kv_tiers='unified'"):
        allocate_host_pools(1, (1,), jnp.dtype(jnp.uint16), device)


def test_to_device_keeps_order_values_and_types():
    arrays = [np.arange(5, dtype=np.int32), np.array([True, False]), np.int32(7), np.zeros((0, 3), np.float32)]
    moved = to_device(arrays)
    assert [a.dtype for a in moved] == [np.asarray(a).dtype for a in arrays]
    for there, here in zip(moved, arrays, strict=True):
        np.testing.assert_array_equal(there, here)
        assert there.sharding.memory_kind == DEVICE.default_memory().kind


def test_physical_memory_bytes():
    def gpu(stats):
        device = fake_device(platform="gpu")
        device.memory_stats.return_value = stats
        return device

    device, host = physical_memory_bytes(gpu({"bytes_limit": 1000, "bytes_in_use": 300}))
    assert device == 700 < host
    assert physical_memory_bytes(gpu({"bytes_limit": 1000}))[0] == 1000
    for unknown in (fake_device(platform="cpu"), gpu(None), gpu({})):
        device, host = physical_memory_bytes(unknown)
        assert device == host > 0

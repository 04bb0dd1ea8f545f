"""Native transfers: host pools are read and written where they lie, in pinned host memory; nothing else is touched."""

import jax
import numpy as np
import pytest

from cpu_kernels import loader, ops
from tests.host_offload.test_transfers import (
    NUM_BLOCKS,
    NUM_HEADS,
    bits,
    on_device,
    on_host,
    random_bits,
    run_in_place,
)

if not loader.is_there():
    pytest.skip("no native kernels were built for this CPU", allow_module_level=True)

all_dtypes = pytest.mark.parametrize("dtype", ["uint16", "float32"])
flash_h2d = jax.jit(ops.flash_h2d, donate_argnums=0)
load_blocks = jax.jit(ops.load_blocks, donate_argnums=0)
save_blocks = jax.jit(ops.save_blocks, donate_argnums=0)
save_pieces = jax.jit(ops.save_pieces, donate_argnums=0)


def ids_by_head(rng, *shape):
    """`[shape[0], heads, *shape[1:]]`: none twice in a head, none null."""
    count = int(np.prod(shape))
    ids = [1 + rng.permutation(NUM_BLOCKS - 1)[:count].reshape(shape) for _ in range(NUM_HEADS)]
    return np.stack(ids, axis=1).astype(np.int32)


@all_dtypes
@pytest.mark.parametrize("share_missing", [0.0, 0.3, 1.0])
def test_flash_h2d(dtype, share_missing):
    rng = np.random.default_rng(0)
    device_values, host_values = random_bits(rng, NUM_BLOCKS, dtype), random_bits(rng, NUM_BLOCKS, dtype)
    slots, blocks = ids_by_head(rng, 4, 7), ids_by_head(rng, 4, 7)
    missing = rng.random(slots.shape) < share_missing
    slots[~missing], blocks[~missing] = rng.choice([-1, 10**6], (2, int((~missing).sum())))
    expected = bits(device_values).copy()
    for seq, head, index in np.argwhere(missing):
        expected[slots[seq, head, index], head] = bits(host_values)[blocks[seq, head, index], head]
    host_pool = on_host(host_values)
    out = run_in_place(flash_h2d, on_device(device_values), host_pool, slots, blocks, missing)
    np.testing.assert_array_equal(bits(out), expected)
    np.testing.assert_array_equal(bits(host_pool), bits(host_values))


@all_dtypes
def test_load_blocks(dtype):
    rng = np.random.default_rng(0)
    device_values, host_values = random_bits(rng, 9, dtype), random_bits(rng, 12, dtype)
    slots, blocks = np.array([3, 1, 0, 8], np.int32), np.array([11, 2, 0, 5], np.int32)
    out = run_in_place(load_blocks, on_device(device_values), on_host(host_values), slots, blocks)
    expected = bits(device_values).copy()
    expected[[3, 1, 8]] = bits(host_values)[[11, 2, 5]]
    np.testing.assert_array_equal(bits(out), expected)


@all_dtypes
def test_save_blocks(dtype):
    rng = np.random.default_rng(0)
    host_values, blocks = random_bits(rng, 9, dtype), random_bits(rng, 3, dtype)
    ids = np.array([4, 0, 7], np.int32)
    out = run_in_place(save_blocks, on_host(host_values), on_device(blocks), ids)
    expected = bits(host_values).copy()
    expected[[4, 7]] = bits(blocks)[[0, 2]]
    np.testing.assert_array_equal(bits(out), expected)


@all_dtypes
def test_save_pieces(dtype):
    rng = np.random.default_rng(0)
    host_values, device_values = random_bits(rng, 9, dtype), random_bits(rng, NUM_BLOCKS, dtype)
    slots, ids = ids_by_head(rng, 3), np.array([4, 0, 7], np.int32)
    device_pool = on_device(device_values)
    out = run_in_place(save_pieces, on_host(host_values), device_pool, slots, ids)
    expected = bits(host_values).copy()
    for index in (0, 2):
        for head in range(NUM_HEADS):
            expected[ids[index], head] = bits(device_values)[slots[index, head], head]
    np.testing.assert_array_equal(bits(out), expected)
    np.testing.assert_array_equal(bits(device_pool), bits(device_values))


def test_no_host_pool_is_copied():
    """A whole pool in host memory is an operand of the call as it is: no temporary memory at all."""
    pool, host = on_device(random_bits(np.random.default_rng(0), 9, "uint16")), None
    host = on_host(np.asarray(pool))
    ids = np.ones((1, NUM_HEADS, 1), np.int32)
    compiled = flash_h2d.lower(pool, host, ids, ids, np.ones(ids.shape, bool)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes


def test_an_id_outside_the_pool_is_an_error():
    pool = on_device(random_bits(np.random.default_rng(0), 9, "uint16"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a block id lies outside its pool"):
        load_blocks(
            pool, on_host(np.asarray(pool)), np.array([9], np.int32), np.array([1], np.int32)
        ).block_until_ready()

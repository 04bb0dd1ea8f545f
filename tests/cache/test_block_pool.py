"""Ids never leave twice, and never come back twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseserve_jax.cache.block_pool import BlockPool, OutOfBlocksError


def test_a_fresh_pool_counts_up_from_one():
    pool = BlockPool(5, "blocks")
    assert pool.allocate(2) == (1, 2)
    assert pool.allocate(3) == (3, 4, 5)
    assert (pool.num_free, pool.num_used) == (0, 5)


def test_last_freed_first_reused():
    pool = BlockPool(4, "blocks")
    first = pool.allocate(3)
    pool.free(first[:2])
    assert pool.allocate(3) == (1, 2, 4)


def test_nothing_for_nothing():
    pool = BlockPool(0, "device slots")
    assert pool.allocate(0) == ()
    pool.free(())
    with pytest.raises(OutOfBlocksError, match="asked for 1 device slots with 0 free of 0"):
        pool.allocate(1)


def test_out_of_blocks_names_asked_free_and_total_and_takes_nothing():
    pool = BlockPool(8, "host blocks")
    pool.allocate(5)
    with pytest.raises(OutOfBlocksError, match="asked for 4 host blocks with 3 free of 8 in all"):
        pool.allocate(4)
    assert pool.num_free == 3


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((0,), "0 is not one of the blocks"),
        ((9,), "9 is not one of the blocks"),
        ((-1,), "-1 is not one of the blocks"),
        ((7,), "double free: 7"),
        ((1, 1), "named twice"),
        ((1, 7), "double free: 7"),
    ],
)
def test_bad_frees_are_errors_that_free_nothing(ids, message):
    pool = BlockPool(8, "blocks")
    pool.allocate(4)
    with pytest.raises(ValueError, match=message):
        pool.free(ids)
    assert pool.num_used == 4
    pool.free((1, 2, 3, 4))
    assert pool.num_free == 8


def test_bad_sizes_are_errors():
    with pytest.raises(ValueError, match="num_blocks=-1"):
        BlockPool(-1, "blocks")
    with pytest.raises(ValueError, match="cannot allocate -1"):
        BlockPool(1, "blocks").allocate(-1)


@given(st.lists(st.integers(0, 9), max_size=60), st.randoms(use_true_random=False))
def test_free_and_used_always_add_up(sizes, rng):
    pool, held = BlockPool(20, "blocks"), []
    for size in sizes:
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.randrange(len(held))))
        elif size <= pool.num_free:
            held.append(pool.allocate(size))
        out = [i for ids in held for i in ids]
        assert len(set(out)) == len(out) == pool.num_used
        assert all(1 <= i <= 20 for i in out)
        assert pool.num_free + pool.num_used == 20

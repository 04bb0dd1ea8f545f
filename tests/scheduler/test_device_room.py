"""Who gets which slots, and who makes room."""

import pytest

from sparseserve_jax.scheduler.batch_control import Share
from sparseserve_jax.scheduler.device_room import DeviceRoom


def share(request_id, slots, dense=0):
    return Share(request_id=request_id, slots=slots, dense_blocks=dense)


def by_id(grants):
    return {g.request_id: (g.slot_ids, g.dense_block_ids) for g in grants}


def test_new_grants():
    parks, grants = DeviceRoom(10, 5).place([share("a", 3, 2), share("b", 2, 1)], [])
    assert parks == []
    assert by_id(grants) == {"a": ((1, 2, 3), (1, 2)), "b": ((4, 5), (3,))}


def test_only_changes_are_granted_and_what_is_held_stays_in_place():
    room = DeviceRoom(10, 5)
    room.place([share("a", 3, 1), share("b", 2, 1)], [])
    assert room.place([share("a", 3, 1), share("b", 2, 1)], []) == ([], [])
    parks, grants = room.place([share("a", 5, 1), share("b", 2, 2)], [])
    assert (parks, by_id(grants)) == ([], {"a": ((1, 2, 3, 6, 7), (1,)), "b": ((4, 5), (2, 3))})


def test_a_surplus_is_kept_until_somebody_needs_it():
    room = DeviceRoom(10, 0)
    room.place([share("a", 6), share("b", 4)], [])
    assert room.place([share("a", 2), share("b", 2)], []) == ([], [])
    parks, grants = room.place([share("a", 2), share("b", 2), share("c", 3)], [])
    assert parks == []
    assert [g.request_id for g in grants] == ["b", "a", "c"]  # cuts first, the last come first
    assert {r: slots for r, (slots, _) in by_id(grants).items()} == {
        "a": (1, 2, 3, 4, 5), "b": (7, 8), "c": (6, 9, 10),
    }  # fmt: skip


def test_holders_that_do_not_decode_keep_their_room_while_they_can():
    room = DeviceRoom(10, 0)
    room.place([share("a", 4), share("b", 4)], [])
    assert room.place([share("a", 6)], ["b"])[0] == []
    parks, grants = room.place([share("a", 7)], ["b"])
    assert (parks, [g.request_id for g in grants]) == (["b"], ["a"])
    assert room.slots.num_free == 3


def test_the_last_come_is_parked_first_and_nobody_more_than_needed():
    room = DeviceRoom(12, 0)
    room.place([share(r, 3) for r in "abcd"], [])
    parks, _ = room.place([share("a", 8)], ["b", "c", "d", "never held"])
    assert parks == ["d", "c"]


def test_dense_blocks_can_be_the_reason_to_park():
    room = DeviceRoom(12, 6)
    room.place([share("a", 2, 3), share("b", 2, 3)], [])
    parks, grants = room.place([share("a", 2, 4)], ["b"])
    assert (parks, len(grants[0].dense_block_ids)) == (["b"], 4)


def test_one_grant_also_for_who_loses_slots_and_gains_dense_blocks():
    room = DeviceRoom(6, 6)
    room.place([share("a", 6, 1)], [])
    _, grants = room.place([share("a", 3, 2), share("b", 3, 1)], [])
    assert by_id(grants) == {"a": ((1, 2, 3), (1, 2)), "b": ((4, 5, 6), (3,))}
    assert len(grants) == 2


def test_without_sparse_layers_a_grant_has_dense_blocks_only():
    _, grants = DeviceRoom(0, 4).place([share("a", 0, 2)], [])
    assert by_id(grants) == {"a": ((), (1, 2))}


def test_release_frees_everything_once():
    room = DeviceRoom(6, 6)
    room.place([share("a", 6, 6)], [])
    room.release("a")
    room.release("a")
    assert (room.slots.num_used, room.dense_blocks.num_used) == (0, 0)


def test_a_batch_that_does_not_fit_is_a_bug():
    with pytest.raises(AssertionError, match="does not fit"):
        DeviceRoom(3, 0).place([share("a", 4)], [])

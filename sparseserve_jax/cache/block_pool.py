"""Block ids in and out, with every misuse an error."""

from __future__ import annotations

from collections.abc import Sequence


class OutOfBlocksError(ValueError):
    """A pool has fewer free ids than were asked for."""


class BlockPool:
    """Hands out the ids 1..num_blocks; 0 is the null block and never leaves.

    Last freed, first reused; a fresh pool counts up from 1. Every call takes time in the number of ids it names.
    Always `num_free + num_used == num_blocks`.

    Args:
        num_blocks: ids in all, 0 for a pool that only serves requests for nothing.
        name: what the ids stand for, for error messages ("host blocks").
    """

    def __init__(self, num_blocks: int, name: str) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks} of the pool of {name} must be at least 0")
        self.num_blocks, self.name = num_blocks, name
        self._free = list(range(num_blocks, 0, -1))
        self._is_used = bytearray(num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Ids that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Ids that are out."""
        return self.num_blocks - len(self._free)

    def allocate(self, n: int) -> tuple[int, ...]:
        """Takes `n` ids out of the pool; the caller owns them until `free`.

        Raises:
            OutOfBlocksError: fewer than `n` are free; nothing was taken.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} {self.name}; ask for 0 or more")
        if n > len(self._free):
            raise OutOfBlocksError(f"asked for {n} {self.name} with {len(self._free)} free of {self.num_blocks} in all")
        if not n:
            return ()
        taken = tuple(self._free[: -n - 1 : -1])
        del self._free[-n:]
        for block_id in taken:
            self._is_used[block_id] = 1
        return taken

    def free(self, ids: Sequence[int]) -> None:
        """Gives ids back.

        Raises:
            ValueError: an id is unknown, not allocated, or named twice; nothing was freed.
        """
        for block_id in ids:
            if not 1 <= block_id <= self.num_blocks:
                raise ValueError(f"{block_id} is not one of the {self.name} (1 to {self.num_blocks})")
            if not self._is_used[block_id]:
                raise ValueError(f"double free: {block_id} of the {self.name} is not allocated")
        if len(set(ids)) != len(ids):
            raise ValueError(f"double free: an id of the {self.name} is named twice in one call")
        for block_id in ids:
            self._is_used[block_id] = 0
        self._free.extend(reversed(ids))

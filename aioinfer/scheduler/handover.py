"""What a server that has computed a prompt tells the server that goes on with it."""

from __future__ import annotations

import msgspec


class Handover(msgspec.Struct, frozen=True):
    """The blocks of a prompt that a server has computed for another one.

    Attributes:
        address: `HOST:PORT` at which the first rank of its first engine serves blocks.
        first_rank: the number of the first rank of the engine that has them; the ranks' ports
            follow each other.
        num_ranks: of that engine.
        held: of each group, the entries of its block table that it has, as pairs of the first entry
            and the one behind the last.
    """

    address: str
    first_rank: int
    num_ranks: int
    held: list[list[tuple[int, int]]]

    @property
    def num_blocks(self) -> int:
        """The blocks of all groups."""
        return sum(end - first for ranges in self.held for first, end in ranges)

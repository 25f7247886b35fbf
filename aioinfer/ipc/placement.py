"""The place of a worker's rank: in the world of all ranks of an engine, in its groups, on its host.

`place_on_hosts` makes a `RankSpec` for each worker of an engine, for the executors that start them.
It is sent to the worker, and its process joins the others by it (`layers.parallel.ProcessGroups`).
Imports no torch.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

#: Process groups that there may be: tensor, data, expert and pipeline parallel ranks.
GROUP_NAMES = ("tp", "dp", "ep", "pp")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank of the world.

    The world is a grid with an axis for each kind of group. Ranks are numbered along the last axis
    first: with `groups = (("dp", 2), ("tp", 2))` ranks 0 and 1 are one tensor-parallel group, 2 and
    3 the other, and 0 and 2 are data-parallel to each other.

    Attributes:
        rank: this rank's number in the world.
        world_size: the number of ranks, on all hosts.
        local_rank: its number among the ranks of its host, which is also the number of its GPU.
        master_address, master_port: of the `TCPStore` through which ranks on several hosts find
            each other. Ranks of one host use a `RendezvousFile`: a loopback address without a port
            stands for that host.
        groups: (name, size) of each axis; names are of `GROUP_NAMES`, and the product of the sizes
            is `world_size`.
        owns_devices: whether the GPUs that the process sees belong to its host's ranks alone, as a
            cluster's scheduler gives them out; else they are counted over all engines.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    groups: tuple[tuple[str, int], ...] = ()
    owns_devices: bool = False

    def __post_init__(self) -> None:
        names = [name for name, _ in self.groups]
        if len(set(names)) < len(names) or not set(names) <= set(GROUP_NAMES):
            raise ValueError(f"process groups are some of {GROUP_NAMES}, not {names}")
        if math.prod(size for _, size in self.groups) != self.world_size:
            raise ValueError(f"{self.groups} do not make a world of {self.world_size} ranks")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"there is no rank {self.rank} of {self.world_size}")

    def members(self, name: str) -> list[list[int]]:
        """Returns the groups called `name` as world ranks, each in the order of its own ranks."""
        index = [axis for axis, _ in self.groups].index(name)
        size = self.groups[index][1]
        stride = math.prod(other for _, other in self.groups[index + 1 :])
        firsts = [rank for rank in range(self.world_size) if rank // stride % size == 0]
        return [[first + stride * number for number in range(size)] for first in firsts]

    def size_of(self, name: str) -> int:
        """Returns the number of ranks of a group called `name`; 1 if there is no such axis."""
        return dict(self.groups).get(name, 1)

    def index_in(self, name: str) -> int:
        """Returns this rank's number in its group called `name`; 0 if there is no such axis."""
        stride = 1
        for axis, size in reversed(self.groups):
            if axis == name:
                return self.rank // stride % size
            stride *= size
        return 0

    @property
    def stage(self) -> int:
        """The pipeline stage that the rank belongs to."""
        return self.index_in("pp")

    @property
    def engine_rank(self) -> int:
        """The number of the rank in its engine. Engines that share experts are the first axis,
        `dp`, of one world; other worlds have one engine."""
        if not self.groups or self.groups[0][0] != "dp":
            return self.rank
        return self.rank % math.prod(size for _, size in self.groups[1:])

    @property
    def engine_size(self) -> int:
        """The number of ranks of the engine; see `engine_rank`."""
        return math.prod(size for name, size in self.groups if name != "dp")

    @property
    def sends_results(self) -> bool:
        """Whether the results of this rank go back to the engine: only the first rank of the last
        stage sends them. The last stage samples, and all of its ranks sample the same."""
        return self.stage == self.size_of("pp") - 1 and self.index_in("tp") == 0

    @property
    def name(self) -> str:
        """The rank's name in messages: its number, and its stage if there are several."""
        return f"{self.rank} (stage {self.stage})" if self.size_of("pp") > 1 else str(self.rank)

    @property
    def names_of_all(self) -> list[str]:
        """The names in messages of all ranks of its world, by their numbers."""
        return [replace(self, rank=rank).name for rank in range(self.world_size)]

    @property
    def is_local(self) -> bool:
        """Whether the ranks are all on this host, and meet in a file."""
        if self.master_port:
            return False
        try:
            return ipaddress.ip_address(self.master_address).is_loopback
        except ValueError:
            return self.master_address == "localhost"


def place_on_hosts(
    groups: Sequence[tuple[str, int]],
    hosts: Sequence[int],
    master: tuple[str, int] = ("127.0.0.1", 0),
    *,
    owns_devices: bool = False,
) -> list[RankSpec]:
    """Returns the places of all ranks of a world.

    Args:
        groups: the axes of the world, as in `RankSpec`.
        hosts: the number of the host on which each rank is to run.
        master: address and port at which ranks of several hosts find each other.
        owns_devices: as in `RankSpec`.
    """
    seen: Counter[int] = Counter()
    places = []
    for rank, host in enumerate(hosts):
        local_rank, seen[host] = seen[host], seen[host] + 1
        places.append(RankSpec(rank, len(hosts), local_rank, *master, tuple(groups), owns_devices))
    return places

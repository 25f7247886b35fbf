"""Where a worker's rank stands: in the world of all ranks of an engine, in its groups, on its host.

`place_ranks` makes a `RankSpec` for each worker of an engine, for whoever starts them:
`MultiprocessExecutor` for the processes of one host; executors for several hosts replace its local
ranks and its address. It is sent to the worker, whose process joins the others by it
(`layers.parallel.ProcessGroups`). Imports no torch.
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass

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
        local_rank: its number among the ranks of its host, which is also that of its GPU.
        master_address, master_port: of the `TCPStore` through which ranks on several hosts find
            each other. Those of one host meet through a `MeetingFile`; a loopback address then
            stands for that host.
        groups: (name, size) of each axis; names are of `GROUP_NAMES`, and the product of the sizes
            is `world_size`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    groups: tuple[tuple[str, int], ...] = ()

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
    def is_output(self) -> bool:
        """Whether this rank's results are those of the engine: of the last stage, which samples,
        the first rank, since all of its ranks sample the same."""
        return self.stage == self.size_of("pp") - 1 and self.index_in("tp") == 0

    @property
    def name(self) -> str:
        """What messages call it: its number, and its stage if there are several."""
        return f"{self.rank} (stage {self.stage})" if self.size_of("pp") > 1 else str(self.rank)

    @property
    def is_local(self) -> bool:
        """Whether the ranks meet on this host's loopback interface."""
        try:
            return ipaddress.ip_address(self.master_address).is_loopback
        except ValueError:
            return self.master_address == "localhost"


def place_ranks(tensor_parallel: int, pipeline_parallel: int = 1) -> tuple[RankSpec, ...]:
    """Returns the ranks of an engine on one host, by their numbers: stage by stage, so that the
    ranks of a stage, which exchange the most, are neighbours."""
    groups: tuple[tuple[str, int], ...] = (("tp", tensor_parallel),)
    if pipeline_parallel > 1:
        groups = (("pp", pipeline_parallel), *groups)
    size = tensor_parallel * pipeline_parallel
    return tuple(RankSpec(rank, size, rank, groups=groups) for rank in range(size))

"""Process groups: ranks that compute one thing together, and their collectives.

`ProcessGroups` holds this rank's group of each name: `tp` for tensor parallelism in the manner of
Megatron (Shoeybi et al., 2019), `dp`, `ep` and `pp` for data, expert and pipeline parallelism. A
tensor-parallel layer that is sharded by its outputs needs no collective; one that is sharded by its
inputs sums its results over the ranks. In a group of one rank all collectives do nothing.

On GPUs the all-reduces of a step are kernels over symmetric memory (`kernels.all_reduce`), which a
group allocates; NCCL brings the ranks together and does the collectives outside a step's graph.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from aioinfer.errors import ConfigError
from aioinfer.ipc.placement import GROUP_NAMES, RankSpec

if TYPE_CHECKING:
    from aioinfer.kernels.symmetric_memory import SymmetricBuffer


_CPU = torch.device("cpu")
_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface


class ParallelGroup:
    """One rank's view of one group.

    Attributes:
        rank: this rank's number in the group.
        size: the number of its ranks.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device = _CPU,
        handle: dist.ProcessGroup | None = None,
    ):
        """`handle` is torch's group; None stands for all ranks of the world."""
        self.rank = rank
        self.size = size
        self._device = device
        self._handle = handle

    @property
    def handle(self) -> dist.ProcessGroup | None:
        """Torch's group; None stands for all ranks of the world."""
        return self._handle

    @classmethod
    def single(cls) -> ParallelGroup:
        """Returns a group of one rank."""
        return cls(0, 1)

    @classmethod
    def connect(
        cls, rank: int, size: int, store: dist.Store, device: torch.device
    ) -> ParallelGroup:
        """Joins a world that is one tensor-parallel group on this host.

        Waits until all of its ranks are there.
        """
        spec = RankSpec(rank, size, rank, groups=(("tp", size),))
        return ProcessGroups.connect(spec, device, store).tp

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` over the ranks, computed in place."""
        if self.size > 1:
            dist.all_reduce(values, group=self._handle)
        return values

    def all_gather_last(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the ranks' `values` [..., n] side by side: [..., size * n]."""
        if self.size == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous(), group=self._handle)
        return torch.cat(parts, dim=-1)

    def all_to_all(
        self, values: torch.Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Sends each rank some of the rows of `values` [sum of sent, ...], and returns those that
        came for this one, [sum of received, ...], both in the order of the ranks.

        Args:
            sent, received: how many rows each rank gets and sends; may be 0.
        """
        if self.size == 1:
            return values
        found = values.new_empty(sum(received), *values.shape[1:])
        dist.all_to_all_single(
            found, values.contiguous(), list(received), list(sent), group=self._handle
        )
        return found

    def meet(self) -> None:
        """Returns when all ranks have called it and their GPUs have finished all launched work.

        Raises an error, or ends the process, if one does not come within torch's time limit.
        """
        if self.size > 1:
            devices = None if self._device.type == "cpu" else [self._device.index]
            dist.barrier(self._handle, device_ids=devices)
            if devices:
                torch.cuda.synchronize(self._device)

    def symmetric_buffer(self, nbytes: int) -> SymmetricBuffer:
        """Returns `nbytes` zeroed bytes on each rank's GPU that all ranks can read and write. Every
        rank has to call it, in the same order.

        Raises:
            ConfigError: the GPUs cannot reach each other's memory.
        """
        import torch.distributed._symmetric_memory as symmetric_memory

        from aioinfer.kernels.symmetric_memory import SymmetricBuffer

        handle = self._handle or dist.group.WORLD
        assert handle is not None
        memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=self._device).zero_()
        try:
            peers = symmetric_memory.rendezvous(memory, handle)
        except RuntimeError as error:
            message = (
                "parallel.tensor_parallel_size above 1 and parallel.expert_parallel need "
                "GPUs that can reach each other's memory (NVLink, or PCIe peer access)"
            )
            raise ConfigError(f"{message}: {error}") from error
        parts = [peers.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(self.size)]
        torch.cuda.synchronize(self._device)
        # no rank may write before all are zero
        dist.barrier(handle, device_ids=[self._device.index])
        return SymmetricBuffer(
            memory,
            torch.tensor([part.data_ptr() for part in parts], device=self._device),
            self.rank,
            self.size,
        )


class ProcessGroups:
    """One rank's groups by name. Made by `single` or `connect`.

    Attributes:
        spec: the place of the rank.
        world: all ranks.
        store: where they have found each other, if there are several.
        tokens: the ranks of `pp` once more, connected by themselves: messages of the last stage
            back to the first must not queue up behind hidden states.
    """

    def __init__(
        self,
        spec: RankSpec,
        groups: Mapping[str, ParallelGroup],
        world: ParallelGroup | None = None,
        tokens: ParallelGroup | None = None,
        store: dist.Store | None = None,
    ):
        self.spec, self.store = spec, store
        self.world = world or ParallelGroup.single()
        self.tokens = tokens or ParallelGroup.single()
        self._groups = {name: groups.get(name, ParallelGroup.single()) for name in GROUP_NAMES}

    @classmethod
    def single(cls) -> ProcessGroups:
        """Returns the groups of a rank that is alone: one rank each."""
        return cls(RankSpec(), {})

    @classmethod
    def connect(
        cls, spec: RankSpec, device: torch.device, store: dist.Store | None = None
    ) -> ProcessGroups:
        """Joins the other ranks of the world, through NCCL on GPUs and gloo on CPUs.

        Waits until all are there. Each process can do this once.

        Args:
            spec: the place of this rank.
            device: of the rank.
            store: where the ranks find each other. Without it, at the `TCPStore` that `spec` names,
                for ranks on several hosts: whoever reaches its port can write to it.
        """
        if spec.world_size == 1:
            return cls(spec, {})
        if store is None:
            store = dist.TCPStore(spec.master_address, spec.master_port, is_master=False)
        _init_world(spec, device, store)
        groups, tokens = {}, None
        for name, size in spec.groups:
            if size == 1:
                continue
            # every rank has to take part in making every group, also the groups of other ranks
            for ranks in spec.members(name):
                handle = None if size == spec.world_size else dist.new_group(ranks)
                back = dist.new_group(ranks) if name == "pp" else None
                if spec.rank in ranks:
                    groups[name] = ParallelGroup(ranks.index(spec.rank), size, device, handle)
                    if back is not None:
                        tokens = ParallelGroup(ranks.index(spec.rank), size, device, back)
        world = ParallelGroup(spec.rank, spec.world_size, device)
        return cls(spec, groups, world, tokens, store)

    def __getitem__(self, name: str) -> ParallelGroup:
        """Returns the group of a name; one that the world has no axis for has one rank.

        Raises KeyError for a name that is not in `GROUP_NAMES`.
        """
        return self._groups[name]

    @property
    def tp(self) -> ParallelGroup:
        """The tensor-parallel group: ranks that hold the shards of one model."""
        return self._groups["tp"]

    @property
    def pp(self) -> ParallelGroup:
        """The pipeline-parallel group: ranks that hold the stages of one model."""
        return self._groups["pp"]

    @property
    def dp(self) -> ParallelGroup:
        """The data-parallel group: ranks that hold the same shard for other requests."""
        return self._groups["dp"]


def _init_world(spec: RankSpec, device: torch.device, store: dist.Store) -> None:
    """Makes torch's default process group of all ranks.

    On one host, the connections between them are of the loopback interface.
    """
    if device.type == "cuda":
        # multicast is not used here, and setting it up needs rights that containers lack
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        if spec.is_local:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl", store=store, rank=spec.rank, world_size=spec.world_size, device_id=device
        )
        return
    if spec.is_local:
        # gloo would take the address of the host's name, which may not be reachable; this variable
        # is the only way to select the interface
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    elif interface := _interface_towards(spec.master_address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    dist.init_process_group("gloo", store=store, rank=spec.rank, world_size=spec.world_size)


def _interface_towards(address: str) -> str | None:
    """Returns the name of the network interface from which this host reaches an IPv4 address, or
    None if it cannot be found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # selects a route; nothing is sent
        except OSError:
            return None
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if answer[20:24] == own:
                return name
    return None

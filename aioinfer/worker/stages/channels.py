"""Channels between pipeline stages: the messages of a `StageChannel` are received in the order in
which they were sent.

- `MemoryChannel`, between GPUs of one host, over symmetric memory (`kernels.peer_messages`).
- `GroupChannel`, between CPUs or hosts: messages of a process group, by gloo or NCCL.

No call waits on the host for a GPU. With NCCL a receive is posted on a stream of its own, so that
it may begin before the step that is being computed ends; it then holds a multiprocessor until the
message has come, which `MemoryChannel` avoids.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from aioinfer.layers.parallel import ParallelGroup

if TYPE_CHECKING:
    from aioinfer.kernels.peer_messages import PeerChannel

#: Receives a message, once: on a GPU its values are there for kernels that are launched after the
#: call.
Receive = Callable[[], torch.Tensor]


class StageChannel(Protocol):
    """A rank's link to the rank that it receives from and to the one that it sends to.

    Attributes:
        waited_ns: nanoseconds that the host has waited for messages; stays 0 on a GPU.
    """

    waited_ns: int

    def send(self, values: torch.Tensor) -> None:
        """Sends a tensor; it may be written to as soon as this returns."""
        ...

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """Returns a callable that receives the next message, of the shape and dtype that are sent.
        These callables are called in the order in which they were made."""
        ...


class GroupChannel:
    """Implements `StageChannel` with point-to-point messages of a process group.

    Args:
        group: the ranks of the pipeline. Another channel needs another group.
        source, target: world ranks, that this one receives from and sends to.
        depth: sends after which an earlier one must have been received.
        device: of this rank.
    """

    def __init__(
        self, group: ParallelGroup, source: int, target: int, depth: int, device: torch.device
    ):
        self.waited_ns = 0
        self._group, self._source, self._target = group.handle, source, target
        self._depth, self._device = depth, device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._receiving = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, values: torch.Tensor) -> None:
        """See `StageChannel.send`."""
        values = values.clone(memory_format=torch.contiguous_format)
        self._sent.append((dist.isend(values, dst=self._target, group=self._group), values))
        if len(self._sent) > self._depth:
            self._sent.popleft()[0].wait()

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """See `StageChannel.expect`. Posts the receive."""
        with self._on_receiving_stream():
            values = torch.empty(shape, dtype=dtype, device=self._device)
            work: Any = dist.irecv(values, src=self._source, group=self._group)
        if self._receiving is not None:
            values.record_stream(torch.cuda.current_stream())

        def receive() -> torch.Tensor:
            began = time.perf_counter_ns()
            work.wait()
            self.waited_ns += time.perf_counter_ns() - began if self._receiving is None else 0
            return values

        return receive

    def _on_receiving_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._receiving is None else torch.cuda.stream(self._receiving)


class MemoryChannel:
    """Implements `StageChannel` over the memory of two GPUs of this host.

    Args:
        incoming, outgoing: from the rank that this one receives from, and to the one that it sends
            to.
    """

    def __init__(self, incoming: PeerChannel, outgoing: PeerChannel):
        self.waited_ns = 0
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, values: torch.Tensor) -> None:
        """See `StageChannel.send`."""
        self._outgoing.send(values)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """See `StageChannel.expect`. Nothing is launched before the returned callable is called."""
        return lambda: self._incoming.receive(shape, dtype)

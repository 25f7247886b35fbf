"""Memory of the host for KV blocks beyond those of the device, and the copies between the two.

A place of that memory has the bytes of one block, all layers one behind the other;
`block_crossings` has the ways in which blocks cross the host's link. On a CPU the copies are made
at once. On a GPU they run beside the steps, on two streams of their own. Nothing waits on the host.

What has to keep its order, and how (see `GpuCopies`):

- a block is read for a save behind the steps before, and loaded behind them: the streams wait for
  the stream of the steps when a plan begins;
- a step that may write a block which is being saved, or read one which is being loaded, waits for
  that copy. A plan names all blocks that its rows use for the first time, in the growth of block
  tables and in its copies (`keep_order`); steps that name no such block do not wait;
- saves and loads of one place, or of one block, wait for each other: a rank may be slower than the
  one whose report has ended a load.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from aioinfer.ipc.anonymous_file import anonymous_file
from aioinfer.ipc.kv_spec import blocks_in
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.worker.block_crossings import Crossing, make_crossing
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.memory import report_shortage
from aioinfer.worker.pinned_memory import pin, unpin

#: Waits until copies have ended, in any thread.
Wait = Callable[[], None]
#: A load that has ended: its ticket, and the microseconds that its copies took.
EndedLoad = tuple[int, int]


def _no_wait() -> None:
    """Waits for nothing: the copies of a CPU have ended."""


class BlockCopies(Protocol):
    """Copies blocks between the device and the host, in the order of the calls."""

    def keep_order(self, plan: StepPlan, max_num_seqs: int) -> None:
        """Has the rows of a plan run behind the copies of blocks that they use."""

    def load(self, moves: I32) -> None:
        """Begins to copy blocks to the device: int32 [L, 4] of `KVMoves.loads`."""

    def save(self, moves: I32) -> Wait:
        """Begins to copy blocks to the host: int32 [S, 3], group, place and block. Returns what
        waits for the end of these copies."""

    def until_free(self, moves: I32) -> Wait:
        """Returns what waits for the end of the copies so far from and to some places: int32
        [R, n], a group and a place in the first two columns."""

    @property
    def has_loads(self) -> bool:
        """Whether any load has not been returned by `take_ended`."""

    def take_ended(self) -> list[EndedLoad]:
        """Returns the loads that have ended since the last call. May be called in another thread
        than the other methods."""

    def await_ended(self) -> list[EndedLoad]:
        """The same, once one has ended."""


class HostBlocks:
    """Places for blocks in memory of the host.

    Attributes:
        groups: uint8 [places, bytes of a block] of each group; without places where the rank has
            none of a group's layers.
        num_places: of each group, as all ranks have them.
        descriptors: of each group, the file in memory that other processes may map; none where the
            memory is the process's own.
    """

    def __init__(
        self, kv: KVTensors, num_places: Sequence[int], *, pinned: bool, shared: bool = False
    ):
        """With `shared`, other processes can map the memory. Raises `ConfigError` where memory is
        too short."""
        sizes = kv.block_bytes
        pinned_at: list[int] = []
        weakref.finalize(self, unpin, pinned_at, kv.device).atexit = False
        self.num_places = tuple(num_places)
        self.descriptors: list[int] = []
        weakref.finalize(self, _close_all, self.descriptors)
        with report_shortage("the KV blocks of the host", "lower cache.host_bytes"):
            self.groups = [
                self._allocate(count if size else 0, size, shared=shared)
                for count, size in zip(num_places, sizes, strict=True)
            ]
            for memory in self.groups:
                if pinned and memory.nbytes:
                    pin(memory)
                    pinned_at.append(memory.data_ptr())
        self._versions = [[0] * count for count in num_places]

    def _allocate(self, count: int, size: int, *, shared: bool) -> torch.Tensor:
        """Returns memory for `count` blocks of `size` bytes. Raises `RuntimeError`."""
        if not shared:
            return torch.empty(count, size, dtype=torch.uint8)
        try:
            self.descriptors.append(anonymous_file("aioinfer-kv", count * size))
            if not count:
                return torch.empty(0, size, dtype=torch.uint8)
            memory = mmap.mmap(self.descriptors[-1], count * size)
        except OSError as error:
            raise RuntimeError(f"cannot allocate memory: {error}") from error
        return torch.frombuffer(memory, dtype=torch.uint8).view(count, size)

    def bytes_of(self, group: int, place: int) -> memoryview:
        """Returns the bytes of a place; none of a group without layers on this rank."""
        memory = self.groups[group]
        return memory[place].numpy().data if len(memory) else memoryview(b"")

    def overwrite(self, group: int, place: int) -> None:
        """Notes that a place gets another block. Called before its bytes change."""
        self._versions[group][place] += 1

    def version(self, group: int, place: int) -> int:
        """Returns how often a place has got another block: what was read of it is whole if that is
        the same before and after."""
        return self._versions[group][place]


def _close_all(descriptors: Sequence[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def make_host_blocks(kv: KVTensors, memory: int, *, shared: bool = False) -> HostBlocks:
    """Returns the places of a rank in `memory` bytes of the host; see `HostBlocks`. Raises
    `ConfigError`."""
    counts = blocks_in(memory, kv.num_blocks, kv.nbytes)
    return HostBlocks(kv, counts, pinned=kv.device.type == "cuda", shared=shared)


def make_copies(kv: KVTensors, host: HostBlocks) -> BlockCopies:
    """Returns the copies of a rank between its KV cache and the host."""
    crossing = make_crossing(kv, host.groups)
    return GpuCopies(kv, crossing) if kv.device.type == "cuda" else CpuCopies(crossing)


class CpuCopies:
    """Implements `BlockCopies` at once."""

    def __init__(self, crossing: Crossing):
        self._crossing = crossing
        self._ended: list[EndedLoad] = []

    def keep_order(self, plan: StepPlan, max_num_seqs: int) -> None:
        """See `BlockCopies.keep_order`."""

    def load(self, moves: I32) -> None:
        """See `BlockCopies.load`."""
        for ticket in dict.fromkeys(moves[:, 3].tolist()):
            began = time.perf_counter()
            self._crossing.to_device(moves[moves[:, 3] == ticket, :3])
            self._ended.append((ticket, round(1e6 * (time.perf_counter() - began))))

    def save(self, moves: I32) -> Wait:
        """See `BlockCopies.save`."""
        self._crossing.to_host(moves)
        return _no_wait

    def until_free(self, moves: I32) -> Wait:
        """See `BlockCopies.until_free`."""
        return _no_wait

    @property
    def has_loads(self) -> bool:
        """See `BlockCopies.has_loads`."""
        return bool(self._ended)

    def take_ended(self) -> list[EndedLoad]:
        """See `BlockCopies.take_ended`."""
        ended, self._ended = self._ended, []
        return ended

    await_ended = take_ended


@dataclass(frozen=True, slots=True)
class _Running:
    """Copies that may not have ended.

    Attributes:
        blocks: of the device, each as `_number`.
        places: of the host, each as `_number`.
        end: recorded behind them.
    """

    blocks: frozenset[int]
    places: frozenset[int]
    end: torch.cuda.Event

    def shares(self, blocks: set[int], places: set[int]) -> bool:
        """Whether they are of one of these blocks, or of one of these places."""
        return not (self.blocks.isdisjoint(blocks) and self.places.isdisjoint(places))


class GpuCopies:
    """Implements `BlockCopies` beside the steps of a GPU."""

    def __init__(self, kv: KVTensors, crossing: Crossing):
        self._crossing = crossing
        self._loads, self._saves = (torch.cuda.Stream(kv.device) for _ in range(2))
        self._loading: deque[_Running] = deque()
        self._saving: deque[_Running] = deque()
        # by ticket, recorded before and behind its copies; of two threads
        self._tickets: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def keep_order(self, plan: StepPlan, max_num_seqs: int) -> None:
        """See `BlockCopies.keep_order`."""
        for running in (self._loading, self._saving):
            while running and running[0].end.query():
                running.popleft()
        if not self._loading and not self._saving:
            return
        used = _numbers(plan.table_rows // max_num_seqs, plan.table_blocks)
        used |= _numbers(plan.copy_groups, plan.copy_sources)
        used |= _numbers(plan.copy_groups, plan.copy_targets)
        steps = torch.cuda.current_stream()
        for copies in (*self._loading, *self._saving):
            if not used.isdisjoint(copies.blocks):
                steps.wait_event(copies.end)

    def load(self, moves: I32) -> None:
        """See `BlockCopies.load`."""
        if not len(moves):
            return
        self._loads.wait_stream(torch.cuda.current_stream())
        blocks, places = _numbers(moves[:, 0], moves[:, 2]), _numbers(moves[:, 0], moves[:, 1])
        for saves in self._saving:
            if saves.shares(blocks, places):
                self._loads.wait_event(saves.end)
        tickets = moves[:, 3]
        with torch.cuda.stream(self._loads):
            for ticket in dict.fromkeys(tickets.tolist()):
                own = moves[tickets == ticket]
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                self._crossing.to_device(own[:, :3])
                end.record()
                blocks, places = _numbers(own[:, 0], own[:, 2]), _numbers(own[:, 0], own[:, 1])
                self._loading.append(_Running(frozenset(blocks), frozenset(places), end))
                self._tickets.append((ticket, begin, end))

    def save(self, moves: I32) -> Wait:
        """See `BlockCopies.save`."""
        if not len(moves):
            return _no_wait
        self._saves.wait_stream(torch.cuda.current_stream())
        blocks, places = _numbers(moves[:, 0], moves[:, 2]), _numbers(moves[:, 0], moves[:, 1])
        for loads in self._loading:
            if loads.shares(blocks, places):
                self._saves.wait_event(loads.end)
        with torch.cuda.stream(self._saves):
            self._crossing.to_host(moves)
            end = self._saves.record_event()
        self._saving.append(_Running(frozenset(blocks), frozenset(places), end))
        return end.synchronize

    def until_free(self, moves: I32) -> Wait:
        """See `BlockCopies.until_free`."""
        places = _numbers(moves[:, 0], moves[:, 1])
        ends = [
            copies.end
            for copies in (*self._loading, *self._saving)
            if not places.isdisjoint(copies.places)
        ]

        def wait() -> None:
            for end in ends:
                end.synchronize()

        return wait

    @property
    def has_loads(self) -> bool:
        """See `BlockCopies.has_loads`."""
        return bool(self._tickets)

    def take_ended(self) -> list[EndedLoad]:
        """See `BlockCopies.take_ended`."""
        ended = []
        while self._tickets and self._tickets[0][2].query():
            ticket, begin, end = self._tickets.popleft()
            ended.append((ticket, round(1000 * begin.elapsed_time(end))))
        return ended

    def await_ended(self) -> list[EndedLoad]:
        """See `BlockCopies.await_ended`."""
        if self._tickets:
            self._tickets[0][2].synchronize()
        return self.take_ended()


def _numbers(groups: I32, blocks: I32) -> set[int]:
    """Returns pairs of a group and a block, or a place, as one number each."""
    return set((groups.astype(np.int64) << 32 | blocks.astype(np.int64)).tolist())

"""Reads adapters from disk into memory of the host, in the form of slots, while steps run.

The threads that read and the one that launches kernels share Python's lock. So a read is a few long
calls without it for each `Run` of numbers; where each matrix goes is found once for all adapters
with one head (`OpenAdapter.head`). Threads that are idle read runs of an adapter that another one
reads: the first token of its request waits for it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from aioinfer.features.adapters.checkpoint import AdapterLayout, OpenAdapter, Run, open_adapter
from aioinfer.features.adapters.layers.parts import Piece, PieceCopies, rank_of
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.sections import AdapterFiles

#: Threads that read adapters; each needs Python's lock for a millisecond of a read.
READERS = 8
#: Heads for which it is kept where matrices go: those that were used most recently.
_MAX_PACKINGS = 8


@dataclass(slots=True)
class PackedAdapter:
    """An adapter in the form of a slot.

    Attributes:
        memory: of the host, [numbers of a slot], at first zeros.
        packing: of the adapter that was read last.
        targets: `Packing.targets` of the memory.
        entered: the end of the last copy into a slot that reads the memory.
    """

    memory: torch.Tensor
    packing: Packing | None = None
    targets: Sequence[list[torch.Tensor]] = ()
    entered: torch.cuda.Event | None = None

    @property
    def rank(self) -> int:
        """The rank of the adapter."""
        return 0 if self.packing is None else self.packing.rank

    def prepare(self, packing: Packing) -> None:
        """Prepares the memory for an adapter that is about to be read."""
        if self.packing is not packing:
            if self.packing is not None:
                self.memory.zero_()  # what is not copied to is elsewhere
            self.packing, self.targets = packing, packing.targets(self.memory)


class RunMemory(threading.local):
    """Memory of a thread for the bytes of a run.

    Attributes:
        memory: uint8, as long as it has to be.
        sources: `Packing.sources` of the memory, for the adapter that is read.
    """

    def __init__(self) -> None:
        self._packing: Packing | None = None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.sources: Sequence[list[torch.Tensor]] = ()

    def prepare(self, packing: Packing) -> None:
        """Prepares the memory for an adapter that is about to be read."""
        if self._packing is not packing:
            if len(self.memory) < packing.max_run_bytes:
                self.memory = torch.empty(packing.max_run_bytes, dtype=torch.uint8)
            self._packing, self.sources = packing, packing.sources(self.memory)


class Packing:
    """How adapters with one head get into the form of slots.

    Args:
        layout: of the adapters.
        slots: the slots.

    Attributes:
        rank: of the adapters.
        num_runs: of an adapter.
        max_run_bytes: the most that is read at once.
    """

    def __init__(self, layout: AdapterLayout, slots: AdapterSlots):
        self._layout, self._dtype = layout, slots.backend.dtype
        self.rank = rank_of(layout.weights)
        self.num_runs = len(layout.runs)
        self.max_run_bytes = max(run.nbytes for run in layout.runs)
        self._max_scale = max(1.0, *(abs(each.scale) for each in layout.weights.values()))
        packed = torch.empty(slots.slot_numbers, device="meta")
        firsts = [run.first for run in layout.runs]
        pieces: list[list[Piece]] = [[] for _ in firsts]
        for piece in slots.pieces(layout.weights, packed):
            if piece.source.numel():
                run = bisect_right(firsts, piece.source.storage_offset()) - 1
                pieces[run].append(piece)
        self._copies = [PieceCopies(of_run) for of_run in pieces]

    def targets(self, packed: torch.Tensor) -> list[list[torch.Tensor]]:
        """Returns what is copied to of a packed slot, for each run."""
        return [[_view(packed, p.target) for p in copies.pieces] for copies in self._copies]

    def sources(self, memory: torch.Tensor) -> list[list[torch.Tensor]]:
        """Returns what is copied of each run when memory has its bytes."""
        found = []
        for run, copies in zip(self._layout.runs, self._copies, strict=True):
            numbers = memory[: run.nbytes].view(run.dtype)
            found.append([_view(numbers, p.source, run.first) for p in copies.pieces])
        return found

    @torch.inference_mode()
    def read(
        self, number: int, adapter: OpenAdapter, packed: PackedAdapter, reading: RunMemory
    ) -> bytes:
        """Reads a run of an adapter, and returns its samples.

        Args:
            number: of the run.
            packed: where to; prepared.
            reading: of this thread.

        Raises:
            ConfigError: the file cannot be read.
            ValueError: it has numbers that are not finite.
        """
        reading.prepare(self)
        run = self._layout.runs[number]
        sample = run.sample(adapter.read(run, reading.memory.numpy().data))
        numbers = reading.memory[: run.nbytes].view(run.dtype)
        if (module := self._not_finite(run, numbers)) is not None:
            text = f"{module} has numbers that are not finite in {self._dtype}"
            raise ValueError(f"{adapter.folder}: {text}")
        self._copies[number].run(packed.targets[number], reading.sources[number])
        return sample

    def _not_finite(self, run: Run, numbers: torch.Tensor) -> str | None:
        """Returns a module with numbers that are NaN or infinite in the dtype of slots: tokens
        without the adapter are multiplied with its matrices, too, by zeros, and would be NaN. All
        ranks look at all numbers, so that they agree."""
        most, end = torch.finfo(self._dtype).max, run.first + len(numbers)
        low, high = (end.item() for end in torch.aminmax(numbers))
        if max(-low, high) * self._max_scale <= most:  # nor of NaN
            return None
        for module, each in self._layout.weights.items():
            for matrix, scale in ((each.down, 1.0), (each.up, each.scale)):
                if matrix.numel() and run.first <= matrix.storage_offset() < end:
                    ends = [end.item() for end in _view(numbers, matrix, run.first).aminmax()]
                    if not all(abs(end * scale) <= most for end in ends):
                        return module
        return None


def _view(memory: torch.Tensor, view: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Returns the same view of memory as one of other memory, of which `first` is the first number
    that `memory` has."""
    begin = memory.storage_offset() + view.storage_offset() - first
    return memory.as_strided(view.shape, view.stride(), begin)


class AdapterReader:
    """Reads adapters; threads may share it.

    Args:
        slots: whose form adapters are to have.

    Attributes:
        threads: that read.
    """

    def __init__(self, slots: AdapterSlots):
        self._slots = slots
        # an adapter is many small matrices, for which threads of PyTorch would wait for each other
        self.threads = ThreadPoolExecutor(READERS, "adapters", torch.set_num_threads, (1,))
        self._packings: OrderedDict[bytes, Packing] = OrderedDict()
        self._lock = threading.Lock()  # of the packings
        self._reading = RunMemory()

    def read(self, files: AdapterFiles, packed: PackedAdapter) -> None:
        """Reads an adapter into memory.

        Raises:
            ConfigError: the files cannot be read.
            ValueError: they have changed, or have numbers that are not finite.
        """
        folder = Path(files.folder)
        with open_adapter(folder) as adapter:
            packing = self._packing_of(adapter)
            packed.prepare(packing)
            read = partial(packing.read, adapter=adapter, packed=packed, reading=self._reading)
            samples = self._share(read, packing.num_runs)
            if adapter.digest_of(samples) != files.sample:
                raise ValueError(f"{folder} has changed since the adapter was loaded")

    def _share(self, read: Callable[[int], bytes], count: int) -> list[bytes]:
        """Returns what `read` returns for so many numbers: it is called in this thread and in those
        that are idle. Raises an error of it once no thread is at work."""
        found, numbers = [b""] * count, iter(range(count))

        def work_off() -> None:
            for number in numbers:  # of which each goes to one thread
                found[number] = read(number)

        helpers = [self.threads.submit(work_off) for _ in range(min(count, READERS) - 1)]
        try:
            work_off()
        finally:
            begun = [each for each in helpers if not each.cancel()]
            wait(begun)
        for each in begun:
            each.result()
        return found

    def _packing_of(self, adapter: OpenAdapter) -> Packing:
        head, packings = adapter.head, self._packings
        with self._lock:
            if head not in packings:
                packings[head] = Packing(adapter.layout(), self._slots)
            packings.move_to_end(head)
            if len(packings) > _MAX_PACKINGS:
                packings.popitem(last=False)
            return packings[head]

"""Worker half of the store of KV: moves blocks between the device and memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from aioinfer.features.kv_store.sections import KVLoaded, KVMoves
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.worker.features import PendingSection, Rank, WorkerFeature
from aioinfer.worker.host_blocks import BlockCopies, make_copies


@dataclass(frozen=True, slots=True)
class PendingLoads(PendingSection):
    """The loads that have ended by the time at which a result is read.

    Attributes:
        take_ended: returns their tickets.
    """

    take_ended: Callable[[], list[int]]

    def fetch(self, stream: torch.cuda.Stream) -> PendingSection:
        """See `PendingSection.fetch`: nothing is on the device."""
        return self

    def to_section(self) -> Section:
        """See `PendingSection.to_section`."""
        return KVLoaded(torch.tensor(self.take_ended(), dtype=torch.int32).numpy())


class Work(WorkerFeature):
    """See `WorkerFeature`.

    Attributes:
        copies: of blocks; None before the service begins.
    """

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.is_needed = rank.config.cache.host_bytes > 0 and rank.kv is not None
        self.copies: BlockCopies | None = None
        self._is_awaited = False

    def begin_service(self) -> None:
        """See `WorkerFeature.begin_service`. Allocates the memory of the host."""
        assert self.rank.kv is not None
        self.copies = make_copies(self.rank.kv, self.rank.config.cache.host_bytes)

    def begin(self, plan: StepPlan) -> None:
        """See `WorkerFeature.begin`."""
        copies, moves = self.copies, plan.section(KVMoves)
        if copies is None:
            return
        copies.keep_order(plan, len(self.rank.slots.tokens))
        self._is_awaited = False
        if moves is not None:
            self._is_awaited = len(moves.awaited) > 0
            copies.load(moves.loads)
            copies.save(moves.saves)

    def read_step(self, step_id: int) -> PendingSection | None:
        """See `WorkerFeature.read_step`."""
        copies = self.copies
        if copies is None or not copies.has_loads:
            return None
        ended = copies.await_ended if self._is_awaited else copies.take_ended
        return PendingLoads(KVLoaded, (), ended)

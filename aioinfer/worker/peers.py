"""The other ranks that a worker computes with, and its connections to them: sums over the ranks of
a tensor-parallel group, experts that engines share, and pipeline stages.

Each call here waits for the same call of the ranks that it connects to, so all make them in the
same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from aioinfer.config import Config
from aioinfer.errors import EngineDeadError
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.models.causal_lm import CausalLM
from aioinfer.worker.memory import report_shortage
from aioinfer.worker.stage_links import StageLinks

#: Seconds that start-up steps may take, once all ranks that share experts have compiled their
#: kernels.
STUCK_AFTER_S = 180.0


class Peers:
    """The ranks that one rank computes with.

    Attributes:
        groups: all groups of the rank; `tp` shares the layers, which are divided among the stages
            of `pp` in order.
        tp, pp: two of them.
        experts: the ranks of all engines that share experts; None if every engine has its own.
    """

    def __init__(self, config: Config, groups: ProcessGroups, device: torch.device):
        """`device` is the rank's."""
        self.groups = groups
        self.tp, self.pp = groups.tp, groups.pp
        self.experts = groups.dp if config.parallel.data_parallel_attention else None
        self._max_tokens = config.max_step_tokens
        self._device = device
        self._links: StageLinks | None = None

    def connect_experts(self, model: CausalLM) -> None:
        """Connects the layers with experts to the same layers of other engines' ranks, on GPUs."""
        if self.experts is None or self._device.type == "cpu":
            return
        remedy = "lower scheduler.max_num_batched_tokens, or take fewer engines"
        with report_shortage("the exchange of tokens between engines", remedy):
            model.connect_experts(self._max_tokens)

    def connect_all_reduce(self, backend: Backend, hidden_size: int) -> None:
        """Gives the layers their sum over the ranks, at the first call; none for one GPU."""
        if self.tp.size == 1 or not backend.has_kernels or backend.all_reduce is not None:
            return
        from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout

        layout = AllReduceLayout.of(self.tp.size, self._max_tokens, hidden_size, backend.dtype)
        memory = self.tp.symmetric_buffer(layout.nbytes)
        backend.all_reduce = AllReduce(memory, layout, hidden_size, backend.dtype)

    def agree(self, holds: bool) -> bool:
        """Returns whether something holds on every stage of the pipeline."""
        lacking = torch.tensor([not holds], dtype=torch.int32, device=self._device)
        return not self.pp.all_reduce(lacking).item()

    def link_stages(
        self, stream_size: int, tap_size: int, num_drafts: int, dtype: torch.dtype
    ) -> StageLinks | None:
        """Returns the links to the other stages, with nothing on its way; None for one stage.
        Arguments as in `StageLinks`."""
        if self.pp.size > 1 and self._links is None:
            self._links = StageLinks(
                self.groups, stream_size, dtype, self._device, self._max_tokens,
                tap_size=tap_size, num_drafts=num_drafts,
            )  # fmt: skip
        self.drain_stages()
        return self._links

    def drain_stages(self) -> None:
        """Receives what other stages have sent. To be called at the end of `compile_only`, too:
        there GPUs neither write into each other's memory nor read, and a message that was not
        written must not be waited for afterwards."""
        if self._links is not None:
            self._links.drain()

    @contextmanager
    def together(self, what: str, report: Callable[[Exception], None] | None) -> Iterator[None]:
        """Context for steps in which this rank and the ranks of other engines wait for each other.
        All begin it together; if `what` does not end, `report` is called with the error, in another
        thread."""
        if self.experts is None or self._device.type == "cpu":
            yield
            return
        self.experts.meet()
        place = self.groups.spec
        error = EngineDeadError(
            f"worker {place.rank} of {place.world_size} that share experts did not end {what} "
            f"within {STUCK_AFTER_S:g} s: it waits for another, or another GPU for it"
        )
        timer = threading.Timer(STUCK_AFTER_S, lambda: report and report(error))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

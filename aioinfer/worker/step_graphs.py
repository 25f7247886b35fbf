"""The CUDA graphs of a GPU model runner: which steps are captured, and which graph a step replays.

A step that only decodes is one graph, from the growth of block tables to the sampled tokens. Where
attention may read the keys of a prefix that rows share once for all of them, it is a graph of a
second set. Of a step with prompts the layers are a graph, all but the last; and a step without rows
is one, in which other engines' ranks wait for this one's experts.

All graphs share their memory, so no two are replayed at the same time.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.request_record import AppendedTokens
from aioinfer.kernels.cascade_attention import MIN_ROWS, MIN_SAVED_KEYS
from aioinfer.worker.cuda_graphs import CudaGraphs, decode_sizes, mixed_sizes, shared_sizes
from aioinfer.worker.first_blocks import SharedPrefixes
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_buffers import PlanBuffer

#: Steps with prompts of more tokens, beside one for each slot, are launched kernel by kernel: each
#: kernel takes longer than its launch.
MIXED_GRAPH_TOKENS = 4096


class GraphBodies(Protocol):
    """The launches to be captured. None waits for the device."""

    def launch_decode(self, rows: int) -> None:
        """Launches a decode step of `rows` rows from the plan buffer."""

    def launch_sharing_decode(self, rows: int) -> None:
        """Launches a decode step with attention that looks for shared prefixes."""

    def launch_idle(self, _: int) -> None:
        """Launches a step without rows."""

    def launch_mixed(self, tokens: int) -> None:
        """Launches all layers but the last for `tokens` tokens."""

    def clear_mixed(self, max_tokens: int) -> None:
        """Makes the kernels of `launch_mixed` find nothing to compute, for up to `max_tokens`
        tokens."""


class StepGraphs:
    """The graphs of one rank. Until `capture` it has none.

    Attributes:
        decode, sharing: of decode steps by their rows; `sharing` look for shared prefixes.
        mixed: of the layers of steps with prompts, by their tokens.
        idle: of a step without rows.
        nbytes: GPU memory that they have taken.
        looks_for_prefixes: whether there is a set that looks for shared prefixes.
    """

    def __init__(self, plan: PlanBuffer, slots: Slots, *, looks_for_prefixes: bool):
        """`plan`: the buffer that the graphs of decode steps read."""
        self.decode, self.sharing = CudaGraphs(), CudaGraphs()
        self.mixed, self.idle = CudaGraphs(), CudaGraphs()
        self.nbytes = 0
        self.looks_for_prefixes = looks_for_prefixes
        self._plan, self._device = plan, slots.device
        self._prefixes = _make_prefixes(slots) if looks_for_prefixes else None

    def capture(self, bodies: GraphBodies, *, has_idle: bool, max_mixed_tokens: int | None) -> None:
        """Captures decode steps, and the layers of steps with prompts.

        For 16 to 512 rows cublasLt's own choice of kernels is up to a tenth faster than cuBLAS's,
        for thousands it is slower. Where a process prefers it from the start (it cannot be set
        later without a warning), that ends with the graphs of decode steps.

        Args:
            bodies: the launches to be captured.
            has_idle: whether other engines' ranks wait for steps without rows.
            max_mixed_tokens: the maximum number of tokens of a step; None where the layers of steps
                with prompts cannot be captured.
        """
        # a capture begins by giving unused memory back, which would count against the graphs
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info(self._device)[0]
        pool = torch.cuda.graph_pool_handle()
        rows = self._plan.rows
        self._plan.clear_growth()
        self.decode.capture(decode_sizes(rows), bodies.launch_decode, pool, run_each=True)
        if has_idle:
            self.idle.capture([1], bodies.launch_idle, pool, run_each=True)
        if self.looks_for_prefixes:
            sizes = shared_sizes(rows, MIN_ROWS)
            self.sharing.capture(sizes, bodies.launch_sharing_decode, pool, run_each=True)
        torch.backends.cuda.preferred_blas_library("cublas")
        if max_mixed_tokens is not None:
            self._capture_mixed(bodies, max_mixed_tokens, pool)
        torch.cuda.synchronize()
        self.nbytes = before - torch.cuda.mem_get_info(self._device)[0]

    def _capture_mixed(self, bodies: GraphBodies, max_tokens: int, pool: Any) -> None:
        """Captures the layers of steps with prompts; `pool` as in `CudaGraphs.capture`."""
        sizes = mixed_sizes(min(max_tokens, MIXED_GRAPH_TOKENS + self._plan.rows))
        bodies.clear_mixed(sizes[-1])
        self.mixed.capture(sizes, bodies.launch_mixed, pool, run_each=False)

    def update(self, plan: StepPlan) -> None:
        """Takes over the part of a plan that the choice of a graph depends on. Called with every
        plan, in order."""
        if self._prefixes is not None:
            self._prefixes.update(plan)

    def has_decode(self, plan: StepPlan) -> bool:
        """Whether the step does nothing but decode, and is captured, if its features suit graphs
        (`WorkerFeature.suits_graphs`)."""
        rows = len(plan.slots)
        return (
            0 < rows <= self.decode.fit(rows)
            and not plan.admissions
            and plan.section(AppendedTokens) is None
            and not len(plan.copy_sources)
            and len(plan.table_rows) <= self._plan.growth
            and plan.num_tokens == rows
            and bool(plan.samples.all())
        )

    def replay_decode(self, plan: StepPlan) -> None:
        """Replays the graph of a step that `has_decode`, and that is in the plan buffer."""
        shares = self._prefixes is not None and self._prefixes.may_save(plan.slots)
        graphs = self.sharing if shares else self.decode
        graphs.replay(graphs.fit(len(plan.slots)))


def _make_prefixes(slots: Slots) -> SharedPrefixes:
    """Returns the detector of steps in which attention may read a shared prefix once."""
    count = len(slots.tokens)
    return SharedPrefixes(count, slots.block_size, min_rows=MIN_ROWS, min_saved=MIN_SAVED_KEYS)

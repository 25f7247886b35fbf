"""The CUDA graphs of a GPU: which steps are captured, and which graph a step replays.

A step that only decodes is one graph, from the growth of block tables to the sampled tokens. Where
attention may read the keys of a prefix that rows share once for all of them, it is a graph of a
second set, and with lookahead rows (`ipc.lookahead`) one of a third. Of a step with prompts the
layers are a graph, all but the last; and a step without rows is one, in which other engines' ranks
wait for this one's experts.

A graph is captured for several sizes, and a step replays the next larger one. All graphs share
their memory, so no two are replayed at the same time. `graph_bodies.GraphBodies` has the launches
that they are captured from.

To capture one takes 30 to 55 ms, nearly all of it Python that launches kernels, and there are about
a hundred: more than half of a start that finds its kernels on disk. A rank that computes alone
captures a fifth of them before it serves, the largest of each kind first, since the others fit into
its memory; then one at a time while it has nothing else to do. What a busy rank still misses:
- a decode step of up to `_EXACT_ROWS` rows, and a step with prompts, has its graph captured first,
  so that the text of few requests does not depend on how long the rank has served;
- another decode step replays a larger graph. What its padding costs is noted by size, and once
  that is what a capture costs, the graph is captured: together never more than twice what is
  needed (the ski-rental rule; Karlin et al., Competitive Snoopy Caching, 1988).
Ranks that compute together capture all of them at the start, in the same order: kernels that wait
for one another belong together.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.ipc.request_record import AppendedTokens
from aioinfer.layers.extension import Extension
from aioinfer.layers.step import Step
from aioinfer.worker.slots import Slots

#: Steps with prompts of more tokens, beside one for each slot, are launched kernel by kernel: each
#: kernel takes longer than its launch.
MIXED_GRAPH_TOKENS = 4096
#: Decode steps of up to so many rows are computed by the graph of their size.
_EXACT_ROWS = 16
#: So many rows of padding take about as long as a capture: 20 us each, for an 8B on an H200.
_MAX_PADDING = 2048

_ROW_SECTIONS = 7


class CudaGraphs:
    """CUDA graphs by size. Without graphs, no size fits.

    Attributes:
        graphs: by size; `replay` captures one that is missing.
        sizes: for which there are graphs, or will be, ascending.
    """

    def __init__(self) -> None:
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.sizes: Sequence[int] = ()
        self._padding: Counter[int] = Counter()  # rows, by the size of the graph that is missing

    def capture(
        self, sizes: Sequence[int], launch: Callable[[int], object], pool: Any,
        first: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Captures the launches of `launch` for each size, the largest first, so that smaller ones
        fit into its memory. The largest is launched once before: memory that its launches keep is
        not the graph's. All kernels have been compiled and loaded (`compilation.compile_only`),
        which cannot be captured.

        Args:
            sizes: ascending.
            pool: of the graphs' memory, from `torch.cuda.graph_pool_handle`; graphs that share it
                are never replayed at the same time.
            first: the sizes that are captured now, the largest among them; by default all. The
                others come with `capture_next` and `replay`.
        """
        self.sizes, self._launch, self._pool = sizes, launch, pool
        launch(sizes[-1])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the launch has left would count against the graphs
        for size in reversed(sizes if first is None else first):
            self._capture(size)

    def capture_next(self) -> bool:
        """Captures the smallest size that is missing, if any is; returns whether one was."""
        size = next((size for size in self.sizes if size not in self.graphs), 0)
        if size:
            self._capture(size)
        return bool(size)

    def _capture(self, size: int) -> None:
        """Captures a size. Steps may be in flight, and their results be waited for by another
        thread; so, unlike in `torch.cuda.graph`, nothing is waited for, and no memory is given
        back."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(capture_stream()):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._launch(size)
            finally:
                graph.capture_end()
        self.graphs[size] = graph

    def fit(self, size: int) -> int:
        """Returns the smallest of `sizes` that is at least `size`; 0 if there is none."""
        index = bisect_left(self.sizes, size)
        return self.sizes[index] if index < len(self.sizes) else 0

    def fit_rows(self, rows: int) -> int:
        """Returns the size of the graph that a decode step of so many rows replays now: what `fit`
        does, or a larger size as long as that one is missing and its capture would not pay."""
        size = self.fit(rows)
        if size <= _EXACT_ROWS or size in self.graphs:
            return size
        larger = next(each for each in self.sizes if each > size and each in self.graphs)
        self._padding[size] += larger - size
        return larger if self._padding[size] <= _MAX_PADDING else size

    def replay(self, size: int) -> None:
        """Replays the graph of one of `sizes`, and captures it first where it is missing."""
        if size not in self.graphs:
            self._capture(size)
        self.graphs[size].replay()


def capture_stream() -> torch.cuda.Stream:
    """Returns PyTorch's stream for captures: libraries keep a workspace for each stream."""
    stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
    assert stream is not None
    return stream


def timed_sizes(sizes: Sequence[int]) -> list[int]:
    """Returns which of the sizes of decode steps are captured before a rank serves, and timed:
    every fourth, and the largest."""
    return sorted({*sizes[::4], sizes[-1]})


def decode_sizes(capacity: int) -> list[int]:
    """Returns the numbers of rows for which decode steps are captured, up to `capacity`: from 32 on
    at most a quarter too many."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, capacity, 32)]
    return [size for size in sizes if size < capacity] + [capacity]


def shared_sizes(capacity: int, min_rows: int) -> list[int]:
    """Returns the numbers of rows for which decode steps that look for a shared prefix are
    captured: fewer, since they are rarer."""
    sizes = [*range(8, 32, 8), *range(32, 128, 32), *range(128, capacity, 64)]
    return [size for size in sizes if min_rows <= size < capacity] + [capacity]


def lookahead_sizes(capacity: int) -> list[int]:
    """Returns the numbers of rows for which decode steps with lookahead are captured: fewer, since
    how many rows there are is chosen."""
    sizes = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, *range(256, capacity, 128)]
    return [size for size in sizes if size < capacity] + [capacity]


def mixed_sizes(max_tokens: int) -> list[int]:
    """Returns the numbers of tokens for which steps with prompts are captured, up to `max_tokens`:
    multiples of their products' tiles."""
    return [
        size
        for size in (*range(64, 512, 64), *range(512, 2560, 128), *range(2560, max_tokens, 256))
        if size < max_tokens
    ] + [max_tokens]


class SharedPrefixes:
    """Detects, on the host, steps with rows that begin with the same KV blocks.

    Decode attention finds shared prefixes on the GPU (`kernels.cascade_attention`). A graph that
    looks for them costs a launch a layer; so there are graphs with and without, and `StepGraphs`
    replays a graph with the search where the block tables say that it may save something. This
    class mirrors the first blocks of every slot of the first KV group.

    Args:
        slots: the maximum of running requests.
        block_size: tokens of a block.
        min_rows: rows that share a prefix at least.
        min_saved: keys that need not be read again at least.
    """

    def __init__(self, slots: int, block_size: int, *, min_rows: int, min_saved: int):
        def needed(blocks: int) -> int:
            """Returns how many rows have to share so many blocks."""
            return max(min_rows, -(-min_saved // (blocks * block_size)) + 1)

        longest = 1
        while needed(longest) > min_rows:
            longest += 1
        doublings = [1 << bits for bits in range(longest.bit_length()) if 1 << bits < longest]
        self._counts = {blocks: needed(blocks) for blocks in (*doublings, longest)}
        # numbers for missing blocks, all different: no two slots share a missing block
        self._none = -1 - np.arange(slots * longest, dtype=np.int32).reshape(slots, longest)
        self._blocks = self._none.copy()
        self._slots: I32 = np.empty(0, np.int32)
        self._found = False

    def update(self, plan: StepPlan) -> None:
        """Takes over the growth of block tables in a plan."""
        slots, longest = self._blocks.shape
        kept = (plan.table_rows < slots) & (plan.table_indices < longest)
        if not kept.any():
            return
        rows, indices = plan.table_rows[kept], plan.table_indices[kept]
        first = rows[indices == 0]  # of a request that enters the slot
        self._blocks[first] = self._none[first]
        self._blocks[rows, indices] = plan.table_blocks[kept]
        self._slots = np.empty(0, np.int32)

    def may_save(self, slots: I32) -> bool:
        """Whether enough of these rows (int32 [R]) have the same blocks at one of some indices."""
        if not np.array_equal(slots, self._slots):
            self._slots = slots.copy()
            self._found = any(
                self._has_equal(slots, blocks - 1, count) for blocks, count in self._counts.items()
            )
        return self._found

    def _has_equal(self, slots: I32, index: int, count: int) -> bool:
        """Whether `count` of the rows have the same block at an index."""
        if len(slots) < count:
            return False
        ordered = np.sort(self._blocks[slots, index])
        return bool((ordered[count - 1 :] == ordered[: len(ordered) - count + 1]).any())


class PlanBuffer:
    """Sections of equal meaning at fixed places: `rows` entries each for slots, starts, lengths,
    samples, and offsets, settled and limits of `LookaheadRows`; `growth` entries each for table
    rows, indices and blocks; at last the number of the result buffer.

    Args:
        rows: the maximum number of rows of a step.
        growth: the maximum number of entries by which block tables grow.
        device: of the worker.

    Attributes:
        values: int32 [7 * rows + 3 * growth + 1] on the device.
        buffer_index: its last entry.
    """

    def __init__(self, rows: int, growth: int, device: torch.device):
        self.rows, self.growth = rows, growth
        size = _ROW_SECTIONS * rows + 3 * growth + 1
        self.values = torch.zeros(size, dtype=torch.int32, device=device)
        self.buffer_index = self.values[-1:]

    def row_section(self, number: int, rows: int) -> torch.Tensor:
        """Returns the first `rows` entries of slots (0), starts (1), lengths (2), samples (3),
        offsets (4), settled (5) or limits (6)."""
        return self.values[number * self.rows : number * self.rows + rows]

    def growth_sections(self) -> tuple[torch.Tensor, ...]:
        """Returns table rows, indices and blocks, each int32 [growth]."""
        return self.values[_ROW_SECTIONS * self.rows : -1].view(3, self.growth).unbind()

    def clear_growth(self) -> None:
        """Makes all entries of the growth padding."""
        self.growth_sections()[0].fill_(-1)

    def fill(
        self, plan: StepPlan, buffer_index: int, host: torch.Tensor, late: I32 | None = None
    ) -> None:
        """Writes a plan into pinned memory (int32 like `values`) and starts its copy; entries
        beyond the plan's rows and growth become padding. The rows `late` (int32 [M]) do not count
        as sampled: their tokens come later."""
        array = host.numpy()
        growth_start = _ROW_SECTIONS * self.rows
        array[:growth_start] = 0
        array[5 * self.rows : 6 * self.rows] = 1  # padding begins at 0
        array[growth_start : growth_start + self.growth] = -1
        of_rows = [plan.slots, plan.starts, plan.lengths, plan.samples]
        lookahead = plan.section(LookaheadRows)
        if lookahead is not None:
            of_rows += lookahead.offsets, lookahead.settled, lookahead.limits
        for number, field in enumerate(of_rows):
            array[number * self.rows : number * self.rows + len(field)] = field
        if late is not None:
            array[3 * self.rows + late] = 0
        for number, field in enumerate((plan.table_rows, plan.table_indices, plan.table_blocks)):
            start = growth_start + number * self.growth
            array[start : start + len(field)] = field
        array[-1] = buffer_index
        self.values.copy_(host, non_blocking=True)


class StepGraphs:
    """The graphs of one rank; none until `GraphBodies.capture`.

    Attributes:
        decode, sharing, lookahead, extended: of decode steps by their rows; `sharing` look for
            shared prefixes, `extended` have the extension of the layers, `lookahead` have it, too,
            and may have lookahead rows.
        mixed, mixed_extended, pictured: of the layers of steps with prompts, by their tokens;
            `pictured` of steps with pictures.
        idle: of a step without rows.
        nbytes: GPU memory that those captured before the rank serves have taken.
        looks_for_prefixes: whether there is a set that looks for shared prefixes.
    """

    def __init__(
        self, plan: PlanBuffer, slots: Slots, *, looks_for_prefixes: bool,
        extension: Extension | None = None,
    ):  # fmt: skip
        """`plan`: the buffer that the graphs of decode steps read; `extension`: of the layers."""
        self.decode, self.sharing, self.lookahead = CudaGraphs(), CudaGraphs(), CudaGraphs()
        self.extended, self.mixed_extended = CudaGraphs(), CudaGraphs()
        self.mixed, self.pictured, self.idle = CudaGraphs(), CudaGraphs(), CudaGraphs()
        self._extension = extension
        self.nbytes = 0
        self.looks_for_prefixes = looks_for_prefixes
        self._plan = plan
        self._prefixes = _make_prefixes(slots) if looks_for_prefixes else None

    def capture_next(self) -> bool:
        """Captures one of the graphs that are missing, small decode steps first; returns whether
        any was."""
        kinds = (
            self.decode, self.mixed, self.lookahead, self.sharing, self.extended,
            self.mixed_extended, self.pictured, self.idle,
        )  # fmt: skip
        return any(graphs.capture_next() for graphs in kinds)

    def update(self, plan: StepPlan) -> None:
        """Takes over the part of a plan that the choice of a graph depends on. Called with every
        plan, in order."""
        if self._prefixes is not None:
            self._prefixes.update(plan)

    def has_decode(self, plan: StepPlan) -> bool:
        """Whether the step does nothing but decode, and is captured, if its features suit graphs
        (`WorkerFeature.suits_graphs`)."""
        rows, ahead = len(plan.slots), plan.section(LookaheadRows) is not None
        return (
            0 < rows <= (self.lookahead if ahead else self.decode).fit(rows)
            and not plan.admissions
            and plan.section(AppendedTokens) is None
            and not len(plan.copy_sources)
            and len(plan.table_rows) <= self._plan.growth
            and plan.num_tokens == rows
            and bool(plan.samples.all())
        )

    @property
    def is_extended(self) -> bool:
        """Whether the step has the extension of the layers."""
        return self._extension is not None and self._extension.is_active

    def layers_of(self, step: Step) -> CudaGraphs:
        """Returns the graphs of layers of a step with prompts: without sizes where there are none,
        as with soft prompts, pictures in extended steps, or such as are attended to both ways."""
        pictures = step.pictures
        if step.prompts is not None or (pictures is not None and pictures.blocks):
            return CudaGraphs()
        if pictures is not None:
            return CudaGraphs() if self.is_extended else self.pictured
        return self.mixed_extended if self.is_extended else self.mixed

    def replay_decode(self, plan: StepPlan) -> None:
        """Replays the graph of a step that `has_decode`, and that is in the plan buffer."""
        if plan.section(LookaheadRows) is not None:
            graphs = self.lookahead
        elif self.is_extended:
            graphs = self.extended
        elif self._prefixes is not None and self._prefixes.may_save(plan.slots):
            graphs = self.sharing
        else:
            graphs = self.decode
        graphs.replay(graphs.fit_rows(len(plan.slots)))


def _make_prefixes(slots: Slots) -> SharedPrefixes:
    """Returns the detector of steps in which attention may read a shared prefix once."""
    from aioinfer.kernels.cascade_attention import MIN_ROWS, MIN_SAVED_KEYS

    count = len(slots.tokens)
    return SharedPrefixes(count, slots.block_size, min_rows=MIN_ROWS, min_saved=MIN_SAVED_KEYS)

"""CUDA graphs of one sequence of launches, captured for several sizes: a step replays the next
larger one.

`StepGraphs` has such sets for decode steps, by number of rows (a second set where attention looks
for shared prefixes), and for the layers of steps with prompts, by number of tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch


class CudaGraphs:
    """CUDA graphs by size. Without graphs, no size fits.

    Attributes:
        graphs: by size.
    """

    def __init__(self) -> None:
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sizes: list[int] = []

    def capture(
        self, sizes: Sequence[int], launch: Callable[[int], object], pool: Any, *, run_each: bool
    ) -> None:
        """Captures the launches of `launch` for each size, the largest first, so that smaller ones
        fit into its memory.

        Args:
            sizes: ascending.
            pool: of the graphs' memory, from `torch.cuda.graph_pool_handle`; graphs that share it
                are never replayed at the same time.
            run_each: launch each size once before; else the largest alone. A first launch may need
                work that cannot be captured: a kernel's compilation, cublasLt's choice.
        """
        for size in reversed(sizes):
            if run_each or size == sizes[-1]:
                launch(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                launch(size)
            self.graphs[size] = graph
        self._sizes = sorted(self.graphs)

    def fit(self, size: int) -> int:
        """Returns the smallest captured size that is at least `size`; 0 if there is none."""
        index = bisect_left(self._sizes, size)
        return self._sizes[index] if index < len(self._sizes) else 0

    def replay(self, size: int) -> None:
        """Replays the graph of a captured size."""
        self.graphs[size].replay()


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


def mixed_sizes(max_tokens: int) -> list[int]:
    """Returns the numbers of tokens for which steps with prompts are captured, up to `max_tokens`:
    multiples of their products' tiles."""
    return [
        size
        for size in (*range(64, 512, 64), *range(512, 2560, 128), *range(2560, max_tokens, 256))
        if size < max_tokens
    ] + [max_tokens]

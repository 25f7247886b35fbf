"""Timing of a product on a GPU by each of its candidates: within layers of the model, or alone.

With dependent launch a kernel loads its weight while the kernels before it end, so the time of a
candidate depends on its neighbours: timed alone, a configuration won with which steps of eight rows
of Llama-3.1-8B took 12 % longer (notes/start-up.md). So for up to `MAX_LAYERS_ROWS` rows the
model's first layers are timed as a decode step computes them, with each candidate in turn. All
other products are timed alone, with a norm before each, since a step has short kernels around its
products: products of more rows and of quantized weights, for which the first way chose no better
and takes longer; products that these layers do not have; and all products of a rank that computes
layers together with others, for which it would have to wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import epilogue_of
from aioinfer.layers.kernel_choices import Candidate, ProductChoices, TimedWeight
from aioinfer.worker.step_graphs import capture_stream

_log = logging.getLogger(__name__)

#: Products of more rows are left to the formats' defaults (`MAX_ROWS`), or timed alone
#: (`MAX_LAYERS_ROWS`).
MAX_ROWS, MAX_LAYERS_ROWS = 512, 64
#: A candidate must be so much faster than the default to replace it, alone and within layers: more
#: than what two timings of one kernel, or of the same layers, differ by.
MARGIN, LAYERS_MARGIN = 1.02, 1.005
#: A graph of a candidate alone has at least so many launches, and at most that many.
_LAUNCHES = 4, 32
#: Features of the norm between two products.
_NORM_WIDTH = 4096
#: Replays of a graph; the first one counts for nothing.
_REPLAYS = 3


@dataclass(frozen=True, slots=True)
class TimedLayers:
    """Layers of the model within which products are timed.

    Attributes:
        launch: launches them for a decode step of so many rows.
        max_rows: the maximum of a step.
    """

    launch: Callable[[int], None]
    max_rows: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of the candidates for a product.

    Attributes:
        seconds: of each, or of layers with it; infinity for a kernel that this card cannot launch.
        margin: see `MARGIN`.
    """

    seconds: dict[Candidate, float]
    margin: float

    @classmethod
    def alone(cls, seconds: Mapping[Candidate, float]) -> Costs:
        """Returns the costs of candidates that were timed alone, less the time that each saves
        elsewhere in a step."""
        return cls({each: taken - each.gain_s for each, taken in seconds.items()}, MARGIN)


def cold_bytes(device: torch.device) -> int:
    """Returns so many bytes of weights, read one after the other, that none of them is left in a
    GPU's L2 cache when its turn comes again."""
    cached: int = torch.cuda.get_device_properties(device).L2_cache_size
    return 2 * cached


class KernelTimer:
    """Launches products on a GPU, and times them.

    The launches of a candidate are a CUDA graph, as in the steps that it is chosen for. They go
    through the weights of several layers, together larger than the L2 cache if there are enough, as
    between two uses of a weight all others are read. The graphs are captured on the stream that
    later captures use, for which cuBLAS then has its workspace.

    Args:
        backend: of the rank.
        layers: within which products are timed; None to time all alone.

    Attributes:
        device: the GPU.
    """

    def __init__(self, backend: Backend, layers: TimedLayers | None = None):
        from aioinfer.kernels.norm import MAX_HIDDEN

        self.device = backend.device
        self._dtype, self._pdl = backend.dtype, backend.pdl
        self._layers = layers
        self._ones = torch.ones(MAX_HIDDEN, dtype=backend.dtype, device=backend.device)
        self._normed = self._ones.new_empty(MAX_ROWS, _NORM_WIDTH)
        self._cold_bytes = cold_bytes(backend.device)
        self._in_layers: dict[ProductChoices, bool] = {}
        self._operands: dict[ProductChoices, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stream = capture_stream()
        self._pool = torch.cuda.graph_pool_handle()
        #: the graph before, which keeps the pool
        self._last: torch.cuda.CUDAGraph | None = None

    def launch(self, choices: ProductChoices, rows: int, candidate: Candidate) -> None:
        """Launches a product of the first of its weights, and the kernels that may read its
        parts."""
        from aioinfer.kernels.norm import add_parts, add_parts_rms_norm

        choices.forced = candidate
        try:
            parts = self._launch(choices, rows, choices.weights[:1])
        finally:
            choices.forced = None
        if parts is not None:
            total = self._operands_of(choices)[1][:rows]
            add_parts_rms_norm(parts, total, self._ones[: total.shape[1]], 1e-6, pdl=self._pdl)
            add_parts(parts, total, pdl=self._pdl)

    @torch.inference_mode()
    def measure(self, choices: ProductChoices, rows: int, candidates: Sequence[Candidate]) -> Costs:
        """Times the candidates for a product of so many rows."""
        layers = self._layers
        if layers is not None and self._is_in(layers, choices, rows):
            run = partial(layers.launch, rows)
            found = {each: self._time(choices, each, run, run) for each in candidates}
            return Costs(found, LAYERS_MARGIN)
        weights = self._weights_in_turn(choices)
        # the second norm sums the parts of the first product
        load = partial(self._launch, choices, rows, weights[:2])
        launch = partial(self._launch, choices, rows, weights)
        found = {each: self._time(choices, each, load, launch) for each in candidates}
        return Costs.alone({each: taken / len(weights) for each, taken in found.items()})

    def close(self) -> None:
        """Frees the memory."""
        self._operands.clear()
        self._last = None

    def _is_in(self, layers: TimedLayers, choices: ProductChoices, rows: int) -> bool:
        """Whether the product is timed within the layers: these compute it, which is found out by
        launching them once."""
        if choices.product.format != "dense" or rows > min(layers.max_rows, MAX_LAYERS_ROWS):
            return False
        if choices not in self._in_layers:
            before = choices.lookups
            layers.launch(rows)
            self._in_layers[choices] = choices.lookups > before
        return self._in_layers[choices]

    def _time(
        self,
        choices: ProductChoices,
        candidate: Candidate,
        load: Callable[[], Any],
        launch: Callable[[], Any],
    ) -> float:
        """Returns the seconds that `launch` takes with a candidate, the shortest of several
        replays; `load` launches each of its kernels."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            choices.forced = candidate
            try:
                load()  # a kernel that is not loaded yet cannot be captured
                graph = self._capture(launch)
            except Exception as error:  # as many kinds as there are kernels
                _log.warning("%s: %s cannot be launched: %s", choices.product, candidate, error)
                return float("inf")
            finally:
                choices.forced = None
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
            for event in events[:-1]:
                event.record()
                graph.replay()
            events[-1].record()
            events[-1].synchronize()
        return min(begin.elapsed_time(end) for begin, end in pairwise(events[1:])) / 1000

    def _capture(self, launch: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        self._last = graph
        return graph

    def _weights_in_turn(self, choices: ProductChoices) -> list[TimedWeight]:
        """Returns the weights of a graph's launches, some of them several times if there are
        few."""
        weights: list[TimedWeight] = choices.weights
        cold = -(-self._cold_bytes // max(1, weights[0].held_bytes))
        count = min(max(_LAUNCHES[0], min(cold, len(weights))), _LAUNCHES[1])
        return [weights[number % len(weights)] for number in range(count)]

    @torch.inference_mode()
    def _launch(
        self, choices: ProductChoices, rows: int, weights: Sequence[TimedWeight]
    ) -> torch.Tensor | None:
        """Computes a product with each of the weights, and a norm before each, which sums the parts
        of the product before it. Returns the last parts, if there are any."""
        from aioinfer.kernels.norm import add_parts_rms_norm, rms_norm

        x, total = (operand[:rows] for operand in self._operands_of(choices))
        part, normed = x[:, :_NORM_WIDTH], self._normed[:rows, : x.shape[1]]
        ones, outputs = self._ones, total.shape[1]
        epilogue = epilogue_of(choices.product.operation, choices.norm, total)
        parts = None
        for weight in weights:
            if parts is None:
                rms_norm(part, ones[: part.shape[1]], 1e-6, out=normed, pdl=self._pdl)
            else:
                add_parts_rms_norm(parts, total, ones[:outputs], 1e-6, pdl=self._pdl)
            product = weight.multiply(x, epilogue)
            is_in_parts = epilogue.add_to is not None and product is not total
            parts = product if is_in_parts else None
        return parts

    def _operands_of(self, choices: ProductChoices) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns random x [MAX_ROWS, inputs], since arithmetic with zeros takes less power, and
        room for the product."""
        if choices not in self._operands:
            shape = choices.product
            x = torch.randn(MAX_ROWS, shape.inputs, dtype=self._dtype, device=self.device)
            self._operands[choices] = x, x.new_zeros(MAX_ROWS, shape.outputs)
        return self._operands[choices]

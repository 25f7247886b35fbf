"""Times, when a worker starts, which kernel computes each product of the model the fastest.

The products are those that the warm-up steps have computed (`Backend.choices`). For numbers of rows
up to `MAX_ROWS` each weight format names its candidates; all are compiled with the other kernels,
timed in CUDA graphs over the weights of several layers, and the fastest is entered, before the
steps themselves are captured. What was found is stored (`stored_choices`), so the next start
compiles the chosen ones and times none. cuBLAS stands for cublasLt here, through which decode
graphs multiply; steps with prompts of so few tokens, which go through cuBLAS itself, take the same
choices.

A norm is launched before each product, since a step has short kernels around its products. With
dependent launch a kernel reads its weight while the one before runs: where that was another product
of the same kind, a configuration was chosen with which steps of eight rows took 13 % longer.

Of tensor-parallel ranks the first one decides for all. Nothing forces them to agree, since each
rank's part of a sum may be computed by any kernel; but a start that reads what is stored then
computes exactly what the start that measured it did.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import TimedWeight
from aioinfer.layers.kernel_choices import Candidate, KernelChoices, ProductChoices
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.worker.cuda_graphs import decode_sizes
from aioinfer.worker.stored_choices import StoredChoices, Texts, machine_of

_log = logging.getLogger(__name__)

#: Products of more rows are left to the formats' defaults.
MAX_ROWS = 512
#: Seconds that timing may take; what was not reached by then stays at the default.
BUDGET_S = 1.5
#: A candidate must be so much faster than the default to replace it: more than what two timings of
#: one kernel differ by.
MARGIN = 1.02
#: A graph of a candidate has at least so many launches, and at most that many.
_LAUNCHES = 4, 32
#: Features of the norm between two products.
_NORM_WIDTH = 4096
#: Replays of a graph, of which the first one counts for nothing.
_REPLAYS = 4

#: Returns the seconds that a candidate takes for a product of so many rows.
Measure = Callable[[ProductChoices, int, Candidate], float]


@dataclass(frozen=True, slots=True)
class Case:
    """A product of one number of rows, for which a kernel is chosen.

    Attributes:
        choices: of the product.
        rows: how many.
        candidates: the default first.
        settled: the choice that was stored, or the only candidate; None if it has to be timed.
    """

    choices: ProductChoices
    rows: int
    candidates: Sequence[Candidate]
    settled: Candidate | None


def list_cases(
    products: Iterable[ProductChoices],
    sizes: Sequence[int],
    stored: Mapping[str, Mapping[int, str]],
) -> list[Case]:
    """Returns the cases of all products, by ascending rows, so that whatever time allows is timed
    of each product."""
    cases = []
    of_weights = [(choices, choices.weights) for choices in products]
    for rows in sizes:
        for choices, weights in of_weights:
            first: TimedWeight | None = weights[0] if weights else None
            product = choices.product
            if first is None or (rows == 1 and not choices.has_single_row):
                continue
            found = first.candidates(product.operation, rows)
            if not found:
                continue
            by_text = {str(candidate): candidate for candidate in found}
            settled = by_text.get(stored.get(str(product), {}).get(rows, ""))
            if len(found) == 1:
                settled = found[0]
            cases.append(Case(choices, rows, found, settled))
    return cases


def fastest(seconds: Mapping[Candidate, float], default: Candidate) -> Candidate:
    """Returns the candidate that took the fewest seconds, less what it gains a step elsewhere, or
    the default if that is no slower but for `MARGIN`."""
    costs = {candidate: taken - candidate.gain_s for candidate, taken in seconds.items()}
    best = min(costs, key=lambda candidate: costs[candidate])
    return default if costs[default] <= MARGIN * costs[best] else best


def time_cases(
    cases: Sequence[Case], measure: Measure, clock: Callable[[], float], budget_s: float
) -> dict[int, Candidate]:
    """Returns what is chosen for cases, by their places; those that the budget did not reach, in
    seconds of `clock`, are missing."""
    end = clock() + budget_s
    chosen = {}
    for place, case in enumerate(cases):
        if clock() > end:
            break
        seconds = {
            candidate: measure(case.choices, case.rows, candidate) for candidate in case.candidates
        }
        chosen[place] = fastest(seconds, case.candidates[0])
    return chosen


class KernelTiming:
    """The choice of kernels of one rank: `prepare`, then `run`.

    Args:
        choices: of the rank.
        sizes: the numbers of rows, ascending.
        stored: where the choices are kept.
        group: the tensor-parallel ranks.
        stopwatch: launches and times the candidates.
    """

    def __init__(
        self,
        choices: KernelChoices,
        sizes: Sequence[int],
        stored: StoredChoices,
        group: ParallelGroup,
        stopwatch: Stopwatch,
    ):
        self._choices, self._sizes, self._stored = choices, sizes, stored
        self._group, self._stopwatch = group, stopwatch
        self._cases: list[Case] = []

    @classmethod
    def of(cls, backend: Backend) -> KernelTiming:
        """Returns that of a rank's products on its GPU."""
        import triton

        stored = StoredChoices(Path(triton.knobs.cache.dir), machine_of(backend.device))
        sizes = decode_sizes(MAX_ROWS)
        return cls(backend.choices, sizes, stored, backend.group, Stopwatch(backend))

    def prepare(self) -> None:
        """Enters the stored choices, and launches all candidates that may be chosen, to be called
        within `compile_only` when all products were launched."""
        stored = self._from_first_rank(self._stored.read() if self._group.rank == 0 else {})
        self._cases = list_cases(self._choices.products.values(), self._sizes, stored)
        self._enter({})
        for case in self._cases:
            launched = case.candidates if case.settled is None else (case.settled,)
            for candidate in launched:
                if candidate.config is not None:
                    self._launch(case, candidate)

    def _launch(self, case: Case, candidate: Candidate) -> None:
        """Launches a candidate; one that cannot be is found to be so again when it is timed."""
        try:
            self._stopwatch.launch(case.choices, case.rows, candidate)
        except Exception:
            _log.exception("%s: %s cannot be compiled", case.choices.product, candidate)

    def run(self, clock: Callable[[], float] = time.perf_counter) -> int:
        """Times what is not settled, enters the fastest candidates and stores them. Returns how
        many choices were measured."""
        began = clock()
        open_cases = [case for case in self._cases if case.settled is None]
        measured = self._measure(open_cases, clock) if self._group.rank == 0 else {}
        measured = self._from_first_rank(measured)
        self._enter(measured)
        self._stopwatch.close()
        count = sum(map(len, measured.values()))
        _log.info(
            "kernels of %d products: %d choices settled before, %d of %d timed in %.2f s (%s)",
            len(self._choices.products), len(self._cases) - len(open_cases), count,
            len(open_cases), clock() - began, self._stored.path,
        )  # fmt: skip
        return count

    def _measure(self, cases: Sequence[Case], clock: Callable[[], float]) -> Texts:
        """Returns what was measured and stored; nothing if something fails, which must not keep the
        server from starting."""
        try:
            timed = time_cases(cases, self._stopwatch.measure, clock, BUDGET_S)
        except Exception:
            _log.exception("kernels cannot be timed: all products take their defaults")
            return {}
        measured = _as_texts((cases[place], chosen) for place, chosen in timed.items())
        return self._stored.add(measured) if measured else {}

    def _enter(self, measured: Texts) -> None:
        """Enters the choices of all cases: what was settled or measured, and the default of what
        was not."""
        by_product: dict[int, tuple[ProductChoices, dict[int, Candidate]]] = {}
        for case in self._cases:
            text = measured.get(str(case.choices.product), {}).get(case.rows)
            chosen = case.settled or next(
                (candidate for candidate in case.candidates if str(candidate) == text),
                case.candidates[0],
            )
            entry = by_product.setdefault(id(case.choices), (case.choices, {}))
            entry[1][case.rows] = chosen
        for choices, by_rows in by_product.values():
            choices.choose(by_rows)

    def _from_first_rank(self, texts: Texts) -> Texts:
        """Returns the first rank's texts on every rank."""
        group, device = self._group, self._stopwatch.device
        if group.size == 1:
            return texts
        content = json.dumps(texts).encode() if group.rank == 0 else b""
        size = group.all_reduce(torch.tensor([len(content)], device=device))
        values = torch.zeros(int(size), dtype=torch.uint8, device=device)
        if group.rank == 0:
            values.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        received = json.loads(bytes(group.all_reduce(values).tolist()))
        return {
            product: {int(rows): text for rows, text in by_rows.items()}
            for product, by_rows in received.items()
        }


def _as_texts(chosen: Iterable[tuple[Case, Candidate]]) -> Texts:
    texts: Texts = {}
    for case, candidate in chosen:
        texts.setdefault(str(case.choices.product), {})[case.rows] = str(candidate)
    return texts


class Stopwatch:
    """Launches products on a GPU, and times them.

    The launches of a candidate are a CUDA graph, as in the steps that it is chosen for. They go
    through the weights of several layers, together larger than the L2 cache if there are enough, as
    between two uses of a weight all others are read. The graphs are captured on the stream that
    later captures use, for which cuBLAS then has its workspace.

    Attributes:
        device: the GPU.
    """

    def __init__(self, backend: Backend):
        from aioinfer.kernels.norm import MAX_HIDDEN

        self.device = backend.device
        self._dtype, self._pdl = backend.dtype, backend.pdl
        self._ones = torch.ones(MAX_HIDDEN, dtype=backend.dtype, device=backend.device)
        self._normed = self._ones.new_empty(MAX_ROWS, _NORM_WIDTH)
        properties = torch.cuda.get_device_properties(backend.device)
        self._cold_bytes = 2 * properties.L2_cache_size
        self._operands: dict[ProductChoices, tuple[torch.Tensor, torch.Tensor]] = {}
        stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
        assert stream is not None
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        #: the graph before, which keeps the pool
        self._last: torch.cuda.CUDAGraph | None = None

    def launch(self, choices: ProductChoices, rows: int, candidate: Candidate) -> None:
        """Launches a product of the first of its weights, and what may read its parts."""
        from aioinfer.kernels.norm import add_parts, add_parts_rms_norm

        parts = self._launch(choices, rows, candidate, choices.weights[:1])
        if parts is not None:
            total = self._operands_of(choices)[1][:rows]
            add_parts_rms_norm(parts, total, self._ones[: total.shape[1]], 1e-6, pdl=self._pdl)
            add_parts(parts, total, pdl=self._pdl)

    @torch.inference_mode()
    def measure(self, choices: ProductChoices, rows: int, candidate: Candidate) -> float:
        """Implements `Measure`: returns the shortest of several replays; infinity for a kernel that
        this card cannot launch."""
        weights = self._weights_in_turn(choices)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            try:
                self._launch(choices, rows, candidate, weights[:1])
            except Exception as error:  # as many kinds as there are kernels
                _log.warning("%s: %s cannot be launched: %s", choices.product, candidate, error)
                return float("inf")
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._launch(choices, rows, candidate, weights)
            finally:
                graph.capture_end()
            self._last = graph
            events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPLAYS + 1)]
            for event in events[:-1]:
                event.record()
                graph.replay()
            events[-1].record()
            events[-1].synchronize()
        shortest = min(begin.elapsed_time(end) for begin, end in pairwise(events[1:]))
        return shortest / 1000 / len(weights)

    def close(self) -> None:
        """Lets go of the memory."""
        self._operands.clear()
        self._last = None

    def _weights_in_turn(self, choices: ProductChoices) -> list[TimedWeight]:
        """Returns the weights of a graph's launches, some of them several times if there are
        few."""
        weights: list[TimedWeight] = choices.weights
        cold = -(-self._cold_bytes // max(1, weights[0].held_bytes))
        count = min(max(_LAUNCHES[0], min(cold, len(weights))), _LAUNCHES[1])
        return [weights[number % len(weights)] for number in range(count)]

    @torch.inference_mode()
    def _launch(
        self,
        choices: ProductChoices,
        rows: int,
        candidate: Candidate,
        weights: Sequence[TimedWeight],
    ) -> torch.Tensor | None:
        """Computes a product with each of the weights by a candidate, and a norm before each, which
        sums the parts of the product before it. Returns the last parts, if there are any."""
        from aioinfer.kernels.norm import add_parts_rms_norm, rms_norm

        x, total = (operand[:rows] for operand in self._operands_of(choices))
        part, normed = x[:, :_NORM_WIDTH], self._normed[:rows, : x.shape[1]]
        ones, outputs = self._ones, total.shape[1]
        is_residual = choices.product.operation == "residual"
        parts = None
        choices.forced = candidate
        try:
            for weight in weights:
                if parts is None:
                    rms_norm(part, ones[: part.shape[1]], 1e-6, out=normed, pdl=self._pdl)
                else:
                    add_parts_rms_norm(parts, total, ones[:outputs], 1e-6, pdl=self._pdl)
                product = compute(choices, weight, x, total)
                parts = product if is_residual else None
        finally:
            choices.forced = None
        return parts

    def _operands_of(self, choices: ProductChoices) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns random x [MAX_ROWS, inputs], since arithmetic with zeros takes less power, and
        room for the product."""
        if choices not in self._operands:
            shape = choices.product
            x = torch.randn(MAX_ROWS, shape.inputs, dtype=self._dtype, device=self.device)
            self._operands[choices] = x, x.new_zeros(MAX_ROWS, shape.outputs)
        return self._operands[choices]


def compute(
    choices: ProductChoices, weight: TimedWeight, x: torch.Tensor, total: torch.Tensor
) -> Any:
    """Computes a product of x [T, inputs] as the layers do; see `kernel_choices.Operation`. What is
    written to, or added to, is `total` [T, outputs], whose first row serves as a bias. Returns the
    product, its parts if they are left to be added, or None if it was added."""
    match choices.product.operation:
        case "plain":
            return weight.multiply(x)
        case "partial":
            return weight.multiply(x, out=total)
        case "biased":
            return weight.multiply(x, total[0])
        case "residual":
            return weight.add_product(x, total)
        case "gated":
            return weight.multiply_gated(x)
        case "normed":
            return weight.multiply_normed(x, choices.norm)
        case "normed gated":
            return weight.multiply_gated(x, choices.norm)

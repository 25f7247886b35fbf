"""Selection of the fastest kernel for each product of the model, by timing when a worker starts.

The products are those that the warm-up steps have computed (`Backend.choices`). For numbers of rows
up to `MAX_ROWS` each weight format names its candidates; all are compiled with the other kernels
and timed (`stopwatch`), and the fastest is entered, before the steps themselves are captured. The
results are stored (`StoredChoices`), so the next start compiles the chosen ones and times none.
cuBLAS stands for cublasLt here, through which decode graphs multiply; steps with prompts of so few
tokens, which go through cuBLAS itself, take the same choices.

Of tensor-parallel ranks the first one decides for all. Nothing forces them to agree, since each
rank's part of a sum may be computed by any kernel; but a start that reads stored choices then
computes exactly the same as the start that measured them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.kernel_choices import (
    Candidate,
    KernelChoices,
    ProductChoices,
    StoredChoices,
    Texts,
    machine_of,
)
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.worker.step_graphs import decode_sizes
from aioinfer.worker.stopwatch import MAX_LAYERS_ROWS, MAX_ROWS, Costs, KernelTimer, TimedLayers

_log = logging.getLogger(__name__)

#: Seconds that timing may take; products not reached by then stay at the default.
BUDGET_S = 1.8

#: Returns what candidates for a product of so many rows take.
Measure = Callable[[ProductChoices, int, Sequence[Candidate]], Costs]


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
    """Returns the cases of all products in the order in which they are timed, so that whatever time
    allows is timed of each product.

    Cases of many rows come first: they take little time, and their default may be a tenth slower
    than the fastest. The others follow; each half is in order of ascending rows. Among cases of
    equal rows the largest weights come first, since the others are timed beside the kernels chosen
    for them.
    """
    cases = []
    of_weights = [(choices, choices.weights) for choices in products]
    for rows in sizes:
        for choices, weights in of_weights:
            first = weights[0] if weights else None
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
    return sorted(cases, key=_order)


def _order(case: Case) -> tuple[bool, int, int]:
    """Returns the sort key of a case; see `list_cases`."""
    shape = case.choices.product
    return case.rows <= MAX_LAYERS_ROWS, case.rows, -shape.outputs * shape.inputs


def fastest(costs: Costs, default: Candidate) -> Candidate:
    """Returns the candidate that takes the fewest seconds, or the default if that is no slower but
    for the margin."""
    seconds = costs.seconds
    best = min(seconds, key=lambda candidate: seconds[candidate])
    return default if seconds[default] <= costs.margin * seconds[best] else best


def time_cases(
    cases: Sequence[Case], measure: Measure, clock: Callable[[], float], budget_s: float
) -> dict[int, Candidate]:
    """Returns the candidates chosen for cases, by their places; cases that the budget, in seconds
    of `clock`, did not reach are missing.

    While it runs, the candidate chosen for a product is entered for all larger numbers of rows that
    are still open, too, if it is among their candidates: products are timed beside one another.
    """
    end = clock() + budget_s
    chosen: dict[int, Candidate] = {}
    for place, case in enumerate(cases):
        if clock() > end:
            break
        costs = measure(case.choices, case.rows, case.candidates)
        chosen[place] = fastest(costs, case.candidates[0])
        for other in cases[place:]:
            is_same = other.choices is case.choices
            if is_same and other.rows >= case.rows and chosen[place] in other.candidates:
                other.choices.replace(other.rows, chosen[place])
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
        stopwatch: KernelTimer,
    ):
        self._choices, self._sizes, self._stored = choices, sizes, stored
        self._group, self._stopwatch = group, stopwatch
        self._cases: list[Case] = []

    @classmethod
    def of(cls, backend: Backend, layers: TimedLayers | None) -> KernelTiming:
        """Returns the choice of kernels for a rank's products on its GPU; `layers` as for
        `KernelTimer`."""
        import triton

        stored = StoredChoices(Path(triton.knobs.cache.dir), machine_of(backend.device))
        sizes = decode_sizes(MAX_ROWS)
        stopwatch = KernelTimer(backend, layers)
        return cls(backend.choices, sizes, stored, backend.group, stopwatch)

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
        """Times the cases that are not settled, enters the fastest candidates and stores them.
        Returns how many choices were measured."""
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
        """Returns the choices that were measured and stored; none if something fails, which must
        not keep the server from starting."""
        try:
            timed = time_cases(cases, self._stopwatch.measure, clock, BUDGET_S)
        except Exception:
            _log.exception("kernels cannot be timed: all products take their defaults")
            return {}
        measured = _as_texts((cases[place], chosen) for place, chosen in timed.items())
        return self._stored.add(measured) if measured else {}

    def _enter(self, measured: Texts) -> None:
        """Enters the choices of all cases: the settled or measured candidate, else the default."""
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

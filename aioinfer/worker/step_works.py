"""The calls of step features: the worker halves of a rank, and which of them a step concerns.

The runner calls the features whose section a plan has, and no others, through the `StepCalls` of
the plan; a plan without sections costs one comparison. The features themselves are in
`aioinfer.features`; since imports go down only, the list there is found by name.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.config import Config
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.sections import I32, Section
from aioinfer.layers.backend import Backend
from aioinfer.layers.extension import Extension
from aioinfer.layers.step import Step
from aioinfer.worker.adjustments import Adjust
from aioinfer.worker.features import (
    AwaitMessage,
    PendingSection,
    ProposalRows,
    Rank,
    SampledStep,
    WorkerFeature,
)


def load_works(names: Iterable[str]) -> Sequence[Any]:
    """Returns the modules of all worker halves, with those of other packages by their `names`."""
    return importlib.import_module("aioinfer.features").load_halves("worker", tuple(names))


def extend_layers(config: Config, backend: Backend) -> Extension | None:
    """Returns what a feature adds to the layers of the model that is made next; None for nothing.
    See `WorkerFeature.extend_layers`."""
    halves = load_works(config.model.features)
    found = (module.Work.extend_layers(config, backend) for module in halves)
    return next(filter(None, found), None)


class Active(NamedTuple):
    """A feature that a step concerns, and its section of the plan."""

    work: WorkerFeature
    section: Any


class StepCalls:
    """The calls of one step's features, in the order of `WorkerFeature`. Falsy if the step concerns
    none.

    Attributes:
        late: int32 [M], the sampled rows that are sampled after all others; None without any.
        pending: what goes back so far.
    """

    __slots__ = ("_active", "_late_one", "_plan", "late", "pending")

    _late_one: Active  # the feature that has late rows

    def __init__(self, plan: StepPlan, active: Sequence[Active] = ()):
        self._plan, self._active = plan, active
        self.late: I32 | None = None
        self.pending: list[PendingSection] = []
        for each in active:
            rows = each.work.late_rows(each.section)
            if rows is None:
                continue
            if self.late is not None:
                raise ValueError("two features of a plan have rows that wait for a message")
            self.late, self._late_one = rows, each

    def __bool__(self) -> bool:
        return bool(self._active)

    @property
    def suit_graphs(self) -> bool:
        """Whether the CUDA graph of a decode step may be replayed for the plan."""
        return all(each.work.suits_graphs for each in self._active)

    def change_inputs(self, step: Step) -> None:
        """Calls `WorkerFeature.change_inputs`."""
        for work, section in self._active:
            if work.changes_inputs:
                work.change_inputs(self._plan, section, step)

    @property
    def need_all_tokens(self) -> bool:
        """Whether a feature needs the hidden states of all tokens of the step."""
        return any(each.work.needs_all_tokens(self._plan, each.section) for each in self._active)

    def read_hidden(self, hidden: torch.Tensor, *, has_all_tokens: bool) -> None:
        """Calls `WorkerFeature.read_hidden`."""
        for work, section in self._active:
            self._add(work.read_hidden(self._plan, section, hidden, has_all_tokens=has_all_tokens))

    def late_logits(
        self, logits: torch.Tensor, places: torch.Tensor, await_message: AwaitMessage | None
    ) -> tuple[torch.Tensor, int]:
        """Returns the changed logits of the late rows, as `WorkerFeature.late_logits` does, and how
        many nanoseconds the message was waited for.

        Raises ValueError without a source of messages.
        """
        if await_message is None:
            raise ValueError("a plan with rows that wait for a message, and no source of messages")
        wait, (work, section) = _TimedWait(await_message), self._late_one
        return work.late_logits(self._plan, section, logits, places, wait), wait.waited_ns

    def adjuster_of_others(self, count: int) -> Adjust | None:
        """Returns `adjuster` of the rows that are not late, of `count` sampled ones."""
        if not self._active:
            return None
        others = np.arange(count)
        if self.late is not None:
            others = np.delete(others, self.late)
        return self.adjuster(others) if len(others) else None

    def adjuster(self, rows: npt.NDArray[np.integer]) -> Adjust | None:
        """Returns what changes float32 logits [n, local_size] of `rows` in place by all
        `WorkerFeature.adjust`; None if no feature of the step does."""
        adjusting = [each for each in self._active if each.work.adjusts_logits]
        return partial(self._adjust, adjusting, rows) if adjusting else None

    def _adjust(
        self, adjusting: Sequence[Active], rows: npt.NDArray[np.integer], logits: torch.Tensor
    ) -> None:
        for work, section in adjusting:
            work.adjust(self._plan, section, logits, rows)

    def read_tokens(self, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        """Calls `WorkerFeature.read_tokens`."""
        for work, section in self._active:
            self._add(work.read_tokens(self._plan, section, logits, tokens))

    def _add(self, found: PendingSection | None) -> None:
        if found is not None:
            self.pending.append(found)


class _TimedWait:
    """Waits for a message as `await_message` does, and notes how long.

    Attributes:
        waited_ns: nanoseconds.
    """

    def __init__(self, await_message: AwaitMessage):
        self.waited_ns = 0
        self._await_message = await_message

    def __call__(self, plan: StepPlan, rows: int) -> I32:
        began = time.perf_counter_ns()
        try:
            return self._await_message(plan, rows)
        finally:
            self.waited_ns += time.perf_counter_ns() - began


class StepWorks:
    """The worker halves of all features of one rank; none by default.

    Attributes:
        all: the worker halves, each of another section.
    """

    def __init__(self, works: Iterable[WorkerFeature] = ()):
        self.all = [work for work in works if work.is_needed]
        self._of_every_step = [work for work in self.all if work.section is None]
        self._by_section = {work.section: work for work in self.all if work.section is not None}
        self._proposing = next((work for work in reversed(self.all) if work.proposes), None)
        self._following = [work for work in self.all if work.follows]

    @classmethod
    def load(cls, rank: Rank, names: Iterable[str] = ()) -> StepWorks:
        """Returns the worker halves of the package's features, and of the features of other
        packages by their `names`. Raises ConfigError."""
        return cls(module.Work(rank) for module in load_works(names))

    def of(self, plan: StepPlan, *, samples: bool = True) -> StepCalls:
        """Returns the calls of the features that a plan concerns, where the rank does not sample of
        those that change inputs. Raises ValueError if two of them have late rows."""
        if not plan.sections:
            return StepCalls(plan)
        found = ((self._by_section.get(type(section)), section) for section in plan.sections)
        return StepCalls(
            plan,
            [
                Active(work, part)
                for work, part in found
                if work is not None and (samples or work.changes_inputs)
            ],
        )

    def begin(self, plan: StepPlan) -> None:
        """Calls `WorkerFeature.begin` of work of every step."""
        for work in self._of_every_step:
            work.begin(plan)

    def take(self, section: Section) -> None:
        """Hands a section that came without a plan to its feature; see `WorkerFeature.take`."""
        for work in self.all:
            if isinstance(section, work.takes):
                work.take(section)

    def change_captured(self, step: Step) -> bool:
        """See `WorkerFeature.change_captured`."""
        return any(
            work.change_captured(step) for work in self._by_section.values() if work.changes_inputs
        )

    def propose(self, rows: ProposalRows) -> None:
        """Calls `WorkerFeature.propose` of the feature that proposes drafts. Without one, whatever
        tokens the slots have are drafts."""
        if self._proposing is not None:
            self._proposing.propose(rows)

    @property
    def follow_steps(self) -> bool:
        """Whether a feature computes anything behind steps with lookahead."""
        return bool(self._following)

    @property
    def read_all_hidden(self) -> bool:
        """Whether it reads the hidden states of all tokens."""
        return any(work.reads_hidden for work in self._following)

    def follow(self, step: SampledStep) -> None:
        """Calls `WorkerFeature.follow`."""
        for work in self._following:
            work.follow(step)

    def read_step(self, step_id: int) -> list[PendingSection]:
        """Returns what goes back behind a step, whatever its plan has."""
        found = [work.read_step(step_id) for work in self._of_every_step]
        return [each for each in found if each is not None]

    def pass_on(self, step_id: int) -> None:
        """Calls `WorkerFeature.pass_on` of work of every step."""
        for work in self._of_every_step:
            work.pass_on(step_id)

    def begin_service(self) -> None:
        """Calls `WorkerFeature.begin_service`."""
        for work in self.all:
            work.begin_service()

    def close(self) -> None:
        """Calls `WorkerFeature.close`."""
        for work in self.all:
            work.close()

    def dummy_sections(self, slots: Sequence[int], lengths: Sequence[int]) -> list[Section]:
        """Returns the sections of a warm-up step; see `WorkerFeature.dummy_section`."""
        found = [work.dummy_section(slots, lengths) for work in self.all]
        return [each for each in found if each is not None]

    def late_sections(self, rows: int) -> list[Section]:
        """Returns the sections of a warm-up step in which all of so many rows are late."""
        late = [work for work in self.all if type(work).late_rows is not WorkerFeature.late_rows]
        found = [work.dummy_section(range(rows), [1] * rows) for work in late]
        return [each for each in found if each is not None]


def sections_of(pending: Iterable[PendingSection]) -> list[Section]:
    """Returns the sections of a result, once its step is over."""
    return [section for each in pending for section in each.to_sections()]

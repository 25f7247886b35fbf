"""The worker half of a step feature, what it works on, and what it is given.

The features themselves are in `aioinfer.features`; `step_works` calls them. `rows_of` and
`first_tokens` find the rows and tokens of slots in a plan, for features whose sections name slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.config import Config, ModelConfig
from aioinfer.ipc.placement import RankSpec
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.read_tally import Tally
from aioinfer.ipc.sections import I32, Section
from aioinfer.layers.backend import Backend
from aioinfer.layers.extension import Extension
from aioinfer.layers.step import Step
from aioinfer.models.causal_lm import CausalLM
from aioinfer.models.drafters.drafter import Drafter
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.slots import RowTensors, Slots, upload
from aioinfer.worker.stage_links import StageLinks

#: Waits for the message that the engine sends behind a plan whose rows it concerns (a number), and
#: returns int32 [rows, words]: a view into memory that all processes share, valid until the step's
#: result has been posted.
AwaitMessage = Callable[[StepPlan, int], I32]


@dataclass(frozen=True, slots=True)
class Rank:
    """What a worker half works on.

    Attributes:
        model: the rank's part of the model.
        slots: the running requests.
        links: to the other stages of a pipeline, if there are any.
        config: the whole configuration.
        drafter: the rank's part of the model that drafts tokens, if there is one.
        kv: the KV cache.
        engine: the number of the engine that the rank belongs to.
        identify_kv: returns 16 bytes that stand for all that a KV block depends on beside its
            tokens; called when the service begins, and when weights may have changed.
        place: of the rank in the world.
        tally: of what the ranks of the engine read, if there may be several.
    """

    model: CausalLM
    slots: Slots
    links: StageLinks | None = None
    config: Config = field(default_factory=lambda: Config(model=ModelConfig(path="")))

    drafter: Drafter | None = None
    kv: KVTensors | None = None
    engine: int = 0
    identify_kv: Callable[[], bytes] = bytes
    place: RankSpec = field(default_factory=RankSpec)
    tally: Tally | None = None

    @property
    def uses_kernels(self) -> bool:
        """Whether features may launch Triton kernels."""
        return self.slots.uses_kernels

    @property
    def device(self) -> torch.device:
        """The rank's device."""
        return self.slots.device

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copies an array to the device; see `slots.upload`."""
        return upload(array, self.device)


class ProposalRows(NamedTuple):
    """The decodes of a step with lookahead, int32 [R] each on the device (see `ipc.lookahead`).

    Attributes:
        slots: the slot of each row.
        bases: the position of the slot's last known token; the same for all rows of a slot.
        offsets: the number of the row among the adjacent rows of its slot; a row with an offset
            above 0 computes a draft.
    """

    slots: torch.Tensor
    bases: torch.Tensor
    offsets: torch.Tensor


class StepRows(NamedTuple):
    """Rows of a step, int32 [R] each on the device.

    Attributes:
        slots, starts, lengths: the slot of each row, its first position and its tokens; length 0 is
            padding, behind all other rows.
        limits: the position of each row from which on nothing may be cached.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    limits: torch.Tensor


class PrepareSuccessors(Protocol):
    """See `Device.prepare_successors`."""

    def __call__(
        self, rows: StepRows, num_tokens: int, num_decodes: int, longest: int, *, keeps_first: bool
    ) -> Step: ...


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step with lookahead whose tokens are in the slots, as far as they were kept.

    Attributes:
        step: as the model computed it.
        rows: of the step; their positions are known.
        longest: at least the tokens of a row.
        sampled: the sampled rows.
        places: the numbers of the sampled rows and the last token of each, int32 [S] each; None
            where both are the number of the sampled row.
        hidden: [T, hidden_size] of all tokens, before the last norm; or of the sampled rows alone,
            if no feature reads all.
        prepare: prepares further rows.
    """

    step: Step
    rows: StepRows
    longest: int
    sampled: RowTensors
    places: tuple[torch.Tensor, torch.Tensor] | None
    hidden: torch.Tensor
    prepare: PrepareSuccessors


@dataclass(frozen=True, slots=True)
class PendingSection:
    """A section of a result whose arrays are still on the device, or on their way to the host.

    Attributes:
        kind: the class of the section.
        parts: its arrays, in the order of the declaration and in their dtypes; some may be on the
            host already.
    """

    kind: type[Section]
    parts: tuple[torch.Tensor, ...]

    def fetch(self, stream: torch.cuda.Stream) -> PendingSection:
        """Starts the copy of the arrays from a GPU to the host on `stream`, the current one, which
        waits for the stream that they were computed on. Their memory is not used again before
        that."""
        for part in self.parts:
            if part.is_cuda:
                part.record_stream(stream)
        return PendingSection(
            self.kind, tuple(part.to("cpu", non_blocking=True) for part in self.parts)
        )

    def to_section(self) -> Section:
        """Returns the section, once the step is over."""
        return self.kind(*(part.cpu().numpy() for part in self.parts))

    def to_sections(self) -> list[Section]:
        """Returns the section, or none where there is nothing to tell, once the step is over."""
        return [self.to_section()]


@dataclass(frozen=True, slots=True)
class LateSection(PendingSection):
    """A section of int32 columns that is made when its step is over, and not when it is launched,
    which is a step or two before: features that read in threads report by it what has been read.

    Attributes:
        report: returns the rows; without any there is no section.
    """

    report: Callable[[], Sequence[Sequence[int]]]

    def fetch(self, stream: torch.cuda.Stream) -> PendingSection:
        """See `PendingSection.fetch`: nothing is on the device."""
        return self

    def to_sections(self) -> list[Section]:
        """See `PendingSection.to_sections`."""
        rows = np.array(self.report(), np.int32).reshape(-1, len(fields(self.kind)))
        return [self.kind(*rows.T.copy())] if len(rows) else []


class WorkerFeature:
    """The worker half of a feature: one object a rank. All ranks of a model call it alike.

    A feature overrides what it needs. Methods with a `section` are called in steps whose plan has
    it. A pipeline calls them on its last stage alone, but those of a feature that `changes_inputs`
    on every stage. Arrays of a plan may be views into the ring, which are valid until the step has
    been launched.

    Attributes:
        section: the plan's section that it serves; None for work of every step.
        takes: the sections that come to it without a plan, for `take`.
        suits_graphs: whether the CUDA graph of a decode step may be replayed for a plan with the
            section: the feature needs no hidden states.
        adjusts_logits: whether `adjust` changes logits.
        proposes: whether `propose` writes drafts; of several features the last one does.
        follows: whether `follow` is called.
        reads_hidden: whether `follow` reads the hidden states of all tokens of a step.
        changes_inputs: whether `change_inputs` is called.
        is_needed: false where the rank's model gives it nothing to do: it is never called then.
    """

    section: ClassVar[type[Section] | None] = None
    takes: ClassVar[tuple[type[Section], ...]] = ()
    suits_graphs: ClassVar[bool] = True
    adjusts_logits: ClassVar[bool] = False
    proposes: ClassVar[bool] = False
    changes_inputs: ClassVar[bool] = False
    follows: bool = False
    reads_hidden: bool = False

    def __init__(self, rank: Rank):
        self.rank = rank
        self.is_needed = True

    @classmethod
    def extend_layers(cls, config: Config, backend: Backend) -> Extension | None:
        """Returns what the feature adds to the layers of a model that is made for a backend; None
        for nothing. Of one feature at most."""
        return None

    # ---------------------------------------------------------------- a step, in this order

    def begin(self, plan: StepPlan) -> None:
        """Prepares for a plan, before anything of it is launched; called on every stage for work
        without a `section`."""

    def take(self, section: Any) -> None:
        """Takes a section that the planning half has sent on its own (`Host.tell`), between the
        launches of two steps: behind the plans that were posted before it. It launches nothing. Its
        arrays hold during the call."""

    def propose(self, rows: ProposalRows) -> None:
        """Writes a draft into `Slots.tokens[slot, base + offset]` for each row with an offset above
        0, from the tokens of its slot up to `base`: any token id, right or wrong.

        Called before the inputs of a step with lookahead rows are prepared, on all ranks, of a
        pipeline on the first and the last stage; all propose the same. On a GPU it may be captured
        in a CUDA graph: it launches the same work for any values of `rows`, and waits for nothing.
        """

    def change_inputs(self, plan: StepPlan, section: Any, step: Step) -> None:
        """Changes the inputs of a step that no graph computes as a whole, before its layers."""

    def change_captured(self, step: Step) -> bool:
        """Gives a step that a graph of the layers is captured from what `change_inputs` gives
        others; the graph is replayed where that was called for the step. Returns whether it
        does: of one feature at most. Called if the feature `changes_inputs`."""
        return False

    def needs_all_tokens(self, plan: StepPlan, section: Any) -> bool:
        """Whether `read_hidden` needs the hidden states of all tokens of the step, and not just
        those of its sampled rows."""
        return False

    def read_hidden(
        self, plan: StepPlan, section: Any, hidden: torch.Tensor, *, has_all_tokens: bool
    ) -> PendingSection | None:
        """Returns what goes back from the hidden states of a step.

        Args:
            hidden: before the last norm: [T, hidden_size] of all tokens if `has_all_tokens`, else
                [S, hidden_size] of the sampled rows, if `rank.model.finishes_with_hidden_states`.
                `rank.model` has `normed` and `logits_of` for them.
        """
        return None

    def late_rows(self, section: Any) -> I32 | None:
        """Returns the sampled rows (int32 [M], ascending places) that are sampled after all others,
        because their logits are changed by a message that comes behind the plan; None for none.
        One feature of a step has such rows at most."""
        return None

    def late_logits(
        self, plan: StepPlan, section: Any, logits: torch.Tensor, places: torch.Tensor,
        await_message: AwaitMessage,
    ) -> torch.Tensor:  # fmt: skip
        """Waits for the message, and returns the changed logits of the late rows, float32 [M,
        local_size], a copy.

        Args:
            logits: [S, local_size] of all sampled rows; not changed.
            places: int32 [M] on the device, the late rows.
        """
        raise NotImplementedError

    def adjust(
        self, plan: StepPlan, section: Any, logits: torch.Tensor, rows: npt.NDArray[np.integer]
    ) -> None:
        """Changes logits before a token is sampled from them, in place: the logits processor of a
        feature. Biases, bans and penalties are applied, and late rows are masked; the temperature
        follows. Each sampled row of the step comes once, in one of two calls if there are late
        rows.

        Args:
            logits: float32 [n, local_size], of the token ids from `rank.model.vocabulary.start` on.
            rows: [n] on the host, the places of these rows among the step's sampled rows.
        """

    def read_tokens(
        self, plan: StepPlan, section: Any, logits: torch.Tensor, tokens: torch.Tensor
    ) -> PendingSection | None:
        """Returns what goes back from the outcome of sampling.

        Args:
            logits: [S, local_size] of the sampled rows, as the model gave them, in its dtype or in
                float32; not to be changed.
            tokens: int32 [S] on the device, what was sampled; -1 where nothing could be.
        """
        return None

    def follow(self, step: SampledStep) -> None:
        """Computes behind a step with lookahead what the next one begins with, once the sampled
        tokens are in the slots. On a GPU it may be captured in a CUDA graph, as `propose`."""

    # ---------------------------------------------------------------- work of every step

    def read_step(self, step_id: int) -> PendingSection | None:
        """Returns what goes back behind a step, whatever its plan has; called for work without a
        `section`, of a pipeline on the last stage."""
        return None

    def pass_on(self, step_id: int) -> None:
        """Exchanges with the other stages of a pipeline (`rank.links`), behind the hidden states of
        a step; called on every stage for work without a `section`."""

    def begin_service(self) -> None:
        """Called after the warm-up: from now on steps are of requests."""

    def close(self) -> None:
        """Called when the worker ends and its process goes on: ends threads, and gives up what
        another worker may need."""

    # ---------------------------------------------------------------- warm-up

    def dummy_section(self, slots: Sequence[int], lengths: Sequence[int]) -> Section | None:
        """Returns the section of a warm-up step that computes whole prompts of `lengths` in `slots`
        and samples a token for each, so that the feature's kernels are compiled, and its memory is
        part of the largest step; None if it has no kernels of its own. A message that late rows
        wait for has all bits set then."""
        return None


def rows_of(plan: StepPlan, slots: I32) -> npt.NDArray[np.intp]:
    """Returns the rows of these slots in a plan: of n slots, [n]."""
    order = np.argsort(plan.slots)
    return order[np.searchsorted(plan.slots, slots, sorter=order)]


def first_tokens(plan: StepPlan, slots: I32) -> npt.NDArray[np.int64]:
    """Returns which of a step's tokens is the first one of the row of each slot: of n slots,
    [n]."""
    firsts = np.cumsum(plan.lengths, dtype=np.int64) - plan.lengths
    return firsts[rows_of(plan, slots)]


def spread(values: npt.NDArray[np.integer], counts: I32, step: int) -> npt.NDArray[np.int64]:
    """Returns each value `counts[i]` times, growing by `step` from one to the next: of n values,
    [sum of counts]."""
    repeated = np.repeat(values.astype(np.int64), counts)
    if step:
        starts = np.repeat(np.cumsum(counts, dtype=np.int64) - counts, counts)
        repeated += np.arange(len(repeated)) - starts
    return repeated

"""The interface between the engine and whatever runs the workers.

An executor owns one worker per rank. The engine posts `StepPlan`s and gets a
`StepResult` for each, in order, on the event loop; behind a plan with constrained rows it posts
their masks. Plans are executed strictly in the order of
posting: the scheduler's reuse of blocks and slots rests on that. A section that is no part of a
plan goes its way between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.ipc.plan import I32, StepPlan, StepResult
from aioinfer.ipc.sections import Section


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The results of the workers' start; rows of the start-up table.

    Attributes:
        device: such as `"cpu (2 threads)"` or `"NVIDIA H200"`.
        dtype: of the weights and the arithmetic, such as `"float32"`, with the reason if it was
            chosen.
        weights_bytes: of one rank, the one with the most.
        kv_cache_bytes: of one rank, the one with the most.
        block_size: tokens a KV block.
        groups: the layers by KV group.
        num_blocks: KV blocks of each group, the same on every rank.
        max_model_len: the longest sequence that the slots can hold.
        max_model_len_reason: why it is less than the model's own, or empty.
        phases: (name, seconds) of each phase of the start.
        graph_bytes: GPU memory of one rank's CUDA graphs.
        implementation: what computes the model, such as `"Triton kernels"`.
        cache_dtype: of the KV cache, with the origin of its scales if it is float8.
        stages: of each pipeline stage, its layers and the weights of one rank in bytes; empty if
            there is one stage.
        step_times: (rows, seconds, whether with lookahead) of decode steps that were measured at
            the start; empty if none were.
        max_lookahead: the maximum of lookahead rows in a step, the same on every rank.
        kv_files: the hashes of KV blocks that have files, of each group, the least recently used
            first; the engine adds them.
    """

    device: str
    dtype: str
    weights_bytes: int
    kv_cache_bytes: int
    block_size: int
    groups: tuple[KVGroup, ...]
    num_blocks: tuple[int, ...]
    max_model_len: int
    max_model_len_reason: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)
    graph_bytes: int = 0
    implementation: str = ""
    cache_dtype: str = ""
    stages: Sequence[tuple[range, int]] = ()
    step_times: Sequence[tuple[int, float, bool]] = ()
    max_lookahead: int = 0
    kv_files: Sequence[Sequence[bytes]] = ()


class StageTime(NamedTuple):
    """Time of a pipeline stage while steps were in flight: computing and idle.

    Attributes:
        busy_s: seconds that its first rank computed.
        idle_s: seconds that it did not: bubbles.
    """

    busy_s: float
    idle_s: float


#: Called while workers start: (phase, done, total); the unit is the phase's own (bytes for
#: weights), and 0 of 0 is reported once by a phase of unknown length.
ProgressCallback = Callable[[str, int, int], None]


class Executor(Protocol):
    """Runs the workers. All methods are called on the event loop."""

    async def start(
        self,
        on_result: Callable[[StepResult], None],
        on_failure: Callable[[Exception], None],
        on_progress: ProgressCallback,
    ) -> WorkerReport:
        """Starts the workers and returns when they can execute plans.

        Args:
            on_result: called on the event loop for each posted plan, in order.
            on_failure: called on the event loop, once, when a worker died or hung; nothing works
                after it.
            on_progress: called on the event loop while the workers start; with "load weights" once
                their processes have been started.

        Raises:
            ConfigError: the configuration does not go with the model or the machine.
            EngineDeadError: a worker failed to start; the message holds its error.
        """
        ...

    def post(self, plan: StepPlan) -> None:
        """Hands a plan to every worker without waiting."""
        ...

    def post_section(self, section: Section) -> None:
        """Hands a section to every worker without waiting, behind what was posted before: its
        feature takes it as soon as the worker has launched that (`WorkerFeature.take`). There is no
        result."""
        ...

    def masks_of(self, step_id: int) -> I32:
        """Returns the memory for the masks of a step with constrained rows, int32 [max_num_seqs,
        words], to be filled from the first row on (see `ipc.masks`)."""
        ...

    def post_masks(self, step_id: int) -> None:
        """Tells every worker that the masks of a step are filled. It must come behind the step's
        plan and before the next one: until then the workers wait."""
        ...

    async def call(
        self, method: str, arguments: Mapping[str, Any], timeout_s: float
    ) -> Sequence[Any]:
        """Calls a method of every worker (`Worker.call`), while no step is in flight. Returns the
        results in the order of the ranks.

        Args:
            method: its name.
            arguments: by name; of JSON's types, as results are.
            timeout_s: workers that have not answered by then count as hung.

        Raises:
            WorkerCallError: it failed on a worker, and all have answered.
            EngineDeadError: a worker has died or hung.
        """
        ...

    def stage_times(self) -> Sequence[StageTime]:
        """Returns how each pipeline stage has spent its time since the workers started; empty if
        there is one stage."""
        ...

    async def shutdown(self) -> None:
        """Ends the workers, and waits until they are gone.

        Safe to call twice, and after a failure.
        """
        ...

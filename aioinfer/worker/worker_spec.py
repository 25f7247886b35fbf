"""The arguments of a worker process, and its report of a failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from aioinfer.config import Config
from aioinfer.errors import AioinferError
from aioinfer.ipc.anonymous_file import RendezvousFile, StackDump
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.masks import MaskMemory
from aioinfer.ipc.placement import RankSpec
from aioinfer.ipc.read_tally import ReadTally
from aioinfer.ipc.ring import Ring


@dataclass(slots=True)
class WorkerSpec:
    """The arguments of a worker process.

    Attributes:
        config, folder: the configuration and the model's folder.
        place: the rank, and where it finds the others.
        plans, results: the rings of the host; one rank of the world (`RankSpec.sends_results`)
            writes results.
        heartbeat: where this rank records its progress.
        control: messages while starting, in both directions, and later calls (`Worker.call`) and
            their answers.
        lifeline: the reading end of a pipe that only the parent can write to; it ends with the
            parent.
        rendezvous: where the ranks of this host find each other.
        stacks: where this rank writes its stacks when it is asked for them.
        masks: where the engine writes which tokens constrained rows may sample.
        tally: where the ranks of this host record what they have read.
        engine: the number of the engine that the rank belongs to.
        visible_devices: the GPUs that the process may see, in the form of `CUDA_VISIBLE_DEVICES`;
            None for the GPUs that its parent sees.
        rank, reader: the number of the rank in its engine, and among the readers of its host's
            ring of plans.
        sends_results, is_staged: whether the rank writes results, and whether there are several
            stages.
    """

    config: Config
    folder: Path
    place: RankSpec
    plans: Ring
    results: Ring
    heartbeat: Heartbeat
    control: Connection
    lifeline: Connection
    stacks: StackDump
    rendezvous: RendezvousFile
    masks: MaskMemory
    tally: ReadTally
    engine: int = 0
    visible_devices: str | None = None
    rank: int = field(init=False)
    reader: int = field(init=False)
    sends_results: bool = field(init=False)
    is_staged: bool = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.reader = self.place.engine_rank, self.place.local_rank
        self.sends_results = self.place.sends_results
        self.is_staged = self.place.size_of("pp") > 1


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The error that ends a rank, as it reports it to the parent.

    Attributes:
        rank: the number of the rank.
        error: the error itself, if it is meant for the user.
        trace: its traceback as text.
        at_ns: when it was caught, of `time.monotonic_ns`.
        in_collective: whether it arose in a collective with other ranks. The cause is then most
            often the end of another rank.
    """

    rank: int
    error: AioinferError | None
    trace: str
    at_ns: int
    in_collective: bool

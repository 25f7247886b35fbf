"""The ranks of one host: starts their processes, watches them, and ends them.

It owns everything that the processes of a host share: the ring of plans, the ring of results, the
masks, and the file in which they meet. `MultiprocessExecutor` has all ranks of an engine in one;
over several hosts the driver has one for its own host, and the agent of each other host
(`host_agent`) has one there. Events are reported as `RankEvents`.

The event loop is woken by file descriptors alone: by an eventfd for results, by the control
connections for start-up messages, and by a pidfd when a process has ended. (The sentinel of
multiprocessing comes too early: when a process closes its descriptors it has no exit status yet.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol, cast

from torch import multiprocessing

from aioinfer.config import Config
from aioinfer.executor import fork_server
from aioinfer.ipc.anonymous_file import RendezvousFile, StackDump
from aioinfer.ipc.heartbeat import Heartbeat, ProcessMonitor
from aioinfer.ipc.masks import MaskMemory, MaskNotice, buffer_of, num_mask_buffers
from aioinfer.ipc.placement import RankSpec
from aioinfer.ipc.plan import I32
from aioinfer.ipc.read_tally import ReadTally
from aioinfer.ipc.ring import Ring
from aioinfer.worker.process import main
from aioinfer.worker.worker_spec import FailureReport, WorkerSpec

#: In the place of a step's number: the message is no plan.
NO_STEP = -1
_JOIN_TIMEOUT_S = 3.0
#: From the end of a process until the fork server has told its exit status: far less in fact.
_STATUS_TIMEOUT_S = 0.5


class RankProcess(Protocol):
    """The process of a rank, as `multiprocessing` has it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def close(self) -> None: ...


class RankEvents(Protocol):
    """Events that a host reports of its ranks, on the event loop. Ranks are numbers in the
    engine."""

    def on_progress(self, rank: int, done: int, total: int) -> None:
        """A rank has loaded `done` of `total` bytes."""
        ...

    def on_answer(self, rank: int, kind: str, value: Any) -> None:
        """A rank has loaded (a `LoadReport`), is ready (its phases and bytes of graphs), or has
        answered a call (the result of `Worker.call`)."""
        ...

    def on_result(self, message: memoryview) -> None:
        """A result has come, encoded; the view holds during the call."""
        ...

    def on_report(self, report: FailureReport) -> None:
        """A rank has reported the error that ends it."""
        ...

    def on_exit(self, rank: int, how: str) -> None:
        """A rank's process has ended, and reported no error."""
        ...

    def on_fault(self, fault: str) -> None:
        """Nothing goes on with this host, for a reason that none of its ranks reports."""
        ...


def spawn(spec: WorkerSpec) -> RankProcess:
    """Starts the process of a rank, which is forked from the fork server."""
    fork_server.start()
    process = multiprocessing.get_context("forkserver").Process(
        target=main,
        args=(spec, dict(os.environ)),
        name=f"aioinfer-worker-{spec.engine}.{spec.rank}",
        daemon=True,
    )
    with fork_server.without_main_module():
        process.start()
    return cast(RankProcess, process)


class HostRanks:
    """The processes of some ranks on this host.

    Args:
        config, folder, engine: as in `WorkerSpec`.
        places: of the ranks, in the order of their numbers on this host.
        heartbeat: where the ranks record their progress: a line for each rank of the engine.
        events: its methods are called when something happens.
        visible_devices: as in `WorkerSpec`.
        launch: starts the process of a rank.
        rendezvous: where the ranks find the ranks of other engines, if they compute with them;
            closed at the end.

    Attributes:
        monitor: whether the processes run at all.
        is_started: whether all ranks serve; set by the owner.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        engine: int,
        places: Sequence[RankSpec],
        heartbeat: Heartbeat,
        events: RankEvents,
        *,
        visible_devices: str | None = None,
        launch: Callable[[WorkerSpec], RankProcess] = spawn,
        rendezvous: RendezvousFile | None = None,
    ):
        self.config = config
        self.ranks = [place.engine_rank for place in places]
        self.monitor = ProcessMonitor()
        self.is_started = False
        self._folder, self._engine, self._places = folder, engine, places
        self._heartbeat, self._events = heartbeat, events
        self._visible_devices, self._launch = visible_devices, launch
        # a plan may carry the pixels of pictures beside admissions; untouched memory costs nothing
        self._plans = Ring(len(places), num_slots=1024)
        self._results = Ring(1)
        self._masks = MaskMemory(num_mask_buffers(config.parallel.pipeline_parallel_size))
        self._tally = ReadTally(max(self.ranks) + 1)
        self._vocab_size = 0
        self._rendezvous = rendezvous or RendezvousFile()
        self._stacks = [StackDump() for _ in places]
        self._processes: list[RankProcess] = []
        self._pidfds: list[int] = []
        self._controls: list[Connection] = []
        self._reported: set[int] = set()
        self._lifeline: Connection | None = None
        self._spawning: asyncio.Future[None] | None = None
        self._exits: list[asyncio.Future[None]] = []  # processes whose exit status is waited for
        self._is_watched = False
        self._is_killed = False
        # A program that ends without a shutdown would send its workers SIGTERM, which they ignore,
        # and wait for them.
        self._at_exit = Finalize(self, _kill_all, args=(self._processes,), exitpriority=1)

    @property
    def name(self) -> str:
        """The name of these ranks in errors."""
        return "this host"

    # ---------------------------------------------------------------- start

    async def start(self) -> None:
        """Starts the processes, and has the event loop watch them."""
        loop = asyncio.get_running_loop()
        self._spawning = loop.run_in_executor(None, self._start_all)
        await asyncio.shield(self._spawning)
        self._is_watched = True
        loop.add_reader(self._results.event_fd(0), self._read_results)
        for index, (pidfd, control) in enumerate(zip(self._pidfds, self._controls, strict=True)):
            loop.add_reader(control.fileno(), self._receive, index)
            loop.add_reader(pidfd, self._handle_exit, index)

    def _start_all(self) -> None:
        """Starts the processes; runs in a thread, since each start takes milliseconds."""
        context = multiprocessing.get_context("forkserver")
        lifeline, self._lifeline = context.Pipe(duplex=False)
        for place, stacks in zip(self._places, self._stacks, strict=True):
            here, there = context.Pipe()
            self._controls.append(here)
            spec = WorkerSpec(
                self.config, self._folder, place, self._plans, self._results, self._heartbeat,
                there, lifeline, stacks, self._rendezvous, self._masks, self._tally, self._engine,
                self._visible_devices,
            )  # fmt: skip
            process = self._launch(spec)
            there.close()
            self._processes.append(process)
            self._pidfds.append(os.pidfd_open(cast(int, process.pid)))
            self.monitor.watch(cast(int, process.pid))
        lifeline.close()

    def allocate(self, num_blocks: Sequence[int], max_model_len: int, vocab_size: int) -> None:
        """Tells every rank how many KV blocks of each group it has, and how long a request may
        be."""
        self._vocab_size = vocab_size
        self._masks.resize(self.config.max_sampled_rows, vocab_size)
        for control in self._controls:
            with contextlib.suppress(OSError):  # the worker is dead; its pidfd reports that
                control.send((tuple(num_blocks), max_model_len))

    def _receive(self, index: int) -> bool:
        """Receives a worker's message. Returns False if there was none, because the worker has
        closed the connection."""
        control, rank = self._controls[index], self.ranks[index]
        try:
            message = control.recv()
        except (EOFError, OSError):
            # its pidfd comes next
            asyncio.get_running_loop().remove_reader(control.fileno())
            return False
        kind = message[0]
        if kind == "progress":
            self._events.on_progress(rank, *message[1:])
        elif kind == "failed":
            self._reported.add(index)
            self._events.on_report(message[1])
        else:
            self._events.on_answer(rank, kind, message[1])
        return True

    # ---------------------------------------------------------------- steps

    def post(self, step_id: int, message: Sequence[memoryview]) -> None:
        """Hands an encoded plan to the ranks, or a section with `NO_STEP`. Raises
        `RingFullError`."""
        self._plans.write(message)

    def masks_of(self, step_id: int) -> I32:
        """Returns the memory for a step's masks; see `Executor.masks_of`."""
        rows = self.config.max_sampled_rows
        return self._masks.buffers(rows, self._vocab_size)[self._buffer_of(step_id)]

    def _buffer_of(self, step_id: int) -> int:
        return buffer_of(step_id, self._masks.num_buffers)

    def call(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Has every rank call a method; see `Executor.call`. Each answers by
        `RankEvents.on_answer`."""
        for control in self._controls:
            with contextlib.suppress(OSError):  # the worker is dead; its pidfd reports that
                control.send((method, dict(arguments)))

    def post_masks(self, step_id: int, masks: I32) -> None:
        """Tells the ranks that the masks of a step are in memory, and puts them there unless they
        are. Raises `RingFullError`.

        Args:
            masks: int32 [rows, words]; may be a part of `masks_of(step_id)`.
        """
        memory = self.masks_of(step_id)[: len(masks)]
        if memory.__array_interface__["data"] != masks.__array_interface__["data"]:
            memory[:] = masks
        self._plans.write(MaskNotice(step_id, self._buffer_of(step_id)).encode())

    def _read_results(self) -> None:
        for _ in range(self._results.announced(0)):
            message = self._results.read(0)
            try:
                self._events.on_result(message)
            finally:
                self._results.release(0)

    # ---------------------------------------------------------------- faults

    def find_fault(self) -> str:
        """Returns which ranks do not run at all, or an empty text. Called every
        `monitor.check_every_s` while there is work."""
        self.monitor.check()
        # while a rank loads, a disk may keep it in an uninterruptible call for long
        stopped = self.monitor.find_stopped("TD" if self.is_started else "T")
        return "; ".join(
            f"worker {self._places[index].name} {what}: "
            f"{self._heartbeat.describe(self.ranks[index])}"
            for index, what in stopped.items()
        )

    def request_stacks(self) -> None:
        """Asks all ranks for their stacks."""
        for process, stacks in zip(self._processes, self._stacks, strict=False):
            stacks.request(cast(int, process.pid))

    def read_stacks(self) -> str:
        """Returns the stacks that have come since `request_stacks`."""
        parts = []
        for place, process, stacks in zip(
            self._places, self._processes, self._stacks, strict=False
        ):
            text = stacks.read() or (
                "none came: it is stopped, or in a system call that cannot be interrupted\n"
            )
            parts.append(f"stacks of worker {place.name} (process {process.pid}):\n{text}")
        return "\n".join(parts)

    def _handle_exit(self, index: int) -> None:
        """Handles the end of a process, once the fork server has told its exit status."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfds[index])
        process = self._processes[index]
        told = loop.run_in_executor(None, process.join, _STATUS_TIMEOUT_S)
        self._exits.append(told)
        told.add_done_callback(lambda _: self._report_exit(index, process.exitcode))

    def _report_exit(self, index: int, code: int | None) -> None:
        """Reports the end of a process with an exit status, unless it is missing."""
        # an error report that is still in the connection explains more than the status
        while not self._is_killed and self._controls[index].poll():
            if not self._receive(index):
                break
        if index in self._reported:
            return
        if code is None:
            how = "ended"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with status {code}"
        self._events.on_exit(self.ranks[index], how)

    # ---------------------------------------------------------------- the end

    def kill(self) -> None:
        """Ends all processes at once."""
        self._is_killed = True
        _kill_all(self._processes)

    async def end(self) -> None:
        """Ends all processes, and waits until they are gone: the processes of a host that serves
        end by themselves when their connection closes. Also after a start that was cancelled."""
        if self._spawning is not None:
            # a cancelled start may still be spawning; Ctrl-C may have ended the fork server
            await asyncio.gather(self._spawning, return_exceptions=True)
        if self._is_watched:
            loop = asyncio.get_running_loop()
            for fd in [
                self._results.event_fd(0),
                *(control.fileno() for control in self._controls),
                *self._pidfds,
            ]:
                loop.remove_reader(fd)
        if self._exits:  # of which there are no more: nothing may use a process that is closed
            await asyncio.wait(self._exits)
        await asyncio.to_thread(self._end_all)

    def _end_all(self) -> None:
        self._at_exit.cancel()
        for control in self._controls:
            control.close()  # at which the worker ends
        grace_s = _JOIN_TIMEOUT_S if self.is_started and not self._is_killed else 0
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
            process.close()
        for pidfd in self._pidfds:
            os.close(pidfd)
        if self._lifeline is not None:
            self._lifeline.close()
        for shared in (
            self._rendezvous,
            self._plans,
            self._masks,
            self._results,
            self._tally,
            self.monitor,
        ):
            shared.close()
        for stacks in self._stacks:
            stacks.close()


def _kill_all(processes: list[RankProcess]) -> None:
    for process in processes:
        process.kill()

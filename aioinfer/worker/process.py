"""A worker process: one rank, which reads plans from a ring and writes results to another.

`HostRanks` has the fork server start it with a `WorkerSpec` (`executor.fork_server`). It loads its
shard of the model, receives the size of the KV cache from the parent, and then sleeps in the kernel
until plans come. It ends when the parent closes the connection, and at once when the parent dies.
Torch is imported late, by `_start`: a process that torchrun or Ray has started notices meanwhile
that its parent dies.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from aioinfer.errors import AioinferError
from aioinfer.ipc.masks import ConstrainedRows, MaskNotice, is_notice
from aioinfer.ipc.plan import I32, StepPlan, decode_section
from aioinfer.worker.compilers import Compilers
from aioinfer.worker.worker_spec import FailureReport, WorkerSpec

if TYPE_CHECKING:
    from aioinfer.layers.parallel import ProcessGroups
    from aioinfer.worker.runner import PendingResult
    from aioinfer.worker.worker import Worker

#: Milliseconds without a message after which a rank whose steps are over captures CUDA graphs that
#: are missing.
_IDLE_MS = 20
#: Turns of a waiting thread of OpenMP, some 0.1 ms; its own default is 300 000.
_SPINS = 4000


def main(spec: WorkerSpec, environment: Mapping[str, str] | None = None) -> None:
    """The body of the process.

    Errors travel to the parent; the exit status is not 0 then.

    Args:
        environment: of the parent, which may have changed since the fork server was started.
    """
    spec.stacks.register()
    name_process(f"aioinfer-w{spec.engine}.{spec.rank}")
    os.environ.update(environment or {})
    # terminals and service managers send these to the whole process group; the parent lets running
    # requests finish, and then ends its workers
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    compilers = Compilers.of_rank(spec.config.parallel)  # while there is one thread
    threading.Thread(target=_die_with_parent, args=(spec.lifeline,), daemon=True).start()
    if spec.visible_devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = spec.visible_devices
    try:
        worker = _start(spec, compilers)
        _serve(spec, worker)
    except Exception as error:
        _report_failure(spec, error)
    os._exit(0)  # no teardown: collectives and GPU contexts may wait for ranks that are gone


def set_library_defaults() -> None:
    """Sets variables that PyTorch's libraries read when they are loaded; the user's values stay."""
    # A thread of OpenMP that spins on one core keeps the one that it waits for from running where
    # other processes have the rest.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(_SPINS)
    # until the decode steps are captured: see `GraphBodies.capture`
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")


def name_process(name: str) -> None:
    """Names this process in lists of processes; the kernel keeps 15 characters of the name."""
    Path("/proc/self/comm").write_text(name, "ascii")


def _report_failure(spec: WorkerSpec, error: Exception) -> None:
    """Sends the error to the parent, and ends the process."""
    at_ns = time.monotonic_ns()
    known = error if isinstance(error, AioinferError) else None
    with contextlib.suppress(OSError):  # the parent has hung up
        spec.control.send(
            (
                "failed",
                FailureReport(
                    spec.rank, known, traceback.format_exc(), at_ns, _arose_in_collective(error)
                ),
            )
        )
    os._exit(1)


def _arose_in_collective(error: BaseException) -> bool:
    """Whether an error, or the one that it was raised from, came out of torch's collectives."""
    modules = [
        frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    if any(module.startswith("torch.distributed") for module in modules):
        return True
    return error.__cause__ is not None and _arose_in_collective(error.__cause__)


def _die_with_parent(lifeline: Connection) -> None:
    """Ends this process when the parent is gone, even in the middle of a step or a collective."""
    lifeline.poll(None)
    os._exit(1)


def _start(spec: WorkerSpec, compilers: Compilers | None) -> Worker:
    """Loads a worker until it can execute plans, and reports the phases to the parent."""
    began = time.perf_counter()
    set_library_defaults()  # where torchrun has started the process, not the fork server
    from aioinfer.worker.called_worker import extended
    from aioinfer.worker.worker import Worker

    kind = extended(Worker, spec.config.parallel.worker_extension)
    worker: Worker = kind(spec.config, spec.folder, _join_groups(spec), spec.engine, spec.tally)
    worker.compilers = compilers
    worker.on_stuck = lambda error: _report_failure(spec, error)
    imported = time.perf_counter()
    report = worker.load(lambda done, total: spec.control.send(("progress", done, total)))
    loaded = time.perf_counter()
    spec.control.send(("loaded", report))
    num_blocks, max_model_len = spec.control.recv()
    begun = time.perf_counter()
    worker.allocate(num_blocks, max_model_len)
    worker.warm_up(leaves_graphs=True)
    phases = [
        ("import", imported - began),
        ("load weights", loaded - imported),
        ("allocate, warm up", time.perf_counter() - begun),
    ]
    spec.control.send(("ready", (phases, worker.graph_bytes, worker.step_times)))
    return worker


def _serve(spec: WorkerSpec, worker: Worker) -> None:
    """Executes plans in order until the parent closes the control connection."""
    finish = _finish if worker.device.type == "cpu" else _FinishingThread(spec).put
    is_last = spec.place.stage == spec.place.size_of("pp") - 1
    runner, launches = worker.runner, worker.device.type != "cpu"
    inbox = _Inbox(spec, worker, samples=is_last)
    with contextlib.suppress(_EndOfPlansError):
        while True:
            plan = inbox.next_plan()
            spec.heartbeat.begin(spec.rank, plan.step_id)
            pending = runner.step(plan, inbox.wait_for_masks)
            if launches:
                spec.heartbeat.launch(spec.rank, plan.step_id)
            inbox.release_plan()
            finish(spec, pending)


class _EndOfPlansError(Exception):
    """The parent has closed the control connection."""


class _Inbox:
    """The messages of a rank in the ring of the plans, one after the other. It sleeps in the kernel
    until one comes or the parent closes the control connection."""

    def __init__(self, spec: WorkerSpec, worker: Worker, *, samples: bool = True):
        """`worker` gets the calls; `samples`: whether the rank samples, and needs masks
        therefore."""
        self._spec = spec
        self._worker = worker
        self._num_announced = 0
        self._may_warm_up = True  # whether a part of the warm-up may be left
        self._last_step = -1  # that was read
        self._holds_plan = False  # whether the ring still has the last plan
        self._skips_masks = not samples
        self._control = spec.control.fileno()
        self._poll = select.poll()
        self._poll.register(spec.plans.event_fd(spec.reader), select.POLLIN)
        self._poll.register(self._control, select.POLLIN)

    def next_plan(self) -> StepPlan:
        """Returns the next plan, which holds until `release_plan`. Raises `_EndOfPlansError`."""
        message = self._read(is_idle=True)
        while self._skips_masks and is_notice(message):
            self._spec.plans.release(self._spec.reader)
            message = self._read(is_idle=True)
        self._holds_plan = True
        plan = StepPlan.decode(message)
        self._last_step = plan.step_id
        if plan.section(ConstrainedRows) is not None and not self._skips_masks:
            # the masks are the next message, and it can be read only when this one is released
            plan = StepPlan.decode(bytes(message))
            self.release_plan()
        return plan

    def release_plan(self) -> None:
        """Gives the memory of the last plan back. Safe to call twice."""
        if self._holds_plan:
            self._holds_plan = False
            self._spec.plans.release(self._spec.reader)

    def wait_for_masks(self, plan: StepPlan, count: int) -> I32:
        """Implements `features.AwaitMessage`. Raises `_EndOfPlansError`."""
        spec = self._spec
        notice = MaskNotice.decode(self._read())
        spec.plans.release(spec.reader)
        if notice.step_id != plan.step_id:
            raise RuntimeError(f"step {plan.step_id} was given the masks of {notice.step_id}")
        rows = spec.config.max_sampled_rows
        return spec.masks.buffers(rows, self._worker.vocab_size)[notice.buffer, :count]

    def _read(self, *, is_idle: bool = False) -> memoryview:
        """Waits for the next plan or notice and returns it, as `_read_message` does. Sections that
        come before it are handed to their features."""
        message = self._read_message(is_idle=is_idle)
        while (section := decode_section(message)) is not None:
            self._worker.runner.works.take(section)
            self._spec.plans.release(self._spec.reader)
            message = self._read_message(is_idle=is_idle)
        return message

    def _read_message(self, *, is_idle: bool) -> memoryview:
        """Waits for the next message and returns it, a view into the ring. Calls that come
        meanwhile are answered, behind the messages that are there: the engine makes them while no
        step is in flight, but knows that of one rank. With `is_idle`
        no step is being prepared: where nothing comes, and no step is in flight, the warm-up goes
        on. A plan that comes meanwhile waits for that."""
        spec = self._spec
        while not self._num_announced:
            found = self._poll.poll(_IDLE_MS if is_idle and self._may_warm_up else None)
            if not found:
                if self._last_step < 0 or spec.heartbeat.has_finished(spec.rank, self._last_step):
                    self._may_warm_up = self._worker.continue_warm_up()
            elif announced := spec.plans.announced(spec.reader):
                self._num_announced = announced
            else:
                self._take_call()
                self._may_warm_up = True  # it may have slept
        self._num_announced -= 1
        return spec.plans.read(spec.reader)

    def _take_call(self) -> None:
        """Answers a call. Raises `_EndOfPlansError`."""
        control = self._spec.control
        try:
            method, arguments = control.recv()
        except (EOFError, OSError):
            raise _EndOfPlansError from None
        control.send(("answer", self._worker.call(method, arguments)))


def _finish(spec: WorkerSpec, pending: PendingResult) -> None:
    """Waits for a step's result; the rank that sends results posts it."""
    result = pending.wait()
    if spec.sends_results:
        spec.results.write(result.encode())
    if spec.is_staged:
        spec.heartbeat.add_busy(spec.rank, result.busy_ns)
    spec.heartbeat.finish(spec.rank, result.step_id)


class _FinishingThread:
    """Waits for the results of steps, in order, while the main thread launches the next step: the
    GPU must not idle in between."""

    def __init__(self, spec: WorkerSpec):
        self._pending: queue.SimpleQueue[PendingResult] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(spec,), daemon=True).start()

    def put(self, spec: WorkerSpec, pending: PendingResult) -> None:
        self._pending.put(pending)

    def _run(self, spec: WorkerSpec) -> None:
        try:
            while True:
                _finish(spec, self._pending.get())
        except Exception as error:
            _report_failure(spec, error)


def _join_groups(spec: WorkerSpec) -> ProcessGroups:
    from aioinfer.layers.parallel import ProcessGroups
    from aioinfer.worker.selection import select_device

    if spec.place.world_size == 1:
        return ProcessGroups(spec.place, {})
    from torch.distributed import FileStore

    place = spec.place
    device = select_device(
        spec.config, place.local_rank, spec.engine, owns_devices=place.owns_devices
    )
    store = None
    if spec.place.is_local:
        store = FileStore(spec.rendezvous.path, spec.place.world_size)
    return ProcessGroups.connect(spec.place, device, store)

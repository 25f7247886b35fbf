"""Worker processes with a real, tiny model: what they answer, how their end is reported, and
that nothing of them is left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from aioinfer.errors import ConfigError, EngineDeadError
from aioinfer.executor import host_ranks, worker_executor
from aioinfer.executor.fork_server import without_main_module
from aioinfer.executor.host_ranks import RankProcess, spawn
from aioinfer.executor.inline import InlineExecutor
from aioinfer.executor.multiprocess import MultiprocessExecutor
from aioinfer.ipc.heartbeat import ProcessMonitor
from aioinfer.ipc.plan import StepResult
from aioinfer.worker.worker_spec import WorkerSpec
from tests.executor_runs import (
    Run,
    broken_plan,
    decode_plan,
    greedy,
    long_prefill_plan,
    prefill_plan,
    tiny_config,
    tiny_llama,
)
from tests.waiting import new_shared_files, shared_files, until
from tests.worker_processes import living, worker_processes

pytestmark = [pytest.mark.longest, pytest.mark.slow]

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


OTHERS: list[psutil.Process] = []


def workers(parent: psutil.Process | None = None) -> list[psutil.Process]:
    """Returns the workers below a process (this one), zombies included, in the order of their
    ranks, without workers of servers that other tests share: they were there before the test."""
    found = worker_processes(None if parent is None else parent.pid)
    return [worker for worker in found if worker not in OTHERS]


def open_files() -> list[str]:
    """Returns what the descriptors of this process are of."""
    gc.collect()
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            found.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{fd}")))
    return sorted(found)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no worker, no zombie, no shared memory."""
    monkeypatch.setattr(sys.modules[__name__], "OTHERS", psutil.Process().children(recursive=True))
    children, shared = multiprocessing.active_children(), shared_files()
    yield
    assert workers() == []
    assert multiprocessing.active_children() == children
    assert new_shared_files(shared) == set()


@pytest.fixture
async def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """Two ranks, not yet started, whose steps may take three seconds."""
    monkeypatch.setattr(worker_executor, "STEP_TIMEOUT_S", 3.0)
    run = Run(MultiprocessExecutor(tiny_config(folder, tensor_parallel_size=2), folder))
    yield run
    await run.executor.shutdown()
    assert workers() == []


def keep_the_loop_until_ended(*processes: psutil.Process) -> None:
    """Returns when processes have sent the executor all their messages, and have ended; it receives
    all of it at once."""
    deadline = time.monotonic() + 10
    while any(process.is_running() for process in processes):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def heartbeat(run: Run, rank: int) -> str:
    return run.executor.heartbeat.describe(rank)  # type: ignore[attr-defined]


def listening_addresses(pid: int) -> set[str]:
    return {
        connection.laddr.ip
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


async def test_two_ranks_give_what_one_gives_and_are_idle_between(folder: Path, run: Run) -> None:
    inline = Run(InlineExecutor(tiny_config(folder, executor="inline"), folder))
    await inline.start()
    expected = await greedy(inline, 7)
    await inline.executor.shutdown()
    assert len(set(expected)) > 1

    before = listening_addresses(os.getpid())
    report = await run.start()
    assert (report.num_blocks, report.block_size, report.max_model_len) == ((32,), 4, 128)
    assert [name for name, _ in report.phases] == [
        "spawn workers", "import", "load weights", "allocate, warm up",
    ]  # fmt: skip
    assert run.progress[-1][1] == run.progress[-1][2]
    assert len(workers()) == 2
    assert listening_addresses(os.getpid()) <= before, "the ranks meet without a port"
    for worker in workers():
        assert listening_addresses(worker.pid) <= {"127.0.0.1"}
    assert await greedy(run, 7) == expected
    assert all(0 < result.take_ns < 1e9 for result in run.results)
    await uses_no_cpu([psutil.Process(), *workers()])
    first = asyncio.create_task(run.executor.shutdown())
    await asyncio.sleep(0)
    await run.executor.shutdown()
    assert workers() == [], "a second shutdown waits as well"
    await first
    assert run.failures == []


async def uses_no_cpu(processes: list[psutil.Process]) -> None:
    """In one of three spans at least: what ticks would tick in each, but what came before may have
    left something to do."""
    spans: list[float] = []
    # 1 %, in the kernel's units of 10 ms
    while len(spans) < 3 and min(spans, default=1.0) >= 0.025:
        before = [sum(process.cpu_times()[:2]) for process in processes]
        await asyncio.sleep(2)
        used = [
            sum(process.cpu_times()[:2]) - begin
            for process, begin in zip(processes, before, strict=True)
        ]
        spans.append(max(used))
    assert min(spans) < 0.025, spans


async def test_a_step_that_fails_ends_all(run: Run) -> None:
    await run.start()
    run.executor.post(broken_plan(0))
    message = await run.wait_for_failure()
    assert re.match(r"worker \d failed:\nTraceback", message)
    assert "IndexError" in message
    await until(lambda: workers() == [])
    await run.executor.shutdown()
    assert len(run.failures) == 1


async def test_a_killed_worker_is_reported_at_once(run: Run) -> None:
    await run.start()
    rank_0, rank_1 = workers()
    await greedy(run, 2)
    rank_0.suspend()  # so that rank 1 is in the middle of the step, waiting for rank 0
    run.executor.post(decode_plan(2, 7))
    await until(lambda: "executing step 2" in heartbeat(run, 1))
    rank_1.kill()
    killed_at = time.monotonic()
    message = await run.wait_for_failure()
    assert time.monotonic() - killed_at < 5, "long before it counts as hung"
    assert re.fullmatch(
        r"worker 1 was killed by SIGKILL: rank 1 was executing step 2, last "
        r"heartbeat \d+\.\d s ago",
        message,
    )
    await until(lambda: workers() == [])
    await run.executor.shutdown()
    assert len(run.failures) == 1


AGO = r"last heartbeat \d+\.\d s ago"


async def test_a_step_without_an_answer_names_the_ranks_that_the_others_wait_for(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """And all stacks are in the log, but for those of the process that is stopped."""
    await run.start()
    _, rank_1 = workers()
    await greedy(run, 3)
    # results come from rank 0
    await until(lambda: "waiting for a plan after step 2" in heartbeat(run, 1))
    rank_1.suspend()
    run.executor.post(decode_plan(3, 8))
    message = await run.wait_for_failure()
    assert "executing step 3" in heartbeat(run, 0)
    assert re.fullmatch(
        rf"step 3 was not answered within 3 s: rank 1 was waiting for a plan "
        rf"after step 2, {AGO}",
        message,
    )
    log = caplog.text
    assert f"engine 0: {message}\nstacks of the server (process {os.getpid()}):\n" in log
    assert re.search(r"_fail_with_stacks", log)
    rank_0_stacks = log[log.index("stacks of worker 0") : log.index("stacks of worker 1")]
    assert rank_0_stacks.count("most recent call first") >= 2, "not all of its threads"
    assert "all_reduce" in rank_0_stacks
    assert re.search(rf"stacks of worker 1 \(process {rank_1.pid}\):\nnone came: it is", log)


@pytest.fixture
async def watched(folder: Path) -> AsyncIterator[Run]:
    """Two ranks, not yet started, that count as stopped when they do not run for a second."""
    executor = MultiprocessExecutor(tiny_config(folder, tensor_parallel_size=2), folder)
    executor.check_every_s = 0.1
    executor.ranks.monitor = ProcessMonitor(check_every_s=0.1, stopped_after_s=1.0)
    yield Run(executor)
    await executor.shutdown()
    assert workers() == []


async def test_a_stopped_worker_is_named_once_there_is_work(watched: Run) -> None:
    """Not the one that waits for it; and nothing is said, or done, while there is no work."""
    await watched.start()
    _, rank_1 = workers()
    await greedy(watched, 3)
    # results come from rank 0
    await until(lambda: "waiting for a plan after step 2" in heartbeat(watched, 1))
    rank_1.suspend()
    await asyncio.sleep(1.5)
    assert (watched.failures, watched.executor._watchdog) == ([], None)  # type: ignore[attr-defined]
    watched.executor.post(decode_plan(3, 8))
    message = await watched.wait_for_failure()
    assert "executing step 3" in heartbeat(watched, 0)
    what = "has not run for 1 s: it is stopped, as by SIGSTOP"
    assert re.fullmatch(
        f"worker 1 {what}: rank 1 was waiting for a plan after step 2, {AGO}", message
    )
    await until(lambda: workers() == [])
    assert len(watched.failures) == 1


async def test_a_worker_stopped_while_starting_is_named(watched: Run) -> None:
    start = asyncio.create_task(watched.start())
    await until(lambda: len(workers()) == 2)
    workers()[1].suspend()
    with pytest.raises(
        EngineDeadError,
        match=r"worker 1 has not run for 1 s: it is stopped, as "
        r"by SIGSTOP: rank 1 has begun no step",
    ):
        await start
    assert workers() == []
    assert watched.failures == []


async def test_ranks_load_side_by_side(tmp_path: Path) -> None:
    """One loads all of its weights while the other is stopped in the middle of it."""
    (tiny_llama(tmp_path, inner=2**17) / "model.safetensors").unlink()
    run = Run(
        MultiprocessExecutor(
            tiny_config(tmp_path, tensor_parallel_size=2, **{"model.load_format": "dummy"}),
            tmp_path,
        )
    )
    executor: Any = run.executor
    stopped = asyncio.Event()

    def stop_rank_0(phase: str, done: int, total: int) -> None:
        if not total:  # the processes have been started, and load nothing yet
            return
        run.progress.append((phase, done, total))
        workers()[0].suspend()
        stopped.set()

    start = asyncio.create_task(
        executor.start(lambda result: None, lambda error: None, stop_rank_0)
    )
    async with asyncio.timeout(30):
        await stopped.wait()
    await until(lambda: bool(executor.answers[1]))
    assert not executor.answers[0]
    assert run.progress[-1][1] < run.progress[-1][2]
    executor._on_progress = lambda *progress: None
    workers()[0].resume()
    await start
    await executor.shutdown()


async def test_a_worker_that_is_slow_but_alive_is_waited_for(watched: Run) -> None:
    """It is stopped for most of the time, and for longer in all than a stopped one is waited
    for."""
    await watched.start()
    expected = await greedy(watched, 8)
    _, rank_1 = workers()
    stopped_s, monitors = 0.0, 0
    answer = asyncio.create_task(greedy(watched, 8))
    while not answer.done() and monitors < 6:
        rank_1.suspend()
        await asyncio.sleep(0.5)
        stopped_s, monitors = stopped_s + 0.5, monitors + 1
        rank_1.resume()
        await asyncio.sleep(0.001)
    assert await answer == expected
    assert watched.failures == []
    assert stopped_s > 1.0


async def test_a_rank_that_waits_for_a_dead_one_is_not_named(run: Run) -> None:
    """Its collective fails, and the event loop hears of that first."""
    await run.start()
    rank_0, rank_1 = workers()
    await greedy(run, 2)
    rank_1.suspend()
    run.executor.post(decode_plan(2, 7))
    await until(lambda: "executing step 2" in heartbeat(run, 0))
    rank_1.send_signal(signal.SIGABRT)
    rank_1.resume()
    keep_the_loop_until_ended(rank_0)
    run.executor.ranks._receive(0)  # type: ignore[attr-defined]  # as the loop may do first, too
    message = await run.wait_for_failure()
    assert re.fullmatch(
        rf"worker 1 was killed by SIGABRT: rank 1 was (executing|waiting).*, {AGO}",
        message,
    )
    await until(lambda: workers() == [])


async def test_the_rank_with_the_first_error_is_named(tmp_path: Path) -> None:
    """One runs out of memory; the other waits for it in a collective, which fails."""
    folder = tiny_llama(tmp_path, inner=65536)
    run = Run(MultiprocessExecutor(tiny_config(folder, tensor_parallel_size=2), folder))
    await run.start()
    rank_0, rank_1 = workers()
    await greedy(run, 2)
    rank_1.rlimit(psutil.RLIMIT_AS, (2**21, 2**21))  # less than it has: it gets no more
    run.executor.post(long_prefill_plan(2, 120))
    keep_the_loop_until_ended(rank_0, rank_1)
    run.executor.ranks._receive(0)  # type: ignore[attr-defined]  # as the loop may do first, too
    message = await run.wait_for_failure()
    # Where a stack cannot grow, or a library does not check its allocations, it ends by SIGSEGV.
    if not message.startswith("worker 1 was killed by SIGSEGV: rank 1 was executing step 2,"):
        assert message.startswith("worker 1 failed:\nTraceback")
        assert re.search("allocate memory|create a primitive", message), "it had memory enough"
    await until(lambda: workers() == [])
    await run.executor.shutdown()


async def test_errors_of_the_start_arrive_as_they_are(folder: Path) -> None:
    run = Run(MultiprocessExecutor(tiny_config(folder, **{"model.max_model_len": 500}), folder))
    with pytest.raises(ConfigError, match=r"model\.max_model_len = 500 needs 125 KV blocks"):
        await run.start()
    assert workers() == []  # without a shutdown
    assert run.failures == []


async def test_a_worker_that_cannot_start_reports_why(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(ConfigError, match=r"(?i)safetensor"):
        await Run(MultiprocessExecutor(tiny_config(folder), folder)).start()


async def test_a_worker_killed_while_starting(run: Run) -> None:
    start = asyncio.create_task(run.start())
    await until(lambda: len(workers()) == 2)
    workers()[1].kill()
    with pytest.raises(
        EngineDeadError, match="worker 1 was killed by SIGKILL: rank 1 has begun no step"
    ):
        await start
    assert run.failures == []


@pytest.mark.parametrize("phase", ["begin", "spawn workers", "load weights", "allocate, warm up"])
async def test_a_start_that_is_cancelled_leaves_nothing(run: Run, phase: str) -> None:
    """In each of its phases, and at no fixed time: a start may be over after 0.2 s."""

    def cancel_in_phase(begun: str, done: int, total: int) -> None:
        if begun == phase == "load weights" and not total:
            return  # the processes have no name yet
        if begun == phase and not start.cancelling():
            assert workers()
            start.cancel()

    executor = run.executor
    assert isinstance(executor, MultiprocessExecutor)
    starting = executor.start(run.results.append, run.failures.append, cancel_in_phase)
    start = asyncio.create_task(starting)
    await asyncio.sleep(0)
    if phase == "spawn workers":
        await until(lambda: executor.ranks._processes)
    if phase in ("begin", "spawn workers"):
        start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert workers() == []


async def test_a_start_that_is_cancelled_again_waits_for_the_end_of_its_workers(run: Run) -> None:
    executor = run.executor
    assert isinstance(executor, MultiprocessExecutor)
    start = asyncio.create_task(run.start())
    await until(lambda: len(workers()) == 2)
    start.cancel()
    await until(lambda: executor._ending)
    for _ in range(3):
        start.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await start
    assert executor._ending is not None
    assert executor._ending.done()
    assert workers() == []


class ProcessToldLate:
    """A rank's process whose exit status is known only once `told` is set."""

    def __init__(self, process: RankProcess):
        self.told = threading.Event()
        self._process = process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def join(self, timeout: float | None = None) -> None:
        if timeout == host_ranks._STATUS_TIMEOUT_S:
            assert self.told.wait(30)
        self._process.join(timeout)


async def test_a_rank_that_ends_while_the_host_ends(run: Run) -> None:
    """Nothing waits for its exit status any more, with its process closed."""
    executor, processes = run.executor, list[ProcessToldLate]()
    assert isinstance(executor, MultiprocessExecutor)

    def launch(spec: WorkerSpec) -> RankProcess:
        processes.append(ProcessToldLate(spawn(spec)))
        return processes[-1]

    ranks, errors = executor.ranks, list[Any]()
    ranks._launch = launch
    await run.start()
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))
    rank_0, rank_1 = workers()
    rank_0.kill()
    await until(lambda: ranks._exits)
    ending = asyncio.create_task(executor.shutdown())
    await asyncio.sleep(0)
    rank_1.kill()
    await until(lambda: not living([rank_1]))
    await asyncio.sleep(0.01)  # for the event loop to see it, if it still watches
    processes[0].told.set()
    await ending
    waits = [told for told in ranks._exits if not told.done()]
    processes[1].told.set()
    await asyncio.gather(*waits)
    await asyncio.sleep(0)
    assert waits == []
    assert errors == []


async def test_no_descriptor_is_left(folder: Path) -> None:
    """The first round also opens what Python, asyncio and torch keep."""
    after: list[list[str]] = []
    for fails in (False, True):
        run = Run(MultiprocessExecutor(tiny_config(folder, tensor_parallel_size=2), folder))
        await run.start()
        if fails:
            run.executor.post(broken_plan(0))
            await run.wait_for_failure()
        await run.executor.shutdown()
        # a thread lets go of the method that it has called only behind telling the result
        await asyncio.sleep(0.1)
        after.append(open_files())
    await MultiprocessExecutor(tiny_config(folder), folder).shutdown()  # never started
    after.append(open_files())
    assert after == [after[0]] * 3


async def test_two_executors_at_a_time_keep_to_their_own_ranks(tmp_path: Path) -> None:
    """Their models differ, so that a message to the wrong ranks would give other tokens."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        tiny_llama(folder, seed=seed)
    alone = []
    for folder in folders:
        run = Run(InlineExecutor(tiny_config(folder), folder))
        await run.start()
        alone.append(await greedy(run, 8))
        await run.executor.shutdown()
    runs = [
        Run(MultiprocessExecutor(tiny_config(folder, tensor_parallel_size=2), folder))
        for folder in folders
    ]
    try:
        await asyncio.gather(*(run.start() for run in runs))
        assert await asyncio.gather(*(greedy(run, 8) for run in runs)) == alone
        assert alone[0] != alone[1]
    finally:
        await asyncio.gather(*(run.executor.shutdown() for run in runs))


UNGUARDED = """
    import asyncio, pathlib, sys
    print("imported", flush=True)
    from aioinfer.executor.multiprocess import MultiprocessExecutor
    from tests.executor_runs import Run, greedy, tiny_config
    folder = pathlib.Path(sys.argv[1])

    async def main():
        run = Run(MultiprocessExecutor(tiny_config(folder), folder))
        await run.start()
        print(await greedy(run, 2), flush=True)
        {then}

    asyncio.run(main())
"""


def run_script(tmp_path: Path, folder: Path, then: str, **variables: str) -> subprocess.Popen[str]:
    """Runs a script without an `if __name__` guard, in which a worker answers; then it does as
    reported. Variables of the environment that are empty are not set."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(UNGUARDED).format(then=then))
    laid_over = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    environment = {name: value for name, value in laid_over.items() if value}
    return subprocess.Popen(
        [sys.executable, script, folder], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


#: What OpenMP shows of its variables, between two lines of a process each.
SHOWN = r"(?s)OPENMP DISPLAY ENVIRONMENT BEGIN.*?OPENMP DISPLAY ENVIRONMENT END\n"


@pytest.mark.parametrize(
    ("then", "policy", "spins"),
    [("pass", "", {"300000", "4000"}), ("await run.executor.shutdown()", "PASSIVE", {"0"})],
)
def test_a_script_without_a_guard_works_and_ends(
    tmp_path: Path, folder: Path, then: str, policy: str, spins: set[str]
) -> None:
    """Also without a shutdown. OpenMP says itself for how many turns a thread spins before it
    sleeps: in the script as by default, and less in its worker; where the user has chosen, in both
    alike."""
    process = run_script(tmp_path, folder, then, OMP_DISPLAY_ENV="VERBOSE", OMP_WAIT_POLICY=policy)
    output, errors = process.communicate(timeout=60)  # its workers would hold these open
    assert (process.returncode, re.sub(SHOWN, "", errors).strip()) == (0, "")
    assert re.fullmatch(r"imported\n\[\d+, \d+\]\n", output)
    shown = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", errors)
    assert len(shown) >= 2
    assert set(shown) == spins


def test_nothing_survives_the_parent(tmp_path: Path, folder: Path) -> None:
    process = run_script(tmp_path, folder, "await asyncio.sleep(600)")
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "imported\n"
    assert process.stdout.readline().startswith("[")
    descendants = psutil.Process(process.pid).children(recursive=True)
    # a worker, the fork server, and multiprocessing's resource tracker
    assert len(descendants) == 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert psutil.wait_procs(descendants, timeout=20)[1] == []
    assert process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()


def test_executors_that_spawn_together_put_the_main_module_back() -> None:
    """The second would begin while the first is at it, take its stand-in for the real module, and
    put that back."""
    main = sys.modules["__main__"]
    entered, may_leave = threading.Event(), threading.Event()

    def spawn() -> None:
        with without_main_module():
            entered.set()
            may_leave.wait(10)

    second = threading.Thread(target=spawn)
    try:
        with without_main_module():
            second.start()
            entered.wait(0.3)
        may_leave.set()
        second.join()
        assert sys.modules["__main__"] is main
    finally:
        sys.modules["__main__"] = main


async def test_a_plan_that_is_too_long_is_reported_as_a_failure(run: Run) -> None:
    await run.start()
    plan = prefill_plan(0)
    plan.sections = [replace(plan.admissions, tokens=np.zeros(9_000_000, np.int32))]
    run.executor.post(plan)
    assert re.match(
        r"step 0 could not be posted: a message of 36\d{6} bytes is too long",
        await run.wait_for_failure(),
    )


async def test_an_error_in_taking_a_result_is_reported_and_ends_the_results(run: Run) -> None:
    """Both results lie there before the first is taken."""
    await run.start()
    taken = []

    def take(result: StepResult) -> None:
        taken.append(result.step_id)
        raise AssertionError("the counts are wrong")

    run.executor._on_result = take  # type: ignore[attr-defined]
    unhandled = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: unhandled.append(context["exception"])
    )
    run.executor.post(prefill_plan(0))
    run.executor.post(decode_plan(1, 6))
    message = await run.wait_for_failure()
    assert (
        message
        == "the result of step 0 could not be handled: AssertionError('the counts are wrong')"
    )
    await until(lambda: workers() == [])
    assert (taken, len(run.failures), len(unhandled)) == ([0], 1, 1)

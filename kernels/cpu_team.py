"""The threads that compute kernels for CPUs beside the thread that calls them.

A barrier that all threads have to reach makes each product wait for the slowest: where another
process has one of the cores, that is a thread that does not run at all for some milliseconds, at
each of a hundred products of a step. So there is none here:

- A task is divided into pieces that threads take from a counter. The caller takes pieces as well,
  and when none is left, it closes the task. It waits for the helpers that have a piece, not for
  those that have not come.
- Waiting threads spin for `_SPINS` turns, some 0.1 ms, which is longer than the time between two
  products of a step, and then sleep on a semaphore. An idle team uses no CPU.
- A helper that loses its core in the middle of a piece makes the caller wait for it, and a helper
  may take the caller's core. Where either costs more than `_LATE_NS`, the cores are busy, and the
  caller computes alone, with the helpers asleep: for `_ALONE` times as long as it has lost, and
  twice as long as the last time if it has not computed with them for as long since.

The results do not depend on which thread takes which piece. A second thread that calls a kernel
while the team has a task computes alone.

All of it happens in one word of memory, the gate: the number of the task (32 bits), whether it is
open, whether the caller sleeps, and how many helpers compute it (16 bits). A helper enters by
adding itself to the gate of the open task that it has seen, all at once, so that the words it reads
of a task (`_ALLOWED`, `_TASK`, `_BODY`) belong to the task that it enters.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from functools import cache
from typing import Any, NamedTuple

from aioinfer.kernels.cpu_compilation import compile_functions
from aioinfer.kernels.cpu_vectors import load_integer, store_integer
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

#: Turns of a waiting thread before it sleeps.
_SPINS = 4000
#: Nanoseconds that are lost to busy cores, and for how many times as long the caller is alone then.
_LATE_NS = 1_000_000
_ALONE = 4
_MAX_ALONE_NS = 500_000_000

_I64 = ir.IntType(64)
_IS_X86 = platform.machine() == "x86_64"

# Parts of the gate below the number of the task.
_ACTIVE, _OPEN, _SLEEPS, _NUMBER = 0xFFFF, 1 << 16, 1 << 17, 32

# Places in the memory of a team, in bytes. The words that threads wait for lie in cache lines of
# their own.
_LINE = 128
_GATE = 0
_ASLEEP = _LINE  # helpers that have announced that they sleep
_BUSY = 2 * _LINE  # whether the team has a task
_ALLOWED = 3 * _LINE  # helpers that may take part in the task
_TASK = _ALLOWED + 8  # the argument of its body
_BODY = _ALLOWED + 16
_ALONE_UNTIL = _ALLOWED + 24  # when the caller computes with helpers again, or did
_ALONE_NS = _ALLOWED + 32  # for how long it was alone last
_LATE = _ALLOWED + 40  # how often it had to be
_CLOCK = 4 * _LINE  # the addresses of functions of the C library
_WAIT = _CLOCK + 8
_POST = _CLOCK + 16
_WAKE_HELPERS = 5 * _LINE  # semaphores
_WAKE_CALLER = 6 * _LINE
_TIME = 7 * _LINE  # of the caller: where the clock writes
_BYTES = 8 * _LINE

_MONOTONIC, _OF_THREAD = 1, 3  # clocks


def _atomic(operation: str) -> Any:
    @intrinsic
    def apply(context, address, value):
        def emit(context, builder, signature, given):
            place = builder.inttoptr(given[0], _I64.as_pointer())
            return builder.atomic_rmw(operation, place, given[1], "seq_cst")

        return types.int64(types.int64, types.int64), emit

    return apply


#: Change the int64 at an address at once (`(address, value)`), and return the value before.
fetch_add, _fetch_and, _fetch_or, _exchange = map(_atomic, ("add", "and", "or", "xchg"))


@intrinsic
def _read(context, address):
    """Returns the int64 at an address that other threads change."""

    def emit(context, builder, signature, given):
        place = builder.inttoptr(given[0], _I64.as_pointer())
        return builder.load_atomic(place, "seq_cst", 8)

    return types.int64(types.int64), emit


@intrinsic
def _replace(context, address, before, after):
    """Writes `after` to an address if `before` is there; returns whether it was."""

    def emit(context, builder, signature, given):
        place = builder.inttoptr(given[0], _I64.as_pointer())
        found = builder.cmpxchg(place, given[1], given[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 1)

    return types.boolean(types.int64, types.int64, types.int64), emit


@intrinsic
def _pause(context):
    """Gives way to the other thread of a core for a moment, where the processor has an instruction
    for that."""

    def emit(context, builder, signature, given):
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            pause = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause")
            builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _call(context, body, argument):
    """Calls `body(argument)`, both addresses. The result is dropped."""

    def emit(context, builder, signature, given):
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), [given[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _call_with_two(context, body, first, second):
    """Calls `body(first, second)`, all integers."""

    def emit(context, builder, signature, given):
        kind = ir.FunctionType(ir.VoidType(), [_I64, _I64])
        builder.call(builder.inttoptr(given[0], kind.as_pointer()), given[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


# -------------------------------------------------------------------- the caller


@njit
def _now(team, clock):
    """Returns nanoseconds of a clock."""
    _call_with_two(load_integer(team + _CLOCK), clock, team + _TIME)
    return load_integer(team + _TIME) * 1_000_000_000 + load_integer(team + _TIME + 8)


@njit
def _open(team, task, body, helpers):
    """Gives a task to the team, and wakes helpers that sleep."""
    store_integer(team + _TASK, task)
    store_integer(team + _BODY, body)
    store_integer(team + _ALLOWED, helpers)
    number = (_read(team + _GATE) >> _NUMBER) + 1
    _exchange(team + _GATE, (number << _NUMBER) | _OPEN)
    if _read(team + _ASLEEP):
        for _ in range(_exchange(team + _ASLEEP, 0)):
            _call(load_integer(team + _POST), team + _WAKE_HELPERS)


@njit
def _close(team):
    """Lets no more helpers in, and waits for those that compute."""
    if not _fetch_and(team + _GATE, ~_OPEN) & _ACTIVE:
        return
    for _ in range(_SPINS):
        if not _read(team + _GATE) & _ACTIVE:
            return
        _pause()
    while _fetch_or(team + _GATE, _SLEEPS) & _ACTIVE:
        _call(load_integer(team + _WAIT), team + _WAKE_CALLER)


@njit
def _note_loss(team, lost):
    """Has the caller compute alone for a while, after so many nanoseconds were lost."""
    now, last = _now(team, _MONOTONIC), load_integer(team + _ALONE_NS)
    alone = _ALONE * lost
    if now - load_integer(team + _ALONE_UNTIL) < last:
        alone = max(alone, 2 * last)
    alone = min(alone, _MAX_ALONE_NS)
    store_integer(team + _ALONE_NS, alone)
    store_integer(team + _ALONE_UNTIL, now + alone)
    store_integer(team + _LATE, load_integer(team + _LATE) + 1)


@njit
def _run_with_helpers(team, task, body, began, helpers):
    """Calls `body(task)` in this thread and in helpers at the same time, and notes the time lost to
    busy cores."""
    computed = _now(team, _OF_THREAD)
    _open(team, task, body, helpers)
    _call(body, task)
    closed = _now(team, _MONOTONIC)
    _close(team)
    took, waited = closed - began, _now(team, _MONOTONIC) - closed
    lost = 0
    if took > _LATE_NS:  # without its core, the caller computes less than the time that passes
        lost = took - (_now(team, _OF_THREAD) - computed)
    if waited > took:  # a piece takes less than all that the caller has computed
        lost = max(lost, waited)
    if lost > _LATE_NS:
        _note_loss(team, lost)


@njit
def run_in_team(team, task, body, threads):
    """Calls `body(task)` in this thread and in up to `threads` - 1 helpers, and returns when the
    pieces that any of these threads took are done. `body` takes pieces until none is left."""
    if threads <= 1 or _exchange(team + _BUSY, 1):
        _call(body, task)
        return
    began = _now(team, _MONOTONIC)
    if began < load_integer(team + _ALONE_UNTIL):
        _call(body, task)
    else:
        _run_with_helpers(team, task, body, began, threads - 1)
    _exchange(team + _BUSY, 0)


@njit
def run_task(task, places):
    """Computes a task in memory with a team.

    `places` are the offsets in it, in bytes, of: the number of threads; the addresses of the team
    and of the body; two counters, which begin at zero: of threads that have begun, and of pieces
    that a thread has taken.
    """
    threads, team, body, arrived, taken = places
    store_integer(task + arrived, 0)
    store_integer(task + taken, 0)
    body = load_integer(task + body)
    run_in_team(load_integer(task + team), task, body, load_integer(task + threads))


@njit
def own_scratch(arrived, scratch, stride):
    """Returns the scratch memory of a thread that begins: the next part, of `stride` bytes, of
    `scratch`. The threads that have begun are counted at the address `arrived`."""
    return scratch + fetch_add(arrived, 1) * stride


# -------------------------------------------------------------------- helpers


@njit
def _await_task(team, index, last):
    """Enters the next open task after `last`, a number; returns its number."""
    turns = 0
    while True:
        gate = _read(team + _GATE)
        number = gate >> _NUMBER
        if number != last:
            if gate & _OPEN and index < load_integer(team + _ALLOWED):
                if _replace(team + _GATE, gate, gate + 1):
                    return number
                continue
            last, turns = number, 0
        if turns < _SPINS:
            turns += 1
            _pause()
            continue
        turns = 0
        fetch_add(team + _ASLEEP, 1)
        if _read(team + _GATE) >> _NUMBER == last:
            _call(load_integer(team + _WAIT), team + _WAKE_HELPERS)


def _help(arguments):
    """A helper's thread: computes the team's tasks until the process ends. `arguments` is the
    address of the team's and of the helper's index, int64 each."""
    team, index = load_integer(arguments), load_integer(arguments + 8)
    last = _read(team + _GATE) >> _NUMBER
    while True:
        last = _await_task(team, index, last)
        _call(load_integer(team + _BODY), load_integer(team + _TASK))
        gate = fetch_add(team + _GATE, -1) - 1
        if gate & _SLEEPS and not gate & _ACTIVE:
            _call(load_integer(team + _POST), team + _WAKE_CALLER)


@cache
def compile_kernel() -> Any:
    """Compiles the helpers' function; see `compile_functions`."""
    (helper,) = compile_functions("cpu_team", _help)
    return helper.ctypes


class Compiled(NamedTuple):
    """The functions of a kernel.

    Attributes:
        run: takes the address of a task and computes it; does not hold the GIL.
        work: the address of the task's body, which each thread calls with the task's address.
    """

    run: Any
    work: int

    @classmethod
    def compile(cls, kernel: str, run: Any, work: Any) -> Compiled:
        """Compiles both; see `compile_functions`."""
        compiled_run, compiled_work = compile_functions(kernel, run, work)
        return cls(compiled_run.ctypes, compiled_work.address)


class Team:
    """The helpers of a process, which share its memory with the thread that calls a kernel.

    Attributes:
        address: of the team's memory, as kernels take it.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        library.aligned_alloc.restype = ctypes.c_void_p
        # never given back: helpers wait there until the process ends
        self.address: int = library.aligned_alloc(ctypes.c_size_t(_LINE), ctypes.c_size_t(_BYTES))
        if not self.address:
            raise MemoryError
        ctypes.memset(self.address, 0, _BYTES)
        self._words = (ctypes.c_int64 * (_BYTES // 8)).from_address(self.address)
        self._helpers = 0
        self._growing = threading.Lock()
        for place, name in (_CLOCK, "clock_gettime"), (_WAIT, "sem_wait"), (_POST, "sem_post"):
            self._words[place // 8] = ctypes.cast(library[name], ctypes.c_void_p).value or 0
        for place in _WAKE_HELPERS, _WAKE_CALLER:
            if library.sem_init(ctypes.c_void_p(self.address + place), 0, 0):
                raise OSError("sem_init failed")

    @property
    def times_late(self) -> int:
        """How often busy cores cost so much that the caller went on alone."""
        return self._words[_LATE // 8]

    def grow(self, threads: int) -> int:
        """Starts helpers until there are `threads` threads with a caller; returns the address."""
        with self._growing:
            if threads > 1:
                compile_kernel()  # here, where an error is seen
            while self._helpers < threads - 1:
                self._helpers += 1
                name = f"kernels {self._helpers}"
                threading.Thread(
                    target=self._help, args=(self._helpers - 1,), name=name, daemon=True
                ).start()
        return self.address

    def _help(self, index: int) -> None:
        """The body of a helper's thread; it does not return."""
        arguments = (ctypes.c_int64 * 2)(self.address, index)
        compile_kernel()(ctypes.addressof(arguments))


@cache
def process_team() -> Team:
    """Returns the team of this process."""
    return Team()

"""Engines whose workers wait for each other in every step post as many steps, in any order of
events, and none when there is nothing to compute."""

from __future__ import annotations

import random
from collections import deque

import pytest

from aioinfer.engine.recovery import EngineState, Lockstep

DEPTH = 2


class Recoverer:
    """The recovery of a `Stepper`."""

    def __init__(self) -> None:
        self.state = EngineState.SERVING
        self.losses: list[str] = []

    def handle_loss(self, error: Exception) -> None:
        self.state = EngineState.RESTARTING
        self.losses.append(str(error))


class Stepper:
    """An engine that has a number of steps to compute, and posts two at a time."""

    def __init__(self, number: int, lockstep: Lockstep):
        self.number = number
        self.recovery = Recoverer()
        self.lockstep = lockstep
        lockstep.join(self.recovery, self.plan_soon)
        self.work = self.posted = self.empty = self.in_flight = 0
        self.is_due = False

    def plan_soon(self) -> None:
        self.is_due = True

    def plan(self) -> None:
        """As `Engine._plan_and_post`."""
        self.is_due = False
        while self.in_flight < DEPTH:
            if self.work:
                self.work -= 1
            elif self.lockstep.is_behind(self.number):
                self.empty += 1
            else:
                return
            self.posted += 1
            self.in_flight += 1
            self.lockstep.record_post(self.number)


def make(count: int) -> list[Stepper]:
    lockstep = Lockstep()
    return [Stepper(number, lockstep) for number in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_all_work_is_done_and_no_engine_waits_for_ever(seed: int) -> None:
    """A step ends on all engines some time after all have posted it."""
    rng = random.Random(seed)
    engines = make(rng.randint(2, 4))
    ended = [0] * len(engines)
    arrivals = deque(rng.choices(range(len(engines)), k=30))
    for _ in range(5000):
        ready = [
            engine
            for engine in engines
            if engine.in_flight and ended[engine.number] < min(other.posted for other in engines)
        ]
        due = [engine for engine in engines if engine.is_due]
        choice = rng.choice("adr")
        if choice == "a" and arrivals and rng.random() < 0.2:
            engine = engines[arrivals.popleft()]
            engine.work += rng.randint(1, 4)
            engine.plan_soon()
        elif choice == "d" and due:
            rng.choice(due).plan()
        elif choice == "r" and ready:
            engine = rng.choice(ready)
            ended[engine.number] += 1
            engine.in_flight -= 1
            engine.plan()
    assert not arrivals
    assert not any(engine.work or engine.in_flight or engine.is_due for engine in engines)
    assert len({engine.posted for engine in engines}) == 1
    assert all(engine.empty < engine.posted for engine in engines)


def test_idle_engines_post_nothing() -> None:
    engines = make(2)
    for engine in engines:
        engine.plan()
    assert [engine.posted for engine in engines] == [0, 0]


def test_the_loss_of_one_is_that_of_all() -> None:
    first, second, dead = engines = make(3)
    dead.recovery.state = EngineState.DEAD
    first.work = 2
    first.plan()
    assert second.lockstep.is_behind(second.number)
    first.recovery.state = EngineState.RESTARTING
    first.lockstep.lose(first.number, RuntimeError("worker 0 was killed\nTraceback"))
    assert second.recovery.losses == ["it shares experts with engine 0: worker 0 was killed"]
    assert not first.recovery.losses
    assert not dead.recovery.losses
    assert not any(first.lockstep.is_behind(engine.number) for engine in engines)

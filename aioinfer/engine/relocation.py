"""Moves the requests of a dead engine to the living ones.

A request that has produced nothing is added there. One that has produced tokens is resumed by
recompute: its tokens so far are recomputed, as after a preemption, and since the sampler's noise is
a function of the request's seed and the position, its text goes on as it would have. All sequences
of a request go to one engine, which the router picks by the tokens that are left to compute.

`Frontend` is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from aioinfer.config import SchedulerConfig
from aioinfer.engine.engine import Engine
from aioinfer.engine.output import OutputSequence, RequestOutput
from aioinfer.engine.recovery import EngineState
from aioinfer.engine.router import Router
from aioinfer.errors import EngineDeadError, OverloadedError


def relocate(
    dead: Engine, engines: Sequence[Engine], router: Router, limits: SchedulerConfig
) -> tuple[int, int]:
    """Moves the requests of `dead`, in the order in which it would have served them, as far as they
    can be resumed and the queue of the living engines has room. Ends the other requests with an
    error.

    Returns how many requests were moved, and how many had to end.
    """
    num_requests = dead.num_requests
    outputs: dict[RequestOutput, list[OutputSequence]] = {}
    for sequence in dead.export_requests():
        outputs.setdefault(sequence.output, []).append(sequence)
    moved = 0
    for output, sequences in outputs.items():
        error = _find_obstacle(dead, engines, sequences, limits)
        if error is not None:
            dead.fail(output, error)
            continue
        _move(dead, engines, router, sequences)
        moved += 1
    return moved, num_requests - moved


def _move(
    dead: Engine, engines: Sequence[Engine], router: Router, sequences: list[OutputSequence]
) -> None:
    """Moves the sequences of a request to the engine where they cost the least."""
    first = sequences[0].request
    longest = max(len(sequence.request.tokens) for sequence in sequences)
    route = router.route(longest, first.block_hashes, _num_slots(sequences))
    first.num_expected = min(route.num_tokens, first.prompt_len - 1)
    dead.release(sequences)
    engines[route.engine].import_requests(sequences)
    router.promise(route, first)


def _find_obstacle(
    dead: Engine,
    engines: Sequence[Engine],
    sequences: Sequence[OutputSequence],
    limits: SchedulerConfig,
) -> Exception | None:
    """Returns why the sequences of a request cannot go to another engine, or None.

    The bounds of the queue are the bounds for new requests (`api.admission`): of all living engines
    together, with free slots as room beside `max_waiting_requests`.
    """
    living = [engine.scheduler for engine in engines if engine.state is not EngineState.DEAD]
    cause = (dead.dead_reason or "").partition("\n")[0]  # without a traceback
    if not all(s.fits_request(sequence.request) for s in living for sequence in sequences):
        return EngineDeadError(f"no engine that lives can hold the request: {cause}")
    waiting = sum(scheduler.num_waiting for scheduler in living)
    free_slots = sum(s.num_free_slots for s in living)
    bound = limits.max_waiting_requests
    if bound is not None and waiting + _num_slots(sequences) > bound + free_slots:
        return OverloadedError(f"{cause}; {waiting} requests wait on the engines that live")
    tokens = sum(scheduler.num_waiting_tokens for scheduler in living)
    more = sum(s.request.num_slots * s.request.prompt_len for s in sequences)
    if (
        limits.max_waiting_tokens is not None
        and tokens
        and (tokens + more > limits.max_waiting_tokens)
    ):
        return OverloadedError(f"{cause}; {tokens} prompt tokens wait on the engines that live")
    return None


def _num_slots(sequences: Sequence[OutputSequence]) -> int:
    return sum(sequence.request.num_slots for sequence in sequences)

"""The masks of constrained rows: when they can be filled, where, and the effects of a sampled
token.

A constrained request is planned ahead like any other: the forward pass of step N+1 needs only the
token of step N, which is in the request's slot; its *sampling* needs the mask, and that needs to
know the token. So the order of messages to the workers is

    plan N+1 │ result N comes │ accept its tokens ► fill the masks of N+1 ► masks N+1 │ plan N+2

and the workers compute step N+1 while its masks are filled. The workers wait only if that takes
longer than a forward pass.

Accepting a token takes some 10 us, which the filler's threads share, so the event loop waits for it
before it emits the step's text: a sequence with a complete output ends with that token. Masks take
longer, up to milliseconds where a grammar's lexer meets a text for the first time. They are filled
in a thread while the event loop emits the text of step N; very few rows are filled at once, since
handing them to a thread takes longer. No plan is posted until then, because it would overtake the
masks in the ring.

Where a constraint leaves one way only for some tokens (the names of an object's members, say), they
are not sampled one by one: the sequence jumps ahead. They are appended like a prompt's, and the
next step computes them in one row (`Scheduler.append`).

With drafts (see `ipc.lookahead`) a request has several rows in a step, each with its mask
(`filling`). A request whose output is complete with one of several kept tokens loses those behind.

Where no request is constrained, nothing of this module runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from operator import and_, eq
from typing import ClassVar, NamedTuple

import numpy as np

from aioinfer.errors import GenerationError
from aioinfer.executor.base import Executor
from aioinfer.features.host import Host
from aioinfer.features.masks.filling import RequestRows, fill_rows
from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import StepResult
from aioinfer.ipc.sections import Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Finish, Request, RequestStatus, Use
from aioinfer.scheduler.steps import Row, StepOutput
from aioinfer.text.constraints import Constraint, Mask, MaskFiller

#: Up to so many requests' rows are filled on the event loop: handing them to a thread takes 90 us,
#: and a mask of a JSON grammar over 152 000 tokens usually 25 us, now and then a millisecond.
_FEW_REQUESTS = 2
#: Forced tokens that are taken at once. Fewer are sampled one by one: the posted row is lost with
#: each jump, and the next step has a row that is no decode, which is not all in one CUDA graph.
MIN_JUMP, MAX_JUMP = 3, 64
#: Looking for forced tokens takes the event loop 3 to 80 us a sequence (a JSON grammar, 152 000
#: tokens): many sequences would wait for it longer than a jump saves.
MAX_JUMPERS = 8


#: The end of a request for which the constraint allows no further token.
_COMPLETE = Finish("stop")


class _Jump(NamedTuple):
    """The tokens that a constraint forces behind a sampled one, and why the request ends with the
    last of them, if it does."""

    tokens: Sequence[int]
    finish: Finish | None


_NO_JUMP = _Jump((), None)


class _Taken(NamedTuple):
    """The tokens that a step has sampled for a constrained request.

    Attributes:
        places: of its tokens in the step's output, ascending.
        num_accepted: how many of them the constraint takes in: not the last one, if it has ended
            the request.
    """

    request: Request
    constraint: Constraint
    places: Sequence[int]
    num_accepted: int


@dataclass(slots=True)
class _Changes:
    """How the output of a step changes: by place, the forced tokens behind it, or the end of the
    request; and the places of tokens that are dropped."""

    jumps: dict[int, _Jump] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)


class PlainFiller:
    """Implements `MaskFiller` for constraints that bring no faster way: one after the other."""

    def accept(self, tokens: Sequence[tuple[Constraint, int]]) -> list[Exception | None]:
        """See `MaskFiller.accept`."""
        errors: list[Exception | None] = []
        for constraint, token in tokens:
            try:
                constraint.accept([token])
                errors.append(None)
            except Exception as error:  # one request's failure must not end the others
                errors.append(error)
        return errors

    def fill(self, rows: Sequence[tuple[Constraint, int]], masks: Mask) -> list[Exception | None]:
        """See `MaskFiller.fill`."""
        errors: list[Exception | None] = []
        for constraint, row in rows:
            try:
                constraint.fill(masks[row])
                errors.append(None)
            except Exception as error:  # one request's failure must not end the others
                errors.append(error)
        return errors


@dataclass(slots=True)
class _MaskedStep:
    """A posted step that still lacks its masks.

    Attributes:
        step_id: the number of its plan.
        rows: the constrained rows, in their order.
        executor: the executor that has the plan.
        filling: the requests whose masks are being filled, with their rows; None before that.
    """

    step_id: int
    rows: Sequence[Row]
    executor: Executor
    filling: dict[Request, RequestRows] | None = None


@dataclass(slots=True)
class _Work:
    """The work of the thread, which uses the constraints of `requests`."""

    future: asyncio.Future[None]
    requests: Collection[Request]


class Constrained(Use):
    """A sequence whose tokens are sampled under a mask. `constraint` has taken in its tokens."""

    __slots__ = ("constraint",)
    feature: ClassVar[str] = "masks"
    needs_drafts: ClassVar[bool] = True

    def __init__(self, constraint: Constraint):
        self.constraint = constraint


def constraint_of(request: Request) -> Constraint | None:
    """Returns the constraint of a request's tokens, or None."""
    use = request.use(Constrained)
    return None if use is None else use.constraint


class Planning(StepFeature):
    """The masks of the posted steps of an engine.

    Attributes:
        filler: fills masks, each constraint by itself or several in threads.
        max_jumpers: no sequence jumps ahead in a step with tokens of more constrained sequences.
    """

    name = "masks"

    def __init__(self, host: Host):
        super().__init__(host)
        self.filler: MaskFiller = PlainFiller()
        self.max_jumpers = MAX_JUMPERS
        self._step: _MaskedStep | None = None
        self._only: dict[Request, Sequence[int]] = {}  # what the posted rows have to sample
        # which kept draft ends a request with an error, in the step whose result comes next
        self._failures: dict[Request, tuple[int, Exception]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._work: _Work | None = None

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        return None if submitted.constraint is None else Constrained(submitted.constraint.start())

    # ---------------------------------------------------------------- tokens

    def take(self, rows: Sequence[Row], result: StepResult, output: StepOutput) -> StepOutput:
        """Takes in the tokens of a step, ends the requests whose output is complete, and fills the
        masks that have waited for these tokens. Returns the step's output together with the forced
        tokens and the ends of requests."""
        changes = _Changes()
        going = [each for each in _taken(rows, output) if each.num_accepted]
        may_jump, level = len(going) <= self.max_jumpers, 0
        while going:  # the first tokens of all requests, then the second ones of some
            tokens = [(each.constraint, output.tokens[each.places[level]]) for each in going]
            following = []
            for each, error in zip(going, self.filler.accept(tokens), strict=True):
                try:
                    if error is not None:
                        raise error
                    if self._proceed(each, level, changes, may_jump=may_jump):
                        following.append(each)
                except Exception as failure:  # one request's failure must not end the others
                    self.host.fail(each.request, _as_generation_error(failure))
                    changes.dropped.update(each.places[level + 1 :])
            going, level = following, level + 1
        self._failures.clear()
        self.fill()
        return _changed(output, changes) if changes.jumps or changes.dropped else output

    def _proceed(self, taken: _Taken, level: int, changes: _Changes, *, may_jump: bool) -> bool:
        """Handles token `level` of a request, which the constraint has accepted: ends the request
        if its output is complete, and lets it jump ahead behind its last token if it may. Returns
        whether there is a next token to accept. Raises what has kept its mask from being filled."""
        request, constraint, place = taken.request, taken.constraint, taken.places[level]
        if constraint.is_finished:
            self._complete(request, len(taken.places) - level - 1)
            changes.dropped.update(taken.places[level + 1 :])
            changes.jumps[place] = _Jump([], _COMPLETE)
            return False
        if level + 1 < len(taken.places):
            failed, error = self._failures.get(request, (0, None))
            if error is not None and failed == level + 1:
                raise error
            return level + 1 < taken.num_accepted
        jump = self._jump(request, constraint) if may_jump else _NO_JUMP
        if jump is not _NO_JUMP:
            changes.jumps[place] = jump
        return False

    def _complete(self, request: Request, num_dropped: int) -> None:
        """Ends a request whose output is complete without its last `num_dropped` tokens."""
        self.host.scheduler().finish(request, *_COMPLETE)
        request.end(_COMPLETE)  # it may have ended with one of these tokens
        if num_dropped:
            del request.tokens[-num_dropped:]

    def _jump(self, request: Request, constraint: Constraint) -> _Jump:
        """Appends the tokens that must come next, if they are enough for a jump to pay off.
        Log-probabilities are known only of tokens that were sampled."""
        if request.params.logprobs is not None or request.slot < 0:
            return _NO_JUMP
        forced = constraint.forced()[:MAX_JUMP]
        if len(forced) < MIN_JUMP:
            return _NO_JUMP
        is_sampled = request.num_pending > 0
        drafts = self._drafts(request, request.num_lookahead)
        num_kept = sum(accumulate(map(eq, drafts, forced), and_))
        if len(forced) - num_kept < MIN_JUMP:
            return _NO_JUMP
        count, finish = self.host.scheduler().append(request, forced, num_kept)
        if not count:
            return _NO_JUMP
        forced = forced[:count]
        if finish is None:
            constraint.accept(forced)
            if constraint.is_finished:
                self.host.scheduler().finish(request, "stop")
                finish = _COMPLETE
            elif is_sampled:  # by the posted row, which is to count it for penalties
                self._only[request] = forced[: num_kept + 1]
        return _Jump(forced, finish)

    def _drafts(self, request: Request, count: int) -> Sequence[int]:
        """Returns the drafts of a request in the posted step, whose first row is known."""
        ahead = self.host.scheduler().features.ahead
        return ahead.drafts(request, count) if count and ahead is not None else ()

    # ---------------------------------------------------------------- masks

    def plan(self, rows: Sequence[Row]) -> Section:
        """See `StepFeature.plan`."""
        return ConstrainedRows(np.array([row.place for row in rows], np.int32))

    def confirm_post(self, step_id: int, rows: Sequence[Row]) -> None:
        """See `StepFeature.confirm_post`. The step's masks are filled now if they do not depend on
        a result that is still to come."""
        self.host.metrics.count("constrained_rows", len(rows))
        self._step = _MaskedStep(step_id, rows, self.host.executor())
        self.is_waiting = True  # no plan may be posted before the masks
        self.fill()

    def fill(self) -> None:
        """Fills and posts the masks of the posted step, if there are any to be filled and all
        tokens before it are known."""
        step = self._step
        if step is None or step.filling is not None:
            return
        counts = Counter(row.request for row in step.rows)
        if any(
            request.num_pending > count and request.status is not RequestStatus.FINISHED
            for request, count in counts.items()
        ):
            return  # more than the tokens of this very step
        masks = step.executor.masks_of(step.step_id)
        step.filling = self._prepare(step.rows, counts, masks)
        began, filling = time.perf_counter(), [*step.filling.values()]
        if len(filling) <= _FEW_REQUESTS:
            fill_rows(self.filler, filling, masks)
            self._end(step, began)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        future = asyncio.get_running_loop().run_in_executor(
            self._thread, fill_rows, self.filler, filling, masks
        )
        self._work = _Work(future, step.filling.keys())
        future.add_done_callback(lambda done: self._take(step, began, done))

    def _prepare(
        self, rows: Sequence[Row], counts: Mapping[Request, int], masks: Mask
    ) -> dict[Request, RequestRows]:
        """Returns the rows whose masks are to be filled, of each request, which has `counts`
        adjacent ones; fills the others."""
        filling = {}
        only, self._only = self._only, {}
        for first, row in enumerate(rows):
            request = row.request
            if first and rows[first - 1].request is request:
                continue
            last = first + counts[request]
            if request.status is not RequestStatus.FINISHED and request not in only:
                drafts = self._drafts(request, counts[request] - 1)
                filling[request] = RequestRows(row.use.constraint, first, drafts)
                continue
            masks[first:last] = -1  # what they sample is dropped
            for number, token in enumerate(only.get(request, ()), first):
                masks[number] = 0
                masks[number, token // 32] = np.int64(1 << token % 32).astype(np.int32)
        return filling

    def _take(self, step: _MaskedStep, began: float, done: asyncio.Future[None]) -> None:
        """Handles the end of the thread's work."""
        if self._work is not None and self._work.future is done:
            self._work = None
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            for each in (step.filling or {}).values():
                each.fail(0, _as_generation_error(error))
        self._end(step, began)
        self.host.go_on()

    def _end(self, step: _MaskedStep, began: float) -> None:
        """Posts the masks of a step, and ends the requests whose first mask could not be filled."""
        if self._step is not step:
            return  # its workers were lost meanwhile
        self.host.metrics.observe("mask_fill_seconds", time.perf_counter() - began)
        self._step, self.is_waiting = None, False
        step.executor.post_masks(step.step_id)
        for request, rows in (step.filling or {}).items():
            if rows.error is None or request.status is RequestStatus.FINISHED:
                continue
            if rows.failed:  # of a draft that may not be kept
                self._failures[request] = rows.failed, rows.error
            else:  # its sampled token is dropped
                self.host.fail(request, _as_generation_error(rows.error))

    # ---------------------------------------------------------------- lost workers

    def lose(self) -> None:
        """Forgets the posted step, since its workers were lost. The constraints have taken in all
        tokens that are known, so they go on from there."""
        self._step, self.is_waiting = None, False
        self._only.clear()
        self._failures.clear()

    def restart(self) -> None:
        """Prepares for new workers. If the thread has still not filled the masks for the lost ones,
        it hangs in one of the constraints: their requests end with an error, and another thread
        takes its place."""
        work, self._work = self._work, None
        if work is not None:
            self.close()
            for request in work.requests:
                if request.status is not RequestStatus.FINISHED:
                    self.host.fail(
                        request, GenerationError("the masks of the request took too long")
                    )

    def close(self) -> None:
        """Ends the thread when it has done its work; does not wait for it. Another one is started
        if masks are to be filled again."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


def _taken(rows: Sequence[Row], output: StepOutput) -> list[_Taken]:
    """Returns the tokens of each request that has any in the output."""
    places: dict[Request, list[int]] = {}
    constraints = {}
    for row, place in zip(rows, output.places(rows), strict=True):
        if place >= 0:
            places.setdefault(row.request, []).append(place)
            constraints[row.request] = row.use.constraint
    return [
        _Taken(
            request, constraints[request], of_request,
            len(of_request) - (request.status is RequestStatus.FINISHED),
        )
        for request, of_request in places.items()
    ]  # fmt: skip


def _changed(output: StepOutput, changes: _Changes) -> StepOutput:
    """Returns the output with its changes."""
    requests: list[Request] = []
    tokens: list[int] = []
    rows: list[int] = []
    finished: dict[int, Finish] = {}
    for place, (request, token, row) in enumerate(
        zip(output.requests, output.tokens, output.rows, strict=True)
    ):
        if place in changes.dropped:
            continue
        forced, finish = changes.jumps.get(place, _NO_JUMP)
        requests += [request] * (1 + len(forced))
        tokens += [token, *forced]
        rows += [row] * (1 + len(forced))
        if finish is None:
            finish = output.finished.get(place)
        if finish is not None:
            finished[len(requests) - 1] = finish
    return dataclasses.replace(
        output, requests=requests, tokens=tokens, rows=rows, finished=finished
    )


def _as_generation_error(error: BaseException) -> GenerationError:
    if isinstance(error, GenerationError):
        return error
    return GenerationError(f"the restrictions of the output could not be applied: {error!r}")

"""The record of an HTTP request: its stages, result and outputs, for the log and for traces.

`request_log` makes a `RequestRecord` for each request; `context` and `delivery` note in it what
they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from aioinfer.engine.metrics import RequestTimes
    from aioinfer.engine.output import OutputSequence, RequestOutput

#: The status of a request whose client went away, as nginx has it: nothing is sent.
CLIENT_GONE = 499


@dataclass(slots=True)
class RequestRecord:
    """The record of an HTTP request. Times are of `time.perf_counter`; 0 stands for a stage that
    was not reached.

    Attributes:
        arrived: when its handler began.
        decoded: when its body was read and decoded.
        submitted: when its prompts were encoded.
        ended: when its last byte was written, or its client had gone.
        status: the HTTP status; 499 if its client went away.
        code, reason: of the error that answers it, where there is one.
        outputs: one for each prompt that was queued.
        prompts: their text, under `logging.prompts`.
        model: the model that its body names, if it does.
    """

    arrived: float
    decoded: float = 0.0
    submitted: float = 0.0
    ended: float = 0.0
    status: int = CLIENT_GONE
    code: str | None = None
    reason: str | None = None
    outputs: Sequence[RequestOutput] = ()
    prompts: list[str] = field(default_factory=list)
    model: str | None = None

    def sequences(self) -> list[OutputSequence]:
        """Returns the sequences of all outputs."""
        return [sequence for output in self.outputs for sequence in output.sequences]

    def stages(self) -> Stages | None:
        """Returns when its sequences were queued, scheduled and generated, None if it has none."""
        found = [s.times for s in self.sequences() if s.times is not None]
        return Stages.of(found) if found else None


@dataclass(frozen=True, slots=True)
class Stages:
    """The times of a request's sequences together: the first of them to be queued, to be scheduled
    and to have a token, and the last token of all. 0 stands for a stage that was not reached."""

    queued: float
    scheduled: float
    first_token: float
    last_token: float

    @classmethod
    def of(cls, times: Sequence[RequestTimes]) -> Stages:
        """Returns the stages of sequences with these times."""

        def first(values: list[float]) -> float:
            return min((value for value in values if value), default=0.0)

        return cls(
            first([t.queued for t in times]),
            first([t.scheduled for t in times]),
            first([t.first_token for t in times]),
            max(t.last_token for t in times),
        )


RECORD = web.RequestKey("record", RequestRecord)

"""A text that the client has predicted for the output, as one more source of drafts."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from aioinfer.features.speculation.ngram import MAX_SUFFIX
from aioinfer.ipc.sections import I32
from aioinfer.scheduler.features import SubmittedRequest
from aioinfer.scheduler.request import Request, Use

#: Tokens of a predicted text that count: the first ones.
MAX_PREDICTED = 4096


class Predicted(Use):
    """The predicted text of a sequence.

    Attributes:
        tokens: int32, the end of the prompt, and the text: it is expected behind that end.
        num_kept, num_dropped: the drafts of the sequence that were kept, and that were not.
    """

    __slots__ = ("_sent", "num_dropped", "num_kept", "tokens")
    feature: ClassVar[str] = "speculation"

    def __init__(self, tokens: I32):
        self.tokens = tokens
        self.num_kept = self.num_dropped = 0
        self._sent: tuple[int, int] | None = None  # how often the request had lost its slot then

    @classmethod
    def of(cls, submitted: SubmittedRequest) -> Predicted | None:
        """Returns the use of a request, None if nothing was predicted. The text counts up to the
        first token that the model does not have."""
        given = submitted.params.predicted_tokens
        if not given:
            return None
        predicted = np.array(given[:MAX_PREDICTED], np.int64)
        unknown = np.flatnonzero((predicted < 0) | (predicted >= submitted.vocab_size))
        predicted = predicted[: unknown[0]] if len(unknown) else predicted
        if not len(predicted):
            return None
        end = np.array(submitted.tokens[-MAX_SUFFIX:], np.int32)
        return cls(np.concatenate([end, predicted.astype(np.int32)]))

    def is_sent(self, request: Request) -> bool:
        """Whether the workers have the text for the slot of its request."""
        return self._sent == (request.num_preemptions, request.num_interruptions)

    def note_sent(self, request: Request) -> None:
        """Notes that the workers get the text for the slot of its request."""
        self._sent = request.num_preemptions, request.num_interruptions

    def note(self, rows: int, kept: int) -> None:
        """Counts the drafts of a step."""
        self.num_kept += kept
        self.num_dropped += rows - kept

"""A text that the client has predicted for the output, as one more source of drafts."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from aioinfer.features.speculation.ngram import MAX_SUFFIX
from aioinfer.ipc.sections import I32
from aioinfer.scheduler.features import SubmittedRequest
from aioinfer.scheduler.request import Use

#: Tokens of a predicted text that count: the first ones.
MAX_PREDICTED = 4096


class Predicted(Use):
    """The predicted text of a sequence.

    Attributes:
        tokens: int32, the end of the prompt, and the text: it is expected behind that end.
        num_kept, num_dropped: the drafts of the sequence that were kept, and that were not.
    """

    __slots__ = ("num_dropped", "num_kept", "tokens")
    feature: ClassVar[str] = "speculation"

    def __init__(self, tokens: I32):
        self.tokens = tokens
        self.num_kept = self.num_dropped = 0

    @classmethod
    def of(cls, submitted: SubmittedRequest) -> Predicted | None:
        """Returns the use of a request, None if nothing was predicted. The text counts up to the
        first token that the model does not have."""
        predicted = np.array(submitted.params.predicted_tokens[:MAX_PREDICTED], np.int64)
        unknown = np.flatnonzero((predicted < 0) | (predicted >= submitted.vocab_size))
        predicted = predicted[: unknown[0]] if len(unknown) else predicted
        if not len(predicted):
            return None
        end = np.array(submitted.tokens[-MAX_SUFFIX:], np.int32)
        return cls(np.concatenate([end, predicted.astype(np.int32)]))

    def note(self, rows: int, kept: int) -> None:
        """Counts the drafts of a step."""
        self.num_kept += kept
        self.num_dropped += rows - kept

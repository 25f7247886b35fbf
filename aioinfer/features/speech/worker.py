"""Worker half of speech: hides the tokens that a transcript may not have next.

A transcript with timestamps begins with one; they come in pairs around each piece of text, and
never fall. Where all timestamps together are likelier than the likeliest text, one of them follows
(Whisper, Radford et al. 2022; as in transformers' `WhisperTimeStampLogitsProcessor`).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.features.speech.sections import SpeechRows
from aioinfer.ipc.plan import StepPlan
from aioinfer.models.encoder_decoder import EncoderDecoderModel
from aioinfer.worker.features import Rank, WorkerFeature


class _Rows(NamedTuple):
    """Rows whose tokens follow the rules, n of them.

    Attributes:
        places: int64 [n], which rows of the logits.
        slots: int64 [n].
        begins, positions: int64 [n], of the output's first token, and of the one that is sampled.
        longest: the tokens of the longest output.
        numbers: as in `SpeechRows`.
    """

    places: torch.Tensor
    slots: torch.Tensor
    begins: torch.Tensor
    positions: torch.Tensor
    longest: int
    numbers: tuple[int, int, int]


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    section = SpeechRows
    adjusts_logits = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        model = rank.model
        self.is_needed = isinstance(model, EncoderDecoderModel) and model.encoder.is_sound
        self._hidden: dict[bytes, torch.Tensor] = {}

    @cached_property
    def _ids(self) -> torch.Tensor:
        """The token id of each column of the logits, int64 [local_size]."""
        vocabulary = self.rank.model.vocabulary
        first = vocabulary.start
        return torch.arange(first, first + vocabulary.local_size, device=self.rank.device)

    def adjust(
        self, plan: StepPlan, section: SpeechRows, logits: torch.Tensor,
        rows: npt.NDArray[np.integer],
    ) -> None:  # fmt: skip
        """See `WorkerFeature.adjust`."""
        sampled = np.flatnonzero(plan.samples)[rows]
        order = np.argsort(section.slots)
        found = np.searchsorted(section.slots, plan.slots[sampled], sorter=order)
        found = order[np.minimum(found, len(order) - 1)]
        is_speech = section.slots[found] == plan.slots[sampled]
        self._hide_suppressed(plan, section, logits, is_speech, sampled, found)
        some = np.flatnonzero(is_speech & (section.has_times[found] == 1))
        if len(some):
            own = self._rows(plan, section, some, sampled[some], found[some])
            logits[own.places] = self._with_times(logits[own.places], own)

    def _hide_suppressed(
        self, plan: StepPlan, section: SpeechRows, logits: torch.Tensor,
        is_speech: npt.NDArray[np.bool_], sampled: npt.NDArray[np.integer],
        found: npt.NDArray[np.integer],
    ) -> None:  # fmt: skip
        """Hides the tokens that may never be sampled, or not as the first one. `sampled` and
        `found`: the rows of the plan and of the section of each row of the logits."""
        ends = plan.starts[sampled] + plan.lengths[sampled]
        is_first = is_speech & (section.begins[found] == ends)
        for rows, tokens in (
            (is_speech, section.suppressed), (is_first, section.first_suppressed)
        ):  # fmt: skip
            if len(tokens) and rows.any():
                hidden = self.rank.upload(rows)[:, None] & self._columns(tokens)
                logits.masked_fill_(hidden, -torch.inf)

    def _columns(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        """Returns which columns of the logits are of some tokens, bool [local_size]."""
        key = tokens.tobytes()
        if key not in self._hidden:
            self._hidden[key] = torch.isin(self._ids, self.rank.upload(tokens.astype(np.int64)))
        return self._hidden[key]

    def _rows(
        self, plan: StepPlan, section: SpeechRows, places: npt.NDArray[np.integer],
        sampled: npt.NDArray[np.integer], found: npt.NDArray[np.integer],
    ) -> _Rows:  # fmt: skip
        positions = plan.starts[sampled] + plan.lengths[sampled]
        begins = section.begins[found]
        arrays = np.stack([places, plan.slots[sampled], begins, positions]).astype(np.int64)
        first, end, latest = section.numbers.tolist()
        longest = max(1, int((positions - begins).max()))
        own, slots, start, position = self.rank.upload(arrays).unbind()
        return _Rows(own, slots, start, position, longest, (first, end, latest))

    def _with_times(self, logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
        """Returns logits [n, local_size] of transcripts with timestamps, without the tokens that
        may not follow."""
        first, end, latest = rows.numbers
        count = rows.positions - rows.begins
        last_is_time = (count >= 1) & (self._token(rows, 1) >= first)
        before_is_time = (count < 2) | (self._token(rows, 2) >= first)
        ids, is_time = self._ids, self._ids >= first
        hidden = (ids == first - 1) | (is_time & (last_is_time & before_is_time)[:, None])
        ends_pair = last_is_time & ~before_is_time
        hidden |= (ids < end) & ends_pair[:, None]
        lowest = self._latest(rows) + (~ends_pair).long()
        hidden |= is_time & (ids < lowest[:, None])
        hidden |= (~is_time | (ids > first + latest)) & (count == 0)[:, None]
        logits = logits.masked_fill(hidden, -torch.inf)
        return logits.masked_fill(
            self._is_time_next(logits, is_time)[:, None] & ~is_time, -torch.inf
        )

    def _token(self, rows: _Rows, back: int) -> torch.Tensor:
        """Returns the token int32 [n] so many places before the one that is sampled."""
        return self.rank.slots.tokens[rows.slots, (rows.positions - back).clamp(min=0)]

    def _latest(self, rows: _Rows) -> torch.Tensor:
        """Returns the latest timestamp of each output, int64 [n]; before the first one the token
        before all timestamps."""
        offsets = torch.arange(rows.longest, device=rows.slots.device)
        tokens = self.rank.slots.tokens
        places = (rows.begins[:, None] + offsets).clamp(max=tokens.shape[1] - 1)
        output = tokens[rows.slots[:, None], places].long()
        is_output = offsets < (rows.positions - rows.begins)[:, None]
        return output.masked_fill(~is_output, -1).amax(dim=1).clamp(min=rows.numbers[0] - 1)

    def _is_time_next(self, logits: torch.Tensor, is_time: torch.Tensor) -> torch.Tensor:
        """Returns whether the timestamps together are likelier than any text, bool [n]."""
        times = logits.masked_fill(~is_time, -torch.inf).logsumexp(dim=1)
        texts = logits.masked_fill(is_time, -torch.inf).amax(dim=1)
        gather = self.rank.model.backend.group.all_gather_last
        return gather(times[:, None]).logsumexp(dim=1) > gather(texts[:, None]).amax(dim=1)

"""Worker half: proposes the recorded text of a slot, by its first tokens. Draft j of a step is
right with the j-th acceptance, at random by position and text: so it is kept with that probability
if the drafts before it are, wherever the request samples its recorded text."""

from __future__ import annotations

import os

import numpy as np
import torch

from aioinfer.worker.features import ProposalRows, Rank, WorkerFeature
from bench_features.recorded_drafts import FILE_VARIABLE, KEY_TOKENS

_NUM_UNIFORMS = 1 << 14


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    proposes = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        with np.load(os.environ[FILE_VARIABLE]) as recording:
            self._texts = torch.tensor(recording["texts"], device=rank.device)
            acceptance = torch.tensor(recording["acceptance"])
        uniforms = torch.rand(
            _NUM_UNIFORMS, len(acceptance), generator=torch.Generator().manual_seed(0)
        )
        self._is_right = (uniforms < acceptance).to(rank.device)

    def propose(self, rows: ProposalRows) -> None:
        """See `WorkerFeature.propose`."""
        tokens, (count, longest) = self.rank.slots.tokens, self._texts.shape
        keys = tokens[:, :KEY_TOKENS].index_select(0, rows.slots)
        is_key = (keys[:, None] == self._texts[None, :, :KEY_TOKENS]).all(-1)
        text = is_key.to(torch.int32).argmax(1)
        at = (rows.bases + rows.offsets).long()
        draft = self._texts[text, at.clamp(max=longest - 1)]
        number = (rows.bases.long() * count + text) * 40_503 % _NUM_UNIFORMS
        last = self._is_right.shape[1] - 1
        is_right = self._is_right[number, (rows.offsets.long() - 1).clamp(0, last)]
        draft = torch.where(is_right, draft, (draft - 1).abs())  # another token id
        where = rows.slots.long(), at
        tokens[where] = torch.where(rows.offsets > 0, draft, tokens[where])

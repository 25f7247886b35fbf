"""Worker half of alignment: from the cross attention of some heads, how much each token of a
transcript attends to each frame of its sound (Radford et al. 2022, and OpenAI's code)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from aioinfer.features.alignment.sections import AlignmentRows, Alignments
from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.cross_attention import KEPT_QUERIES, CrossAttention
from aioinfer.layers.step import Step
from aioinfer.models.encoder_decoder import EncoderDecoderModel
from aioinfer.worker.features import PendingSection, Rank, WorkerFeature, first_tokens, rows_of

#: Frames of the median filter.
_WIDTH = 7


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    section = AlignmentRows
    suits_graphs = False
    changes_inputs = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        model = rank.model
        self.is_needed = isinstance(model, EncoderDecoderModel) and model.encoder.is_sound
        self._step: Step

    def change_inputs(self, plan: StepPlan, section: AlignmentRows, step: Step) -> None:
        """See `WorkerFeature.change_inputs`: the layers keep their queries."""
        step.memo[KEPT_QUERIES] = []
        self._step = step

    def read_hidden(
        self,
        plan: StepPlan,
        section: AlignmentRows,
        hidden: torch.Tensor,
        *,
        has_all_tokens: bool,
    ) -> PendingSection:
        """See `WorkerFeature.read_hidden`."""
        layers = self._step.memo.pop(KEPT_QUERIES)
        rows, starts = rows_of(plan, section.slots), first_tokens(plan, section.slots)
        heads = section.heads.reshape(-1, 2).tolist()
        matrices = []
        for row, start, first, frames in zip(
            rows.tolist(), starts.tolist(), section.firsts.tolist(), section.frames.tolist(),
            strict=True,
        ):  # fmt: skip
            tokens = slice(start + first, start + int(plan.lengths[row]))
            found = torch.zeros(tokens.stop - tokens.start, frames, device=hidden.device)
            for layer, (attention, queries) in enumerate(layers):
                own = self._own([head for number, head in heads if number == layer], attention)
                if own and len(found):
                    weights = self._weights(attention, queries[tokens][:, own], row, own)
                    for each in weights[..., :frames].split(1):  # the median takes much memory
                        found += _normed(each)[0]
            matrices.append(found.flatten() / len(heads))
        summed = self.rank.model.backend.group.all_reduce(torch.cat(matrices))
        return PendingSection(Alignments, (summed,))

    def _own(self, heads: Sequence[int], attention: CrossAttention) -> list[int]:
        """Returns those of some heads that this rank has, by its own numbers."""
        count = attention.shape.num_heads
        first = self.rank.model.backend.group.rank * count
        return [head - first for head in heads if 0 <= head - first < count]

    def _weights(
        self, attention: CrossAttention, queries: torch.Tensor, row: int, heads: Sequence[int]
    ) -> torch.Tensor:
        """Returns the weights float32 [h, T, max_len] of queries [T, h, head_size] of a row."""
        keys = attention.keys_of(row, self._step)[:, heads].permute(1, 2, 0).float()
        scores = queries.transpose(0, 1).float() @ keys
        return (scores * attention.shape.scale).softmax(dim=-1)


def _normed(weights: torch.Tensor) -> torch.Tensor:
    """Returns weights [h, T, frames] less their mean over the tokens and in standard deviations,
    of each frame and the 3 on either side the median."""
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    # of one token all weights are the mean
    normed = (weights - mean) / deviation.clamp(min=torch.finfo(torch.float32).tiny)
    reach = _WIDTH // 2
    if weights.shape[-1] <= reach:
        return normed
    padded = F.pad(normed, (reach, reach), mode="reflect")
    return padded.unfold(-1, _WIDTH, 1).sort().values[..., reach]

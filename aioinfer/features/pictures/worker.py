"""Worker half of pictures: computes the embeddings of pictures, keeps them, and puts them in the
place of tokens.

Each tensor-parallel rank has the whole tower. The ranks divide the pictures of a step, and all keep
all embeddings; a single picture is computed by every rank. Of a pipeline the first stage does so;
the others learn where pictures are, and where RoPE places tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from aioinfer.features.pictures.sections import PictureRows, pack_pixels
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.layers.pictures import PictureBlock, StepPictures
from aioinfer.layers.step import SampledRows, Step
from aioinfer.worker.features import Rank, WorkerFeature, first_tokens, rows_of, spread


class Work(WorkerFeature):
    """See `WorkerFeature`.

    Attributes:
        embeddings: [rows, width], of the pictures that `EmbeddingCache` has records of; without
            rows in pipeline stages that encode none.
    """

    section = PictureRows
    suits_graphs = False
    changes_inputs = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        tower = rank.model.tower
        self.is_needed = tower is not None
        if tower is None:
            return
        self._tower, media = tower, rank.config.media
        self._budget = min(media.encoder_budget, media.cache_embeddings)
        self._encodes = rank.model.backend.stage == 0
        self._rows = torch.zeros(rank.config.max_step_tokens, dtype=torch.int64, device=rank.device)
        self.embeddings = torch.zeros(
            media.cache_embeddings if self._encodes else 0,
            tower.width,
            dtype=rank.model.backend.dtype,
            device=rank.device,
        )

    def change_inputs(self, plan: StepPlan, section: PictureRows, step: Step) -> None:
        """See `WorkerFeature.change_inputs`."""
        if len(section.targets) and self._encodes:
            targets = self.rank.upload(section.targets).long()
            self.embeddings.index_copy_(0, targets, self._encode(section))
        tokens = spread(first_tokens(plan, section.slots), section.lengths, 1)
        if self._encodes or len(section.blocks):
            rows = np.full(max(step.padded, plan.num_tokens), -1, np.int64)
            rows[tokens] = section.sources
            self._rows[: len(rows)].copy_(self.rank.upload(rows), non_blocking=True)
            step.pictures = self._pictures_of(step)
        if step.pictures is not None and len(section.blocks):
            step.pictures = step.pictures._replace(
                places=self.rank.upload(tokens[section.sources >= 0]),
                blocks=_blocks(plan, section), keeps_windows=self._tower.format.keeps_windows,
            )  # fmt: skip
        if section.positions.shape[1]:
            self._place(step, self.rank.upload(tokens), self.rank.upload(section.positions))

    def change_captured(self, step: Step) -> bool:
        """See `WorkerFeature.change_captured`: pictures whose tokens attend to each other both ways
        are not captured."""
        if not self._encodes or self._tower.format.is_bidirectional:
            return False
        step.pictures = self._pictures_of(step)
        return True

    def _pictures_of(self, step: Step) -> StepPictures:
        return StepPictures(self._rows[: len(step.inputs.input_ids)], self.embeddings)

    def _encode(self, section: PictureRows) -> torch.Tensor:
        """Returns the embeddings of the pictures of a step, [E, width], one picture's behind the
        other's. Where there are several, each rank computes some, and the sum of what the ranks
        have is all of them."""
        group, counts = self.rank.model.backend.group, section.shapes[:, 5].tolist()
        if group.size == 1 or len(counts) == 1:
            return self._tower.encode(*self._pictures(section, 0, len(counts)))
        found = self.embeddings.new_zeros(sum(counts), self._tower.width)
        first, end = pictures_of_rank(counts, group.rank, group.size)
        if first < end:
            start = sum(counts[:first])
            rows = slice(start, start + sum(counts[first:end]))
            found[rows] = self._tower.encode(*self._pictures(section, first, end))
        return group.all_reduce(found)

    def _pictures(
        self, section: PictureRows, first: int, end: int
    ) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        """Returns the pixels of the pictures from `first` to `end` of those that are to be encoded,
        on the device, and their grids."""
        sizes = [3 * math.prod(shape[:3]) for shape in section.shapes.tolist()]
        start = sum(sizes[:first])
        shapes, sizes = section.shapes[first:end].tolist(), sizes[first:end]
        flat = self.rank.upload(section.pixels.view(np.uint8)[start : start + sum(sizes)])
        pixels = [
            part.view(*shape[:3], 3) for part, shape in zip(flat.split(sizes), shapes, strict=True)
        ]
        return pixels, [(shape[3], shape[4]) for shape in shapes]

    def _place(self, step: Step, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """Enters the rotary positions int32 [3, N] of tokens int64 [N]."""
        inputs = step.inputs
        assert inputs.rotary is not None
        rotary = inputs.rotary
        if rotary.stride(0) == 0:  # a view of one row for all three
            rotary = rotary.contiguous()
        rotary.index_copy_(1, tokens, positions)
        step.inputs = dataclasses.replace(inputs, rotary=rotary)
        if step.sampled is not None:
            step.sampled = SampledRows.of(step.inputs, step.sampled.rows, step.sampled.last)

    def dummy_section(self, slots: Sequence[int], lengths: Sequence[int]) -> Section | None:
        """See `WorkerFeature.dummy_section`: on a GPU as many embeddings as a step computes, on a
        CPU the smallest picture."""
        is_gpu = self.rank.device.type == "cuda"
        picture = self._tower.format.dummy(self._budget if is_gpu else 1)
        capacity = self.rank.config.media.cache_embeddings
        targets = np.arange(picture.num_embeddings, dtype=np.int32) % capacity
        sources = np.full(lengths[0], -1, np.int32)
        shown = min(len(sources), len(targets))
        sources[:shown] = targets[:shown]
        has_sections = self._tower.format.has_sections
        positions = np.zeros((3, lengths[0] if has_sections else 0), np.int32)
        shape = (*picture.pixels.shape[:3], *picture.grid, picture.num_embeddings)
        return PictureRows(
            np.array(slots[:1], np.int32), np.array(lengths[:1], np.int32), sources, positions,
            np.array([shape], np.int32), targets, pack_pixels([picture.pixels]),
            np.empty((0, 3), np.int32),
        )  # fmt: skip


def pictures_of_rank(counts: Sequence[int], rank: int, size: int) -> tuple[int, int]:
    """Returns the first picture that a rank of `size` computes, and the one behind its last.

    Args:
        counts: the embeddings of each picture; ranks get as equal parts of their sum as whole
            pictures allow.
    """
    ends = list(itertools.accumulate(counts))
    total = ends[-1]
    owners = [
        min(size - 1, size * (end + end - count) // (2 * total))
        for end, count in zip(ends, counts, strict=True)
    ]
    return bisect_left(owners, rank), bisect_right(owners, rank)


def _blocks(plan: StepPlan, section: PictureRows) -> list[PictureBlock]:
    """Returns the tokens of each picture in which tokens attend both ways; a picture's placeholders
    are one run."""
    rows, found, first = rows_of(plan, section.slots).tolist(), [], 0
    for number, start, end in section.blocks.tolist():
        position = max(start, int(plan.starts[rows[number]]))
        found.append(PictureBlock(rows[number], first, end - position, position, start, end))
        first += end - position
    return found

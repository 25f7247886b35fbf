"""Worker half of sources: encodes sources, and has the layers keep keys and values of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aioinfer.features.sources.sections import NewSources
from aioinfer.ipc.plan import StepPlan
from aioinfer.ipc.sections import Section
from aioinfer.layers.step import Step
from aioinfer.models.encoder_decoder import EncoderDecoderModel
from aioinfer.worker.features import Rank, WorkerFeature


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    section = NewSources
    suits_graphs = False
    changes_inputs = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.is_needed = isinstance(rank.model, EncoderDecoderModel)

    @property
    def _model(self) -> EncoderDecoderModel:
        model = self.rank.model
        assert isinstance(model, EncoderDecoderModel)
        return model

    def change_inputs(self, plan: StepPlan, section: NewSources, step: Step) -> None:
        """See `WorkerFeature.change_inputs`."""
        values = section.values
        if self._model.encoder.is_sound:
            values = values.view(np.float32)
        sources = self.rank.upload(values).split(section.lengths.tolist())
        self._model.write_sources(sources, section.blocks.tolist())

    def dummy_section(self, slots: Sequence[int], lengths: Sequence[int]) -> Section | None:
        """See `WorkerFeature.dummy_section`: on a GPU as many sources as a step encodes, on a CPU
        the smallest one; all in the first block."""
        encoder, budget = self._model.encoder, self.rank.config.media.encoder_budget
        is_gpu = self.rank.device.type == "cuda"
        count = max(1, budget // encoder.max_tokens) if is_gpu else 1
        length = encoder.max_values if is_gpu else 1
        return NewSources(
            np.zeros(count, np.int32),
            np.full(count, length, np.int32),
            np.zeros(count * length, np.int32),
        )

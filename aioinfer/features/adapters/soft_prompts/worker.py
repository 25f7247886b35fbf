"""Worker half of soft prompts: puts their vectors in the place of the embeddings of virtual
tokens."""

from __future__ import annotations

import numpy as np

from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.soft_prompts.sections import SoftPromptRows
from aioinfer.ipc.plan import StepPlan
from aioinfer.layers.pictures import StepPictures
from aioinfer.layers.step import Step
from aioinfer.worker.features import Rank, WorkerFeature, first_tokens, spread


class Work(WorkerFeature):
    """See `WorkerFeature`."""

    section = SoftPromptRows
    suits_graphs = False
    changes_inputs = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        adapters = rank.model.backend.extension
        prompts = adapters.prompts if isinstance(adapters, AdapterSlots) else None
        self.is_needed = prompts is not None
        if prompts is not None:
            self._prompts = prompts

    def change_inputs(self, plan: StepPlan, section: SoftPromptRows, step: Step) -> None:
        """See `WorkerFeature.change_inputs`."""
        prompts, counts = self._prompts, section.counts
        tokens = spread(first_tokens(plan, section.slots), counts, 1)
        rows = spread(section.adapters * prompts.max_tokens + section.starts, counts, 1)
        of_tokens = np.full(plan.num_tokens, -1, np.int64)
        of_tokens[tokens] = rows
        vectors = prompts.tensors[0].flatten(0, 1)
        step.prompts = StepPictures(self.rank.upload(of_tokens), vectors)

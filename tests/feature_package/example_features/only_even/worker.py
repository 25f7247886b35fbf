import numpy as np
import torch

from aioinfer.worker.features import WorkerFeature
from example_features.only_even.sections import EvenRows


class Work(WorkerFeature):
    section = EvenRows
    adjusts_logits = True

    def __init__(self, rank):
        super().__init__(rank)
        first, size = rank.model.vocabulary.start, rank.model.vocabulary.local_size
        self._is_odd = torch.arange(first, first + size, device=rank.device) % 2 == 1

    def adjust(self, plan, section, logits, rows):
        is_asked = self.rank.upload(np.isin(rows, section.rows))
        logits.masked_fill_(is_asked[:, None] & self._is_odd, -torch.inf)

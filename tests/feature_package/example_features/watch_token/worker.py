import torch

from aioinfer.worker.features import PendingSection, WorkerFeature
from example_features.watch_token.sections import WatchedLogits, WatchedTokens


class Work(WorkerFeature):
    section = WatchedTokens

    def read_tokens(self, plan, section, logits, tokens):
        vocabulary = self.rank.model.vocabulary
        rows = self.rank.upload(section.rows).long()
        local = self.rank.upload(section.tokens - vocabulary.start).long()
        is_here = (local >= 0) & (local < vocabulary.local_size)
        found = logits[rows, torch.where(is_here, local, 0)].float()
        found = vocabulary.group.all_reduce(torch.where(is_here, found, 0.0))
        return PendingSection(WatchedLogits, (found,))

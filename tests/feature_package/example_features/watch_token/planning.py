import numpy as np

from aioinfer.errors import RequestError
from aioinfer.scheduler.features import StepFeature
from aioinfer.scheduler.request import Use
from example_features.watch_token.sections import WatchedLogits, WatchedTokens


class WatchedToken(Use):
    feature = "watch_token"
    result_bytes = 4  # of each result

    def __init__(self, token):
        self.token, self.logits = token, []

    @property
    def output(self):
        return self.logits


class Planning(StepFeature):
    name = "watch_token"
    extra_args = ("watch_token",)

    @classmethod
    def use_of(cls, submitted, index):
        token = submitted.params.extra_args.get("watch_token")
        if token is None:
            return None
        if type(token) is not int or not 0 <= token < submitted.vocab_size:
            raise RequestError(f"watch_token must be a token id, not {token!r}", param="vllm_xargs")
        return WatchedToken(token)

    def plan(self, rows):
        columns = np.array([(row.place, row.use.token) for row in rows], np.int32)
        return WatchedTokens(*columns.T)

    def take(self, rows, result, output):
        logits = result.section(WatchedLogits).logits.tolist()
        for row, logit, place in zip(rows, logits, output.places(rows), strict=True):
            if place >= 0:  # else the token of the row was dropped
                row.use.logits.append(logit)
        return output

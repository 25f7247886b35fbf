"""How many drafts a step verifies, for each request.

With k drafts a request gets E(k) = 1 + p_1 + ... + p_k tokens of a step on average, where p_j is
the probability that draft j is kept (`acceptance`). A step of so many rows takes T(rows) seconds
(`costs`). The number of rows with the most tokens a second of all requests together is chosen;
the drafts are those of the highest probabilities. With few streams a row is nearly free, and
drafts of low probability pay; with many, or where experts make rows dear, only sure ones or none
do.

Where none pays, a request is still probed with one draft now and then, so rarely that probes cost
at most `MAX_PROBE_COST` of the time. A probe that is kept brings the request's drafts back at once.

Requests whose features need each token before the next one (`Use.allows_lookahead`) have no drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

from aioinfer.features.host import Host
from aioinfer.features.speculation.acceptance import Acceptance
from aioinfer.features.speculation.costs import SIZES, StepCosts
from aioinfer.scheduler.features import StepFeature
from aioinfer.scheduler.request import Request

#: The part of the time that probes may cost.
MAX_PROBE_COST = 0.005
#: Drafts must promise so much more tokens a second: less is within what measured times differ.
_MIN_GAIN = 1.02
#: Requests that are probed in a step, and steps between two probes at least.
_NUM_PROBED, _MIN_INTERVAL = 8, 4
#: With more requests, a choice holds for so many steps: it takes longer to make.
_MANY, _STEPS_OF_CHOICE = 16, 4
#: Weight of a step in the average of all requests.
_MEAN_WEIGHT = 0.02
#: The counters of `/metrics`: draft sequences, their tokens, those that were kept; by position.
DRAFTS, DRAFT_TOKENS, ACCEPTED = "spec_drafts", "spec_draft_tokens", "spec_accepted_tokens"
ACCEPTED_AT = "spec_accepted_at_"
_first = itemgetter(0)


class Planning(StepFeature):
    """Chooses the drafts of each step of an engine.

    Attributes:
        costs: of the engine's steps, measured again after a restart of its workers.
        mean: the acceptance of all requests on average.
    """

    name = "speculation"

    def __init__(self, host: Host):
        super().__init__(host)
        speculation = host.config.speculation
        self.looks_ahead = speculation.method != "none"
        self._max_drafts = speculation.max_draft_tokens
        self.costs: StepCosts | None = None
        self.mean = Acceptance()
        self._step = self._next_probe = self._choose_at = 0
        self._chosen: Mapping[Request, int] | None = None
        # a drafter drafts behind a step for the next one, in the KV cache that all steps fill
        self._drafts_behind = speculation.method not in ("none", "ngram")
        self._looked_ahead = False
        self.reserve = speculation.max_draft_tokens - 1 if self._drafts_behind else 0
        self._probed = 0  # where in the list of requests the last probe ended

    def restart(self) -> None:
        """See `StepFeature.restart`."""
        self.costs = None

    def lookahead(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        """See `StepFeature.lookahead`."""
        if not self._drafts_behind:
            return self._plan(decodes)
        if not decodes:  # prompts, whose keys the drafter needs, unless drafts do not pay
            return {} if self._looked_ahead or not self._step else None
        had_drafts, ahead = self._looked_ahead, self._plan(decodes)
        self._looked_ahead = ahead is not None
        return ahead if had_drafts or ahead is None else {}

    def _plan(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        """Returns the drafts that a step should verify; None for none."""
        if self.costs is None:
            self.costs = StepCosts(self.host.scheduler().limits.row_seconds)
        self._step += 1
        if not decodes or self.costs.is_stale(len(decodes)):
            return None
        if self._step >= self._choose_at or len(decodes) <= _MANY:
            self._chosen = self._choose(decodes, self.costs)
            self._choose_at = self._step + _STEPS_OF_CHOICE
        if self._chosen is None and self._step >= self._next_probe:
            return self._probe(decodes, self.costs)
        return self._chosen

    def take_lookahead(self, request: Request, rows: int, kept: int) -> None:
        """See `StepFeature.take_lookahead`."""
        self._acceptance(request).learn(rows, kept)
        mean = self.mean
        mean.first += _MEAN_WEIGHT * (bool(kept) - mean.first)
        if kept:
            self._next_probe = min(self._next_probe, self._step)
            further = (kept - 1) / max(1, min(rows, kept + 1) - 1)
            mean.further += _MEAN_WEIGHT * (further - mean.further)
        count = self.host.metrics.count
        count(DRAFTS)
        count(DRAFT_TOKENS, rows)
        if kept:
            count(ACCEPTED, kept)
            for position in range(kept):
                count(f"{ACCEPTED_AT}{position}")

    def note_step(self, num_rows: int, seconds: float) -> None:
        """See `StepFeature.note_step`."""
        if self.costs is not None:
            self.costs.learn(num_rows, seconds)

    def _acceptance(self, request: Request) -> Acceptance:
        if request.lookahead_state is None:
            request.lookahead_state = self.mean.new()
        acceptance: Acceptance = request.lookahead_state
        return acceptance

    def _choose(self, decodes: Sequence[Request], costs: StepCosts) -> Mapping[Request, int] | None:
        """Returns the drafts of each request that has any, with which the step yields the most
        tokens a second."""
        rows = len(decodes)
        if costs.seconds(2 * rows) >= 2.0 * costs.seconds(rows):
            return None  # a row more for each costs what it yields, even if all are kept
        candidates = [
            (probability, request)
            for request in decodes
            if _allows_lookahead(request)
            for probability in self._acceptance(request).probabilities(self._max_drafts)
        ]
        candidates.sort(key=_first, reverse=True)
        tokens = [float(rows), *accumulate((p for p, _ in candidates), initial=float(rows))][1:]
        best, most = 0, _MIN_GAIN * rows / costs.seconds(rows)
        for size in SIZES[bisect_right(SIZES, rows) :]:
            drafts = min(size - rows, len(candidates))
            rate = tokens[drafts] / costs.seconds(rows + drafts)
            if rate > most:
                best, most = drafts, rate
            if drafts == len(candidates):
                break
        if not best:
            return None
        chosen: dict[Request, int] = {}
        for _, request in candidates[:best]:
            chosen[request] = chosen.get(request, 0) + 1
        return chosen

    def _probe(self, decodes: Sequence[Request], costs: StepCosts) -> Mapping[Request, int] | None:
        """Returns one draft for some requests, and sets when the next are probed."""
        allowed = [request for request in decodes if _allows_lookahead(request)]
        if not allowed:
            return None
        first = self._probed % len(allowed)
        probed = (allowed[first:] + allowed[:first])[:_NUM_PROBED]
        self._probed = first + len(probed)
        rows = len(decodes)
        cost = costs.seconds(rows + len(probed)) / costs.seconds(rows) - 1.0
        interval = max(_MIN_INTERVAL, min(1024, int(cost / MAX_PROBE_COST)))
        self._next_probe = self._step + interval
        return dict.fromkeys(probed, 1)


def _allows_lookahead(request: Request) -> bool:
    return not request.uses or all(use.allows_lookahead for use in request.uses)

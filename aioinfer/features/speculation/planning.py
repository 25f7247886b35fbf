"""How many drafts a step verifies, for each request.

With k drafts a request gets E(k) = 1 + p_1 + ... + p_k tokens of a step on average, where p_j is
the probability that draft j is kept (`acceptance`). A step of so many rows takes T(rows) seconds
(`costs`). The number of rows with the most tokens a second of all requests together is chosen;
the drafts are those of the highest probabilities. With few streams a row is nearly free, and
drafts of low probability pay; with many, or where experts make rows dear, only sure ones or none
do.

Where none pays, a request is still probed with one draft now and then, so rarely that probes cost
at most `MAX_PROBE_COST` of the time. A probe that is kept brings the request's drafts back at once,
unless the drafts behind such probes were seldom kept of late (`Acceptance.returned`).

In a pipeline a request with drafts is due again when their result has come, and not while it is on
its way: there all requests of a micro-batch have drafts or none has, which keeps it whole.

Requests whose features need each token before the next one (`Use.allows_lookahead`) have no drafts,
and those under a mask (`Use.needs_drafts`) only drafts that the engine can find as the workers do.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import ClassVar

import numpy as np

from aioinfer.features.host import Host
from aioinfer.features.speculation.acceptance import Acceptance, mean_of
from aioinfer.features.speculation.costs import SIZES, StepCosts
from aioinfer.features.speculation.ngram import (
    LONG,
    MAX_PREDICTED,
    MAX_SUFFIX,
    NONE,
    find_drafts,
    find_match,
    kind_of,
    min_suffix_of,
)
from aioinfer.features.speculation.sections import PredictedTexts
from aioinfer.features.speculation.texts import EndedTexts
from aioinfer.ipc.sections import I32, Section
from aioinfer.scheduler.features import StepFeature, SubmittedRequest
from aioinfer.scheduler.request import Request, Use
from aioinfer.scheduler.steps import Row

#: The part of the time that probes may cost.
MAX_PROBE_COST = 0.005
#: Drafts must promise so much more tokens a second: less is within what measured times differ.
_MIN_GAIN, _MIN_PIPELINE_GAIN = 1.02, 1.1
#: Until it is measured, a step behind drafts is supposed to wait so long for their result, in a
#: pipeline.
_WAIT_S = 0.3e-3
#: Requests that are probed in a step, and steps between two probes at least.
_NUM_PROBED, _MIN_INTERVAL = 8, 4
#: A request that keeps at least this part of its first drafts is probed with so many.
_PROMISING, _DEEP = 0.7, 3
#: After requests have come or gone, or a probe was kept, the next probe comes sooner where there
#: are fewer than so many requests, but not before so many steps: what is known of a request rests
#: on few drafts. With many, a probe is dear, and drafts that are kept need not pay.
_FEW, _EARLY = 64, 8
#: With more requests, a choice holds for so many steps: it takes longer to make. That there are no
#: drafts holds longer, unless a probe is kept or requests come or go.
_MANY, _STEPS_OF_CHOICE, _STEPS_OF_NONE = 16, 2, 16
#: Requests whose texts are searched for matches in a step.
_NUM_LOOKED = 16
#: Weight of a step in the average of all requests.
_MEAN_WEIGHT = 0.02
#: Tokens of predicted texts that a plan takes (1 MiB, 64 texts of full length).
_MAX_TEXT_TOKENS = 64 * (MAX_PREDICTED + MAX_SUFFIX)
#: The counters of `/metrics`: draft sequences, their tokens, those that were kept; by position.
DRAFTS, DRAFT_TOKENS, ACCEPTED = "spec_drafts", "spec_draft_tokens", "spec_accepted_tokens"
ACCEPTED_AT = "spec_accepted_at_"
_first = itemgetter(0)


class DraftText(Use):
    """A text that the output of a sequence may follow, as one more source of drafts.

    Attributes:
        tokens: int32, tokens that the sequence has, and the text: it is expected behind them.
    """

    __slots__ = ("_sent", "tokens")
    feature: ClassVar[str] = "speculation"

    def __init__(self, tokens: I32):
        self.replace(tokens)

    def replace(self, tokens: I32) -> None:
        """Makes it another text."""
        self.tokens = tokens
        self._sent: tuple[int, int] | None = None  # how often the request had lost its slot then

    def is_sent(self, request: Request) -> bool:
        """Whether the workers have the text for the slot of its request."""
        return self._sent == (request.num_preemptions, request.num_interruptions)

    def note_sent(self, request: Request) -> None:
        """Notes that the workers get the text for the slot of its request."""
        self._sent = request.num_preemptions, request.num_interruptions


class Predicted(DraftText):
    """A text that the client has predicted for the output.

    Attributes:
        tokens: int32, the end of the prompt, and the text.
        num_kept, num_dropped: the drafts of the sequence that were kept, and that were not.
    """

    __slots__ = ("num_dropped", "num_kept")

    def __init__(self, tokens: I32):
        super().__init__(tokens)
        self.num_kept = self.num_dropped = 0

    @classmethod
    def of(cls, submitted: SubmittedRequest) -> Predicted | None:
        """Returns the use of a request, None if nothing was predicted. The text counts up to the
        first token that the model does not have."""
        given = submitted.params.predicted_tokens
        if not given:
            return None
        predicted = np.array(given[:MAX_PREDICTED], np.int64)
        unknown = np.flatnonzero((predicted < 0) | (predicted >= submitted.vocab_size))
        predicted = predicted[: unknown[0]] if len(unknown) else predicted
        if not len(predicted):
            return None
        end = np.array(submitted.tokens[-MAX_SUFFIX:], np.int32)
        return cls(np.concatenate([end, predicted.astype(np.int32)]))

    def note(self, rows: int, kept: int) -> None:
        """Counts the drafts of a step."""
        self.num_kept += kept
        self.num_dropped += rows - kept


class _Requested:
    """What is known of the drafts of one request.

    Attributes:
        acceptance: by how long the match of its text is, where drafts are matches.
        match: how long it is, as far as the engine knows the text.
    """

    __slots__ = ("_before", "_since", "acceptance", "match")

    def __init__(self, means: Sequence[Acceptance]):
        self.acceptance = [mean.new() for mean in means]
        self.match = self._before = NONE
        self._since = 0

    def note_match(self, match: int, step: int) -> bool:
        """Notes how long the match is when a step is planned. Returns whether it has become
        longer."""
        self._before, self.match, self._since = self.match, match, step
        return match > self._before

    def acceptance_at(self, step: int) -> tuple[int, Acceptance]:
        """Returns how long the match was when one of the last steps was planned, and the acceptance
        of such steps."""
        match = self.match if step >= self._since else self._before
        return match, self.acceptance[match]


class Planning(StepFeature):
    """Chooses the drafts of each step of an engine.

    Attributes:
        costs: of the engine's steps, measured again after a restart of its workers.
        means: the acceptance of all requests on average, by how long the match of a text is.
    """

    name = "speculation"

    def __init__(self, host: Host):
        super().__init__(host)
        speculation = host.config.speculation
        self.looks_ahead = speculation.method != "none"
        self._max_drafts = speculation.max_draft_tokens
        self.costs: StepCosts | None = None
        self.means = [Acceptance() for _ in range(LONG + 1)]
        self._step = self._next_probe = self._choose_at = 0
        self._interval = 0  # steps between two probes
        self._num_decodes = 0  # at the last choice
        self._chosen: dict[Request, int] | None = None  # of requests that have not ended
        # a drafter drafts behind a step for the next one, in the KV cache that all steps fill
        self._drafts_behind = speculation.has_drafter
        self._min_suffix = min_suffix_of(speculation)
        # a feature of another package may propose others than n-grams
        self._finds_drafts = not (self._drafts_behind or host.config.model.features)
        # steps in a row that drafted; a request is in every so many steps, with its drafts of then
        self._num_drafting, self._num_stages = 0, host.config.parallel.pipeline_parallel_size
        # steps that are planned before the result of a step is taken
        self._num_ahead = self._num_stages if host.config.scheduler.plan_ahead else 0
        self._had_drafts = False  # the last step whose result has come
        self._looked = 0  # where in the list of requests the last search for matches ended
        self._ended: EndedTexts | None = None
        if self.looks_ahead and host.config.cache.enable_prefix_caching:
            self._ended = EndedTexts()
        self.reserve = speculation.max_draft_tokens - 1 if self._drafts_behind else 0
        self._probed = 0  # where in the list of requests the last probe ended
        for position in range(self._max_drafts if self.looks_ahead else 0):
            host.metrics.count(f"{ACCEPTED_AT}{position}", 0)  # `/metrics` shows it from the start

    def restart(self) -> None:
        """See `StepFeature.restart`."""
        self.costs = self._chosen = None

    def drafts(self, request: Request, count: int) -> Sequence[int]:
        """See `StepFeature.drafts`."""
        predicted = self._predicted(request)
        found = find_drafts(np.frombuffer(request.tokens, np.int32), count, predicted)
        return [0] * count if found is None else found.tolist()

    @staticmethod
    def _predicted(request: Request) -> I32 | None:
        """Returns the text that a request may follow, if the workers have one."""
        use = request.use(DraftText) if request.uses else None
        return use.tokens if use is not None and use.is_sent(request) else None

    @classmethod
    def use_of(cls, submitted: SubmittedRequest, index: int) -> Use | None:
        """See `StepFeature.use_of`."""
        return Predicted.of(submitted)

    def plan(self, rows: Sequence[Row]) -> Section | None:
        """See `StepFeature.plan`. A text is sent with a row of its request, and again when that has
        been preempted; with a later row where a plan has texts enough."""
        new: dict[int, I32] = {}
        room = _MAX_TEXT_TOKENS
        for row in rows if self.host.scheduler().limits.max_lookahead else ():
            if row.use.is_sent(row.request):
                continue
            room -= len(row.use.tokens)
            if room < 0:
                break
            row.use.note_sent(row.request)
            new[row.request.slot] = row.use.tokens
        if not new:
            return None
        counts = [len(tokens) for tokens in new.values()]
        return PredictedTexts(
            np.array([*new], np.int32), np.array(counts, np.int32), np.concatenate([*new.values()])
        )

    def lookahead(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        """See `StepFeature.lookahead`."""
        if not self._drafts_behind:
            return self._plan(decodes)
        if not decodes:  # prompts, whose keys the drafter needs, unless drafts do not pay
            return {} if self._num_drafting or not self._step else None
        had_drafts, ahead = self._num_drafting >= self._num_stages, self._plan(decodes)
        self._num_drafting = 0 if ahead is None else self._num_drafting + 1
        if had_drafts or ahead is None:
            return ahead
        self._next_probe = self._step  # there are no drafts yet: the next step has them
        return {}

    def _plan(self, decodes: Sequence[Request]) -> Mapping[Request, int] | None:
        """Returns the drafts that a step should verify; None for none."""
        if self.costs is None:
            self.costs = StepCosts(self._start_times())
        self._step += 1
        if not decodes or self.costs.is_stale(len(decodes)):
            return None
        if self._look(decodes) and len(decodes) <= _FEW:
            self._choose_at = self._step
        num_decodes = len(decodes)
        if self._num_stages > 1:  # of all micro-batches, whose sizes change behind drafts
            num_decodes = len(self.host.scheduler().running)
        if self._step >= self._choose_at or num_decodes != self._num_decodes:
            if num_decodes != self._num_decodes:
                self._num_decodes = num_decodes
                self._probe_early()
            self._chosen = self._choose(decodes, self.costs)
            if self._chosen is None:
                self._choose_at = self._step + _STEPS_OF_NONE
            else:
                # steps of a pipeline take turns with other requests
                holds = len(decodes) > _MANY and self._num_stages == 1
                self._choose_at = self._step + (_STEPS_OF_CHOICE if holds else 1)
        if self._chosen is None and self._step >= self._next_probe:
            return self._probe(decodes, self.costs)
        return self._chosen

    def _start_times(self) -> list[tuple[int, float, bool]]:
        """Returns the times of steps as the workers measured them at their start."""
        wait = _WAIT_S if self._num_stages > 1 else 0.0
        measured = self.host.scheduler().limits.step_times
        return [(rows, seconds + wait * ahead, ahead) for rows, seconds, ahead in measured]

    def take_lookahead(self, request: Request, rows: int, kept: int) -> None:
        """See `StepFeature.take_lookahead`."""
        match, acceptance = self._known(request).acceptance_at(self._step - self._num_ahead)
        mean = self.means[match]
        acceptance.learn(rows, kept, mean)
        if request.uses and (use := request.use(Predicted)) is not None:
            use.note(rows, kept)
        mean.first += _MEAN_WEIGHT * (bool(kept) - mean.first)
        if kept:
            if self._chosen is None:
                self._choose_at = self._step
                self._probe_early()
            if rows > 1:
                further = (kept - 1) / (min(rows, kept + 1) - 1)
                mean.further += _MEAN_WEIGHT * (further - mean.further)
        count = self.host.metrics.count
        count(DRAFTS)
        count(DRAFT_TOKENS, rows)
        if kept:
            count(ACCEPTED, kept)
            for position in range(kept):
                count(f"{ACCEPTED_AT}{position}")

    def note_step(self, num_rows: int, seconds: float, has_lookahead: bool) -> None:
        """See `StepFeature.note_step`. In a pipeline a step behind one with drafts is launched when
        the result of that one has come. The wait is a cost of drafts: so a step is measured only
        behind a step of its own kind, with drafts or without."""
        is_alike, self._had_drafts = has_lookahead == self._had_drafts, has_lookahead
        if self.costs is not None and (is_alike or self._num_stages == 1):
            self.costs.learn(num_rows, seconds, has_lookahead=has_lookahead)

    def _probe_early(self) -> None:
        """Has the next probe come sooner, where there are few requests."""
        early = max(_EARLY, self._interval * self._num_decodes // _FEW)
        self._next_probe = min(self._next_probe, self._step + early)

    def _look(self, decodes: Sequence[Request]) -> bool:
        """Looks for the ends of texts earlier in them; of many requests for those of some in turn.
        Returns whether a request is more likely to keep drafts than before."""
        first = self._looked % len(decodes) if len(decodes) > _NUM_LOOKED else 0
        some = [*decodes[first : first + _NUM_LOOKED]]
        self._looked = first + len(some)
        grown = [self._look_for(request) for request in some if self._allows_lookahead(request)]
        return any(grown)

    def _look_for(self, request: Request) -> bool:
        """Looks for the end of a request's text earlier in it and in the text that it may follow,
        and if they do not have it, in those of requests that have ended. Returns whether the
        request is more likely to keep drafts than before."""
        size = find_match(request.tokens, self._predicted(request))
        if self._ended is not None and size < MAX_SUFFIX:
            use = request.use(DraftText) if request.uses else None
            found = None if isinstance(use, Predicted) else self._ended.find(request)
            if found is not None:
                size = MAX_SUFFIX
                if use is None:
                    request.uses = (*request.uses, DraftText(found))
                else:
                    use.replace(found)
        return self._known(request).note_match(kind_of(size, self._min_suffix), self._step)

    def note_end(self, request: Request) -> None:
        """See `StepFeature.note_end`. Texts of requests with errors may be wrong. The choice lets
        go of the request: the next one may come hours later, and until then it would keep all that
        the request has, such as pictures."""
        if self._chosen is not None:
            self._chosen.pop(request, None)
        if self._ended is not None and request.finish_reason != "error" and request.num_output:
            self._ended.add(request)

    def _known(self, request: Request) -> _Requested:
        if request.lookahead_state is None:
            request.lookahead_state = _Requested(self.means)
        known: _Requested = request.lookahead_state
        return known

    def _acceptance(self, request: Request) -> Acceptance:
        known = self._known(request)
        return known.acceptance[known.match]

    def _choose(self, decodes: Sequence[Request], costs: StepCosts) -> dict[Request, int] | None:
        """Returns the drafts of each request that has any, with which the step yields the most
        tokens a second."""
        rows = len(decodes)
        known = [
            (self._acceptance(request), request)
            for request in decodes
            if self._allows_lookahead(request)
        ]
        self._follow([acceptance for acceptance, _ in known])
        is_pipeline = self._num_stages > 1
        most = (_MIN_PIPELINE_GAIN if is_pipeline else _MIN_GAIN) * rows / costs.plain(rows)
        last = bisect_left(SIZES, rows + self._max_drafts * len(known))
        sizes = SIZES[bisect_right(SIZES, rows) : last + 1]
        likeliest = max((acceptance.first for acceptance, _ in known), default=0.0)
        if all(rows + likeliest * (n - rows) <= most * costs.with_lookahead(n) for n in sizes):
            return None
        mean = mean_of([acceptance for acceptance, _ in known])
        candidates = [
            (probability, request)
            for acceptance, request in known
            for probability in acceptance.probabilities(self._max_drafts, mean)
        ]
        candidates.sort(key=_first, reverse=True)
        if is_pipeline:
            candidates = _one_each_first(candidates)
        tokens = [*accumulate((p for p, _ in candidates), initial=float(rows))]
        best = 0
        for size in sizes:
            drafts = min(size - rows, len(candidates))
            if is_pipeline and drafts < len(known):
                continue
            rate = tokens[drafts] / costs.with_lookahead(rows + drafts)
            if rate > most:
                best, most = drafts, rate
            if drafts == len(candidates):
                break
        if not best:
            return None
        chosen: dict[Request, int] = {}
        for _, request in candidates[:best]:
            chosen[request] = chosen.get(request, 0) + 1
        for acceptance, request in known:
            if request not in chosen:
                acceptance.forget(mean)
        return chosen

    @staticmethod
    def _follow(known: Sequence[Acceptance]) -> None:
        """Has requests that have had no draft follow those that have, if these are some."""
        seen = [each for each in known if each.is_known]
        if _NUM_PROBED <= len(seen) < len(known):
            mean = mean_of(seen)
            for each in known:
                if not each.is_known:
                    each.follow(mean)

    def _probe(self, decodes: Sequence[Request], costs: StepCosts) -> Mapping[Request, int] | None:
        """Returns one draft for some requests, and several for some that keep their first ones:
        as many as cost no more than few of them, since a graph computes as many rows for fewer.
        Sets when the next are probed."""
        allowed = [request for request in decodes if self._allows_lookahead(request)]
        if not allowed:
            return None
        first = self._probed % len(allowed)
        rows = len(decodes)
        most = costs.with_lookahead(rows + _NUM_PROBED)
        count = _NUM_PROBED
        for size in SIZES[bisect_right(SIZES, rows + count) :]:
            if costs.with_lookahead(size) > most:
                break
            count = size - rows
        promising = [r for r in allowed if self._acceptance(r).first >= _PROMISING]
        deep = min(_DEEP, self._max_drafts)
        probed = dict.fromkeys(promising[: count // (2 * deep)], deep)
        left = count - deep * len(probed)
        others = [r for r in allowed[first:] + allowed[:first] if r not in probed][:left]
        probed.update(dict.fromkeys(others, 1))
        self._probed = first + len(others)
        cost = costs.with_lookahead(rows + sum(probed.values())) / costs.plain(rows) - 1.0
        if self._num_stages > 1:  # the probed requests may miss a turn
            cost += len(probed) / rows
        self._interval = max(_MIN_INTERVAL, min(1024, int(cost / MAX_PROBE_COST)))
        self._next_probe = self._step + self._interval
        return probed

    def _allows_lookahead(self, request: Request) -> bool:
        return not request.uses or all(
            use.allows_lookahead and (self._finds_drafts or not use.needs_drafts)
            for use in request.uses
        )


def _one_each_first(candidates: Iterable[tuple[float, Request]]) -> list[tuple[float, Request]]:
    """Returns candidates with the first one of each request before all others."""
    seen: set[Request] = set()
    first: list[tuple[float, Request]] = []
    further: list[tuple[float, Request]] = []
    for candidate in candidates:
        (further if candidate[1] in seen else first).append(candidate)
        seen.add(candidate[1])
    return first + further

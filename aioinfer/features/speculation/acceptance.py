"""How likely the drafts of a request are kept, from its last steps.

Two probabilities describe a request: that the first draft of a step is kept, and that a further
one is if those before it are. (Drafts out of a copied text are mostly all right or all wrong; those
of a draft model get worse slowly. Two numbers fit both well enough to choose how many to verify.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

#: Weight of the last step in both averages, and at most of a request's first steps: what is known
#: of others counts like `_PRIOR` steps of its own.
_WEIGHT, _PRIOR = 0.08, 1.0
#: Weight of a draft that a step did not have, where all that it had were kept.
_UNTRIED_WEIGHT = 0.02
#: A draft that is kept where less than `_DORMANT` of them were may show that the text begins to
#: repeat something, or be chance. How likely the next draft is then kept is learned as an average,
#: which begins with `_RETURN` and takes in each such draft by `_RETURN_WEIGHT`.
_DORMANT, _RETURN, _RETURN_WEIGHT = 0.2, 0.5, 0.05
#: Probabilities of a new request are those of the others, but within these bounds.
_MIN_NEW, _MAX_NEW = 0.15, 0.5
#: What a request without drafts comes nearer to the average of all with each choice.
_DRIFT = 0.2
#: A request that keeps a part p of its drafts has p (1 - p) times this as the variance of its
#: estimate, roughly.
_NOISE = 0.3


class Acceptance:
    """The acceptance of the drafts of one request.

    Attributes:
        first: probability that the first draft of a step is kept.
        further: probability that a draft is kept if the draft before it is.
        returned: of an average of requests, probability that a first draft is kept behind one that
            was where hardly any was.
    """

    __slots__ = ("_has_returned", "_steps", "first", "further", "returned")

    def __init__(self, first: float = 0.3, further: float = 0.7):
        self.first, self.further, self.returned = first, further, _RETURN
        self._steps, self._has_returned = 0.0, False

    def new(self) -> Acceptance:
        """Returns the acceptance of a request of which nothing is known, if this is that of others
        on average."""
        return Acceptance(min(_MAX_NEW, max(_MIN_NEW, self.first)), self.further)

    def learn(self, drafts: int, kept: int, others: Acceptance) -> None:
        """Takes in a step with `drafts` drafts, of which the first `kept` were kept; `others` is
        the average of all requests."""
        self._steps += 1.0
        if self._has_returned:
            others.returned += _RETURN_WEIGHT * (bool(kept) - others.returned)
        self._has_returned = kept > 0 and self.first < _DORMANT
        weight = max(_WEIGHT, 1.0 / (_PRIOR + self._steps))
        if kept:
            returned = others.returned if self._has_returned else 0.0
            self.first = max(returned, self.first + weight * (1.0 - self.first))
        else:
            self.first -= weight * self.first
        for _ in range(kept - 1):
            self.further += weight * (1.0 - self.further)
        if 0 < kept < drafts:
            self.further -= weight * self.further
        elif kept:  # one more might have been kept, too: or it would never be tried again
            self.further += _UNTRIED_WEIGHT * (1.0 - self.further)

    @property
    def is_known(self) -> bool:
        """Whether the request has had a draft."""
        return self._steps > 0.0

    def follow(self, mean: Acceptance) -> None:
        """Takes over the average of other requests, since the request has had no draft."""
        self.first, self.further = mean.first, mean.further

    def forget(self, mean: Acceptance) -> None:
        """Comes nearer to the average of the requests, since this one has no drafts that would show
        whether the probability is still so low: the others do not keep it from drafts for good."""
        if self.first < mean.first:
            self.first += _DRIFT * (mean.first - self.first)

    def probabilities(self, most: int, mean: Acceptance) -> Iterator[float]:
        """Yields the probabilities that draft 1, 2, ... `most` of a step is kept: none is above the
        one before it. What differs little from `mean` is taken for chance, so that equal requests
        get equally many drafts."""
        probability = _shrink(self.first, mean.first)
        further = _shrink(self.further, mean.further)
        for _ in range(most):
            yield probability
            probability *= further


def mean_of(requests: Sequence[Acceptance]) -> Acceptance:
    """Returns the average of the requests of a step."""
    count = max(1, len(requests))
    first, further = (sum(each.first for each in requests), sum(each.further for each in requests))
    return Acceptance(first / count, further / count)


def _shrink(own: float, mean: float) -> float:
    """Returns a probability between a request's own estimate and the mean of all: nearer to the
    mean, the less both differ, compared with the standard deviation of an estimate."""
    difference = own - mean
    square = difference * difference
    noise = _NOISE * own * (1.0 - own)
    return mean + difference * square / (square + noise) if square else own

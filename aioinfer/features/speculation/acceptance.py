"""How likely the drafts of a request are kept, from its last steps.

Two probabilities describe a request: that the first draft of a step is kept, and that a further
one is if those before it are. (Drafts out of a copied text are mostly all right or all wrong; those
of a draft model get worse slowly. Two numbers fit both well enough to choose how many to verify.)
"""

from __future__ import annotations

from collections.abc import Iterator

#: Weights of the last step in both averages.
_FIRST_WEIGHT, _FURTHER_WEIGHT = 0.12, 0.12
#: A draft that is kept where hardly any was shows that the text repeats something: the next steps
#: try at least so hard.
_DORMANT, _RETURN = 0.12, 0.5
#: Probabilities of a new request are those of the others, but within these bounds.
_MIN_NEW, _MAX_NEW = 0.15, 0.8


class Acceptance:
    """The acceptance of the drafts of one request.

    Attributes:
        first: probability that the first draft of a step is kept.
        further: probability that a draft is kept if the draft before it is.
    """

    __slots__ = ("first", "further")

    def __init__(self, first: float = 0.3, further: float = 0.7):
        self.first, self.further = first, further

    def new(self) -> Acceptance:
        """Returns the acceptance of a request of which nothing is known, if this is that of others
        on average."""
        return Acceptance(min(_MAX_NEW, max(_MIN_NEW, self.first)), self.further)

    def learn(self, drafts: int, kept: int) -> None:
        """Takes in a step with `drafts` drafts, of which the first `kept` were kept."""
        if kept:
            returned = _RETURN if self.first < _DORMANT else 0.0
            self.first = max(returned, self.first + _FIRST_WEIGHT * (1.0 - self.first))
        else:
            self.first -= _FIRST_WEIGHT * self.first
        for _ in range(kept - 1):
            self.further += _FURTHER_WEIGHT * (1.0 - self.further)
        if 0 < kept < drafts:
            self.further -= _FURTHER_WEIGHT * self.further

    def probabilities(self, most: int) -> Iterator[float]:
        """Yields the probabilities that draft 1, 2, ... `most` of a step is kept: none is above the
        one before it."""
        probability = self.first
        for _ in range(most):
            yield probability
            probability *= self.further

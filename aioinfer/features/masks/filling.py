"""The masks of a request's rows in a step: of its last token, and of the drafts behind it.

The mask of a draft's row depends on the draft: a copy of the constraint accepts the drafts one
after the other. Where a mask forbids the next draft, its row samples another token, and all rows
behind it are skipped (see `ipc.lookahead`): their masks do not matter. So the masks of a step are
filled in levels: of all first rows, side by side; of the second rows of all requests whose first
draft is allowed; and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aioinfer.text.constraints import Constraint, Mask, MaskFiller


@dataclass(slots=True)
class RequestRows:
    """The constrained rows of one request in a step.

    Attributes:
        constraint: of the request, which has taken in all tokens up to its first row.
        first: the number of its first mask; the other rows have the next ones.
        drafts: the tokens that the other rows compute.
        error: why the mask of a row could not be filled, if one could not.
        failed: the number of that row among the request's.
    """

    constraint: Constraint
    first: int
    drafts: Sequence[int] = ()
    error: Exception | None = None
    failed: int = 0

    def fail(self, level: int, error: Exception) -> None:
        """Notes that the mask of row `level` could not be filled."""
        self.error, self.failed = error, level


def fill_rows(filler: MaskFiller, requests: Sequence[RequestRows], masks: Mask) -> None:
    """Fills the masks of all rows of some requests, int32 [rows, words]. A row whose mask does not
    matter allows everything. Errors are noted in `requests`. It may run in a thread."""
    going, level = [(each, each.constraint) for each in requests], 0
    while going:
        rows = [(constraint, each.first + level) for each, constraint in going]
        errors = _fill(filler, rows, masks)
        following = []
        for (each, constraint), error in zip(going, errors, strict=True):
            if error is not None:
                each.fail(level, error)
            elif level < len(each.drafts):
                ahead = _advance(each, constraint, level, masks)
                if ahead is not None:
                    following.append((each, ahead))
                    continue
            masks[each.first + level + 1 : each.first + len(each.drafts) + 1] = -1
        going, level = following, level + 1


def _fill(
    filler: MaskFiller, rows: Sequence[tuple[Constraint, int]], masks: Mask
) -> Sequence[Exception | None]:
    try:
        return filler.fill(rows, masks)
    except Exception as error:
        return [error] * len(rows)


def _advance(
    request: RequestRows, constraint: Constraint, level: int, masks: Mask
) -> Constraint | None:
    """Returns the constraint behind the draft of row `level` + 1; None if the mask of row `level`
    forbids the draft, or the output is complete with it."""
    draft = request.drafts[level]
    if not masks[request.first + level, draft // 32] >> draft % 32 & 1:
        return None
    try:
        ahead = constraint if level else constraint.copy()
        ahead.accept([draft])
    except Exception as error:  # it ends the request if the draft is kept
        request.fail(level + 1, error)
        return None
    return None if ahead.is_finished else ahead

"""Lookahead rows: rows of one token by which a step computes more than the next token of a request.

A request that decodes has one row in a step, which computes its last token. With lookahead it has
1 + k adjacent rows of one token each, at consecutive positions: the last known token, and behind it
k draft tokens, which the workers propose and write into the request's slot. Every row samples the
token behind its own, with the noise of its own position, so row i is the plain run's row if all
drafts before it are what the plain run samples: drafts are kept as long as they equal the sampled
tokens (sample and match; greedy and seeded text is that of a run without drafts). The sampled token
of the first draft that differs is kept, too; the rows behind it are skipped: their result is
`SKIPPED`.

Positions. How many drafts were kept is known on the device at once, and in the engine when the
result comes, one step later. So the device keeps, for each slot, the position of the first token
that is not computed (`Slots.next_start`), and the rows of a request with a posted step of unknown
outcome begin there, wherever that is; `StepPlan.starts` has the lowest position that it can be. KV
blocks are in place for the highest one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.sections import I32, Section, array

#: The result of a sampled row that stands behind a draft that was not kept.
SKIPPED = -2


@dataclass(frozen=True, slots=True)
class LookaheadRows(Section):
    """The part of a plan that describes its lookahead. Plans have it that have lookahead rows, or a
    row whose position only the device knows, or whose step drafts tokens for the next one. R rows,
    as in the plan.

    Attributes:
        offsets: int32 [R], the number of the row among the adjacent rows of its slot, 0 for the
            first or only one. A row with an offset above 0 computes a draft token.
        settled: int32 [R], 1 if `StepPlan.starts` is the row's position; 0 if the row begins at
            `Slots.next_start` of its slot plus its offset, at or behind `StepPlan.starts`. The same
            for all rows of a slot.
        limits: int32 [R], for how many tokens of the row's request there are KV blocks: a model
            that drafts caches nothing at or behind this position. The same for all rows of a slot.
    """

    offsets: I32 = array(np.int32)
    settled: I32 = array(np.int32)
    limits: I32 = array(np.int32)

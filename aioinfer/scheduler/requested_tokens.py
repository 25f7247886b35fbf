"""The tokens that a request asks log-probabilities of, where these are not a few of the
likeliest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from aioinfer.ipc.requested_logprobs import ALL, RequestedLogprobRows
from aioinfer.ipc.sections import I32


@dataclass(frozen=True, slots=True)
class RequestedTokens:
    """The tokens that each row of a request brings log-probabilities of.

    Attributes:
        ids: int32, the tokens; None for all.
        count: how many these are.
    """

    ids: I32 | None
    count: int

    @property
    def held_bytes(self) -> int:
        """Bytes of a result that the request holds while it runs."""
        return 8 + 4 * self.count


def section_of(rows: Iterable[tuple[int, RequestedTokens]]) -> RequestedLogprobRows | None:
    """Returns the section of a plan for `rows`: places among its sampled rows, ascending, each with
    its requested tokens. None without any."""
    listed = list(rows)
    if not listed:
        return None
    ids = [tokens.ids for _, tokens in listed if tokens.ids is not None]
    return RequestedLogprobRows(
        np.array([row for row, _ in listed], np.int32),
        np.array([ALL if each.ids is None else each.count for _, each in listed], np.int32),
        np.concatenate(ids) if ids else np.empty(0, np.int32),
    )

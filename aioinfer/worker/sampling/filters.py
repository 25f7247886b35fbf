"""Min-p, top-k and top-p on the host: which tokens of a row may be sampled.

The sampler calls `filter_tokens` for one row at a time.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from aioinfer.ipc.plan import F32

#: How far below the largest scaled logit top-k and top-p look, one after the other, so that they
#: rarely sort the whole vocabulary.
SPANS = (8.0, 12.0, math.inf)


def filter_tokens(
    scaled: F32, largest: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.intp]:
    """Returns the ids (ascending) of the tokens that min-p, top-k and top-p keep, in this order; at
    least one.

    Each filter sees the tokens that the filters before it kept, and keeps all of them down to some
    logit, so that equal logits stay or go together: top-k may keep more than k, and top-p more than
    it must.

    Args:
        scaled: float32 [vocab_size], logits over temperature, finite or minus infinity; `largest`
            of them.
        top_k: 0 keeps all. top_p: 1 keeps all. min_p: 0 keeps all.
    """
    lowest = largest - SPANS[0]
    head = np.flatnonzero(scaled >= lowest)
    values = scaled[head]
    border = largest + math.log(min_p) if min_p > 0 else -math.inf
    if 0 < top_k < len(scaled):
        among = values if len(values) >= top_k else scaled
        border = max(border, float(np.partition(among, len(among) - top_k)[len(among) - top_k]))
    if top_p < 1:
        kept = values[values >= border] if border >= lowest else scaled[scaled >= border]
        border = max(border, _top_p_border(kept, largest, top_p))
    return head[values >= border] if border >= lowest else np.flatnonzero(scaled >= border)


def _top_p_border(kept: F32, largest: float, top_p: float) -> float:
    """Returns the lowest of the fewest largest logits in `kept` that hold `top_p` of its
    probability."""
    mass = top_p * float(np.exp(kept - largest).sum(dtype=np.float64))
    for span in SPANS:
        descending = np.sort(kept[kept >= largest - span])[::-1]
        sums = np.cumsum(np.exp(descending - largest), dtype=np.float64)
        reached = int(np.searchsorted(sums, mass))
        if reached < len(descending):
            return float(descending[reached])
    return -math.inf  # all of them, but for rounding

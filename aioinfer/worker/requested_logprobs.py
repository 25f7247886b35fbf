"""Log-probabilities of the tokens that requests name, or of all tokens, on CPUs and GPUs.

The runners call `requested_logprobs` in steps whose plan has such rows
(`ipc.requested_logprobs`). It is rare, so it is plain torch: of several tensor-parallel ranks each
gathers the whole logits of these rows, a few at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from aioinfer.ipc.requested_logprobs import ALL, RequestedLogprobRows, RequestedLogprobs
from aioinfer.ipc.sections import I32
from aioinfer.layers.embedding import Vocabulary
from aioinfer.worker.prompt_rows import PendingSection

#: Rows whose logits over the whole vocabulary exist at a time.
_ROWS = 16


def requested_logprobs(
    logits: torch.Tensor,
    wanted: RequestedLogprobRows,
    vocabulary: Vocabulary,
    upload: Callable[[I32], torch.Tensor],
) -> PendingSection:
    """Returns the section of a result with the requested log-probabilities. Every rank has to call
    this.

    Args:
        logits: [S, local_size], of the step's sampled rows; not changed.
        wanted: which of them, and which tokens.
        vocabulary: the rank's shard.
        upload: copies an array to the device of the logits.
    """
    whole = wanted.counts == ALL
    ends = np.cumsum(np.where(whole, 0, wanted.counts))
    rows, tokens = upload(wanted.rows), upload(wanted.tokens)
    found: list[torch.Tensor] = []
    for first in range(0, len(wanted.rows), _ROWS):
        some = logits.index_select(0, rows[first : first + _ROWS])
        logprobs = _gather_vocabulary(some, vocabulary).float().log_softmax(dim=-1)
        for number, values in enumerate(logprobs, first):
            if not whole[number]:
                of_row = tokens[ends[number] - wanted.counts[number] : ends[number]]
                values = values.index_select(0, of_row)
            found.append(values)
    counts = np.where(whole, vocabulary.vocab_size, wanted.counts).astype(np.int32)
    values = torch.cat(found).to("cpu", non_blocking=True)
    of_rows = torch.tensor(wanted.rows), torch.from_numpy(counts)
    return PendingSection(RequestedLogprobs, (*of_rows, values))


def _gather_vocabulary(logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Returns logits [n, vocab_size] of all shards, from the logits [n, local_size] of the rank."""
    if vocabulary.group.size == 1:
        return logits
    padded = torch.nn.functional.pad(logits, (0, vocabulary.shard_size - vocabulary.local_size))
    return vocabulary.group.all_gather_last(padded)[:, : vocabulary.vocab_size]

"""The gated delta rule (Yang et al. 2025, "Gated Delta Networks"), in plain torch.

A head keeps a matrix S [key channels, value channels] of a sequence. Of a token with key k, value
v, query q, decay exp(g) and rate beta,

    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T;    output S^T q.

Decodes compute it so. Of longer rows a chunk of tokens is computed at once (Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length"): all corrections
v - S^T k of a chunk are the solution of a triangular system, and what is left are products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from aioinfer.layers.state_rows import StateRow, StateRows


class HeadInputs(NamedTuple):
    """The inputs of some tokens, in float32.

    Attributes:
        queries, keys: [T, heads, key channels]. values: [T, heads, value channels].
        decays: [T, heads], the logarithms g, not above 0. rates: [T, heads], between 0 and 1.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor

    def of(self, tokens: slice) -> HeadInputs:
        """Returns the inputs of some of the tokens."""
        return HeadInputs(*(x[tokens] for x in self))


def delta_rule(inputs: HeadInputs, cache: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Returns the outputs of a step's tokens [T, heads, value channels], and writes the states.

    Args:
        cache: [num_blocks, heads, key channels, value channels], the layer's states.
        rows: of the step.
    """
    decodes = rows.decodes
    out = torch.empty_like(inputs.values)
    if decodes:
        states = rows.read(cache).to(out.dtype)
        out[:decodes] = _advance(inputs.of(slice(decodes)), states)
        rows.write(cache, states.to(cache.dtype))
    for row in rows.rows:
        out[row.tokens] = _compute_row(inputs.of(row.tokens), cache, row, rows.chunk)
    return out


def _advance(inputs: HeadInputs, states: torch.Tensor) -> torch.Tensor:
    """Returns the outputs of one token of each of several sequences, and advances their `states`
    [R, heads, key channels, value channels] in place."""
    queries, keys, values, decays, rates = inputs
    states.mul_(decays.exp()[..., None, None])
    read = torch.matmul(keys.unsqueeze(-2), states)
    corrections = (values.unsqueeze(-2) - read).mul_(rates[..., None, None])
    flat = states.flatten(0, 1)
    flat.baddbmm_(keys.flatten(0, 1).unsqueeze(-1), corrections.flatten(0, 1))
    return torch.matmul(queries.unsqueeze(-2), states).squeeze(-2)


def _compute_row(
    inputs: HeadInputs, cache: torch.Tensor, row: StateRow, chunk: int
) -> torch.Tensor:
    """Returns the outputs of the tokens of one row [count, heads, value channels], and writes its
    states. Tokens of chunks that the row has in part are padded: those change no state."""
    lead = row.start % chunk
    count = -(-(lead + row.count) // chunk)
    pad = lead, count * chunk - lead - row.count

    def chunks(x: torch.Tensor) -> torch.Tensor:
        """Returns x [T, heads, ...] as [heads, chunks, chunk, ...]."""
        padded = F.pad(x.movedim(0, -1), pad).movedim(-1, 1)
        return padded.unflatten(1, (count, chunk))

    queries, keys, values, decays, rates = (chunks(x) for x in inputs)
    sums = decays.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=sums.device).triu(1)
    # exp of positive differences, of later tokens, might overflow
    decayed = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(later, -torch.inf).exp_()
    weighted = keys * rates.unsqueeze(-1)
    system = (weighted @ keys.mT).mul_(decayed)
    known = torch.cat((values * rates.unsqueeze(-1), weighted * sums.exp().unsqueeze(-1)), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, of_state = solved.split((values.shape[-1], keys.shape[-1]), dim=-1)
    scores = (queries @ keys.mT).mul_(decayed)
    queries = queries * sums.exp().unsqueeze(-1)
    last = sums[..., -1:]
    keys = keys * (last - sums).exp().unsqueeze(-1)

    state = row.initial(cache).to(values.dtype)
    blocks = dict(row.ends)
    outputs = torch.empty_like(values)
    for number in range(count):
        corrections = own[:, number] - of_state[:, number] @ state
        torch.baddbmm(
            queries[:, number] @ state, scores[:, number], corrections, out=outputs[:, number]
        )
        state = state * last[:, number].exp().unsqueeze(-1)
        state.baddbmm_(keys[:, number].mT, corrections)
        done = min((number + 1) * chunk - lead, row.count)
        if done in blocks:
            cache[blocks[done]] = state
    return outputs.flatten(1, 2)[:, lead : lead + row.count].transpose(0, 1)

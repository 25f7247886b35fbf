"""Recurrences over a matrix a head, in plain torch: the gated delta rule (Yang et al. 2025, "Gated
Delta Networks"), Kimi delta attention (Moonshot AI 2025, "Kimi Linear") and Mamba-2's (Dao and Gu
2024, "Transformers are SSMs").

A head keeps a matrix S [key channels, value channels] of a sequence. A token has a key k, a value
v, a query q, a decay exp(g) and, for the delta rule, a rate beta:

    S <- exp(g) S;    S <- S + k v^T                         Mamba-2
    S <- exp(g) S;    S <- S + k (beta (v - S^T k))^T        the delta rule
    output S^T q

In Kimi delta attention each key channel, a row of S, has a decay of its own; else all have the
same. Decodes compute it so. Of longer rows a chunk of tokens is computed at once: what a token's
output owes to the tokens before it in the chunk is a product of scores and values. Of the delta
rule all corrections v - S^T k of a chunk are the solution of a triangular system (Yang et al. 2024,
"Parallelizing Linear Transformers with the Delta Rule over Sequence Length").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from aioinfer.errors import ConfigError
from aioinfer.layers.shards import HeadVector, NamedShards, Shard
from aioinfer.layers.state_rows import StateRow, StateRows

#: Tokens of a chunk where channels decay apart: the products of two tokens are no matrix product.
_CHANNEL_CHUNK = 16


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """The shape of a Gated DeltaNet.

    Attributes:
        num_key_heads: heads of queries and keys, of the model or of this rank.
        num_heads: heads of values, a multiple of these.
        key_size, value_size: channels of a head.
        width: tokens of the convolution.
        by_channel: whether each key channel has a decay of its own, and gates are sigmoids (Kimi
            delta attention), and not SiLUs.
    """

    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    width: int
    by_channel: bool = False

    @property
    def shared(self) -> int:
        """How many heads of values share a head of keys."""
        return self.num_heads // self.num_key_heads

    @property
    def mixed_sizes(self) -> tuple[int, int, int]:
        """Channels of queries, keys and values."""
        keys = self.num_key_heads * self.key_size
        return keys, keys, self.num_heads * self.value_size

    @property
    def projected_sizes(self) -> tuple[int, int, int, int]:
        """Channels of the projection: the convolution's, the gate's, and rates and decays; by
        channel the convolution's, rates, and the inputs of further ones of decays and gates."""
        if self.by_channel:
            return sum(self.mixed_sizes), self.num_heads, self.key_size, self.key_size
        values = self.num_heads * self.value_size
        return sum(self.mixed_sizes), values, self.num_heads, self.num_heads


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """The shape of a Mamba-2 layer. Raises `ConfigError` unless groups divide the heads.

    Attributes:
        num_heads: of the model, or of this rank.
        head_size: channels of a head.
        num_groups: groups of heads that share B and C, of the model or of this rank.
        state_size: channels of B and C.
        width: tokens of the convolution.
        step_limits: the least and the largest step.
        conv_bias: of the convolution. bias: of the projections. output_bias: of the last one.
        norm: where the outputs are normed: after they are gated, before, or not at all.
    """

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    width: int
    step_limits: tuple[float, float] = (0.0, float("inf"))
    conv_bias: bool = True
    bias: bool = False
    output_bias: bool = False
    norm: Literal["after gate", "before gate", "none"] = "after gate"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise ConfigError(
                f"{self.num_heads} heads of Mamba-2 must be a multiple of its {self.num_groups} "
                "groups (mamba_n_groups)"
            )

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Mamba2Shape:
        """Reads the shape from the fields of a decoded `config.json` that most families have."""
        heads, size = config["mamba_n_heads"], config.get("mamba_d_head")
        channels = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
        low, high = config.get("time_step_limit") or (0.0, float("inf"))
        if isinstance(high, Mapping):  # transformers writes {"__float__": "Infinity"}
            high = high["__float__"]
        return cls(
            heads,
            channels // heads if size in (None, "auto") else size,
            config["mamba_n_groups"],
            config["mamba_d_state"],
            config["mamba_d_conv"],
            (float(low), float(high)),
            bool(config.get("mamba_conv_bias", True)),
            bool(config.get("mamba_proj_bias", False)),
            bool(config.get("mamba_proj_bias", False)),
        )

    @property
    def channels(self) -> int:
        """Channels of all heads."""
        return self.num_heads * self.head_size

    @property
    def mixed_sizes(self) -> tuple[int, int, int]:
        """Channels of x, B and C."""
        return self.channels, self.num_groups * self.state_size, self.num_groups * self.state_size


class HeadInputs(NamedTuple):
    """The inputs of some tokens, in float32.

    Attributes:
        queries, keys: [T, heads, key channels]. values: [T, heads, value channels].
        decays: [T, heads, key channels], or [T, heads, 1] for all of them, the logarithms g, not
            above 0.
        rates: [T, heads], of the delta rule, between 0 and 1; None without corrections.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    rates: torch.Tensor | None

    def of(self, tokens: slice | torch.Tensor) -> HeadInputs:
        """Returns the inputs of some of the tokens."""
        queries, keys, values, decays, rates = self
        rates = None if rates is None else rates[tokens]
        return HeadInputs(queries[tokens], keys[tokens], values[tokens], decays[tokens], rates)


class HeadDecay:
    """The decays of heads, exp(-exp(A) d) for steps d = softplus(x + bias), of this rank.

    Args:
        name: of the checkpoint module that has A and the bias, as `A_log` and `dt_bias`.
        heads: which of its heads this rank has.
        device: of the parameters.
        channels: of each head, which have a decay and a bias each.

    Attributes:
        logs: float32 [heads], A.
        biases: float32 [heads * channels].
    """

    def __init__(self, name: str, heads: Shard, device: torch.device, channels: int = 1):
        self._channels = channels
        self._parameters = (
            HeadVector(f"{name}.A_log", heads, device, has_ones=True),
            HeadVector(f"{name}.dt_bias", heads.times(channels), device),
        )
        self.logs, self.biases = (each.values for each in self._parameters)
        # -exp(0): an exponential without memory would import torch's compiler, for two seconds
        self._factors = torch.full_like(self.logs, -1.0)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's heads of the checkpoint's tensors go."""
        for each in self._parameters:
            yield from each.weight_shards()

    def finalize(self) -> None:
        """Computes what steps are multiplied with."""
        torch.neg(self.logs.exp(), out=self._factors)

    def steps(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the steps, float32 [T, heads, channels], for x [T, heads * channels]."""
        return F.softplus(x.float() + self.biases).unflatten(-1, (-1, self._channels))

    def __call__(self, steps: torch.Tensor) -> torch.Tensor:
        """Returns the logarithms of the decays, float32 [T, heads, channels]."""
        return self._factors.unsqueeze(-1) * steps


def recur(inputs: HeadInputs, cache: torch.Tensor, rows: StateRows) -> torch.Tensor:
    """Returns the outputs of a step's tokens [T, heads, value channels], behind those of the tokens
    that it replays, and writes the states.

    Args:
        cache: [num_blocks, heads, key channels, value channels], the layer's states.
        rows: of the step.
    """
    out = torch.empty_like(inputs.values)

    def advance(tokens: slice | torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        out[tokens] = _advance(inputs.of(tokens), states)
        return states

    rows.advance(cache, advance, out.dtype)
    chunk = rows.chunk
    if inputs.decays.shape[-1] > 1:
        chunk = math.gcd(chunk, _CHANNEL_CHUNK)
    for row in rows.rows:
        out[row.tokens] = _compute_row(inputs.of(row.tokens), cache, row, chunk)
    return out


def _advance(inputs: HeadInputs, states: torch.Tensor) -> torch.Tensor:
    """Returns the outputs of one token of each of several sequences, and advances their `states`
    [R, heads, key channels, value channels] in place."""
    queries, keys, values, decays, rates = inputs
    states.mul_(decays.exp().unsqueeze(-1))
    added = values.unsqueeze(-2)
    if rates is not None:
        added = (added - torch.matmul(keys.unsqueeze(-2), states)).mul_(rates[..., None, None])
    flat = states.flatten(0, 1)
    flat.baddbmm_(keys.flatten(0, 1).unsqueeze(-1), added.flatten(0, 1))
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

    queries, keys, values, decays = (chunks(x) for x in inputs[:4])
    rates = None if inputs.rates is None else chunks(inputs.rates)
    sums = decays.cumsum(-2)
    if rates is not None:
        values, of_state = _corrections(keys, values, rates, sums)
    scores = _scores(queries, keys, sums)
    queries = queries * sums.exp()
    last = sums[..., -1:, :]
    keys = keys * (last - sums).exp()

    state = row.initial(cache).to(values.dtype)
    blocks = {end.length: end.block for end in row.ends}
    outputs = torch.empty_like(values)
    for number in range(count):
        added = values[:, number]
        if rates is not None:
            added = added - of_state[:, number] @ state
        torch.baddbmm(queries[:, number] @ state, scores[:, number], added, out=outputs[:, number])
        state = state * last[:, number].exp().mT
        state.baddbmm_(keys[:, number].mT, added)
        done = min((number + 1) * chunk - lead, row.count)
        if done in blocks:
            cache[blocks[done]] = state
    return outputs.flatten(1, 2)[:, lead : lead + row.count].transpose(0, 1)


def _scores(x: torch.Tensor, keys: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Returns the products of each token's x with the keys of the tokens up to it, of which is left
    what decays leave by then: [heads, chunks, chunk, chunk].

    Args:
        x, keys: [heads, chunks, chunk, key channels].
        sums: [heads, chunks, chunk, key channels or 1], of the decays from the chunk's first token
            on.
    """
    if sums.shape[-1] == 1:
        flat = sums.squeeze(-1)
        # exp of positive differences, of later tokens, might overflow
        left = (flat.unsqueeze(-1) - flat.unsqueeze(-2)).clamp_(max=0).exp_()
        return (x @ keys.mT).mul_(left).tril_()
    # A factor for each of the two tokens instead might overflow: exp(-sum) has no bound.
    columns = [
        (x * keys[..., i : i + 1, :])
        .mul_((sums - sums[..., i : i + 1, :]).clamp_(max=0).exp_())
        .sum(-1)
        for i in range(sums.shape[-2])
    ]
    return torch.stack(columns, dim=-1).tril_()


def _corrections(
    keys: torch.Tensor,
    values: torch.Tensor,
    rates: torch.Tensor,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns U and W such that U - W S are the corrections of a chunk's tokens by the delta rule,
    each times its rate, for the state S before the chunk.

    Args:
        keys, values: [heads, chunks, chunk, channels]. rates: [heads, chunks, chunk].
        sums: as in `_scores`.
    """
    weighted = keys * rates.unsqueeze(-1)
    system = _scores(weighted, keys, sums)
    known = torch.cat((values * rates.unsqueeze(-1), weighted * sums.exp()), -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    own, of_state = solved.split((values.shape[-1], keys.shape[-1]), dim=-1)
    return own, of_state

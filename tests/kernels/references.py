"""The operations of `kernels` in plain torch, to which tests and benchmarks compare the kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
import torch.nn.functional as F
from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.delta_arguments import DeltaInputs, DeltaWeights
from aioinfer.kernels.expert_arguments import SILU, Activation
from aioinfer.kernels.expert_routing import SMALLEST as SMALLEST_SUM
from aioinfer.kernels.expert_routing import RoutingRule
from aioinfer.kernels.expert_weights import PLACES, SCALE_OFFSET, PackedExperts, ScaledExperts
from aioinfer.kernels.few_rows_scaled import ScaledMatrix
from aioinfer.kernels.grouped_weight import PackedGroups
from aioinfer.kernels.mamba import MambaInputs, MambaWeights
from aioinfer.kernels.prepare import PreparedInputs
from aioinfer.kernels.qk_norm_rope_cache import FLOAT8_MAX
from aioinfer.kernels.quantize import GROUP, MAXIMA, SMALLEST, InputFormat, ScaledInputs

#: The magnitudes of MXFP4 by their three bits.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@singledispatch
def dequantized(weight: Any) -> torch.Tensor:
    """Returns the numbers that activations or weights stand for: float32 [T, K] of `ScaledInputs`,
    [N, K] of `ScaledMatrix`, [E, N, K] of experts; float64 [N, K] of `PackedGroups`."""
    raise TypeError(type(weight))


@dequantized.register
def _(weight: torch.Tensor) -> torch.Tensor:
    return weight


@dequantized.register
def _(inputs: ScaledInputs) -> torch.Tensor:
    channels = inputs.values.shape[1]
    width = channels if inputs.scales.shape[1] == 1 else GROUP
    return inputs.values.float() * inputs.scales.repeat_interleave(width, 1)[:, :channels]


@dequantized.register(ScaledMatrix)
@dequantized.register(ScaledExperts)
def _(weight: ScaledMatrix | ScaledExperts) -> torch.Tensor:
    *_, rows, inputs = weight.values.shape
    scales = weight.scales.repeat_interleave(weight.rows_per_scale, -2)[..., :rows, :]
    if weight.is_grouped:
        scales = scales.repeat_interleave(GROUP, -1)[..., :inputs]
    return weight.values.float() * scales


@dequantized.register
def _(weight: PackedGroups) -> torch.Tensor:
    packed = weight.integers.transpose(1, 2).flatten(0, 1).int()  # [N, units, run]
    runs = [packed >> shift & 2**weight.bits - 1 for shift in range(0, 16, weight.bits)]
    integers = torch.stack(runs, 2).flatten(1).double()
    of_group = torch.arange(integers.shape[1], device=packed.device) // weight.group
    scales, zeros = weight.scales.t(), torch.full_like(weight.scales.t(), 2 ** (weight.bits - 1))
    if weight.has_zeros:
        scales, zeros = scales & ~255, scales & 255
    floats = scales.contiguous().view(torch.float32).double()
    values = (integers - zeros[:, of_group]) * floats[:, of_group]
    return values[: weight.features, : weight.inputs]


@dequantized.register
def _(weight: PackedExperts) -> torch.Tensor:
    one = _dequantized_floats if weight.is_float else _dequantized_integers
    return torch.stack(
        [one(weight, *each) for each in zip(weight.words, weight.scales, strict=True)]
    )


def _dequantized_integers(
    weight: PackedExperts, words: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    shape = weight.features, weight.inputs, weight.group
    return dequantized(PackedGroups(words, scales, weight.has_zeros, scales, *shape, 4)).float()


def _dequantized_floats(
    weight: PackedExperts, words: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    rows = words.transpose(1, 2).flatten(0, 1).int()  # [N, units, run]
    magnitudes = torch.tensor(_MAGNITUDES, device=words.device)
    runs = []
    for sign, *bits in PLACES:
        code = sum((rows >> place & 1) << 2 - number for number, place in enumerate(bits))
        assert isinstance(code, torch.Tensor)
        runs.append(magnitudes[code] * (1 - 2 * (rows >> sign & 1)))
    values = torch.stack(runs, 2)  # [N, units, part, run]
    shifts = torch.arange(0, 32, 8, device=words.device)
    codes = (scales.t()[..., None] >> shifts & 255) + weight.shift - SCALE_OFFSET
    powers = torch.exp2((codes - 127).double()).float()
    return (values * powers[..., None]).flatten(1)[: weight.features, : weight.inputs]


def product_reference(
    x: torch.Tensor | ScaledInputs,
    weight: torch.Tensor | ScaledMatrix | PackedGroups,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Returns in float64 what the products of dense layers compute: x, or its RMSNorm, times the
    weight; of a gated one silu(gate) * up; plus the residual."""
    wide = dequantized(x).double()
    if norm_weight is not None:
        wide = rms_norm_reference(wide, norm_weight.double(), eps)
    product = wide @ dequantized(weight).double().T
    if gated:
        product = gated_activation_reference(product)
    return product if residual is None else product + residual.double()


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` in plain torch, in x's dtype throughout (pass float64 for a reference)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the norm of x + residual, and x + residual, in plain torch."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def gated_activation_reference(gate_up: torch.Tensor, kind: str = "silu") -> torch.Tensor:
    """`gated_activation` in plain torch, for interleaved columns [..., 2 * I]."""
    gate, up = gate_up.unflatten(-1, (-1, 2, GATE_RUN)).unbind(-2)
    if kind == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if kind == "gelu_pytorch_tanh" else "none")
    return (activated * up).flatten(-2)


def quantize_reference(
    x: torch.Tensor,
    format: InputFormat,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> ScaledInputs:
    """`quantize` in plain torch, in float32."""
    x = x.float()
    if norm_weight is not None:
        x = rms_norm_reference(x, norm_weight.float(), eps)
    width = x.shape[1]
    size = GROUP if format.is_grouped else width
    maximum = MAXIMA[format.dtype]
    parts = torch.nn.functional.pad(x, (0, -width % size)).unflatten(1, (-1, size))
    if format.static_scale is None:
        scales = parts.abs().amax(-1).clamp(min=SMALLEST) / maximum
    else:
        scales = format.static_scale.expand(parts.shape[:2])
    values = (parts / scales[..., None]).clamp(-maximum, maximum).flatten(1)[:, :width]
    values = (values.round() if format.dtype == torch.int8 else values).to(format.dtype)
    return ScaledInputs(values, scales.t().contiguous().t())


def select_reference(
    logits: torch.Tensor, rule: RoutingRule, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (weights [T, top_k], experts int64 [T, top_k]) for the router's logits [T, E], in
    plain torch and in the logits' dtype."""
    scores = logits.sigmoid() if rule.is_sigmoid else logits.softmax(-1)
    preferred = scores if bias is None else scores + bias
    if rule.top_groups < rule.num_groups:
        groups = preferred.unflatten(1, (rule.num_groups, -1))
        totals = groups.topk(rule.group_best, dim=-1).values.sum(-1)
        best = totals.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        is_in = torch.zeros_like(totals, dtype=torch.bool).scatter_(1, best, True)
        preferred = groups.masked_fill(~is_in.unsqueeze(-1), -torch.inf).flatten(1)
    experts = preferred.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
    weights = scores.gather(1, experts)
    if rule.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return weights * rule.scale, experts


def activation_reference(gate_up: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
    """Returns the activations [..., I] of interleaved columns [..., 2 * I], in plain torch."""
    if not activation.alpha:
        return gated_activation_reference(gate_up)
    gate, up = gate_up.unflatten(-1, (-1, 2, GATE_RUN)).unbind(-2)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (gate * torch.sigmoid(activation.alpha * gate) * (up + 1)).flatten(-2)


def experts_reference(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: Activation = SILU,
    rounded: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> torch.Tensor:
    """Returns the weighted sum of the experts' outputs [T, H], expert by expert in plain torch and
    in x's dtype, for interleaved `gate_up` [E, 2 * I, H], `down` [E, H, I], and the `weights` and
    `experts` [T, top_k] of each token of x [T, H].

    Args:
        biases: of both products, [E, 2 * I] and [E, H].
        activation: of the first product.
        rounded: a function applied to the inputs of both products.
    """
    total = torch.zeros_like(x)
    for expert in experts.unique().tolist():
        token, place = (experts == expert).nonzero(as_tuple=True)
        both = rounded(x[token]) @ gate_up[expert].to(x.dtype).T
        both = both if biases is None else both + biases[0][expert].to(x.dtype)
        output = rounded(activation_reference(both, activation)) @ down[expert].to(x.dtype).T
        output = output if biases is None else output + biases[1][expert].to(x.dtype)
        total.index_add_(0, token, output * weights[token, place].to(x.dtype).unsqueeze(1))
    return total


def all_reduce_reference(
    partials: list[torch.Tensor], residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`AllReduce.add` in plain torch: returns the new residual and its norm, in the inputs' dtype
    (pass float64 for a reference)."""
    total = residual + sum(partials)
    return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * norm_weight


def gather_masked_reference(
    logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """`gather_masked` in plain torch."""
    tokens = torch.arange(first, first + logits.shape[1], device=logits.device)
    allowed = (masks[:, tokens // 32] >> (tokens % 32).int() & 1).bool()
    gathered = logits[rows.long()].float()
    broken = gathered.isnan() | (gathered == float("inf"))
    return torch.where(allowed | broken, gathered, float("-inf"))


def token_logprobs_reference(
    logits: torch.Tensor, sampled: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`token_logprobs` in plain torch, for rows that all request it."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.sort(dim=-1, descending=True, stable=True)
    return (
        logprobs.gather(1, sampled.long()[:, None])[:, 0],
        best.indices[:, :top].int(),
        best.values[:, :top],
    )


def penalties_reference(
    logits: torch.Tensor,
    tokens: list[list[int]],
    prompt_lens: list[int],
    repetition: list[float],
    presence: list[float],
    frequency: list[float],
) -> torch.Tensor:
    """`apply_penalties` in plain torch, from each row's tokens (prompt and output); returns new
    logits [S, V]."""
    out = logits.clone()
    for row, (ids, prompt_len) in enumerate(zip(tokens, prompt_lens, strict=True)):
        for token in set(ids):
            count = ids[prompt_len:].count(token)
            value = out[row, token]
            value = value / repetition[row] if value > 0 else value * repetition[row]
            out[row, token] = value - frequency[row] * count - presence[row] * (count > 0)
    return out


def prepare_inputs_reference(
    slots: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor,
    tables: torch.Tensor, inputs: PreparedInputs,
    *, block_size: int, rotary_offsets: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """`prepare_inputs` in plain torch, row by row."""
    if inputs.rotary is not None:
        inputs.rotary.zero_()
    inputs.input_ids.zero_()
    inputs.positions.zero_()
    inputs.slot_mapping.fill_(-1)
    first = 0
    for row, (slot, start, length) in enumerate(
        zip(slots.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    ):
        end = start + length if length else 0
        blocks = -(-end // block_size)
        positions = torch.arange(start, start + length, device=tokens.device)
        here = slice(first, first + length)
        inputs.input_ids[here] = tokens[slot, start : start + length]
        inputs.positions[here] = positions.int()
        if inputs.rotary is not None and rotary_offsets is not None:
            inputs.rotary[:, here] = positions.int() + rotary_offsets[slot]
        inputs.slot_mapping[here] = (
            tables[slot, positions // block_size].long().clamp(min=0) * block_size
            + positions % block_size
        )
        inputs.query_starts[row] = first
        inputs.seq_lens[row] = end
        inputs.block_tables[row, :blocks] = tables[slot, :blocks]
        first += length
    inputs.query_starts[len(slots)] = first


def embed_reference(ids: torch.Tensor, weight: torch.Tensor, first: int = 0) -> torch.Tensor:
    """`embed` in plain torch."""
    index = ids.long() - first
    in_shard = (index >= 0) & (index < weight.shape[0])
    return torch.where(in_shard[:, None], weight[index.clamp(0, weight.shape[0] - 1)], 0)


def grow_tables_reference(
    rows: torch.Tensor, indices: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor
) -> None:
    """`grow_tables` in plain torch."""
    valid = rows >= 0
    tables[rows[valid].long(), indices[valid].long()] = blocks[valid]


def qk_norm_rope_cache_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    num_q_heads: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    axes: torch.Tensor | None = None,
    norm_last: bool = False,
    values_normed: bool = False,
    scales: torch.Tensor | None = None,
    key_shifts: torch.Tensor | None = None,
) -> torch.Tensor:
    """`qk_norm_rope_cache` in plain torch, in the inputs' dtype; writes to the caches and returns
    q [T, Hq, D]. The caches have that dtype, too: with scales, they get the numbers that would be
    read from caches in float8. Without a rotation cos_sin is [max_pos, 0]; with `axes` [R / 2] a
    pair of channels is rotated by that one of three positions [3, T]."""
    kv_heads, head_size = k_cache.shape[2:]
    half = cos_sin.shape[1] // 2
    q, k, v = qkv.unflatten(1, (-1, head_size)).split([num_q_heads, kv_heads, kv_heads], dim=1)
    angles = cos_sin[positions.long()].to(qkv.dtype)
    cos, sin = angles[..., :half], angles[..., half:]
    if axes is not None:  # [3, T, R / 2]
        index = axes.to(cos.device).expand(1, *cos.shape[1:])
        cos, sin = cos.gather(0, index)[0], sin.gather(0, index)[0]
    cos, sin = cos[:, None], sin[:, None]

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x if norm_last else normed(x, weight)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        x = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
        return normed(x, weight) if norm_last else x

    if values_normed:
        v = normed(v, torch.ones_like(v[0, 0]))
    is_written = slot_mapping >= 0
    slots = slot_mapping[is_written].long()
    keys = turned(k, k_weight) if key_shifts is None else turned(k, k_weight) - key_shifts
    for number, (cache, new) in enumerate(((k_cache, keys), (v_cache, v))):
        if scales is not None:
            scale, inverse = (scales[row, :, None].to(new.dtype) for row in (number, 2 + number))
            stored = (new * inverse).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
            new = stored.to(new.dtype) * scale
        cache.view(-1, kv_heads, head_size)[slots] = new[is_written].to(cache.dtype)
    return turned(q, q_weight)


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """`paged_attention` in plain torch, row by row, in the inputs' dtype (pass float64 for a
    reference)."""
    out = torch.zeros_like(q)
    starts = query_starts.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        begin, end = starts[row], starts[row + 1]
        if seq_len == 0 or begin == end:
            continue
        blocks = block_tables[row, : -(-seq_len // k_cache.shape[1])].long()
        keys = (
            k_cache[blocks]
            .flatten(0, 1)[:seq_len]
            .repeat_interleave(q.shape[1] // k_cache.shape[2], dim=1)
        )
        values = (
            v_cache[blocks]
            .flatten(0, 1)[:seq_len]
            .repeat_interleave(q.shape[1] // k_cache.shape[2], dim=1)
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * (
            q.shape[2] ** -0.5 if scale is None else scale
        )
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position = torch.arange(seq_len - (end - begin), seq_len, device=q.device)[:, None]
        key_position = torch.arange(seq_len, device=q.device)[None, :]
        visible = key_position <= position
        if slopes is not None:
            scores = scores + slopes.to(scores)[:, None, None] * (key_position - position)
        if window:
            visible = visible & (key_position > position - window)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:  # a key of its own, whose weight is dropped
            column = sinks.to(scores)[:, None, None].expand(-1, end - begin, 1)
            weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def latent_cache_reference(
    latents: torch.Tensor,
    queries: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`latent_cache` in plain torch, in the inputs' dtype; writes to the cache and returns the
    rotated queries [T, H, P]."""
    latent, key = latents.split((len(weight), queries.shape[2]), dim=-1)
    normed = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * weight
    cos, sin = cos_sin[positions.long()].to(latents.dtype)[:, None].chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    is_written = slot_mapping >= 0
    new = torch.cat((normed, rotate(key.unsqueeze(1)).squeeze(1)), dim=-1)
    cache.view(-1, cache.shape[2])[slot_mapping[is_written].long()] = new[is_written]
    return rotate(queries)


def latent_decode_reference(
    absorbed: torch.Tensor,
    rotated: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """`latent_decode` in plain torch, row by row, in the inputs' dtype (pass float64 for a
    reference)."""
    out = torch.zeros_like(absorbed)
    for row, seq_len in enumerate(seq_lens.tolist()):
        if seq_len:
            blocks = block_tables[row, : -(-seq_len // cache.shape[1])].long()
            keys = cache[blocks].flatten(0, 1)[:seq_len]
            queries = torch.cat((absorbed[row], rotated[row]), dim=-1)
            weights = (queries @ keys.t() * scale).softmax(-1)
            out[row] = weights @ keys[:, : absorbed.shape[2]]
    return out


def latent_prefill_reference(
    queries: torch.Tensor,
    plain_keys: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """The attention of one row's queries [Q, H, N + P], its last tokens, to its keys [K, H, N] and
    [K, P] and values [K, H, V], in the inputs' dtype: [Q, H, V]."""
    shared = keys.unsqueeze(1).expand(-1, plain_keys.shape[1], -1)
    whole = torch.cat((plain_keys, shared), dim=-1)
    scores = torch.einsum("qhd,khd->hqk", queries, whole) * scale
    count, length = len(queries), len(keys)
    later = torch.arange(length) > torch.arange(length - count, length)[:, None]
    weights = scores.masked_fill(later.to(scores.device), float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def delta_reference(
    inputs: DeltaInputs, weights: DeltaWeights, window: torch.Tensor, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gated delta rule of one row, token by token in float64: its output [T, HV * V], and the
    windows [T, C, W - 1] and matrices [T, HV, K, V] after each token, from those before it."""
    mixed, z, b, a = (x.double() for x in inputs)
    conv, a_log, dt_bias, norm = (w.double() for w in weights[:4])
    heads, key, value = matrix.shape
    key_heads = (mixed.shape[1] - heads * value) // (2 * key)
    rates = F.softplus(a + dt_bias).view(len(mixed), heads, -1)
    beta, decay = b.sigmoid(), (-a_log.exp()[:, None] * rates).exp()  # [T, HV, 1 or K]
    gates = F.silu(z) if decay.shape[2] == 1 else z.sigmoid()
    window, state = window.double(), matrix.double()
    outputs, windows, matrices = [], [], []
    for t in range(len(mixed)):
        taken = torch.cat([window, mixed[t][:, None]], 1)
        window = taken[:, 1:]
        x = F.silu((taken * conv).sum(1))
        q, k, v = x.split([key_heads * key, key_heads * key, heads * value])
        q, k = (
            (y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
                heads // key_heads, 0
            )
            for y in (q.view(key_heads, key), k.view(key_heads, key))
        )
        state = state * decay[t][:, :, None]
        delta = beta[t][:, None] * (v.view(heads, value) - torch.einsum("hkv,hk->hv", state, k))
        state = state + k[:, :, None] * delta[:, None, :]
        o = torch.einsum("hkv,hk->hv", state, q) * key**-0.5
        o = o / (o.square().mean(1, keepdim=True) + weights.norm_eps).sqrt()
        outputs.append((o * norm * gates[t]).flatten())
        windows.append(window)
        matrices.append(state)
    return torch.stack(outputs), torch.stack(windows), torch.stack(matrices)


def mamba_reference(
    inputs: MambaInputs, weights: MambaWeights, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba-2's recurrence of one row, token by token in float64: its output [T, H * P], and the
    matrices [T, H, N, P] after each token, from the one before them."""
    mixed, steps = (x.double() for x in inputs)
    a_log, dt_bias, skip = (w.double() for w in weights[:3])
    heads, state_size, head_size = matrix.shape
    groups = (mixed.shape[1] - heads * head_size) // (2 * state_size)
    states = groups * state_size
    x, b, c = mixed.split([heads * head_size, states, states], 1)
    b, c = (
        y.unflatten(1, (groups, state_size)).repeat_interleave(heads // groups, 1) for y in (b, c)
    )
    x = x.unflatten(1, (heads, head_size))
    steps = F.softplus(steps + dt_bias).clamp(weights.least, weights.largest)
    state, outputs, matrices = matrix.double(), [], []
    for t in range(len(mixed)):
        decay = (-a_log.exp() * steps[t]).exp()[:, None, None]
        state = state * decay + b[t][:, :, None] * (x[t] * steps[t][:, None])[:, None, :]
        outputs.append(torch.einsum("hnp,hn->hp", state, c[t]) + skip[:, None] * x[t])
        matrices.append(state)
    return torch.stack(outputs).flatten(1), torch.stack(matrices)

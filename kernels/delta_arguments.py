"""What the kernels of the gated delta rule share: their arguments, in groups, and the device
functions of the gates and of the gated norm.

The layer is that of Qwen3-Next and Qwen3.5 (Yang et al., "Gated Delta Networks", 2025). A token's
mixed channels [queries, keys, values] pass a causal convolution of each channel and SiLU; queries
and keys are l2-normed. With the decay exp(g), g = -exp(a_log) * softplus(a + dt_bias), and
beta = sigmoid(b), a value head keeps the matrix S [K, V]:

    S = exp(g) S;   S = S + k (beta (v - S^T k))^T;   o = S^T q K^-1/2

and its output is RMSNorm(o) * norm_weight * silu(z). Each key head serves HV / HK value heads. In
Kimi delta attention (Moonshot AI, "Kimi Linear", 2025) each channel of a key, a row of S, has a
decay of its own, HK = HV, and gates are sigmoid(z).

Rows of one token are computed by `delta_decode`, longer rows by `delta_prefill`: each looks at a
row's length on the GPU and leaves the other rows alone, so a step with rows of both kinds launches
both over all of its rows. Where states lie is said in `states.StateTables`.
"""
# ruff: noqa: N803  (compile-time constants are written in capitals)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

#: Of the l2 norm of queries and keys.
L2_EPS = tl.constexpr(1e-6)


class DeltaInputs(NamedTuple):
    """What the projections of a layer give for T tokens. Rows of T may be strided.

    Attributes:
        mixed: [T, C], C = 2 HK K + HV V: all queries, then all keys, then all values.
        z: [T, HV, V], the output gate.
        b, a: [T, HV], of beta and of the decay; a [T, HV K] for decays by channel.
    """

    mixed: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


class DeltaWeights(NamedTuple):
    """The other weights of a layer, on this rank.

    Attributes:
        conv: [C, W], the convolution's, contiguous; the last column is the current token's.
        a_log, dt_bias: [HV]; dt_bias [HV K] for decays by channel.
        norm: [V], contiguous.
        norm_eps: added to the mean square.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float


class DeltaShape(NamedTuple):
    """The compile-time shape of a layer: key heads and the value heads of each, channels of keys
    and of values, powers of two that hold them, the width of the convolution, tokens a block, and
    whether each channel of a key has a decay of its own. (A field named `value` would be shadowed
    by that of Triton's constants.)"""

    key_heads: int
    group: int
    key_size: int
    value_size: int
    key_pad: int
    value_pad: int
    width: int
    block_size: int
    by_channel: bool = False

    @classmethod
    def of(cls, inputs: DeltaInputs, weights: DeltaWeights, matrices: torch.Tensor,
           block_size: int) -> DeltaShape:  # fmt: skip
        """Returns the shape for `matrices` [num_blocks, HV, K, V].

        Raises:
            ValueError: shapes do not fit together, or lines are not contiguous.
        """
        heads, key, value = matrices.shape[1:]
        channels, width = weights.conv.shape
        key_heads = (channels - heads * value) // (2 * key)
        by_channel = key > 1 and inputs.a.shape[1] == heads * key
        decays = heads * key if by_channel else heads
        fits = (
            channels == 2 * key_heads * key + heads * value
            and key_heads > 0
            and heads % key_heads == 0
            and inputs.mixed.shape[1] == channels
            and inputs.z.shape[1:] == (heads, value)
            and (key_heads == heads or not by_channel)
            and inputs.a.shape[1:] == weights.dt_bias.shape == (decays,)
            and inputs.b.shape[1:] == weights.a_log.shape == (heads,)
            and weights.norm.shape == (value,)
        )
        is_dense = (
            weights.conv.is_contiguous()
            and matrices.stride()[1:] == (key * value, value, 1)
            and inputs.mixed.stride(1) == inputs.a.stride(1) == inputs.b.stride(1) == 1
            and inputs.z.stride()[1:] == (value, 1)
        )
        if not fits or not is_dense:
            raise ValueError(
                f"mixed {tuple(inputs.mixed.shape)}, z {tuple(inputs.z.shape)}, "
                f"a {tuple(inputs.a.shape)}, conv {tuple(weights.conv.shape)} and matrices "
                f"{tuple(matrices.shape)} do not fit together, or are not contiguous"
            )
        pads = max(16, triton.next_power_of_2(key)), max(16, triton.next_power_of_2(value))
        group = heads // key_heads
        return cls(key_heads, group, key, value, *pads, width, block_size, by_channel)


@triton.jit
def silu(x):
    """Returns x * sigmoid(x), x in float32."""
    return x * tl.sigmoid(x)


@triton.jit
def gate_of(z, SHAPE: tl.constexpr):
    """Returns the factors of outputs for their gates z, in float32."""
    return tl.sigmoid(z) if SHAPE.by_channel else silu(z)


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)), x in float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """Returns g <= 0, the logarithm of the decay, all in float32."""
    return -tl.exp(a_log) * softplus(a + dt_bias)

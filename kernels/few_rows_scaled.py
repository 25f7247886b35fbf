"""Linear layers with weights of one byte for one to sixteen rows, whose time is that of reading the
weights.

The counterpart of `few_rows_dense`, with the same two kernels and fusions: float8 or int8 weights
are read once, 16 bytes a thread, converted in registers and multiplied with 16-bit activations. A
scale of an output feature is applied to its sum; scales of blocks are applied to the sums of 16
inputs, the ones that a thread has, or of one tensor-core step. More rows are left to
`scaled_product`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from aioinfer.kernels.few_rows_dense import MAX_ROWS, FewRowsConfig, launch_few_rows
from aioinfer.kernels.products import product_output
from aioinfer.kernels.quantize import GROUP


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A weight of one byte: value * scale.

    Attributes:
        values: float8_e4m3fn or int8 [N, K], contiguous.
        scales: float32 [N / rows_per_scale, groups], contiguous. One group holds all inputs;
            several hold `GROUP` inputs each.
        rows_per_scale: neighbouring rows that share scales.
        counters: int32 [C], zeros between launches, for products whose inputs are divided over
            several programs; without it they are not.
        is_paired: of each 128 rows, every other eight (gate rows) share scales, and so do the eight
            between them (up rows); `rows_per_scale` is 8.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rows_per_scale: int = 1
    counters: torch.Tensor | None = None
    is_paired: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether scales belong to `GROUP` inputs, instead of to a row."""
        return self.scales.shape[1] > 1


def few_rows_scaled_config(
    rows: int, features: int, inputs: int, *, normed: bool, gated: bool, grouped: bool,
    itemsize: int = 2,
) -> FewRowsConfig:  # fmt: skip
    """Returns the configuration for x [rows, inputs] and `features` output features.

    Derived from `few_rows_dense_config`: a tile holds twice the weights, for as many bytes. With
    scales of blocks a tensor-core step is one block of inputs. Those of one row are measured on an
    H200; more rows come here only with activations that are not quantized, and are not tuned.

    Args:
        itemsize: bytes of an activation; float32 (for tests) takes the smallest tile.
    """
    if rows > 1 and itemsize > 2:
        return FewRowsConfig(16, GROUP, 4, 3)
    if rows > MAX_ROWS // 2:  # 64 features would be a wgmma of 16 columns, which loads single bytes
        if features >= 12288 or gated:
            return FewRowsConfig(32, GROUP if grouped else 256, 4, 5)
        return FewRowsConfig(16, GROUP, 1, 8) if grouped else FewRowsConfig(16, 256, 2, 6)
    if rows > 1:
        if features >= 12288:
            return FewRowsConfig(64, GROUP, 4, 6) if grouped else FewRowsConfig(64, 256, 4, 4)
        if gated:
            return FewRowsConfig(32, GROUP if grouped else 256, 4, 5)
        return FewRowsConfig(16, GROUP, 1, 8) if grouped else FewRowsConfig(16, 512, 2, 6)
    step = max(GROUP, min(4096 if gated and not grouped else 2048, triton.next_power_of_2(inputs)))
    return FewRowsConfig(8 if grouped else 4, step, 4)


def few_rows_scaled(
    x: torch.Tensor,
    weight: ScaledMatrix,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    pdl: bool = False,
    config: FewRowsConfig | None = None,
) -> torch.Tensor:
    """Returns x @ weight.T, for few rows of x, accumulated in float32.

    Args:
        x: [M, K], M <= 16; bf16, fp16 or fp32; rows may be strided.
        weight: [N, K]; with `gated` [2 * N, K], interleaved, N a multiple of 8.
        norm_weight: [K] of the RMSNorm (with `eps`) that x passes through first; None for no norm.
        residual: [M, N], added to the product; may be `out`.
        gated: weight holds two projections: eight rows of the gate, then the matching eight of up,
            and so on; returns silu(x @ gate.T) * (x @ up.T).
        out: [M, N] to write to; by default a new tensor.
        pdl: launch as a programmatic dependent of the kernel before (Hopper and later); `weight` is
            read before that kernel ends, so that kernel must not write it.
        config: instead of `few_rows_scaled_config`'s (for tests and tuning).

    Returns:
        [M, N] in x's dtype.

    Raises:
        ValueError: the shapes do not fit, or there are more than 16 rows.
    """
    (rows, inputs), values, grouped = x.shape, weight.values, weight.is_grouped
    out = product_output(
        x, values.shape, out, gated=gated, max_rows=MAX_ROWS, stored=(values, weight.scales)
    )  # fmt: skip
    config = config or few_rows_scaled_config(
        rows, out.shape[1], inputs, normed=norm_weight is not None, gated=gated, grouped=grouped,
        itemsize=x.element_size(),
    )  # fmt: skip
    if grouped and (config.step != GROUP if rows > 1 else config.step % GROUP):
        raise ValueError(f"steps must be of {GROUP} inputs, not of {config.step}")
    launch_few_rows(
        x, values, weight.scales, weight.rows_per_scale, norm_weight, eps, residual, gated, out,
        pdl, config,
    )  # fmt: skip
    return out

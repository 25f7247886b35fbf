"""Random inputs for the products with weights in groups, and their results beside those of the
float64 reference: for the interpreter's tests and the tests on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from aioinfer.kernels.few_rows_grouped import FewRowsGroupedConfig
from aioinfer.kernels.grouped_product import GroupedConfig, grouped_product
from aioinfer.kernels.grouped_weight import PackedGroups, pack_groups
from cases import Pair, normal, poisoned
from references import product_reference

#: Products of Qwen3-8B, and others of their size: output features, inputs, whether gated.
QWEN3_8B = {
    "qkv": (6144, 4096, False), "o": (4096, 4096, False), "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False), "one of three ranks": (4096, 4864, False),
    "nothing divides": (1000, 1000, False),
}  # fmt: skip


def random_groups(
    features: int,
    inputs: int,
    *,
    bits: int = 4,
    group: int | None = 128,
    has_zeros: bool = False,
    device: str = "cpu",
) -> PackedGroups:
    """Returns a weight [features, inputs] of uniform integers, whose products are of the inputs'
    magnitude."""
    shape = features, 1 if group is None else -(-inputs // group)
    integers = torch.randint(0, 2**bits, (features, inputs), device=device)
    scales = (0.5 + torch.rand(shape, device=device)) / (0.3 * 2**bits * inputs**0.5)
    zeros = torch.randint(0, 2**bits, shape, device=device) if has_zeros else None
    return pack_groups(integers, scales.half(), zeros, bits, group)


def grouped(
    weight: PackedGroups,
    rows: int,
    dtype: torch.dtype,
    *,
    normed: bool = False,
    gated: bool = False,
    config: GroupedConfig | FewRowsGroupedConfig | None = None,
    pdl: bool = False,
    multiply: Callable[..., torch.Tensor] = grouped_product,
) -> Pair:
    """Runs `grouped_product`, or a kernel with its arguments: with a residual where it is not
    gated."""
    device = str(weight.integers.device)
    features = weight.features // 2 if gated else weight.features
    # rows with a stride: those of a part of a wider tensor
    x = normal(rows, weight.inputs + 8, dtype=dtype, device=device)[:, : weight.inputs]
    norm = normal(weight.inputs, dtype=dtype, device=device) if normed else None
    residual = None if gated else normal(rows, features, dtype=dtype, device=device)
    given = {"residual": residual, "gated": gated}
    if normed:
        given["norm_weight"] = norm
    out = multiply(
        x, weight, **given,
        out=poisoned(rows, features, dtype=dtype, device=device),
        config=config, pdl=pdl,
    )  # fmt: skip
    assert not weight.counters.any()
    return out, product_reference(x, weight, **given)

"""The cases of `bench_kernels.py` for weights of 4-bit and 8-bit integers in groups: the products
at Qwen3-8B's shapes, beside those with bf16 weights and with weights that are dequantized first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from aioinfer.kernels import grouped_hopper as hopper
from aioinfer.kernels import grouped_hopper_configs as hopper_configs
from aioinfer.kernels.activation import gated_activation
from aioinfer.kernels.few_rows_grouped import (
    MAX_ROWS,
    FewRowsGroupedConfig,
    few_rows_grouped,
    few_rows_grouped_config,
    fuses_norm,
    supports,
)
from aioinfer.kernels.grouped_product import (
    GroupedConfig,
    grouped_config,
    grouped_product,
)
from aioinfer.kernels.grouped_weight import PackedGroups, dequantize, pack_groups
from aioinfer.kernels.norm import rms_norm

from benchlib.kernel_cases import BF16, DEVICE, Case, random_tensor
from tests.kernels.references import product_reference

#: Output features (of gate and up together), inputs, whether the norm comes before, whether the
#: gate comes after; where neither, a residual is added.
SHAPES = {
    "8B qkv": (6144, 4096, True, False),
    "8B o": (4096, 4096, False, False),
    "8B gate_up": (24576, 4096, True, True),
    "8B down": (4096, 12288, False, False),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 8192)
#: Rows that the fused kernel is tried with: more than the table gives it, to find where it ends.
MAX_TRIED_ROWS = 256
#: Bits, inputs of a group, and zero points, of which the first is the case of the others' floors.
SCHEMES = {
    "int4 g128": (4, 128, False),
    "int4 g128 zeros": (4, 128, True),
    "int4 g32": (4, 32, False),
    "int8 g128": (8, 128, False),
}
#: Configurations of the kernel for few rows, beside its table's.
FEW_ROWS = [
    FewRowsGroupedConfig(warps, depth, programs)
    for warps, depth, programs in (
        (16, 2, 1), (16, 3, 1), (8, 2, 1), (8, 4, 1), (8, 2, 2), (8, 3, 2), (8, 2, 3), (4, 2, 4),
        (4, 3, 4), (4, 4, 3), (4, 2, 5),
    )
]  # fmt: skip


def random_weight(
    features: int, inputs: int, bits: int, group: int, has_zeros: bool
) -> PackedGroups:
    """Returns a weight of uniform integers."""
    shape = features, inputs // group
    integers = torch.randint(0, 2**bits, (features, inputs), dtype=torch.uint8, device=DEVICE)
    scales = (0.5 + torch.rand(shape, device=DEVICE)) / (0.3 * 2**bits * inputs**0.5)
    zeros = torch.randint(0, 2**bits, shape, device=DEVICE) if has_zeros else None
    return pack_groups(integers, scales.half(), zeros, bits, group)


def configs(rows: int, weight: PackedGroups, tune: bool) -> list[tuple[str, GroupedConfig]]:
    """Returns the table's configuration and, to tune, others."""
    best = grouped_config(rows, weight)
    found = [("table", best)]
    if tune:
        columns = [best.rows] if rows <= 64 else [64, 128, 256]
        tiles = (
            ((32, 1), (32, 2), (64, 2), (64, 4))
            if rows <= 8
            else ((64, 4), (64, 8), (128, 4), (128, 8), (256, 8))
        )
        depths = (3, 5) if rows <= 8 else (2, 3, 4)
        for (features, warps), width, stages, splits in itertools.product(
            tiles, columns, depths, (1, 2, 4)
        ):
            if (splits == 1 or rows <= 64) and width <= max(rows, 8):
                config = GroupedConfig(features, width, splits, warps, stages)
                name = f"n{features} m{width} w{warps} s{stages} k{splits}"
                found.append((name, config))
    return found


def few_rows_configs(
    x: torch.Tensor, weight: PackedGroups, tune: bool
) -> list[tuple[str, FewRowsGroupedConfig]]:
    """Returns the configurations of the kernel for few rows: its table's and, to tune, others."""
    if len(x) > MAX_ROWS or not supports(x, weight):
        return []
    tried = FEW_ROWS if tune else []
    named = [(f"w{c.warps} d{c.depth} p{c.programs}", c) for c in tried]
    return [("table", few_rows_grouped_config(weight)), *named]


def grouped_cases(tune: bool) -> Iterator[Case]:
    """Products with weights in groups, with the fused operations."""
    for name, (features, inputs, normed, gated) in SHAPES.items():
        for scheme, (bits, group, has_zeros) in SCHEMES.items():
            is_main = scheme == next(iter(SCHEMES))
            if not is_main and (tune or not gated):
                continue
            copies = max(1, int(3e8 / (features * inputs * bits / 8)))
            weights = [
                random_weight(features, inputs, bits, group, has_zeros) for _ in range(copies)
            ]
            for rows in ROWS:
                if is_main and not tune:
                    yield from dense_cases(name, rows, features, inputs, gated)
                yield from row_cases(f"{name} x{rows}", scheme, rows, weights, normed, gated, tune)


def row_cases(
    name: str, scheme: str, rows: int, weights: list[PackedGroups], normed: bool, gated: bool,
    tune: bool,
) -> Iterator[Case]:  # fmt: skip
    """The fused kernel, and a dequantization followed by torch's product, for a number of rows."""
    weight = weights[0]
    outputs = weight.features // 2 if gated else weight.features
    x = random_tensor(rows, weight.inputs)
    given = {
        "norm_weight": random_tensor(weight.inputs) if normed and rows == 1 else None,
        "residual": None if gated or normed else random_tensor(rows, outputs),
        "gated": gated,
    }
    out = torch.empty(rows, outputs, dtype=BF16, device=DEVICE)
    size, flops = (
        weight.nbytes + x.nbytes + out.nbytes,
        2.0 * rows * weight.features * weight.inputs,
    )
    last = slice(max(0, rows - 64), rows)
    part = {k: v[last] if k == "residual" and v is not None else v for k, v in given.items()}
    expected = product_reference(x[last], weight, **part)

    def checked(run: Callable[[PackedGroups], object]) -> Callable[[], float]:
        def check() -> float:
            out.fill_(float("nan"))
            run(weight)
            return float((out[last].double() - expected).norm() / expected.norm())

        return check

    fusions = {k: v for k, v in given.items() if k != "norm_weight"}
    norm = given["norm_weight"]
    normed_x = x if norm is None else rms_norm(x, norm, 1e-6)
    for variant, config in configs(rows, weight, tune) if rows <= MAX_TRIED_ROWS else []:
        for pdl in (False, True) if rows == 1 and not tune else (False,):

            def run(w: PackedGroups, config: GroupedConfig = config, pdl: bool = pdl) -> None:
                grouped_product(normed_x, w, out=out, config=config, pdl=pdl, **fusions)

            runs = [lambda w=w, run=run: run(w) for w in weights]
            label = f"{scheme} {variant}" + " pdl" * pdl
            yield Case("grouped", name, label, runs, size, flops, checked(run))
    yield from hopper_cases(name, scheme, x, weights, given, out, checked, size, flops, tune)
    for variant, few_rows in few_rows_configs(x, weight, tune):
        is_fused = norm is not None and fuses_norm(rows, weight)
        # without the norm, which is a launch of its own then, and with it
        for kept, pdl in itertools.product((None, norm) if is_fused else (None,), (False, True)):

            def run_few_rows(
                w: PackedGroups, norm: torch.Tensor | None = kept,
                config: FewRowsGroupedConfig = few_rows, pdl: bool = pdl,
            ) -> None:  # fmt: skip
                few_rows_grouped(x, w, norm_weight=norm, out=out, config=config, pdl=pdl, **fusions)

            runs = [lambda w=w, run=run_few_rows: run(w) for w in weights]
            label = f"{scheme} few_rows {variant}" + " norm" * (kept is not None) + " pdl" * pdl
            check = checked(lambda w, run=run_few_rows, norm=norm: run(w, norm))
            yield Case("grouped", name, label, runs, size, flops, check)
    if rows < 64 or tune:
        return
    scratch = torch.empty(weight.features, weight.inputs, dtype=BF16, device=DEVICE)

    def expand(w: PackedGroups) -> None:
        product = x @ dequantize(w, scratch).t()
        if gated:
            gated_activation(product, out=out)
        elif given["residual"] is not None:
            torch.add(product, given["residual"], out=out)
        else:
            out.copy_(product)

    runs = [lambda w=w: expand(w) for w in weights]
    yield Case("grouped", name, f"{scheme} dequantized", runs, size, flops, checked(expand))
    runs = [lambda w=w: dequantize(w, scratch) for w in weights]
    yield Case("grouped", name, f"{scheme} dequantize alone", runs, weight.nbytes + scratch.nbytes)


def hopper_cases(
    name: str, scheme: str, x: torch.Tensor, weights: list[PackedGroups], given: dict[str, Any],
    out: torch.Tensor, checked: Callable[..., Callable[[], float]], size: int, flops: float,
    tune: bool,
) -> Iterator[Case]:  # fmt: skip
    """The kernel for many rows, on Hopper: the table's configuration, and to tune all others."""
    weight, given = weights[0], {k: v for k, v in given.items() if k != "norm_weight"}
    if len(x) < 32 or not hopper.supports(x, weight, out=out, **given):
        return
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    best = hopper_configs.grouped_hopper_config(len(x), weight, programs, gated=given["gated"])
    found = [("table", best)]
    if tune:
        tried = hopper_configs.configs(len(x), weight, given["gated"])
        found += [(f"m{c.tokens} k{c.splits}", c) for c in tried]
        if best.tokens == 128:  # words of fewer units, x of more runs
            stages = {"word_stages": 2, "stages": 8 if given["gated"] else 6}
            found.append(("table, other stages", replace(best, **stages)))
    for variant, config in found:

        def run(w: PackedGroups, config: hopper_configs.GroupedHopperConfig = config) -> None:
            hopper.grouped_hopper(x, w, out=out, config=config, **given)

        runs = [lambda w=w, run=run: run(w) for w in weights]
        label = f"{scheme} hopper {variant}"
        yield Case("grouped", name, label, runs, size, flops, checked(run))


def dense_cases(name: str, rows: int, features: int, inputs: int, gated: bool) -> Iterator[Case]:
    """torch's product with bf16 weights, and the gate after it."""
    copies = max(1, int(3e8 / (features * inputs * 2)))
    weights = [random_tensor(features, inputs, scale=inputs**-0.5) for _ in range(copies)]
    x = random_tensor(rows, inputs)

    def run(w: torch.Tensor) -> torch.Tensor:
        product = torch.nn.functional.linear(x, w)
        return gated_activation(product) if gated else product

    size = weights[0].nbytes + x.nbytes + 2 * rows * features // (2 if gated else 1)
    runs = [lambda w=w: run(w) for w in weights]
    flops = 2.0 * rows * features * inputs
    yield Case("grouped", f"{name} x{rows}", "bf16, torch", runs, size, flops)

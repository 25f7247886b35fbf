"""Products of one-byte weights for `bench_kernels.py`, beside products of bf16 weights at the same
shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from aioinfer.kernels import block_hopper
from aioinfer.kernels import few_rows_float8 as few_rows_kernel
from aioinfer.kernels.activation import gated_activation
from aioinfer.kernels.few_rows_dense import MAX_ROWS, FewRowsConfig
from aioinfer.kernels.few_rows_float8 import (
    FewRowsFloat8Config,
    few_rows_float8,
    few_rows_float8_config,
)
from aioinfer.kernels.few_rows_scaled import (
    ScaledMatrix,
    few_rows_scaled,
    few_rows_scaled_config,
)
from aioinfer.kernels.quantize import GROUP, MAXIMA, InputFormat, ScaledInputs, quantize
from aioinfer.kernels.scaled_hopper import hopper_product, supports
from aioinfer.kernels.scaled_product import (
    ProductConfig,
    cublas_product,
    product_config,
    scaled_product,
)
from aioinfer.kernels.scaled_tiles import BLOCK_CONFIGS, CONFIGS, BlockConfig, HopperConfig

from benchlib.kernel_cases import BF16, DEVICE, PRODUCTS, Case, random_tensor
from tests.kernels.references import product_reference

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
SHAPES = {name: shape for name, shape in PRODUCTS.items() if name in (
    "8B qkv", "8B o", "8B gate_up", "8B down")}  # fmt: skip
FP8, INT8 = torch.float8_e4m3fn, torch.int8
#: Dtype of the values, whether scales are of blocks.
KINDS = {"fp8": (FP8, False), "blocks": (FP8, True), "int8": (INT8, False)}
#: Rows of the products in Gluon for few rows, and their configurations beside the table's.
FEW_ROWS = (1, 2, 4, 8)
FEW_ROWS_CONFIGS = [
    FewRowsFloat8Config(*config)
    for config in (
        (16, 4, 2, 4),
        (16, 4, 2, 6),
        (16, 4, 4, 2),
        (16, 4, 4, 3),
        (16, 8, 1, 2),
        (16, 8, 1, 3),
        (16, 8, 2, 2),
        (16, 8, 4, 1),
        (16, 8, 4, 2),
        (32, 4, 2, 3),
        (32, 8, 1, 2),
    )
]
#: The check of many rows takes so many of them.
CHECKED = 200
#: Configurations of large products, beside the tables' own.
TILES = [
    ProductConfig(features, tokens, step, warps, stages, splits=splits)
    for features, tokens, step, warps, stages in (
        (16, 16, 256, 1, 8),
        (32, 16, 256, 2, 6),
        (64, 16, 128, 4, 8),
        (64, 16, 256, 4, 6),
        (64, 32, 128, 4, 6),
        (64, 32, 256, 4, 5),
        (64, 64, 128, 4, 6),
        (64, 64, 256, 4, 4),
        (64, 128, 128, 4, 4),
        (64, 128, 128, 4, 6),
        (64, 256, 128, 4, 4),
        (128, 64, 128, 4, 4),
        (128, 128, 128, 4, 4),
        (128, 128, 128, 8, 4),
        (128, 128, 128, 8, 6),
        (128, 256, 128, 8, 3),
        (128, 256, 128, 8, 4),
        (256, 128, 128, 8, 4),
    )
    for splits in (1, 2, 4)
]


def matrix(rows: int, inputs: int, kind: str, run: int) -> ScaledMatrix:
    """Returns a random weight as large as a bf16 one in `kernel_cases`."""
    dtype, grouped = KINDS[kind]
    maximum = MAXIMA[dtype]
    values = random_tensor(rows, inputs, scale=maximum / 4).clamp(-maximum, maximum).to(dtype)
    shape = (rows // run, inputs // GROUP) if grouped else (rows, 1)
    scales = (0.5 + torch.rand(shape, device=DEVICE)) * 4 / maximum / inputs**0.5
    counters = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    if is_paired := grouped and run < GROUP:  # scales of blocks of the gate and of up
        runs = torch.arange(len(scales), device=DEVICE)
        scales = scales[runs // (GROUP // run) * (GROUP // run) + runs % 2].contiguous()
    return ScaledMatrix(values, scales, run if grouped else 1, counters, is_paired)


def scaled_cases(tune: bool) -> Iterator[Case]:
    """Products of activations that are quantized already, with gate or residual sum; and the
    kernels that quantize them."""
    for name, (features, inputs, _, gated) in SHAPES.items():
        lines = features * (1 + gated)
        copies = max(1, int(3e8 / (lines * inputs)))
        dense = [random_tensor(lines, inputs, scale=inputs**-0.5) for _ in range(copies)]
        for rows in ROWS:
            yield from dense_cases(f"{name} x{rows}", rows, features, inputs, gated, dense)
        del dense
        for kind in KINDS:
            weights = [matrix(lines, inputs, kind, 8 if gated else 128) for _ in range(copies)]
            for rows in FEW_ROWS:
                title = f"{name} x{rows}"
                yield from few_rows_gluon(title, kind, rows, features, inputs, gated, weights, tune)
            for rows in ROWS:
                title = f"{name} x{rows}"
                if rows <= MAX_ROWS:
                    yield from few_rows(title, kind, rows, features, inputs, gated, weights, tune)
                if rows > 1:
                    yield from many_rows(title, kind, rows, features, inputs, gated, weights, tune)
            del weights
    yield from quantize_cases()


def dense_cases(
    title: str, rows: int, features: int, inputs: int, gated: bool, weights: list[torch.Tensor]
) -> Iterator[Case]:
    x = random_tensor(rows, inputs)
    size = weights[0].nbytes + x.nbytes + rows * features * 2
    runs = [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
    flops = 2.0 * rows * len(weights[0]) * inputs
    yield Case("scaled", title, "bf16, product alone", runs, size, flops)


def few_rows(
    title: str, kind: str, rows: int, features: int, inputs: int, gated: bool,
    weights: list[ScaledMatrix], tune: bool,
) -> Iterator[Case]:  # fmt: skip
    x, norm = random_tensor(rows, inputs), random_tensor(inputs)
    residual = None if gated else random_tensor(rows, features)
    normed = {"norm_weight": norm} if rows == 1 and gated else {}
    grouped = weights[0].is_grouped
    table = few_rows_scaled_config(
        rows, features, inputs, normed=bool(normed), gated=gated, grouped=grouped
    )
    for config in [table, *(few_rows_variants(rows, table) if tune else [])]:

        def run(w: ScaledMatrix, config: FewRowsConfig = config) -> torch.Tensor:
            return few_rows_scaled(x, w, residual=residual, gated=gated, config=config, **normed)

        def check(run: Callable[..., torch.Tensor] = run) -> float:
            wide = None if residual is None else residual.double()
            given = {name: norm.double() for name in normed}
            expected = product_reference(
                x.double(), weights[0], residual=wide, gated=gated, **given
            )
            return float((run(weights[0]).double() - expected).norm() / expected.norm())

        variant = f"{kind} n{config.features} k{config.step} w{config.num_warps}"
        yield Case(
            "scaled", title, f"{variant} s{config.num_stages}",
            [lambda w=w, run=run: run(w) for w in weights], nbytes(weights[0], x, features),
            check=check,
        )  # fmt: skip


def few_rows_gluon(
    title: str, kind: str, rows: int, features: int, inputs: int, gated: bool,
    weights: list[ScaledMatrix], tune: bool,
) -> Iterator[Case]:  # fmt: skip
    """Products of few rows: the Gluon kernels and the table's kernel with programmatic dependent
    launch, beside `few_rows_scaled`."""
    x, norm = random_tensor(rows, inputs), random_tensor(inputs)
    if not few_rows_kernel.supports(x, weights[0]):
        return
    residual = None if gated else random_tensor(rows, features)
    normed = {"norm_weight": norm} if gated else {}
    wide = None if residual is None else residual.double()
    given = {name: norm.double() for name in normed}
    table = few_rows_float8_config(
        rows, len(weights[0].values), inputs, grouped=weights[0].is_grouped
    )
    others = [config for config in FEW_ROWS_CONFIGS if tune and config != table]
    options = {"residual": residual, "gated": gated, **normed}
    size = nbytes(weights[0], x, features)

    def error(out: torch.Tensor) -> float:
        expected = product_reference(x.double(), weights[0], residual=wide, gated=gated, **given)
        return float((out.double() - expected).norm() / expected.norm())

    for config in [table, *others]:
        variant = f"{kind} Gluon n{config.features} w{config.num_warps} d{config.depth}"
        for pdl in (False, True) if config == table or rows == 1 else (False,):

            def run(
                w: ScaledMatrix, config: FewRowsFloat8Config = config, pdl: bool = pdl
            ) -> torch.Tensor:
                return few_rows_float8(x, w, config=config, pdl=pdl, **options)

            yield Case(
                "scaled", title, f"{variant} p{config.programs}{' pdl' * pdl}",
                [lambda w=w, run=run: run(w) for w in weights], size,
                check=lambda run=run: error(run(weights[0])),
            )  # fmt: skip
    runs = [lambda w=w: few_rows_scaled(x, w, pdl=True, **options) for w in weights]
    yield Case("scaled", title, f"{kind} few_rows_scaled pdl", runs, size)


def few_rows_variants(rows: int, table: FewRowsConfig) -> Iterator[FewRowsConfig]:
    """Yields other configurations for few rows."""
    if rows > 1:
        return
    for features in (1, 2, 4, 8):
        for warps in (2, 4, 8):
            for step in (2048, 4096):
                config = FewRowsConfig(features, step, warps, 1)
                if config != table:
                    yield config


def many_rows(
    title: str, kind: str, rows: int, features: int, inputs: int, gated: bool,
    weights: list[ScaledMatrix], tune: bool,
) -> Iterator[Case]:  # fmt: skip
    dtype, grouped = KINDS[kind]
    x = quantize(random_tensor(rows, inputs), InputFormat(dtype, grouped))
    residual = None if gated else random_tensor(rows, features)
    last = slice(max(0, rows - CHECKED), rows)
    size, flops = nbytes(weights[0], x.values, features), 2.0 * rows * len(weights[0].values)
    case = Case("scaled", title, "", [], size, flops * inputs, rate_factor=2.0)

    def error(out: torch.Tensor) -> float:
        few = ScaledInputs(x.values[last], x.scales[last])
        wide = None if residual is None else residual[last]
        expected = product_reference(few, weights[0], residual=wide, gated=gated)
        return float((out[last].double() - expected).norm() / expected.norm())

    table = product_config(rows, len(weights[0].values), inputs, grouped=grouped)
    exact = [replace(table, exact_sums=True)] if kind == "fp8" else []
    for config in [table, *exact, *(tiles_of(rows, len(weights[0].values) // 64) if tune else [])]:

        def run(w: ScaledMatrix, config: ProductConfig = config) -> torch.Tensor:
            return scaled_product(x, w, BF16, residual=residual, gated=gated, config=config)

        variant = f"{kind} n{config.features} t{config.tokens} k{config.step} w{config.num_warps}"
        variant += f" s{config.num_stages} /{config.splits}"
        yield replace(
            case, variant=f"{variant}{' exact' * config.exact_sums}",
            runs=[lambda w=w, run=run: run(w) for w in weights],
            check=lambda run=run: error(run(weights[0])),
        )  # fmt: skip
    yield from hopper_variants(case, kind, x, weights, residual, gated, error)
    if kind != "fp8":
        return

    def apart(w: ScaledMatrix) -> torch.Tensor:
        product = cublas_product(x, w)
        return gated_activation(product) if gated else product.add_(residual)

    yield replace(
        case, variant="fp8 cuBLASLt, then the rest", runs=[lambda w=w: apart(w) for w in weights],
        check=lambda: error(apart(weights[0])),
    )  # fmt: skip
    yield replace(
        case, variant="fp8 cuBLASLt alone", runs=[lambda w=w: cublas_product(x, w) for w in weights]
    )


def hopper_variants(
    case: Case, kind: str, x: ScaledInputs, weights: list[ScaledMatrix],
    residual: torch.Tensor | None, gated: bool, error: Callable[[torch.Tensor], float],
) -> Iterator[Case]:  # fmt: skip
    """The products in Gluon, for 64 rows and more; products with tokens as rows from 16 on."""
    if not supports(x, weights[0], BF16):
        return
    if len(x) >= 16 and block_hopper.supports(x, weights[0], BF16):
        yield from block_variants(case, x, weights, residual, gated, error)
    if len(x) < 64:
        return
    for config in CONFIGS[gated, weights[0].is_grouped]:

        def run(w: ScaledMatrix, config: HopperConfig = config) -> torch.Tensor:
            return hopper_product(x, w, BF16, residual=residual, gated=gated, config=config)

        yield replace(
            case, variant=f"{kind} Gluon c{config.consumers} t{config.tokens} s{config.stages}",
            runs=[lambda w=w, run=run: run(w) for w in weights],
            check=lambda run=run: error(run(weights[0])),
        )  # fmt: skip


def block_variants(
    case: Case, x: ScaledInputs, weights: list[ScaledMatrix], residual: torch.Tensor | None,
    gated: bool, error: Callable[[torch.Tensor], float],
) -> Iterator[Case]:  # fmt: skip
    """The products with scales of blocks and tokens as rows; tiles of twice the tokens or more are
    left out."""
    for config in BLOCK_CONFIGS:
        if config.tokens >= 2 * max(64, len(x)) or not config.allows(gated=gated):
            continue

        def run(w: ScaledMatrix, config: BlockConfig = config) -> torch.Tensor:
            return block_hopper.block_product(
                x, w, BF16, residual=residual, gated=gated, config=config
            )

        yield replace(
            case,
            variant=f"blocks rows c{config.consumers} t{config.tokens} n{config.lines}",
            runs=[lambda w=w, run=run: run(w) for w in weights],
            check=lambda run=run: error(run(weights[0])),
        )


def tiles_of(rows: int, tiles: int) -> Iterator[ProductConfig]:
    """Yields the configurations to try for a number of rows; `tiles`: of 64 weight rows."""
    tokens = min(128, max(16, rows))
    splits = 1 if tiles > 132 else 4 if rows <= 128 else 2 if rows <= 256 else 1
    for tile in TILES:
        if tokens <= tile.tokens <= max(16, rows) and tile.splits <= splits:
            yield tile


def nbytes(weight: ScaledMatrix, x: torch.Tensor, features: int) -> float:
    """Returns the bytes that a product has to read and write."""
    return weight.values.nbytes + weight.scales.nbytes + x.nbytes + len(x) * features * 2


def quantize_cases() -> Iterator[Case]:
    """Activations quantized after a norm, and alone."""
    for rows in (32, 256, 8192):
        for kind, (dtype, grouped) in KINDS.items():
            format = InputFormat(dtype, grouped)
            for before, width in (("norm", 4096), ("", 12288)):
                x = random_tensor(rows, width)
                given = {"norm_weight": random_tensor(width)} if before == "norm" else {}

                def run(x=x, given=given, format=format) -> ScaledInputs:  # type: ignore[no-untyped-def]
                    return quantize(x, format, **given)

                title = f"quantize {width} x{rows}"
                size = x.nbytes + rows * width
                yield Case("scaled", title, f"{kind} {before or 'alone'}", [run], size)

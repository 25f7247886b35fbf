"""Products of two to 128 rows for `bench_kernels.py`: each way by itself, and chains of a decode
step's products and norms, where the end of each kernel overlaps with the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from aioinfer.kernels import gated_product as gated_kernel
from aioinfer.kernels.activation import gated_activation
from aioinfer.kernels.gated_product import gated_product, gated_product_reference
from aioinfer.kernels.linear import MAX_ROWS, skinny_linear
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.streamed_product import StreamWorkspace, streamed_product
from aioinfer.kernels.streamed_tiles import (
    StreamConfig,
    Tiling,
    configs,
    estimated_time,
    padded_rows,
    stream_config,
    tiling,
)

from benchlib.kernel_cases import DEVICE, LINEARS, Case, random_tensor

ROWS = (2, 8, 16, 32, 64, 128)
SHAPES = {name: shape for name, shape in LINEARS.items() if name.startswith("8B")}
#: Layers of a chain: 3.1 GB of weights.
LAYERS = 8
#: What `layers.formats.dense` takes `skinny_linear` for without the streamed product.
SKINNY_ROWS = 8
Product = Callable[[torch.Tensor], object]


@contextmanager
def cublaslt() -> Iterator[None]:
    """Lets torch multiply through cuBLASLt, as graphs of decode steps do."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def few_cases(tune: bool) -> Iterator[Case]:
    """Products by themselves, then chains."""
    workspace = StreamWorkspace.create(torch.device(DEVICE))
    with cublaslt():
        for name, (features, inputs, _, gated) in SHAPES.items():
            lines = features * (1 + gated)
            copies = max(1, int(3e8 / (lines * inputs * 2)))
            weights = [random_tensor(lines, inputs, scale=inputs**-0.5) for _ in range(copies)]
            for rows in ROWS:
                yield from product_cases(f"{name} x{rows}", rows, gated, weights, workspace, tune)
            del weights
        yield from chain_cases(workspace, tune)


def product_cases(
    title: str, rows: int, gated: bool, weights: list[torch.Tensor], workspace: StreamWorkspace,
    tune: bool,
) -> Iterator[Case]:  # fmt: skip
    """All ways to compute one product, with a residual sum where it is as wide as the stream."""
    lines, inputs = weights[0].shape
    features = lines // 2 if gated else lines
    x, out = random_tensor(rows, inputs), random_tensor(rows, features)
    residual = random_tensor(rows, features) if features == 4096 else None
    size = weights[0].nbytes + x.nbytes + out.nbytes
    case = Case("few", title, "", [], size, 2.0 * rows * lines * inputs)

    def error(product: Product) -> float:
        wide = x.double(), weights[0].double()
        expected = gated_product_reference(*wide) if gated else wide[0] @ wide[1].T
        expected += 0 if residual is None else residual.double()
        product(weights[0])
        return float((out.double() - expected).norm() / expected.norm())

    def make(variant: str, product: Product) -> Case:
        runs = [partial(product, weight) for weight in weights]
        return replace(case, variant=variant, runs=runs, check=partial(error, product))

    yield make("cuBLASLt", partial(with_cublas, x, out, residual, gated))
    if rows <= MAX_ROWS:
        for pdl in (False, True):
            given = {"residual": residual, "gated": gated, "out": out, "pdl": pdl}
            yield make("skinny_linear" + " pdl" * pdl, partial(skinny_linear, x, **given))
    if gated:
        for pdl in (False, True):
            yield make("gated_product" + " pdl" * pdl, partial(gated_product, x, out=out, pdl=pdl))
    for variant, (config, spans) in stream_configs(rows, lines, inputs, tune).items():
        for pdl in (False, True):
            given = {"residual": residual, "gated": gated, "out": out, "pdl": pdl}
            given |= {"config": config, "spans": spans}

            def streamed(weight: torch.Tensor, given: dict[str, object] = given) -> object:
                return streamed_product(x, weight, workspace, **given)

            yield make(variant + " pdl" * pdl, streamed)


def with_cublas(
    x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, gated: bool,
    weight: torch.Tensor,
) -> None:  # fmt: skip
    """The product as `layers.formats.dense` computes it without kernels of our own."""
    if residual is not None:
        torch.addmm(residual, x, weight.t(), out=out)
    elif gated:
        gated_activation(torch.mm(x, weight.t()), out=out)
    else:
        torch.mm(x, weight.t(), out=out)


def stream_configs(
    rows: int, lines: int, inputs: int, tune: bool
) -> dict[str, tuple[StreamConfig, Tiling]]:
    """Returns the selected configuration and its spans and, to tune, all others, the selected one
    with fewer stages, and each with as many programs as there can be, or with whole tiles."""
    steps = inputs // 64
    best = stream_config(rows, lines, steps, processors())
    found = [best]
    if tune:
        found += [config for config in configs(padded_rows(rows)) if config != best]
        found += [replace(best, stages=best.stages // 2)] if best.stages >= 8 else []
    named = {}
    for c in found:
        spans = tiling(c, lines, steps, processors())
        most = min(spans.units, processors() * c.programs)
        others = (most, 128 * c.programs, spans.tiles, spans.tiles // 2) if tune else ()
        wanted = [n for n in others if most // 2 < n <= most]
        for programs in dict.fromkeys([spans.programs, *wanted]):
            name = f"stream c{c.consumers}x{c.consumer_rows} s{c.stages} b{c.blocks} p{programs}"
            named[name] = c, replace(spans, programs=programs)
    return named


def processors() -> int:
    """Returns the multiprocessors of the GPU."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count


def chain_cases(workspace: StreamWorkspace, tune: bool) -> Iterator[Case]:
    """Layers of a decode step without attention: qkv, output and sum, norm, gate and up, down and
    sum, norm. All with dependent launch, where kernels have it."""
    layers = [
        [
            random_tensor(features * (1 + gated), inputs, scale=inputs**-0.5)
            for name, (features, inputs, _, gated) in SHAPES.items()
            if name != "8B lm_head"
        ]
        for _ in range(LAYERS)
    ]
    size = sum(weight.nbytes for weights in layers for weight in weights)
    for rows in ROWS:
        first, state = random_tensor(rows, 4096), random_tensor(rows, 4096)
        norm = torch.ones_like(first[0])

        def run(
            multiply: Callable[..., torch.Tensor], early: bool = False,
            first: torch.Tensor = first, state: torch.Tensor = state, norm: torch.Tensor = norm,
        ) -> torch.Tensor:  # fmt: skip
            state.copy_(first)
            normed = rms_norm(state, norm, 1e-6, pdl=True)  # behind a copy: not early
            for qkv, o, gate_up, down in layers:
                queries = multiply(normed, qkv)[:, :4096]
                multiply(queries, o, residual=state)
                normed = rms_norm(state, norm, 1e-6, pdl=True, early=early)
                multiply(multiply(normed, gate_up, gated=True), down, residual=state)
                normed = rms_norm(state, norm, 1e-6, pdl=True, early=early)
            return normed

        ways = {"before": before} | streamed_ways(rows, workspace, tune)

        def error(
            way: Callable[..., torch.Tensor], run: Callable[..., torch.Tensor] = run
        ) -> float:
            expected = run(before).double()
            return float((run(way).double() - expected).norm() / expected.norm())

        for variant, way in ways.items():
            yield Case(
                "few", f"8B {LAYERS} layers x{rows}", variant, [partial(run, way)], size,
                check=partial(error, way), repeats=2,
            )  # fmt: skip


def before(
    x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """A product without the streamed kernel, a residual sum in place."""
    rows = len(x)
    if residual is not None and rows <= SKINNY_ROWS:
        return skinny_linear(x, weight, residual=residual, out=residual, pdl=True)
    if residual is not None:
        return residual.addmm_(x, weight.t())
    if not gated:
        return torch.nn.functional.linear(x, weight)
    if gated_kernel.use_fused(rows, weight):
        return gated_product(x, weight, pdl=True)
    return gated_activation(torch.nn.functional.linear(x, weight), pdl=True)


def streamed_ways(
    rows: int, workspace: StreamWorkspace, tune: bool
) -> dict[str, Callable[..., torch.Tensor]]:
    """Returns the streamed kernel with the selected configurations and, to tune, with the best of
    those alike in one respect."""

    def way(is_allowed: Callable[[StreamConfig], bool]) -> Callable[..., torch.Tensor]:
        allowed = [config for config in configs(padded_rows(rows)) if is_allowed(config)]

        def multiply(
            x: torch.Tensor, weight: torch.Tensor, *, residual: torch.Tensor | None = None,
            gated: bool = False,
        ) -> torch.Tensor:  # fmt: skip
            lines, steps = len(weight), weight.shape[1] // 64
            config = min(allowed, key=lambda one: estimated_time(one, lines, steps, processors()))
            return streamed_product(
                x, weight, workspace, residual=residual, out=residual, gated=gated, pdl=True,
                config=config
            )  # fmt: skip

        return multiply

    found = {"streamed": way(lambda config: True)}
    if tune:
        kinds = sorted({(c.tile_rows, c.blocks, c.programs) for c in configs(padded_rows(rows))})
        for kind in kinds:
            found["stream rows {} b{} p{}".format(*kind)] = way(
                lambda c, kind=kind: (c.tile_rows, c.blocks, c.programs) == kind
            )
    return found

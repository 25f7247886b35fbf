"""Weights of one byte that stay so, computed with by our kernels and cuBLASLt.

One row is multiplied as it is, in 16 bits, in one launch with the norm before it. More are
quantized first, where the scheme says so, in the launch of the norm before the product, in the
launch of the all-reduce with a norm, or in a launch of its own: converting weights in registers
takes longer, also for two rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.block_hopper import block_product, has_blocks, select_config
from aioinfer.kernels.block_hopper import supports as block_supports
from aioinfer.kernels.few_rows_dense import MAX_ROWS
from aioinfer.kernels.few_rows_float8 import few_rows_float8, supports
from aioinfer.kernels.few_rows_scaled import ScaledMatrix, few_rows_scaled
from aioinfer.kernels.quantize import (
    GROUP,
    MAX_CHANNELS,
    InputFormat,
    ScaledInputs,
    quantize,
)
from aioinfer.kernels.scaled_hopper import hopper_product
from aioinfer.kernels.scaled_hopper import supports as hopper_supports
from aioinfer.kernels.scaled_product import (
    ALIGNMENT,
    CONFIGS,
    CUBLAS_ROWS,
    MAX_PROGRAMS,
    cublas_product,
    product_config,
    scaled_product,
    use_cublas,
)
from aioinfer.kernels.scaled_tiles import BlockConfig, close_configs, hopper_rows
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.scaled import DTYPES, ScaledWeight
from aioinfer.layers.formats.schemes import ScaledScheme
from aioinfer.layers.kernel_choices import (
    CUBLAS,
    Candidate,
    Operation,
    Product,
    ProductChoices,
)
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import Shard, Source

#: Tiles that only more rows than these select are compiled when they are first used.
WARM_UP_ROWS = 4096

_HOPPER, _PRODUCT = "scaled_hopper", "scaled_product"

Inputs: TypeAlias = "torch.Tensor | ScaledInputs"


class KernelScaledWeight(ScaledWeight):
    """A weight of one byte on a GPU: a `TimedWeight`.

    Scales of blocks are kept for the longest run of rows in which they are the same: 128 where
    blocks are whole, 8 where rows of gate and up are interleaved (1/256 of the weight's bytes), 1
    where a rank's rows begin within a block.
    """

    def __init__(
        self, sources: Sequence[Source], columns: Shard, backend: Backend, scheme: ScaledScheme
    ):
        super().__init__(sources, columns, backend, scheme)
        self._pdl = backend.pdl
        self._dtype = backend.dtype
        self._format: InputFormat | None = None
        self._loaded: ScaledMatrix | None = None
        self._all_choices, self._device = backend.choices, backend.device
        self._choices: dict[Operation, ProductChoices] = {}

    @staticmethod
    def supports(columns: Shard, backend: Backend, scheme: ScaledScheme) -> bool:
        """Whether the kernels take such weights: float8 needs compute capability 8.9, blocks must
        have 128 inputs and begin with the rank's, and TMA reads whole 16 bytes."""
        device, is_fp8 = backend.device, scheme.kind == "fp8"
        if is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return False
        if scheme.block is not None and (scheme.block[1] != GROUP or columns.start % GROUP):
            return False
        return columns.size % ALIGNMENT == 0 and columns.size <= MAX_CHANNELS

    def finalize(self) -> None:
        """Puts the rows in their order and gathers their scales."""
        values, rows = self.values, self.scale_rows()
        if self._row_order is not None:
            order = self._row_order.to(values.device)
            values = values.view(torch.uint8)[order].view(values.dtype)
            rows = rows[order]
        run = _common_run(rows)
        scales = self.scales[rows[::run]].view(-(-self._out // run), -1).contiguous()
        counters = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=values.device)
        self._loaded = ScaledMatrix(values, scales, run, counters, _is_paired(rows, run))
        if self._scheme.inputs != "none":
            static = self.input_scale
            is_grouped = self._scheme.block is not None and static is None
            self._format = InputFormat(DTYPES[self._scheme.kind], is_grouped, static)
        self.release()

    @property
    def held_bytes(self) -> int:
        """See `WeightFormat.held_bytes`."""
        return self.matrix.values.nbytes + self.matrix.scales.nbytes

    @property
    def matrix(self) -> ScaledMatrix:
        """The weight, after `finalize`."""
        assert self._loaded is not None, "finalize was not called"
        return self._loaded

    def input_format(self, rows: int) -> InputFormat | None:
        """See `WeightFormat.input_format`."""
        return self._format if rows > 1 else None

    def warm_up_rows(self) -> Sequence[int]:
        """See `WeightFormat.warm_up_rows`."""
        bounds = [bound for bound, *_ in CONFIGS if bound is not None]
        firsts = {1, 2, MAX_ROWS // 2 + 1, CUBLAS_ROWS, *self._hopper_rows()}
        return sorted(firsts | {bound + 1 for bound in bounds})

    def _hopper_rows(self) -> list[int]:
        values = self.matrix.values
        if not values.is_cuda or torch.cuda.get_device_capability(values.device)[0] != 9:
            return []
        programs = torch.cuda.get_device_properties(values.device).multi_processor_count
        return hopper_rows(
            *values.shape, programs, WARM_UP_ROWS, grouped=self.matrix.is_grouped,
            blocks=has_blocks(self.matrix),
        )  # fmt: skip

    # ---------------------------------------------------------------- which kernel

    def candidates(self, operation: Operation, rows: int) -> Sequence[Candidate]:
        """See `TimedWeight.candidates`: the candidates for quantized inputs."""
        out, inputs = self.matrix.values.shape

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=self._dtype, device=self._device)

        x = self._quantized(empty(rows, inputs))
        if isinstance(x, torch.Tensor):
            return ()
        total = empty(rows, out) if operation in ("partial", "residual") else None
        residual = total if operation == "residual" else None
        if operation == "biased":
            residual = empty(out).expand(rows, -1)
        options = {"residual": residual, "gated": operation == "gated", "out": total}
        default = self._default(x, **options)
        return [default, *(other for other in self._all(x, **options) if other != default)]

    def _all(self, x: ScaledInputs, **options: Any) -> Iterator[Candidate]:
        """Yields all candidates; options as in `scaled_product`."""
        is_plain = options["residual"] is None and not options["gated"]
        if is_plain and use_cublas(x, self.matrix, self._dtype, min_rows=2):
            yield CUBLAS
        yield self._triton(x)
        if self._is_for_hopper(x, options["residual"], options["out"]):
            programs = torch.cuda.get_device_properties(x.values.device).multi_processor_count
            for config in close_configs(
                len(x), *self.matrix.values.shape, programs, gated=options["gated"],
                grouped=self.matrix.is_grouped, blocks=block_supports(x, self.matrix, self._dtype),
            ):  # fmt: skip
                yield Candidate(_HOPPER, config)

    def _default(self, x: Inputs, **options: Any) -> Candidate:
        """Returns the candidate for a product where nothing was timed; options as in
        `scaled_product`."""
        is_plain = options["residual"] is None and not options["gated"]
        if is_plain and use_cublas(x, self.matrix, self._dtype):
            return CUBLAS
        config = select_config(x, self.matrix, self._dtype, **options)
        return self._triton(x) if config is None else Candidate(_HOPPER, config)

    def _triton(self, x: Inputs) -> Candidate:
        """Returns `scaled_product` in the configuration that its tables have for x."""
        config = None
        if isinstance(x, ScaledInputs):
            lines, inputs = self.matrix.values.shape
            config = product_config(len(x), lines, inputs, grouped=self.matrix.is_grouped)
        return Candidate(_PRODUCT, config)

    def _is_for_hopper(self, x: Inputs, *results: torch.Tensor | None) -> bool:
        """Whether `hopper_product` takes x, and a residual and a result if they are given."""
        return (
            isinstance(x, ScaledInputs)
            and hopper_supports(x, self.matrix, self._dtype)
            and all(
                each is None or (each.stride(0) > 0 and each.data_ptr() % 16 == 0)
                for each in results
            )
        )

    def _select(self, operation: Operation, x: Inputs, **options: Any) -> Candidate:
        """Returns the candidate that computes a product; options as in `scaled_product`."""
        if not isinstance(x, ScaledInputs):
            return self._default(x, **options)
        choices = self._choices.get(operation)
        if choices is None:
            (out, inputs), dtype = self.matrix.values.shape, str(self._dtype)
            scales = "blocks" if self.matrix.is_grouped else "channels"
            format = f"{self._scheme.kind} {scales}"
            product = Product(operation, format, out, inputs, dtype.removeprefix("torch."))
            choices = self._choices[operation] = self._all_choices.register(product, self)
        chosen = choices.find(len(x))
        if chosen is None or (
            chosen.kernel == _HOPPER
            and not self._is_for_hopper(x, options["residual"], options["out"])
        ):
            return self._default(x, **options)
        return chosen

    # ---------------------------------------------------------------- products

    def multiply(
        self, x: Inputs, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        if bias is not None:
            return self._multiply("biased", x, bias.expand(len(x), -1), out)
        return self._multiply("plain" if out is None else "partial", x, None, out)

    def fuses_norm(self, rows: int) -> bool:
        """See `WeightFormat.fuses_norm`. For many rows one launch norms and quantizes."""
        return rows == 1 or self.input_format(rows) is not None

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply_normed`."""
        if len(x) == 1:
            return _multiply_few(
                x, self.matrix, norm_weight=norm.weight, eps=norm.eps, out=out, pdl=self._pdl
            )
        return self.multiply(self._normed(x, norm), out=out)

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """See `WeightFormat.multiply_gated`."""
        if len(x) == 1 and norm is not None:
            options = {"norm_weight": norm.weight, "eps": norm.eps}
            return _multiply_few(x, self.matrix, gated=True, pdl=self._pdl, **options)
        inputs = self._quantized(x) if norm is None else self._normed(x, norm)
        if isinstance(inputs, torch.Tensor) and len(x) <= MAX_ROWS:
            return _multiply_few(inputs, self.matrix, gated=True, pdl=self._pdl)
        return self._tiled_product("gated", inputs, gated=True)

    def warm_up_gated(self) -> None:
        """Does nothing: `warm_up_rows` has all configurations."""

    def add_product(self, x: Inputs, total: torch.Tensor) -> None:
        """See `WeightFormat.add_product`."""
        self._multiply("residual", x, total, total)

    def _multiply(
        self,
        operation: Operation,
        x: Inputs,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns x W^T + residual [T, out]."""
        inputs = self._quantized(x)
        if isinstance(inputs, torch.Tensor) and len(inputs) <= MAX_ROWS:
            return _multiply_few(inputs, self.matrix, residual=residual, out=out, pdl=self._pdl)
        return self._tiled_product(operation, inputs, residual, out)

    def _tiled_product(
        self,
        operation: Operation,
        x: Inputs,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """Returns the product of many rows, by the kernel that is the faster one."""
        options = {"residual": residual, "out": out, "gated": gated}
        selected = self._select(operation, x, **options)
        if selected == CUBLAS and isinstance(x, ScaledInputs):
            return cublas_product(x, self.matrix, out)
        options |= {"pdl": self._pdl, "config": selected.config}
        if selected.kernel == _HOPPER and isinstance(x, ScaledInputs):
            by_blocks = isinstance(selected.config, BlockConfig)
            product = block_product if by_blocks else hopper_product
            return product(x, self.matrix, self._dtype, **options)
        return scaled_product(x, self.matrix, self._dtype, **options)

    def _quantized(self, x: Inputs) -> Inputs:
        """Returns x as the product takes so many rows."""
        format = self.input_format(len(x))
        if isinstance(x, ScaledInputs) or format is None:
            return x
        return quantize(x, format, pdl=self._pdl)

    def _normed(self, x: torch.Tensor, norm: RMSNorm) -> Inputs:
        """Returns the norm of x, as the product takes so many rows."""
        format = self.input_format(len(x))
        if format is None:
            return norm(x)
        return quantize(x, format, norm_weight=norm.weight, eps=norm.eps, pdl=self._pdl)


def use_few_rows(x: torch.Tensor, weight: ScaledMatrix, *, gated: bool = False) -> bool:
    """Whether `few_rows_float8` multiplies instead of `few_rows_scaled`: one row, on Hopper, of
    weights that it was measured to be faster with on an H200: weights of gate and up, and weights
    of many inputs with a scale for each output feature."""
    is_long = not weight.is_grouped and x.shape[1] > 8192
    return len(x) == 1 and (gated or is_long) and supports(x, weight)


def _multiply_few(x: torch.Tensor, weight: ScaledMatrix, **options: Any) -> torch.Tensor:
    """Returns the product of up to `MAX_ROWS` unquantized rows; see `few_rows_scaled`."""
    gated = options.get("gated", False)
    product = few_rows_float8 if use_few_rows(x, weight, gated=gated) else few_rows_scaled
    return product(x, weight, **options)


def _common_run(rows: torch.Tensor) -> int:
    """Returns of how many neighbouring output features all have the same scales, given the row of
    scales of each (int64 [out])."""
    for run in (GROUP, GATE_RUN):
        if torch.equal(rows[::run].repeat_interleave(run)[: len(rows)], rows):
            return run
    return 1


def _is_paired(rows: torch.Tensor, run: int) -> bool:
    """Returns `ScaledMatrix.is_paired` of interleaved output features, given as for `_common_run`:
    whether runs of the gate share scales within `GROUP` features, and so do runs of up."""
    if run != GATE_RUN or len(rows) % (2 * run):
        return False
    pairs = rows[::run].view(-1, 2)
    in_group = GROUP // (2 * run)
    first = torch.arange(len(pairs), device=rows.device) // in_group * in_group
    return torch.equal(pairs, pairs[first])

"""Weights of one byte that stay so, computed with by our kernels and cuBLASLt.

One row is multiplied as it is, in 16 bits, in one launch with the norm before it. More are
quantized first, where the scheme says so, in the launch of the norm before the product, in the
launch of the all-reduce with a norm, or in a launch of its own: converting weights in registers
takes longer, also for two rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

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
from aioinfer.layers.formats.base import Epilogue
from aioinfer.layers.formats.kernel_dense import fused_arguments
from aioinfer.layers.formats.scaled import DTYPES, ScaledWeight
from aioinfer.layers.formats.schemes import ScaledScheme
from aioinfer.layers.kernel_choices import Candidate, Operation
from aioinfer.layers.shards import Shard, Source

#: Tiles that only more rows than these select are compiled when they are first used.
WARM_UP_ROWS = 4096

#: Kernels, by the names of candidates: `_FEW_ROWS` is `kernels.few_rows_scaled`, or
#: `few_rows_float8`, and `_HOPPER` is `kernels.scaled_hopper`, or `block_hopper`.
_FEW_ROWS, _HOPPER, _PRODUCT = "few_rows", "scaled_hopper", "scaled_product"
_CUBLAS = Candidate("cublas", fuses=frozenset({"out"}))
_FUSES = frozenset({"bias", "gate", "add_to", "out"})

Inputs: TypeAlias = "torch.Tensor | ScaledInputs"


class KernelScaledWeight(ScaledWeight):
    """A weight of one byte on a GPU.

    Scales of blocks are kept for the longest run of rows in which they are the same: 128 where
    blocks are whole, 8 where rows of gate and up are interleaved (1/256 of the weight's bytes), 1
    where a rank's rows begin within a block.
    """

    def __init__(
        self, sources: Sequence[Source], columns: Shard, backend: Backend, scheme: ScaledScheme
    ):
        super().__init__(sources, columns, backend, scheme)
        self._format: InputFormat | None = None
        self._loaded: ScaledMatrix | None = None

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
        """See `Weight.finalize`. Gathers the scales of the rows."""
        values, rows = self.values, self.scale_rows()
        if self.row_order is not None:
            order = self.row_order.to(values.device)
            stored = values.view(torch.uint8)
            stored.copy_(stored[order])
            rows = rows[order]
        run = _common_run(rows)
        scales = self.scales[rows[::run]].view(-(-self._out // run), -1).contiguous()
        if self._loaded is not None:  # again, in the same memory
            self._loaded.scales.copy_(scales)
            self.release()
            return
        counters = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=values.device)
        self._loaded = ScaledMatrix(values, scales, run, counters, _is_paired(rows, run))
        if self._scheme.inputs != "none":
            static = self.input_scale
            is_grouped = self._scheme.block is not None and static is None
            self._format = InputFormat(DTYPES[self._scheme.kind], is_grouped, static)
        self.release()

    def drop(self) -> list[torch.Tensor]:
        """See `Droppable.drop`: the scales stay."""
        return [self.matrix.values]

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        self._make_room(None if self._loaded is None else self._loaded.values)

    @property
    def held_bytes(self) -> int:
        """See `Weight.held_bytes`."""
        return self.matrix.values.nbytes + self.matrix.scales.nbytes

    @property
    def matrix(self) -> ScaledMatrix:
        """The weight, after `finalize`."""
        assert self._loaded is not None, "finalize was not called"
        return self._loaded

    def input_format(self, rows: int) -> InputFormat | None:
        """See `Weight.input_format`."""
        return self._format if rows > 1 else None

    @property
    def format(self) -> str:
        """See `Weight.format`."""
        return f"{self._scheme.kind} {'blocks' if self.matrix.is_grouped else 'channels'}"

    def warm_up_cases(self, operation: Operation) -> Iterable[tuple[int, Candidate | None]]:
        """See `Weight.warm_up_cases`."""
        bounds = [bound for bound, *_ in CONFIGS if bound is not None]
        firsts = {1, 2, MAX_ROWS // 2 + 1, CUBLAS_ROWS, *self._hopper_rows()}
        return [(rows, None) for rows in sorted(firsts | {bound + 1 for bound in bounds})]

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

    def kernels(self, operation: Operation, x: Inputs, epilogue: Epilogue) -> Iterator[Candidate]:
        """See `Weight.kernels`. Quantized inputs have several candidates; others have the kernel
        for their number of rows, which selects its own configuration."""
        if not isinstance(x, ScaledInputs):
            few = Candidate(_FEW_ROWS, fuses=_FUSES | {"norm"})
            yield few if len(x) <= MAX_ROWS else Candidate(_PRODUCT, fuses=_FUSES)
            return
        matrix, dtype = self.matrix, self._backend.dtype
        residual, gated = epilogue.added(len(x)), epilogue.gate is not None
        is_plain = residual is None and not gated
        if is_plain and use_cublas(x, matrix, dtype):
            yield _CUBLAS
        options = {"residual": residual, "gated": gated, "out": epilogue.out}
        selected = select_config(x, matrix, dtype, **options)
        if selected is not None:
            yield Candidate(_HOPPER, selected, _FUSES)
        lines, inputs = matrix.values.shape
        config = product_config(len(x), lines, inputs, grouped=matrix.is_grouped)
        yield Candidate(_PRODUCT, config, _FUSES)
        if is_plain and use_cublas(x, matrix, dtype, min_rows=2):
            yield _CUBLAS
        if hopper_supports(x, matrix, dtype):
            programs = torch.cuda.get_device_properties(x.values.device).multi_processor_count
            for close in close_configs(
                len(x), lines, inputs, programs, gated=gated, grouped=matrix.is_grouped,
                blocks=block_supports(x, matrix, dtype),
            ):  # fmt: skip
                yield Candidate(_HOPPER, close, _FUSES)

    def takes(self, candidate: Candidate, x: Inputs, epilogue: Epilogue) -> bool:
        """See `Weight.takes`."""
        return candidate.kernel != _HOPPER or (
            isinstance(x, ScaledInputs)
            and hopper_supports(x, self.matrix, self._backend.dtype)
            and all(
                each is None or (each.stride(0) > 0 and each.data_ptr() % 16 == 0)
                for each in (epilogue.added(len(x)), epilogue.out)
            )
        )

    def launch(self, candidate: Candidate, x: Inputs, epilogue: Epilogue) -> torch.Tensor:
        """See `Weight.launch`."""
        matrix, dtype = self.matrix, self._backend.dtype
        options = fused_arguments(epilogue, len(x)) | {"pdl": self._backend.pdl}
        if not isinstance(x, ScaledInputs) and candidate.kernel == _FEW_ROWS:
            is_float8 = use_few_rows(x, matrix, gated=options["gated"])
            return (few_rows_float8 if is_float8 else few_rows_scaled)(x, matrix, **options)
        options["config"] = candidate.config
        if isinstance(x, ScaledInputs) and candidate.kernel == _HOPPER:
            by_blocks = isinstance(candidate.config, BlockConfig)
            return (block_product if by_blocks else hopper_product)(x, matrix, dtype, **options)
        if isinstance(x, ScaledInputs) and candidate == _CUBLAS:
            return cublas_product(x, matrix, epilogue.out)
        return scaled_product(x, matrix, dtype, **options)


def use_few_rows(x: torch.Tensor, weight: ScaledMatrix, *, gated: bool = False) -> bool:
    """Whether `few_rows_float8` multiplies instead of `few_rows_scaled`: one row, on Hopper, of
    weights that it was measured to be faster with on an H200: weights of gate and up, and weights
    of many inputs with a scale for each output feature."""
    is_long = not weight.is_grouped and x.shape[1] > 8192
    return len(x) == 1 and (gated or is_long) and supports(x, weight)


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

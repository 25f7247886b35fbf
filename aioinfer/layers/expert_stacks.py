"""The weights of all experts of a layer on a GPU: one tensor for each projection, unquantized, in
float8 or in four bits, as `kernels.expert_product` reads them.

An expert's checkpoint tensors are read by the weight formats (`layers.formats`), which know their
names, packing and shards; their memory is the place in the layer's tensor where the expert is to
lie, and `finalize` puts it into the kernels' order there, expert by expert. So there is no second
copy, but of one expert for a moment. Weights that the kernels do not read are dequantized into that
tensor.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from aioinfer.kernels.activation import GATE_RUN
from aioinfer.kernels.expert_arguments import SILU, Activation
from aioinfer.kernels.expert_weights import (
    BLOCK,
    MAX_SCALE,
    PARTS,
    ExpertWeights,
    PackedExperts,
    ScaledExperts,
    pack_floats,
    packed_shape,
)
from aioinfer.kernels.grouped_weight import MAX_RUN, pack_groups, supports_group
from aioinfer.kernels.quantize import GROUP, InputFormat
from aioinfer.kernels.scaled_product import ALIGNMENT
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats import make_weight
from aioinfer.layers.formats.base import Droppable, Weight
from aioinfer.layers.formats.dense import DenseWeight
from aioinfer.layers.formats.grouped import GroupedWeight
from aioinfer.layers.formats.mxfp4 import MXFP4Weight
from aioinfer.layers.formats.scaled import DTYPES, ScaledWeight
from aioinfer.layers.formats.schemes import (
    GroupScheme,
    MXFP4Scheme,
    Quantization,
    ScaledScheme,
    Scheme,
)
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard

_log = logging.getLogger(__name__)
#: The code of a scale of MXFP4 that is NaN.
_NAN_SCALE = 255


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """One projection of all experts that this rank has.

    Attributes:
        sources: of each expert: the checkpoint modules whose rows it holds, one after the other.
        columns: the input features that this rank has.
        order: int64, the row, in checkpoint order, at each place; None for the same order.
    """

    sources: Sequence[Sequence[Source]]
    columns: Shard
    order: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Output features of an expert."""
        return sum(source.rows.size for source in self.sources[0])


_Part = TypeVar("_Part", bound=Weight)


class ProjectionStack(Droppable, ABC, Generic[_Part]):
    """The weights of one projection of all experts of a layer that this rank has.

    Attributes:
        input_format: how activations of more than one token are quantized; None for as they are.
    """

    def __init__(self, shape: ProjectionShape, backend: Backend):
        self._shape, self._backend = shape, backend
        #: The weight of each expert, until all are in the kernels' order.
        self._parts: list[_Part] = []
        self._weight: ExpertWeights | None = None
        self.input_format: InputFormat | None = None

    @property
    def weight(self) -> ExpertWeights:
        """All experts, after `finalize`."""
        assert self._weight is not None, "finalize was not called"
        return self._weight

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go, before `finalize`."""
        for part in self._parts:
            yield from part.weight_shards()

    @abstractmethod
    def finalize(self) -> None:
        """Puts the loaded weights into the kernels' order."""

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        raise NotImplementedError

    def _reorder(self, weight: torch.Tensor) -> None:
        """Puts the rows of one expert's weight into their order, in place."""
        if self._shape.order is not None:
            weight.copy_(weight[self._shape.order.to(weight.device)])


class DenseStack(ProjectionStack[DenseWeight]):
    """Unquantized weights: [E, N, K]."""

    def __init__(self, shape: ProjectionShape, backend: Backend):
        super().__init__(shape, backend)
        size = len(shape.sources), shape.rows, shape.columns.size
        self._memory = torch.empty(size, dtype=backend.dtype, device=backend.device)
        self.begin_reload()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        shape, backend = self._shape, self._backend
        self._parts = [
            DenseWeight(sources, shape.columns, backend, memory)
            for sources, memory in zip(shape.sources, self._memory, strict=True)
        ]

    def drop(self) -> list[torch.Tensor]:
        """See `Droppable.drop`."""
        return [self._memory]

    def finalize(self) -> None:
        """See `ProjectionStack.finalize`."""
        self._parts = []
        for weight in self._memory:
            self._reorder(weight)
        self._weight = self._memory


class DequantizedStack(ProjectionStack[Weight]):
    """Quantized weights that the kernels do not read: dequantized when they are loaded."""

    def __init__(self, shape: ProjectionShape, backend: Backend, quantization: Quantization | None):
        super().__init__(shape, backend)
        self._quantization = quantization
        self._dequantized: torch.Tensor | None = None
        self.begin_reload()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        shape, plain = self._shape, replace(self._backend, has_kernels=False)
        self._parts = [
            make_weight(sources, shape.columns, plain, self._quantization)
            for sources in shape.sources
        ]

    def drop(self) -> list[torch.Tensor]:
        """See `Droppable.drop`."""
        return [] if self._dequantized is None else [self._dequantized]

    def finalize(self) -> None:
        """See `ProjectionStack.finalize`."""
        if self._dequantized is None:
            size = len(self._parts), self._shape.rows, self._shape.columns.size
            dtype, device = self._backend.dtype, self._backend.device
            self._dequantized = torch.empty(size, dtype=dtype, device=device)
        self._parts.reverse()
        for weight in self._dequantized:
            weight.copy_(self._parts.pop().dequantized())
            self._reorder(weight)
        self._weight = self._dequantized


class ScaledStack(ProjectionStack[ScaledWeight]):
    """Weights of one byte with scales for rows or blocks. Int8 weights are multiplied with
    activations that are not quantized."""

    def __init__(self, shape: ProjectionShape, backend: Backend, scheme: ScaledScheme):
        super().__init__(shape, backend)
        self._scheme = scheme
        size = len(shape.sources), shape.rows, shape.columns.size
        dtype = DTYPES[scheme.kind]
        self._values = torch.empty(size, dtype=dtype, device=backend.device)
        self._scales: torch.Tensor | None = None
        self.begin_reload()

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        shape, backend, scheme = self._shape, self._backend, self._scheme
        self._parts = [
            ScaledWeight(sources, shape.columns, backend, scheme, values)
            for sources, values in zip(shape.sources, self._values, strict=True)
        ]

    def drop(self) -> list[torch.Tensor]:
        """See `Droppable.drop`: the scales stay."""
        return [self._values]

    @staticmethod
    def supports(shape: ProjectionShape, backend: Backend, scheme: ScaledScheme) -> bool:
        """Whether the kernels read such weights: blocks must have 128 inputs and begin with the
        rank's, and rows begin at multiples of 16 bytes."""
        device, columns = backend.device, shape.columns
        is_fp8 = scheme.kind == "fp8"
        if is_fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return False
        if scheme.block is not None and (scheme.block[1] != GROUP or columns.start % GROUP):
            return False
        return columns.size % ALIGNMENT == 0

    def finalize(self) -> None:
        """See `ProjectionStack.finalize`. Scales are kept for the longest run of rows in which they
        are the same."""
        rows = self._parts[0].scale_rows()
        if self._shape.order is not None:
            rows = rows[self._shape.order.to(rows.device)]
        run = next(run for run in (GROUP, GATE_RUN, 1) if _is_run(rows, run))
        scales = torch.stack(
            [part.scales[rows[::run]].view(len(rows[::run]), -1) for part in self._parts]
        )
        self._scales = scales if self._scales is None else self._scales.copy_(scales)
        for values in self._values:
            self._reorder(values.view(torch.uint8))
        self._weight = ScaledExperts(self._values, self._scales, run)
        if self._scheme.inputs != "none" and self._scheme.kind == "fp8":
            static = None
            if self._scheme.inputs == "static":  # all experts of a token have the same inputs
                found = [part.input_scale for part in self._parts]
                static = torch.stack([scale for scale in found if scale is not None]).max()
            is_grouped = self._scheme.block is not None and static is None
            self.input_format = InputFormat(DTYPES[self._scheme.kind], is_grouped, static)
        self._parts = []


def _is_run(rows: torch.Tensor, run: int) -> bool:
    """Whether in each run of places the row of scales (int64 [N]) is the same."""
    return torch.equal(rows[::run].repeat_interleave(run)[: len(rows)], rows)


class IntegerStack(ProjectionStack[GroupedWeight]):
    """Weights of 4-bit integers in groups."""

    def __init__(self, shape: ProjectionShape, backend: Backend, scheme: GroupScheme):
        super().__init__(shape, backend)
        self._scheme = scheme
        self._run = _best_run(shape.columns.size, scheme.group_size)
        place = packed_shape(shape.rows, shape.columns.size, self._run)
        memory = len(shape.sources), *place
        self._words = torch.empty(memory, dtype=torch.int16, device=backend.device)
        self._parts = [
            GroupedWeight(sources, shape.columns, backend, scheme, memory=words)
            for sources, words in zip(shape.sources, self._words, strict=True)
        ]

    @staticmethod
    def supports(shape: ProjectionShape, backend: Backend, scheme: GroupScheme) -> bool:
        """Whether the kernels read such weights: in four bits, in the order of the inputs, and
        groups begin with the rank's."""
        size = scheme.group_size
        if scheme.bits != 4 or scheme.has_order or not supports_group(size):
            return False
        return size is None or shape.columns.start % size == 0

    def finalize(self) -> None:
        """See `ProjectionStack.finalize`."""
        scheme, shape, scales = self._scheme, self._shape, []
        group = scheme.group_size
        self._parts.reverse()
        for words in self._words:
            integers, kept, zeros = self._parts.pop().joined()
            if shape.order is not None:
                order = shape.order.to(integers.device)
                integers, kept = integers[order], kept[order]
                zeros = None if zeros is None else zeros[order]
            packed = pack_groups(integers, kept, zeros, scheme.bits, group, self._run)
            words.copy_(packed.integers)
            scales.append(packed.scales)
            group_size = packed.group
        self._weight = PackedExperts(
            self._words, torch.stack(scales), shape.rows, shape.columns.size, group_size,
            scheme.has_zeros,
        )  # fmt: skip


def _best_run(inputs: int, group: int | None) -> int:
    """Returns the longest run that pads a rank's inputs least: 384 of them are one and a half units
    of four runs of 64."""
    longest = MAX_RUN if group is None else min(group, MAX_RUN)
    runs = (longest, MAX_RUN // 2) if longest == MAX_RUN else (longest,)
    return min(runs, key=lambda run: -(-inputs // (PARTS * run)) * run)


class MXFP4Stack(ProjectionStack[MXFP4Weight]):
    """Weights in MXFP4."""

    def __init__(self, shape: ProjectionShape, backend: Backend):
        super().__init__(shape, backend)
        place = packed_shape(shape.rows, shape.columns.size, BLOCK)
        memory = len(shape.sources), *place
        self._words = torch.empty(memory, dtype=torch.int16, device=backend.device)
        self._parts = [
            MXFP4Weight(sources, shape.columns, backend, memory=words)
            for sources, words in zip(shape.sources, self._words, strict=True)
        ]

    @staticmethod
    def supports(shape: ProjectionShape) -> bool:
        """Whether the kernels read such weights: blocks begin and end with the rank's inputs."""
        return shape.columns.start % BLOCK == shape.columns.size % BLOCK == 0

    def finalize(self) -> None:
        """See `ProjectionStack.finalize`. Scales above 2, which no published checkpoint has, are
        halved for all experts of the layer as often as it takes.

        Raises:
            ValueError: a scale is NaN.
        """
        shape = self._shape
        largest = int(torch.stack([part.largest_scale() for part in self._parts]).max())
        if largest == _NAN_SCALE:
            raise ValueError(f"a scale of {shape.sources[0][0].name} is not a number")
        shift, scales = max(0, largest - MAX_SCALE), []
        self._parts.reverse()
        for words in self._words:
            blocks, codes = self._parts.pop().joined()
            codes = (codes.int() - shift).clamp_(min=0)
            if shape.order is not None:
                order = shape.order.to(blocks.device)
                blocks, codes = blocks[order], codes[order]
            packed, kept = pack_floats(blocks, codes)
            words.copy_(packed)
            scales.append(kept)
        self._weight = PackedExperts(
            self._words, torch.stack(scales), shape.rows, shape.columns.size, BLOCK, is_float=True,
            shift=shift,
        )  # fmt: skip


def make_stack(
    shape: ProjectionShape, backend: Backend, quantization: Quantization | None
) -> ProjectionStack[Any]:
    """Returns the weights of a projection, in the format that its scheme asks for.

    Raises:
        ConfigError: as `formats.make_weight`.
    """
    schemes = set(_schemes(shape, quantization))
    scheme = schemes.pop() if len(schemes) == 1 else quantization
    match scheme:
        case None:
            return DenseStack(shape, backend)
        case ScaledScheme() if _is_separate(shape) and ScaledStack.supports(shape, backend, scheme):
            return ScaledStack(shape, backend, scheme)
        case GroupScheme() if IntegerStack.supports(shape, backend, scheme):
            return IntegerStack(shape, backend, scheme)
        case MXFP4Scheme() if not _is_separate(shape) and MXFP4Stack.supports(shape):
            return MXFP4Stack(shape, backend)
    _log.info("%s: experts are dequantized when loaded", shape.sources[0][0].name)
    return DequantizedStack(shape, backend, quantization)


def _schemes(shape: ProjectionShape, quantization: Quantization | None) -> Iterator[Scheme | None]:
    """Yields the scheme of each module."""
    for sources in shape.sources:
        for source in sources:
            yield None if quantization is None else quantization.scheme_of(source.name)


def _is_separate(shape: ProjectionShape) -> bool:
    """Whether each expert has checkpoint tensors of its own."""
    return shape.sources[0][0].stack is None


class StackedExperts:
    """The weights of all experts of a layer that this rank has.

    Args:
        gate_up: the rows of the gates, then of up, or in turns; a multiple of 8 channels.
        down: the second projections, for these channels.
        backend: of the rank.
        quantization: of the model, or None.
        has_biases: whether both projections have biases, in one checkpoint tensor of all experts
            each (gpt-oss).
        activation: of the first product.

    Attributes:
        activation: as given.
    """

    def __init__(
        self,
        gate_up: ProjectionShape,
        down: ProjectionShape,
        backend: Backend,
        quantization: Quantization | None = None,
        *,
        has_biases: bool = False,
        activation: Activation = SILU,
    ):
        self.activation = activation
        self._shapes = gate_up, down
        self.first, self.second = (
            make_stack(shape, backend, quantization) for shape in self._shapes
        )
        self._biases: list[torch.Tensor | None] = [None, None]
        if has_biases:
            zeros = partial(torch.zeros, dtype=backend.dtype, device=backend.device)
            self._biases = [zeros(len(shape.sources), shape.rows) for shape in self._shapes]

    @property
    def gate_up(self) -> ExpertWeights:
        """[E, 2 * channels, hidden_size], interleaved, after `finalize`."""
        return self.first.weight

    @property
    def down(self) -> ExpertWeights:
        """[E, hidden_size, channels], after `finalize`."""
        return self.second.weight

    @property
    def biases(self) -> list[torch.Tensor | None]:
        """The biases of both projections [E, N], in the order of their rows, after `finalize`."""
        return self._biases

    @property
    def held_bytes(self) -> int:
        """Bytes that the weights take on the device, after `finalize`."""
        kept = (self.gate_up, self.down, *self._biases)
        return sum(each.nbytes for each in kept if each is not None)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go, before `finalize`."""
        yield from self.first.weight_shards()
        yield from self.second.weight_shards()
        for shape, biases in zip(self._shapes, self._biases, strict=True):
            if biases is None:
                continue
            for (source, *_), bias in zip(shape.sources, biases, strict=True):
                rows = source.rows
                shard = WeightShard(bias, 0, rows.start, rows.total, stack=source.stack)
                yield f"{source.name}_bias", shard

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`."""
        self.first.begin_reload()
        self.second.begin_reload()

    def finalize(self) -> None:
        """Puts the loaded weights into the kernels' order. The output's biases are added by the
        rank that has the first channels."""
        self.first.finalize()
        self.second.finalize()
        first, second = self._biases
        order = self._shapes[0].order
        if first is not None and order is not None:
            first.copy_(first[:, order.to(first.device)])
        if second is not None and self._shapes[1].columns.start:
            second.zero_()


def interleaved_order(channels: int, *, in_turns: bool) -> torch.Tensor:
    """Returns which row, int64 [2 * channels], is at each place of an interleaved weight:
    `GATE_RUN` rows of the gate, the matching ones of up, and so on.

    Args:
        channels: a multiple of `GATE_RUN`.
        in_turns: the checkpoint has channel i in rows 2 i and 2 i + 1; otherwise the rows of up are
            behind the rows of the gate.
    """
    rows = torch.arange(2 * channels)
    pairs = rows.view(-1, 2).t() if in_turns else rows.view(2, -1)
    return pairs.unflatten(1, (-1, GATE_RUN)).transpose(0, 1).flatten()

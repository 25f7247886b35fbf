"""Weights in 4 or 8 bits, of which groups of inputs share a scale and an offset, as converted GGUF
files hold them.

On CPUs they are multiplied as they are by kernels that numba compiles (`CompiledWeight` over
`kernels.affine_product`): a quarter of the bytes of float16, and as exact as float32. numba is an
optional dependency (`aioinfer[cpu]`); without it such weights become float16. On GPUs they are
dequantized when they are loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from aioinfer.errors import ConfigError
from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import PLAIN, Epilogue
from aioinfer.layers.formats.dense import DenseWeight, has_half_products
from aioinfer.layers.formats.quantized import QuantizedWeight
from aioinfer.layers.formats.schemes import AffineScheme
from aioinfer.layers.kernel_choices import Candidate
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard, sharded_part

if TYPE_CHECKING:
    from aioinfer.kernels.cpu_team import Compiled

_log = logging.getLogger(__name__)
#: With these scales, random integers (of a deviation of 4.6 in 4 bits, 74 in 8) make weights as
#: large as dense models with random weights have.
_DUMMY_SCALES = {4: 0.02 / 4.6, 8: 0.02 / 74}
#: 4-bit integers without offsets are stored plus this.
MIDDLE = 8
#: Values dequantized at a time: a slice of float32 that stays small beside the weight.
_SLICE_VALUES = 1 << 22
#: Pieces for each thread, so that one that is kept from running does not hold the others up.
_PIECES = 4
_compiling = threading.Lock()
#: What the compiled kernels compute in the same launch, and SiLU of gates where these lie so.
_FUSES = frozenset({"norm", "bias", "add_to"})


class AffineWeight(QuantizedWeight):
    """A weight of 4-bit or 8-bit integers: integer * scale + offset.

    Its sources may have different schemes, or none: GGUF files mix them.

    Args:
        schemes: of each source.
        parts: the rows of each source, if they are loaded by their owner; by default new memory.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        schemes: Sequence[AffineScheme | None],
        parts: Sequence[AffineRows | torch.Tensor] | None = None,
    ):
        super().__init__(sources, columns, backend)
        self._scheme = tuple(schemes)
        self._compiled: CompiledWeight | None = None
        device = backend.device
        self._parts = parts or [
            torch.empty(source.rows.size, columns.size, device=device)
            if scheme is None
            else AffineRows(source, columns, scheme, device)
            for source, scheme in zip(sources, schemes, strict=True)
        ]

    def weight_shards(self) -> NamedShards:
        """See `Weight.weight_shards`."""
        for source, part in zip(self._sources, self._parts, strict=True):
            if isinstance(part, AffineRows):
                yield from part.weight_shards()
            else:
                dim, shard = sharded_part(source.rows, self._columns)
                yield f"{source.name}.weight", WeightShard(part, dim, shard.start, shard.total)

    def dequantized(self) -> torch.Tensor:
        """See `QuantizedWeight.dequantized`."""
        weight = torch.empty(self._out, self._columns.size, device=self._backend.device)
        first = 0
        for source, part in zip(self._sources, self._parts, strict=True):
            out = weight[first : first + source.rows.size]
            first += source.rows.size
            if isinstance(part, AffineRows):
                part.dequantize_into(out)
            else:
                out.copy_(part)
        return weight

    @property
    def held_bytes(self) -> int:
        """See `Weight.held_bytes`."""
        return super().held_bytes if self._compiled is None else self._compiled.nbytes

    @property
    def is_compiled(self) -> bool:
        """Whether the products are computed by compiled kernels, after `finalize`."""
        return self._compiled is not None

    def finalize(self) -> None:
        """Lays the weight out for the kernels, or else prepares products with it as float16 on a
        CPU; see `QuantizedWeight.finalize` otherwise."""
        parts, backend = self._parts, self._backend
        if self.row_order is None and has_compiled_products(backend) and can_lay_out(parts):
            is_gated = self.gate == "halves" and can_gate(parts)
            self._compiled = CompiledWeight(parts, self._columns.size, gated=is_gated)
            self.only = Candidate("compiled", fuses=_FUSES | {"gate"} if is_gated else _FUSES)
            self.release()
        elif has_half_products(backend):
            weight = self.dequantized()
            self.release()
            self._use(DenseWeight(self._sources, self._columns, backend, weight, is_half=True))
        else:
            super().finalize()

    def release(self) -> None:
        """See `QuantizedWeight.release`."""
        self._parts = []

    def launch(self, candidate: Candidate, x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        """See `Weight.launch`."""
        assert self._compiled is not None, "finalize was not called"
        return self._compiled.multiply(x, epilogue)


class AffineRows:
    """The rows of one checkpoint module that a rank has, as they are stored.

    Args:
        source: which rows.
        columns: the input features that this rank has.
        scheme: of the module.
        device: where they are kept.

    Attributes:
        scheme: of the module.
        integers: uint8 [rows, in / 2] or int8 [rows, in].
        scales, offsets: float32 [rows, groups]; offsets may be None.

    Raises:
        ConfigError: a rank's input features do not begin and end with a byte.
    """

    def __init__(self, source: Source, columns: Shard, scheme: AffineScheme, device: torch.device):
        self._source, self._columns, self.scheme = source, columns, scheme
        rows, size = source.rows.size, scheme.group_size
        if scheme.bits == 4 and (columns.start % 2 or columns.size % 2):
            raise ConfigError(
                f"{source.name}: {columns.size} input features from {columns.start} on cannot be "
                "taken out of pairs of 4-bit integers; take fewer tensor-parallel ranks"
            )
        packed = 2 if scheme.bits == 4 else 1
        self._bytes = Shard(columns.start // packed, columns.size // packed,
                            columns.total // packed)  # fmt: skip
        first, end = columns.start // size, -(-(columns.start + columns.size) // size)
        self._groups = Shard(first, end - first, -(-columns.total // size))
        dtype = torch.uint8 if scheme.bits == 4 else torch.int8
        self.integers = torch.empty(rows, self._bytes.size, dtype=dtype, device=device)
        self.scales = torch.empty(rows, self._groups.size, device=device)
        self.offsets = torch.zeros_like(self.scales) if scheme.has_offsets else None

    def __len__(self) -> int:
        return len(self.integers)

    @property
    def has_whole_groups(self) -> bool:
        """Whether this rank's input features are groups without a remainder."""
        size = self.scheme.group_size
        return self._columns.start % size == 0 and self._columns.size % size == 0

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take."""
        kept = (self.integers, self.scales, self.offsets)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go."""
        name, rows = self._source.name, self._source.rows
        dim, part = sharded_part(rows, self._bytes)
        yield f"{name}.weight_integers", WeightShard(self.integers, dim, part.start, part.total)
        # a rank's columns may lie within one group: then it has all groups, and a part of the rows
        dim, part = sharded_part(rows, self._groups)
        scale = _DUMMY_SCALES[self.scheme.bits]
        yield (
            f"{name}.weight_scales",
            WeightShard(self.scales, dim, part.start, part.total, dummy=scale),
        )
        if self.offsets is not None:
            offset = -scale * (MIDDLE - 0.5) if self.scheme.bits == 4 else 0.0
            yield (
                f"{name}.weight_offsets",
                WeightShard(self.offsets, dim, part.start, part.total, dummy=offset),
            )

    def dequantized(self, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """Returns some rows (a slice, or their numbers, int64 [n]) in float32 [n, in]: the numbers
        that the `gguf` package gives, bit for bit."""
        integers, scheme = self.integers[rows], self.scheme
        if scheme.bits == 4:
            integers = torch.stack((integers & 15, integers >> 4), dim=-1).flatten(1)
        values = integers.float()
        if scheme.bits == 4 and not scheme.has_offsets:
            values -= MIDDLE
        values = self._by_group(values)
        values *= self.scales[rows].unsqueeze(-1)
        if self.offsets is not None:
            values += self.offsets[rows].unsqueeze(-1)
        begin = self._columns.start - self._groups.start * scheme.group_size
        return values.flatten(1)[:, begin : begin + self._columns.size]

    def _by_group(self, values: torch.Tensor) -> torch.Tensor:
        """Returns values [n, in] as [n, groups, group size], zeros where a group is not this
        rank's."""
        size = self.scheme.group_size
        before = self._columns.start - self._groups.start * size
        after = self._groups.size * size - before - self._columns.size
        if before or after:
            values = torch.nn.functional.pad(values, (before, after))
        return values.unflatten(1, (-1, size))

    def dequantize_into(self, out: torch.Tensor) -> None:
        """Writes all rows to `out` [rows, in], in its dtype, a slice at a time."""
        step = max(1, _SLICE_VALUES // max(1, out.shape[1]))
        for begin in range(0, len(out), step):
            some = slice(begin, begin + step)
            out[some] = self.dequantized(some)


def has_compiled_products(backend: Backend) -> bool:
    """Whether quantized weights are multiplied as they are here. Compiles the kernels when it is
    first called; other threads that call it meanwhile wait."""
    is_plain = backend.device.type == "cpu" and not backend.has_kernels
    return is_plain and backend.dtype == torch.float32 and _compiled() is not None


def _compiled() -> Compiled | None:
    """Returns the kernels, or None if numba is missing or cannot compile them here."""
    if importlib.util.find_spec("numba") is None:
        return None
    with _compiling:
        return _compiled_once()


@cache
def _compiled_once() -> Compiled | None:
    try:
        from aioinfer.kernels.affine_product import compile_kernel

        return compile_kernel()
    except Exception as error:  # whatever a compiler says of a processor it does not know
        _log.warning("quantized weights become float16: numba cannot compile: %s", error)
        return None


def can_lay_out(parts: Sequence[AffineRows | torch.Tensor]) -> bool:
    """Whether the kernels can compute with a weight of these parts."""
    from aioinfer.kernels.affine_product import PAIR

    return all(
        len(part) % PAIR == 0 and (isinstance(part, torch.Tensor) or part.has_whole_groups)
        for part in parts
    ) and any(len(part) for part in parts)


def can_gate(parts: Sequence[AffineRows | torch.Tensor]) -> bool:
    """Whether SiLU of the first half of a weight's outputs, times the second half, can be computed
    with the product: gate and up are stored alike."""
    if len(parts) != 2 or len(parts[0]) != len(parts[1]) or not can_lay_out(parts):
        return False
    gate, up = parts
    if isinstance(gate, AffineRows) and isinstance(up, AffineRows):
        return gate.scheme == up.scheme
    return isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)


class CompiledWeight:
    """A weight laid out for the kernels: pairs of panels, each of as many outputs as a vector has
    numbers, in which the outputs lie side by side.

    Args:
        parts: rows of the weight, one part after the other: quantized, or float32 [rows, in].
        inputs: input features.
        gated: whether the products may be SiLU of the first part, times the second.
    """

    def __init__(
        self, parts: Sequence[AffineRows | torch.Tensor], inputs: int, *, gated: bool = False
    ):
        from aioinfer.kernels.affine_product import LANES, PAIR, TILE_BYTES, Segment, Task
        from aioinfer.kernels.cpu_team import process_team

        kernels = _compiled()
        assert kernels is not None
        self._run = kernels.run
        self._inputs = inputs
        self._outputs = sum(map(len, parts))
        self._gated = gated
        self._kept: list[torch.Tensor] = []
        self._segments = (ctypes.c_int64 * (len(Segment) * len(parts)))()
        groups = [parts] if gated else [[part] for part in parts]
        end = column = 0
        for number, rows in enumerate(groups):
            count = sum(map(len, rows))
            end += count // PAIR
            step, second = (LANES, len(rows[0])) if gated else (PAIR, LANES)
            described = [end, *self._lay_out(rows), column, step, second]
            first = number * len(Segment)
            self._segments[first : first + len(Segment)] = described
            column += count
        threads = torch.get_num_threads()
        self._scratch = TILE_BYTES + inputs * PAIR * 4
        self._threads = threads
        self._task = (ctypes.c_int64 * len(Task))()
        chunk = max(1, end // (threads * _PIECES)) if threads > 1 else end
        self._task[Task.CHUNK : Task.NEXT] = [
            chunk, self._scratch, process_team().grow(threads), kernels.work, inputs, end,
            ctypes.addressof(self._segments),
        ]  # fmt: skip
        self._address = ctypes.addressof(self._task)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return sum(tensor.nbytes for tensor in self._kept)

    def _lay_out(self, parts: Sequence[AffineRows | torch.Tensor]) -> tuple[int, ...]:
        """Lays out the parts of a segment; returns bits, group size, and the addresses of integers,
        scales and offsets."""
        if isinstance(parts[0], torch.Tensor):
            panels = _in_pairs([part for part in parts if isinstance(part, torch.Tensor)])
            weights = panels.permute(0, 3, 1, 2).contiguous()
            self._kept.append(weights)
            return 32, 1, weights.data_ptr(), 0, 0
        rows = [part for part in parts if isinstance(part, AffineRows)]
        scheme = rows[0].scheme
        integers = _in_pairs([part.integers for part in rows])
        scales = _in_pairs([part.scales for part in rows])
        offsets = None
        if scheme.has_offsets:
            offsets = _in_pairs([part.offsets for part in rows if part.offsets is not None])
        elif scheme.bits == 4:
            offsets = scales * -MIDDLE
        kept = [
            None if panels is None else panels.transpose(2, 3).contiguous()
            for panels in (integers, scales, offsets)
        ]
        self._kept += [tensor for tensor in kept if tensor is not None]
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in kept)
        return scheme.bits, scheme.group_size, *addresses

    def multiply(self, x: torch.Tensor, epilogue: Epilogue = PLAIN) -> torch.Tensor:
        """Returns the product with an epilogue [..., out] for x [..., in], without `out`; `norm` is
        an RMSNorm, and `gate` SiLU of a weight that was laid out so."""
        from aioinfer.kernels.affine_product import ADDS, GATES

        bias, total, norm = epilogue.bias, epilogue.add_to, epilogue.norm
        flags, width = 0 if total is None else ADDS, self._outputs
        if epilogue.gate is not None:
            flags, width = GATES, self._outputs // 2
        out = torch.empty(*x.shape[:-1], width) if total is None else total
        inputs = self._inputs
        x = x.reshape(-1, inputs).contiguous()
        rows = len(x)
        if not rows:
            return out
        assert out.is_contiguous()
        memory = torch.empty(self._scratch * self._threads, dtype=torch.uint8)
        normed, eps, norm_weight = None, 0, 0
        if isinstance(norm, RMSNorm):
            normed = torch.empty_like(x)
            eps = struct.unpack("i", struct.pack("f", norm.eps))[0]
            norm_weight = norm.weight.data_ptr()
        self._task[:12] = [
            rows, x.data_ptr(), out.data_ptr(), 4 * inputs, 4 * out.shape[-1], flags,
            0 if bias is None else bias.data_ptr(), norm_weight, eps,
            0 if normed is None else normed.data_ptr(), memory.data_ptr(), self._threads,
        ]  # fmt: skip
        self._run(self._address)
        return out


def _in_pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns [pairs, 2, lanes, n] of one tensor [outputs, n], or of the tensors of gate and up,
    panel by panel."""
    from aioinfer.kernels.affine_product import LANES

    if len(parts) == 1:
        return parts[0].unflatten(0, (-1, 2, LANES))
    return torch.stack([part.unflatten(0, (-1, LANES)) for part in parts], dim=1)

"""Weights in 4 or 8 bits on a CPU, multiplied as they are by kernels that numba compiles
(`kernels.affine_product`): a quarter of the bytes of float16, and as exact as float32.

numba is an optional dependency (`aioinfer[cpu]`); without it such weights become float16 (`half`).
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

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.affine_rows import MIDDLE, AffineRows
from aioinfer.layers.norm import RMSNorm

if TYPE_CHECKING:
    from aioinfer.kernels.cpu_team import Compiled

_log = logging.getLogger(__name__)
#: Pieces for each thread, so that one that is kept from running does not hold the others up.
_PIECES = 4
_compiling = threading.Lock()


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
        gated: whether the products are to be SiLU of the first part, times the second
            (`multiply_gated`).
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

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, norm: RMSNorm | None = None
    ) -> torch.Tensor:
        """Returns x W^T + b [..., out], or norm(x) W^T + b, for x [..., in]."""
        out = torch.empty(*x.shape[:-1], self._outputs)
        self._compute(x, out, 0, bias, norm)
        return out

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """Returns silu(gate) * up [..., out / 2] for x [..., in], or for norm(x)."""
        from aioinfer.kernels.affine_product import GATES

        out = torch.empty(*x.shape[:-1], self._outputs // 2)
        self._compute(x, out, GATES, None, norm)
        return out

    def add_product(self, x: torch.Tensor, total: torch.Tensor) -> None:
        """Adds x W^T to `total` [T, out], in place, for x [T, in]."""
        from aioinfer.kernels.affine_product import ADDS

        self._compute(x, total, ADDS, None, None)

    def _compute(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        flags: int,
        bias: torch.Tensor | None,
        norm: RMSNorm | None,
    ) -> None:
        """Writes a product to `out` [..., columns], whose rows follow each other."""
        inputs = self._inputs
        x = x.reshape(-1, inputs).contiguous()
        rows = len(x)
        if not rows:
            return
        assert out.is_contiguous()
        memory = torch.empty(self._scratch * self._threads, dtype=torch.uint8)
        normed, eps, norm_weight = None, 0, 0
        if norm is not None:
            normed = torch.empty_like(x)
            eps = struct.unpack("i", struct.pack("f", norm.eps))[0]
            norm_weight = norm.weight.data_ptr()
        self._task[:12] = [
            rows, x.data_ptr(), out.data_ptr(), 4 * inputs, 4 * out.shape[-1], flags,
            0 if bias is None else bias.data_ptr(), norm_weight, eps,
            0 if normed is None else normed.data_ptr(), memory.data_ptr(), self._threads,
        ]  # fmt: skip
        self._run(self._address)


def _in_pairs(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns [pairs, 2, lanes, n] of one tensor [outputs, n], or of the tensors of gate and up,
    panel by panel."""
    from aioinfer.kernels.affine_product import LANES

    if len(parts) == 1:
        return parts[0].unflatten(0, (-1, 2, LANES))
    return torch.stack([part.unflatten(0, (-1, LANES)) for part in parts], dim=1)

"""Weights in 4 or 8 bits, of which groups of inputs share a scale and an offset, as converted GGUF
files hold them.

On CPUs they are multiplied as they are (`compiled`), or else as float16 (`half`); on GPUs they are
dequantized when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.affine_rows import AffineRows
from aioinfer.layers.formats.compiled import (
    CompiledWeight,
    can_gate,
    can_lay_out,
    has_compiled_products,
)
from aioinfer.layers.formats.half import HalfDenseWeight, has_half_products
from aioinfer.layers.formats.quantized import QuantizedWeight
from aioinfer.layers.formats.schemes import AffineScheme
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard, sharded_part


class AffineWeight(QuantizedWeight):
    """A weight of 4-bit or 8-bit integers: integer * scale + offset.

    Its sources may have different schemes, or none: GGUF files mix them.

    Args:
        schemes: of each source.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        schemes: Sequence[AffineScheme | None],
    ):
        super().__init__(sources, columns, backend)
        self._scheme = tuple(schemes)
        self._compiled: CompiledWeight | None = None
        self._is_gated = False
        device = backend.device
        self._parts = [
            torch.empty(source.rows.size, columns.size, device=device)
            if scheme is None
            else AffineRows(source, columns, scheme, device)
            for source, scheme in zip(sources, schemes, strict=True)
        ]

    def weight_shards(self) -> NamedShards:
        """See `WeightFormat.weight_shards`."""
        for source, part in zip(self._sources, self._parts, strict=True):
            if isinstance(part, AffineRows):
                yield from part.weight_shards()
            else:
                dim, shard = sharded_part(source.rows, self._columns)
                yield f"{source.name}.weight", WeightShard(part, dim, shard.start, shard.total)

    def dequantized(self) -> torch.Tensor:
        """See `QuantizedWeight.dequantized`."""
        return self._dequantized(torch.float32)

    def _dequantized(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the loaded weight [out, in]; no more than a slice of it is float32 otherwise."""
        weight = torch.empty(
            self._out, self._columns.size, dtype=dtype, device=self._backend.device
        )
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
        """See `WeightFormat.held_bytes`."""
        return super().held_bytes if self._compiled is None else self._compiled.nbytes

    @property
    def is_compiled(self) -> bool:
        """Whether the products are computed by compiled kernels, after `finalize`."""
        return self._compiled is not None

    def prepare_gate(self) -> bool:
        """See `WeightFormat.prepare_gate`."""
        self._is_gated = has_compiled_products(self._backend) and can_gate(self._parts)
        return self._is_gated

    def finalize(self) -> None:
        """Lays the weight out for the kernels, or else prepares products with it as float16 on a
        CPU; see `QuantizedWeight.finalize` otherwise."""
        parts, backend = self._parts, self._backend
        if self._row_order is None and has_compiled_products(backend) and can_lay_out(parts):
            self._compiled = CompiledWeight(parts, self._columns.size, gated=self._is_gated)
            self.release()
            return
        if not has_half_products(backend):
            super().finalize()
            return
        weight = self.dequantized()
        if self._row_order is not None:
            weight = weight[self._row_order]
        self.release()
        self._dense = HalfDenseWeight(self._sources, self._columns, backend, weight)
        self._dense.finalize()

    def release(self) -> None:
        """See `QuantizedWeight.release`."""
        self._parts = []

    # ---------------------------------------------------------------- products

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply`."""
        if self._compiled is None:
            return super().multiply(x, bias, out)
        product = self._compiled.multiply(x, bias)
        return product if out is None else out.copy_(product)

    def fuses_norm(self, rows: int) -> bool:
        """See `WeightFormat.fuses_norm`."""
        return self._compiled is not None or super().fuses_norm(rows)

    def multiply_normed(
        self, x: torch.Tensor, norm: RMSNorm, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `WeightFormat.multiply_normed`."""
        if self._compiled is None:
            return super().multiply_normed(x, norm, out)
        product = self._compiled.multiply(x, norm=norm)
        return product if out is None else out.copy_(product)

    def multiply_gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """See `WeightFormat.multiply_gated`."""
        if self._compiled is None:
            return super().multiply_gated(x, norm)
        return self._compiled.multiply_gated(x, norm)

    def add_product(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor | None:
        """See `WeightFormat.add_product`."""
        if self._compiled is None:
            return super().add_product(x, total)
        self._compiled.add_product(x, total)
        return None

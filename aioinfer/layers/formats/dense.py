"""Weights as they are: float32, bfloat16 or float16, [out, in] as in checkpoints, computed with by
torch.

On a CPU a float32 weight is repacked: for oneDNN (`PackedWeight`), or as float16 for FBGEMM
(`HalfWeight`; Khudia et al. 2021), which torch brings. FBGEMM converts float16 in registers: half
as many bytes are read as with float32, which is what bounds products of few rows
(docs/quantization.md). On a GPU `kernel_dense` multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from functools import cache

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import ACTIVATIONS, Epilogue, Weight
from aioinfer.layers.kernel_choices import Candidate
from aioinfer.layers.shards import NamedShards, Shard, Source, WeightShard, sharded_part

#: The batch size for which oneDNN lays out packed weights. Its layouts for 1 to 32 rows are alike,
#: and these serve prefill as well.
_PACKED_ROWS = 8
#: Activations that oneDNN computes along the way, and by which algorithm.
_FUSED_ACTIVATIONS: dict[str | None, tuple[str, str]] = {
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
}
#: Up to so many rows our own products beat cuBLAS on a GPU where nothing but a residual sum goes
#: with them, where nothing was timed (notes/products.md).
MAX_FEW_ROWS = 8


class DenseWeight(Weight):
    """A weight computed with by torch.

    Args:
        sources, columns, backend: as in `Weight`.
        weight: [out, in], for a weight that is loaded in another format; by default a new tensor.
        is_half: whether it becomes float16 on a CPU.
    """

    only: Candidate | None = Candidate("torch", fuses=frozenset({"bias", "activation"}))

    def __init__(
        self,
        sources: Sequence[Source],
        columns: Shard,
        backend: Backend,
        weight: torch.Tensor | None = None,
        *,
        is_half: bool = False,
    ):
        super().__init__(sources, columns, backend)
        if weight is None:
            shape = self._out, columns.size
            weight = torch.empty(shape, dtype=backend.dtype, device=backend.device)
        self.weight: torch.Tensor | None = weight
        self._is_half = is_half
        self._final_order: torch.Tensor | None = None  # of the rows, once they are reordered
        self._held_bytes = weight.numel() * (2 if is_half else weight.itemsize)
        self._packed: PackedWeight | HalfWeight | None = None

    @property
    def held_bytes(self) -> int:
        """See `Weight.held_bytes`."""
        return self._held_bytes

    @property
    def kind(self) -> Hashable:
        """See `Weight.kind`."""
        return "dense"

    def weight_shards(self) -> NamedShards:
        """See `Weight.weight_shards`."""
        first = 0
        for source in self._sources:
            part = self.loaded[first : first + source.rows.size]
            first += source.rows.size
            dim, shard = sharded_part(source.rows, self._columns)
            if source.is_transposed:
                transposed = WeightShard(part.t(), 1 - dim, shard.start, shard.total)
                yield f"{source.name}.weight", transposed
            elif source.stack is None:
                store = source.scaling(part)
                yield (
                    f"{source.name}.weight",
                    WeightShard(part, dim, shard.start, shard.total, store=store),
                )
            elif source.stack.is_out_first:
                stacked = WeightShard(part, dim, shard.start, shard.total, stack=source.stack)
                yield source.name, stacked
            else:
                yield (
                    source.name,
                    WeightShard(part.t(), 1 - dim, shard.start, shard.total, stack=source.stack),
                )

    @property
    def loaded(self) -> torch.Tensor:
        """The weight [out, in], where it was not repacked."""
        assert self.weight is not None
        return self.weight

    def dequantized(self) -> torch.Tensor:
        """See `Weight.dequantized`."""
        return self.loaded

    def finalize(self) -> None:
        """See `Weight.finalize`. On a CPU in float32, repacks the weight."""
        self._reorder()
        self._packed = HalfWeight(self.loaded) if self._is_half else pack_weight(self.loaded)
        if self._packed is not None:
            self.weight = None

    def drop(self) -> list[torch.Tensor]:
        """See `Droppable.drop`."""
        self._packed = None
        return [] if self.weight is None else [self.weight]

    def begin_reload(self) -> None:
        """See `Weight.begin_reload`. A weight that was repacked gets memory to be loaded into, and
        its layout is dropped."""
        self.row_order = self._final_order
        if self.weight is None:
            shape, backend = (self._out, self._columns.size), self._backend
            self.weight = torch.empty(shape, dtype=backend.dtype, device=backend.device)
            self._packed = None

    def _reorder(self) -> None:
        if self.row_order is not None:
            self.loaded.copy_(self.loaded[self.row_order.to(self.loaded.device)])
            self._final_order, self.row_order = self.row_order, None

    def launch(self, candidate: Candidate, x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        """See `Weight.launch`."""
        bias, activation = epilogue.bias, epilogue.activation
        if isinstance(self._packed, PackedWeight):
            return self._packed.multiply(x, bias, activation)
        if self._packed is not None:
            product = self._packed.multiply(x, bias)
        else:
            product = F.linear(x, self.loaded, bias)
        return product if activation is None else ACTIVATIONS[activation](product)


class PackedWeight:
    """A float32 weight on a CPU, laid out twice: for products with several rows, and with one.

    Several rows go to oneDNN, which wants blocks of its own. One row is bound by how fast the
    weight is read, and the fastest reader in torch is a batched product, which gives each thread a
    part of the batch: the weight is cut into as many parts as there are threads. Wide weights are
    cut along the output, as they are; others along the input, transposed, and the parts' results
    are summed. That reads a sixth faster than oneDNN, for the weight's size once more. With one
    thread there is the layout for several rows only.

    Args:
        weight: float32 [out, in].
    """

    def __init__(self, weight: torch.Tensor):
        out_features, in_features = weight.shape
        self._blocks: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
        self._by_output = in_features > out_features
        divided = out_features if self._by_output else in_features
        self._parts = math.gcd(torch.get_num_threads(), divided)
        if self._parts == 1:  # one thread: nothing to divide
            return
        if self._by_output:
            self._row_layout = weight.view(self._parts, -1, in_features).transpose(1, 2)
        else:
            self._row_layout = weight.t().contiguous().view(self._parts, -1, out_features)

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None
    ) -> torch.Tensor:
        """Returns x W^T + b [..., out] for x [..., in], or its activation of `ACTIVATIONS`."""
        if x.numel() != x.shape[-1] or self._parts == 1:
            if activation in _FUSED_ACTIVATIONS:
                return self._multiply_blocks(x, bias, _FUSED_ACTIVATIONS[activation])
            product = self._multiply_blocks(x, bias)
        else:
            product = self._multiply_row(x, bias)
        return product if activation is None else ACTIVATIONS[activation](product)

    def _multiply_row(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b for one row."""
        if self._by_output:
            expanded = x.reshape(1, 1, -1).expand(self._parts, -1, -1)
            product = torch.bmm(expanded, self._row_layout)
        else:
            product = torch.bmm(x.reshape(self._parts, 1, -1), self._row_layout).sum(0)
        product = product.view(*x.shape[:-1], -1)
        return product if bias is None else product.add_(bias)

    def _multiply_blocks(
        self, x: torch.Tensor, bias: torch.Tensor | None, fused: tuple[str, str] = ("none", "")
    ) -> torch.Tensor:
        """Returns x W^T + b [..., out] for x [..., in], computed by oneDNN for `padded_rows`, with
        oneDNN's activation and its algorithm."""
        rows = x.reshape(-1, x.shape[-1])
        missing = padded_rows(len(rows)) - len(rows)
        padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        product = torch.ops.mkldnn._linear_pointwise(
            padded, self._blocks, bias, fused[0], [], fused[1]
        )
        return product[: len(rows)].view(*x.shape[:-1], -1)


def padded_rows(rows: int) -> int:
    """Returns the number of rows that a product of `rows` rows is computed with: the same up to 16,
    and above that the next of eight numbers an octave, at most an eighth more.

    oneDNN makes kernels for every number of rows that it meets, and keeps them: about 2.4 MB for
    the four weights of a layer, and 1.5 ms at the first product (notes/memory.md). Without
    rounding, the memory of a server that meets ever new batch sizes grows for hours.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


def pack_weight(weight: torch.Tensor | None) -> PackedWeight | None:
    """Returns a float32 CPU weight [out, in] laid out for products, or None for any other."""
    if (
        weight is None
        or weight.device.type != "cpu"
        or weight.dtype != torch.float32
        or not torch.backends.mkldnn.is_available()
    ):
        return None
    return PackedWeight(weight)


class HalfWeight:
    """A weight laid out for FBGEMM.

    Args:
        weight: float32 [out, in] on a CPU; magnitudes beyond 65 504 become that.
    """

    def __init__(self, weight: torch.Tensor):
        self._out = len(weight)
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x W^T + b [..., out] in float32 for x [..., in]."""
        if x.numel() == 0:
            return x.new_zeros(*x.shape[:-1], self._out)
        product = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return product if bias is None else product.add_(bias)


def has_half_products(backend: Backend) -> bool:
    """Whether float16 weights are multiplied faster than float32 ones here, as exact but for the
    weights' rounding."""
    is_plain = backend.device.type == "cpu" and not backend.has_kernels
    return is_plain and backend.dtype == torch.float32 and _has_half_operators()


@cache
def _has_half_operators() -> bool:
    """Whether torch was built with FBGEMM and the processor has AVX2, which it needs."""
    try:
        weight = HalfWeight(torch.eye(2, 16))
        return torch.equal(weight.multiply(torch.ones(1, 16), None), torch.ones(1, 2))
    except (RuntimeError, NotImplementedError):
        return False

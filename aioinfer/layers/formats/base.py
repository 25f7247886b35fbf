"""The one product of linear layers, `Weight.multiply`, and what a weight format has to give for it.

A linear layer knows which part of which checkpoint modules this rank has (`Source`), and what goes
with the product (`Epilogue`). A weight format knows which tensors such a module has in the
checkpoint, where their parts go (`WeightShard`), and which kernels multiply with them. What a
kernel does not compute along the way, `Weight.multiply` adds by launches of their own.

A format with one way to multiply gives it as `Weight.only`; a format of which several kernels may
be the fastest names them in `Weight.kernels`, the default first, and is timed with each
(`kernel_choices`). A new format is a class like `dense.DenseWeight`, and a line in
`formats.FORMATS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from aioinfer.layers.backend import Backend
from aioinfer.layers.kernel_choices import Candidate, Operation, Product, ProductChoices
from aioinfer.layers.norm import Norm, RMSNorm
from aioinfer.layers.shards import NamedShards, Shard, Source

if TYPE_CHECKING:
    from aioinfer.kernels.quantize import InputFormat
    from aioinfer.layers.extension import ProductExtension


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


#: Activations by the names that configurations have for them.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": _squared_relu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class Epilogue(NamedTuple):
    """What is computed with a product x W^T [T, out] of x [T, in], before it and after it.

    Attributes:
        norm: of x.
        bias: [out], added to the product.
        gate: an activation of `ACTIVATIONS`: the result is that of the gate, the first half of the
            outputs, times the second half: [T, out / 2].
        add_to: [T, out], to which the product is added, in place.
        out: [T, out], to which the product is written; not with `add_to`.
        activation: one of `ACTIVATIONS`, of the product with its bias; not with `gate` or `add_to`.
        operand: of the weight's extension, added to the product before the bias and the gate.
    """

    norm: Norm | None = None
    bias: torch.Tensor | None = None
    gate: str | None = None
    add_to: torch.Tensor | None = None
    out: torch.Tensor | None = None
    activation: str | None = None
    operand: Any = None

    def added(self, rows: int) -> torch.Tensor | None:
        """Returns the addend of so many rows of the product: `add_to`, the bias [rows, out] or
        None."""
        if self.add_to is not None or self.bias is None:
            return self.add_to
        return self.bias.expand(rows, -1)


PLAIN = Epilogue()


def epilogue_of(operation: Operation, norm: Norm | None, total: torch.Tensor) -> Epilogue:
    """Returns the epilogue of an operation with a weight; `total` [T, out] is the operand that the
    product is added to or written to, and its first row the bias."""
    match operation:
        case "plain":
            return PLAIN
        case "partial":
            return Epilogue(out=total)
        case "biased":
            return Epilogue(bias=total[0])
        case "residual":
            return Epilogue(add_to=total)
        case "gated":
            return Epilogue(gate="silu")
        case "normed":
            return Epilogue(norm)
        case "normed gated":
            return Epilogue(norm, gate="silu")


class Droppable:
    """What has weights that may be loaded again."""

    def drop(self) -> list[torch.Tensor]:
        """Gives up the values of weights that were finalized, until they are loaded again; what a
        CPU has repacked is freed. Returns the memory that products read, and takes none."""
        raise NotImplementedError


class Weight(Droppable, ABC):
    """The weight of one linear layer on one rank: `out` output features of `in` input features.

    Args:
        sources: the checkpoint modules of its rows, one after the other.
        columns: the input features that this rank has.
        backend: of the rank.

    Attributes:
        only: the one way to multiply; None where there are several (`kernels`).
        row_order: int64 [out], the row, in checkpoint order, at each place; None for the same
            order. Set before `finalize`, as the next two are.
        gate: how the outputs of gate and up lie, if SiLU of the one times the other is what the
            product is for: in "halves", or "interleaved" as in `kernels.activation`; "" for others.
        reads_in_order: whether the inputs come in the order of `input_order`.
        extension: what is added to the products of a step's tokens; None for nothing.
    """

    only: Candidate | None = None
    gate: Literal["", "halves", "interleaved"] = ""
    reads_in_order = False
    extension: ProductExtension | None = None

    def __init__(self, sources: Sequence[Source], columns: Shard, backend: Backend):
        self._sources, self._columns, self._backend = sources, columns, backend
        self._out = sum(source.rows.size for source in sources)
        self.row_order: torch.Tensor | None = None
        self._choices: dict[Operation, ProductChoices] = {}

    # ---------------------------------------------------------------- what a format gives

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Weights of the same kind launch the same kernels."""

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """Bytes that the weight takes on the device, after `finalize`."""

    @abstractmethod
    def weight_shards(self) -> NamedShards:
        """Yields where this rank's parts of the checkpoint's tensors go, before `finalize`."""

    @abstractmethod
    def dequantized(self) -> torch.Tensor:
        """Returns the loaded weight [out, in] in 16 or 32 bits, its rows in checkpoint order.
        Called instead of `finalize`, for weights that `multiply` does not multiply."""

    def input_order(self) -> torch.Tensor | None:
        """Returns the order in which the weight would read its inputs (int64 [in]: the input at
        each place), if it is another than the checkpoint's and it can have them so; else None."""
        return None

    @abstractmethod
    def finalize(self) -> None:
        """Prepares the loaded weight for the device, its rows in `row_order`."""

    def begin_reload(self) -> None:
        """Prepares a weight that was finalized for `weight_shards` and `finalize` to be called
        again. On a GPU, where graphs refer to it, its memory stays the same. Of weights alone that
        the checkpoint has in 16 or 32 bits."""
        raise NotImplementedError

    def input_format(self, rows: int) -> InputFormat | None:
        """Returns how the inputs of products of so many rows are quantized; None if they are not.
        Such a product takes `ScaledInputs` in the place of x, too."""
        return None

    @abstractmethod
    def launch(self, candidate: Candidate, x: Any, epilogue: Epilogue) -> torch.Tensor:
        """Computes a product by a candidate, with an epilogue of what it fuses alone; `norm` is an
        RMSNorm then, and `gate` SiLU. Returns what `multiply` returns."""

    @property
    def format(self) -> str:
        """How the weight is stored, for the table of choices."""
        raise NotImplementedError

    def kernels(self, operation: Operation, x: Any, epilogue: Epilogue) -> Iterator[Candidate]:
        """Yields the candidates for a product, with or without repetition, the default first, which
        must take these operands; x and epilogue as in `launch`."""
        raise NotImplementedError

    def takes(self, candidate: Candidate, x: Any, epilogue: Epilogue) -> bool:
        """Whether a candidate can compute a product with these operands."""
        return True

    def extended_candidate(self, operation: Operation, rows: int) -> Candidate | None:
        """Returns the candidate, by default, that adds the extension to a product of so many tokens
        in its own launch; None if none does."""
        return None

    def warm_up_cases(self, operation: Operation) -> Iterable[tuple[int, Candidate | None]]:
        """Yields numbers of rows and candidates, which together are all configurations of kernels
        that are selected for an operation where nothing was timed; None for the candidate that is
        selected. A normed operation has one row."""
        return ()

    # ---------------------------------------------------------------- the product

    def multiply(self, x: Any, epilogue: Epilogue = PLAIN) -> torch.Tensor:
        """Returns the product with an epilogue [..., out] for x [..., in], or [T, out] for x [T,
        in] with kernels.

        With `add_to`, returns that tensor, or parts (float32 [P, T, out]), whose sum over the first
        dimension is yet to be added to it.
        """
        if self.extension is not None and self.extension.is_active:
            return self._multiply_extended(x, epilogue, self.extension)
        return self._multiply(x, epilogue)

    def _multiply_extended(
        self, x: torch.Tensor, epilogue: Epilogue, extension: ProductExtension
    ) -> torch.Tensor:
        """Computes `multiply` with the extension: in the product's own launch if a kernel does, or
        else in launches of its own."""
        norm, bias, gate, total, out, activation, _ = epilogue
        if norm is not None and not self._keeps_norm(x, epilogue):
            x, norm = norm(x), None
        fused_gate = gate if self._fuses_gate(epilogue) else None
        operation = _operation_of(Epilogue(norm, bias, fused_gate, total, out))
        if extension.may_fuse(x) and self.extended_candidate(operation, len(x)) is not None:
            operand = extension.operand(x)
            return self._multiply(x, epilogue._replace(norm=norm, operand=operand))
        if norm is not None:
            x = norm(x)
        extension.begin(x.flatten(0, -2))
        is_changed = gate is not None or activation is not None
        product = self._multiply(x, Epilogue(None, bias, None, total, None if is_changed else out))
        rows = product if total is None else total
        extension.add(x.flatten(0, -2), rows.flatten(0, -2))
        if not is_changed:
            return product
        product = self._activate(product, gate, activation)
        return product if out is None else out.copy_(product)

    def _multiply(self, x: Any, epilogue: Epilogue) -> torch.Tensor:
        norm, bias, gate, total, out, activation, operand = epilogue
        if bias is not None and total is not None:
            total.add_(bias)  # before the product, which may stay in parts
            bias = None
        is_gated = self._fuses_gate(epilogue)
        candidate = self.only
        if candidate is None:
            x, norm = self._prepare(x, Epilogue(norm, bias, None, total))
            wanted = epilogue._replace(norm=norm, bias=bias, gate=gate if is_gated else None)
            candidate = self.select(x, wanted)
        fuses = candidate.fuses
        if norm is not None and not ("norm" in fuses and isinstance(norm, RMSNorm)):
            x, norm = norm(x), None
        is_gated = is_gated and "gate" in fuses
        fused_activation = activation if "activation" in fuses else None
        is_composed = (gate is not None and not is_gated) or activation is not fused_activation
        fused_bias = bias if "bias" in fuses else None
        fused_total = total if "add_to" in fuses else None
        fused_out = out if "out" in fuses and not is_composed else None
        fused = PLAIN  # most products on a CPU, of which each tuple would take a microsecond
        if is_gated or not (
            norm is fused_bias is fused_total is fused_out is fused_activation is operand is None
        ):
            fused = Epilogue(
                norm, fused_bias, gate if is_gated else None, fused_total, fused_out,
                fused_activation, operand,
            )  # fmt: skip
        product = self.launch(candidate, x, fused)
        if bias is not None and fused_bias is None:
            product.add_(bias)
        if is_composed:
            product = self._activate(product, gate, activation)
        if total is not None:
            return total.add_(product) if fused_total is None else product
        return product if out is None or product is out else out.copy_(product)

    def _fuses_gate(self, epilogue: Epilogue) -> bool:
        """Whether a kernel may compute the gate with the product."""
        return epilogue.gate == "silu" and epilogue.bias is None and self.gate != ""

    def _keeps_norm(self, x: Any, epilogue: Epilogue) -> bool:
        """Whether the norm is left to the kernel: that of one row, where nothing is added to the
        product. More rows are normed once, and not by every program of a kernel."""
        is_plain = epilogue.bias is epilogue.add_to is None
        return len(x) == 1 and is_plain and isinstance(epilogue.norm, RMSNorm)

    def _prepare(self, x: Any, epilogue: Epilogue) -> tuple[Any, Norm | None]:
        """Returns x as kernels take it, along with the quantization if there is one, and the norm
        that is left to them."""
        rows, norm = len(x), epilogue.norm
        format = self.input_format(rows) if isinstance(x, torch.Tensor) else None
        if format is not None:
            from aioinfer.kernels.quantize import quantize

            given = {}
            if isinstance(norm, RMSNorm):
                given = {"norm_weight": norm.weight, "eps": norm.eps}
            elif norm is not None:
                x = norm(x)
            return quantize(x, format, **given, pdl=self._backend.pdl), None
        if norm is not None and not self._keeps_norm(x, epilogue):
            return norm(x), None
        return x, norm

    def _activate(
        self, product: torch.Tensor, gate: str | None, activation: str | None
    ) -> torch.Tensor:
        """Returns activation(gate) * up of a product [..., out], or its activation."""
        if gate is None:
            assert activation is not None
            return ACTIVATIONS[activation](product)
        if self.gate == "interleaved":
            from aioinfer.kernels.activation import gated_activation

            return gated_activation(product, kind=gate, pdl=self._backend.pdl)
        first, second = product.chunk(2, dim=-1)
        return ACTIVATIONS[gate](first).mul_(second)

    # ---------------------------------------------------------------- which kernel

    def select(self, x: Any, epilogue: Epilogue) -> Candidate:
        """Returns the candidate that computes a product: the one that was chosen for its number of
        rows, if it takes the operands, or else the default."""
        operation = _operation_of(epilogue)
        choices = self._choices.get(operation)
        if choices is None:
            shape, dtype = (self._out, self._columns.size), str(self._backend.dtype)
            product = Product(operation, self.format, *shape, dtype.removeprefix("torch."))
            choices = self._backend.choices.register(product, self, epilogue.norm)
            self._choices[operation] = choices
        chosen, extended = choices.find(len(x)), epilogue.operand is not None
        if extended and chosen is not None and "operand" not in chosen.fuses:
            chosen = None
        if chosen is not None and self.takes(chosen, x, epilogue):
            return chosen
        if extended and (fusing := self.extended_candidate(operation, len(x))) is not None:
            return fusing
        return next(self.kernels(operation, x, epilogue))

    def candidates(self, operation: Operation, rows: int) -> list[Candidate]:
        """Returns the ways to compute a product of so many rows, the default first; none where the
        operation has no such products."""
        if rows > 1 and operation in ("normed", "normed gated"):
            return []  # normed by a launch of its own
        backend = self._backend
        empty = partial(torch.empty, dtype=backend.dtype, device=backend.device)
        x: Any = empty(rows, self._columns.size)
        format = self.input_format(rows)
        if format is not None:
            from aioinfer.kernels.quantize import empty_inputs

            x, _ = empty_inputs(rows, self._columns.size, format, backend.device)
        epilogue = epilogue_of(operation, None, empty(rows, self._out))
        found = self.kernels(operation, x, epilogue)
        return list(dict.fromkeys(each for each in found if self.takes(each, x, epilogue)))

    def warm_up(
        self, operation: Operation, norm: Norm | None = None, *, has_single_row: bool = True
    ) -> None:
        """Launches an operation in every configuration that the number of rows selects, and the
        activation of its gate, which is a launch of its own behind kernels that do not fuse it.

        Args:
            operation: with the weight.
            norm: of a normed operation.
            has_single_row: whether it is computed of one row, too.
        """
        backend, has_rows = self._backend, operation not in ("normed", "normed gated")
        zeros = partial(torch.zeros, dtype=backend.dtype, device=backend.device)
        for rows, candidate in self.warm_up_cases(operation):
            is_computed = has_rows if rows > 1 else has_single_row
            if not is_computed:
                continue
            x = zeros(rows, self._columns.size)
            epilogue = epilogue_of(operation, norm, zeros(rows, self._out))
            if candidate is None:
                self.multiply(x, epilogue)
            else:
                self.launch(candidate, x, epilogue)
        if operation in ("gated", "normed gated"):
            self._activate(zeros(1, self._out), "silu", None)


def _operation_of(epilogue: Epilogue) -> Operation:
    norm, bias, gate, total, out, *_ = epilogue
    if norm is not None:
        return "normed" if gate is None else "normed gated"
    if gate is not None:
        return "gated"
    if total is not None:
        return "residual"
    if bias is not None:
        return "biased"
    return "plain" if out is None else "partial"

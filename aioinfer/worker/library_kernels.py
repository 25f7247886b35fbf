"""The kernels of cuBLAS, which are loaded while a rank has nothing else to do.

For most numbers of rows cuBLAS has a kernel of its own, which the driver loads when it is launched
for the first time: 3 to 6 ms, at the end of which the launching thread waits for all that the GPU
has been given (measured on an H200; notes/step-loop.md). Decode steps and most layers of steps with
prompts are CUDA graphs, whose kernels are loaded when they are captured. The last layer and the
head of a step with prompts are launched one by one, for as many rows as the step happens to have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import LMHead
from aioinfer.layers.formats.base import epilogue_of
from aioinfer.layers.formats.kernel_dense import CUBLAS, KernelDenseWeight
from aioinfer.layers.kernel_choices import Operation, ProductChoices
from aioinfer.worker.gpu_device import GpuDevice

_log = logging.getLogger(__name__)

#: cuBLAS has equal kernels for the numbers of rows between two multiples of this, nearly always.
STRIDE = 8
#: Up to so many rows: twice the prompt tokens that a step has by default.
_MAX_ROWS = 4096
#: Seconds of launches between which a plan may come.
_TURN_S = 0.02


class _Case(NamedTuple):
    """A product of one number of rows.

    Attributes:
        out: room for the product of the head [rows, vocabulary]; None for other products.
    """

    weight: KernelDenseWeight
    operation: Operation
    rows: int
    out: torch.Tensor | None = None


class LibraryKernels:
    """The kernels of a rank's products that cuBLAS computes, of weights in 16 or 32 bits.

    Args:
        backend: of the rank, when the warm-up is over.
        max_rows: of a step.
        head: of the model, and room for its products [rows, vocabulary]; None where there is none.
    """

    def __init__(
        self, backend: Backend, max_rows: int,
        head: tuple[KernelDenseWeight, torch.Tensor] | None = None,
    ):  # fmt: skip
        self._backend = backend
        rows = range(STRIDE, min(max_rows, _MAX_ROWS) + 1, STRIDE)
        # multiples of large powers of two first: nearly all steps with prompts are as large
        sizes = sorted(rows, key=lambda each: -(each & -each))
        self._cases = _list_cases(list(backend.choices.products.values()), sizes, head)

    @classmethod
    def of(cls, model: Any, device: GpuDevice, backend: Backend) -> LibraryKernels:
        """Returns those of a model, which the device's steps compute."""
        head = getattr(model, "head", None)
        weight = head.weight if isinstance(head, LMHead) else None
        if not isinstance(weight, KernelDenseWeight):
            return cls(backend, device.max_tokens)
        return cls(backend, device.max_tokens, (weight, device.logits))

    @torch.inference_mode()
    def load_next(self) -> bool:
        """Launches some of the products that cuBLAS computes, in no more memory than a step takes;
        returns whether there were any left."""
        end = time.perf_counter() + _TURN_S
        try:
            for case in self._cases:
                self._launch(case)
                if time.perf_counter() > end:
                    return True
        except torch.OutOfMemoryError:  # of a GPU that others use, too
            _log.info("kernels of cuBLAS are loaded by the steps that need them: no memory is left")
            self._cases = iter(())
        return False

    def _launch(self, case: _Case) -> None:
        """Launches a product if cuBLAS computes it."""
        weight, operation, rows, out = case
        outputs, inputs = weight.loaded.shape
        x = torch.empty(rows, inputs, dtype=self._backend.dtype, device=self._backend.device)
        if out is None:
            out = x.new_empty(rows if operation in ("partial", "residual") else 1, outputs)
        epilogue = epilogue_of(operation, None, out)
        if weight.select(x, epilogue) == CUBLAS:
            weight.launch(CUBLAS, x, epilogue._replace(gate=None))


def _list_cases(
    products: Sequence[ProductChoices],
    sizes: Sequence[int],
    head: tuple[KernelDenseWeight, torch.Tensor] | None,
) -> Iterator[_Case]:
    """Yields the products of all sizes; those of one row are normed in their launch."""
    for rows in sizes:
        for choices in products:
            weight, operation = next(iter(choices.weights), None), choices.product.operation
            if isinstance(weight, KernelDenseWeight) and not operation.startswith("normed"):
                yield _Case(weight, operation, rows)
        if head is not None and rows <= len(head[1]):
            yield _Case(head[0], "partial", rows, head[1][:rows])

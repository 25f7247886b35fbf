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
from collections.abc import Iterator
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
#: Products of more rows have few kernels.
_MAX_ROWS = 4096
#: Seconds of launches between which a plan may come.
_TURN_S = 0.02


class _Case(NamedTuple):
    """A product of one number of rows.

    Attributes:
        choices: of its kernels; None for the head, which has none.
    """

    weight: KernelDenseWeight
    operation: Operation
    choices: ProductChoices | None
    rows: int


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
        self._backend, self._head = backend, head
        rows = range(STRIDE, min(max_rows, _MAX_ROWS) + 1, STRIDE)
        # multiples of large powers of two first: nearly all steps with prompts are as large
        self._cases = self._list(sorted(rows, key=lambda each: -(each & -each)))

    @classmethod
    def of(cls, model: Any, device: GpuDevice, backend: Backend) -> LibraryKernels:
        """Returns those of a model, which the device's steps compute."""
        head = getattr(model, "head", None)
        weight = head.weight if isinstance(head, LMHead) else None
        if not isinstance(weight, KernelDenseWeight):
            return cls(backend, device.max_tokens)
        return cls(backend, device.max_tokens, (weight, device.logits))

    def _list(self, sizes: list[int]) -> Iterator[_Case]:
        for rows in sizes:
            for choices in self._backend.choices.products.values():
                weight = next(iter(choices.weights), None)
                if isinstance(weight, KernelDenseWeight):
                    yield _Case(weight, choices.product.operation, choices, rows)
            if self._head is not None and rows <= len(self._head[1]):
                yield _Case(self._head[0], "partial", None, rows)

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
        weight, operation, choices, rows = case
        chosen = None if choices is None else choices.find(rows)
        if operation.startswith("normed"):  # more rows than one are normed by a launch of its own
            return
        if (chosen or weight.default(operation, rows)) != CUBLAS:
            return
        outputs, inputs = weight.loaded.shape
        x = torch.empty(rows, inputs, dtype=self._backend.dtype, device=self._backend.device)
        if choices is None and self._head is not None:
            out = self._head[1][:rows]
        else:
            out = x.new_empty(rows if operation in ("partial", "residual") else 1, outputs)
        weight.launch(CUBLAS, x, epilogue_of(operation, None, out)._replace(gate=None))

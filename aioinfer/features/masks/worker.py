"""Worker half of masks: constrained rows wait for their masks, which are applied to their logits.

The engine fills the masks while the step is computed (see `ipc.masks`). On a GPU they are read by
the copy engine where the engine writes them, in memory that all processes share: the whole memory
is registered with CUDA when the first masks come. Only the masks of a step's constrained rows are
copied, on a stream of their own, while the device still computes the step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import numpy as np
import torch

from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.worker.features import AwaitMessage, Rank, WorkerFeature

_log = logging.getLogger(__name__)


class Work(WorkerFeature):
    """See `WorkerFeature`. The message that constrained rows wait for is their masks, int32 [M,
    words] as `ipc.masks` describes them."""

    section = ConstrainedRows

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self._uploads = MaskUploads(rank.device)

    def late_rows(self, section: ConstrainedRows) -> I32 | None:
        """See `WorkerFeature.late_rows`."""
        return section.rows if len(section.rows) else None

    def late_logits(
        self,
        plan: StepPlan,
        section: ConstrainedRows,
        logits: torch.Tensor,
        places: torch.Tensor,
        await_message: AwaitMessage,
    ) -> torch.Tensor:
        """See `WorkerFeature.late_logits`."""
        masks = await_message(plan, len(section.rows))
        first = self.rank.model.vocabulary.start
        if self.rank.uses_kernels:
            from aioinfer.kernels.masks import gather_masked

            return gather_masked(logits, places, self._uploads.upload(masks), first=first)
        masked = logits.index_select(0, places)
        mask_logits(masked, masks, first)
        return masked

    def dummy_section(self, slots: Sequence[int], lengths: Sequence[int]) -> ConstrainedRows:
        """See `WorkerFeature.dummy_section`."""
        return ConstrainedRows(np.arange(len(slots), dtype=np.int32))


def mask_logits(logits: torch.Tensor, masks: I32, first: int = 0) -> None:
    """Makes the logits of tokens that the masks do not allow minus infinity, in place. NaN and
    infinity stay, so that a row with broken logits is found all the same.

    Args:
        logits: float32 [M, V] on a CPU, of the token ids from `first` on.
        masks: int32 [M, words], of the whole vocabulary.
        first: the token id of the first column.
    """
    values = logits.numpy()
    last = first + values.shape[1]
    begin = first // 32
    words = np.ascontiguousarray(masks[:, begin : (last + 31) // 32])
    for of_row, mask in zip(values, words, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").view(np.bool_)
        forbidden = ~allowed[first - 32 * begin : last - 32 * begin]
        forbidden &= of_row < np.inf  # false for NaN, too
        of_row[forbidden] = -np.inf


class MaskUploads:
    """Uploads masks. `device` is the device of the steps; on a CPU (in tests) it copies plainly."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._registered: int | None = None  # the address of the memory, 0 if it could not be

    def upload(self, masks: I32) -> torch.Tensor:
        """Returns masks (int32 [M, words], rows of shared memory) on the device. Later launches
        wait for them, and the host does not."""
        if self._stream is None:
            return torch.from_numpy(masks.copy())
        source = torch.from_numpy(masks)
        if not self._is_registered(masks):
            source = source.pin_memory()  # a copy, in memory that torch keeps until it is over
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            uploaded = source.to(self._device, non_blocking=True)
        current.wait_stream(self._stream)
        uploaded.record_stream(current)
        return uploaded

    def _is_registered(self, masks: I32) -> bool:
        """Whether CUDA reads the memory of `masks` directly; registers all of it at the first
        call."""
        whole = _whole_of(masks)
        if whole is None:
            return False
        if self._registered is None:
            address = whole.ctypes.data
            error = torch.cuda.cudart().cudaHostRegister(address, whole.nbytes, 0)
            self._registered = 0 if int(error) else address
            if int(error):
                _log.warning("masks are copied twice: cudaHostRegister failed with %s", error)
                with contextlib.suppress(RuntimeError):  # or the next launch would report the error
                    torch.zeros(1, device=self._device)
        return self._registered == whole.ctypes.data


def _whole_of(masks: I32) -> I32 | None:
    """Returns the array [buffers, rows, words] that `masks` are a view of; None if they are none of
    `ipc.masks.MaskMemory`."""
    base = masks
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base if base is not masks and not base.flags.owndata else None

"""Token masks of constrained rows: which tokens each row may sample, and how rows wait for their
masks.

A plan is posted before the masks of its rows are known, since they depend on the tokens of the
previous step. So the plan only lists its constrained rows (`ConstrainedRows`). The workers compute
the step, all but the sampling of these rows, and wait for a `MaskNotice`: a message in the ring of
the plans, behind its plan and before the next one. The masks themselves are in `MaskMemory`, which
all processes of an engine share.

A mask is packed: token id t is bit `t % 32` of word `t // 32`, of int32 words; a set bit allows the
token.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioinfer.ipc.anonymous_file import AnonymousFile
from aioinfer.ipc.sections import I32, Section, array

#: Steps that may have masks in memory at a time without a pipeline: two steps are in flight, and
#: one more makes sure that no rank still copies a buffer that is overwritten.
NUM_MASK_BUFFERS = 3
#: Stands in a notice where a plan has its version.
NOTICE_MARK = -1
_NOTICE = struct.Struct("=iiq")


def mask_words(vocab_size: int) -> int:
    """Returns how many int32 words the mask of one token takes."""
    return (vocab_size + 31) // 32


@dataclass(frozen=True, slots=True)
class ConstrainedRows(Section):
    """The sampled rows of a step that have to wait for a mask.

    Attributes:
        rows: int32 [M], ascending: their places among the sampled rows, in the order of the result.
            `rows[i]` has mask i of the step's buffer.
    """

    rows: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class MaskNotice:
    """The message that the masks of a step are in memory.

    Attributes:
        step_id: the number of the step.
        buffer: the buffer of `MaskMemory` that has the masks, from its first row on.
    """

    step_id: int
    buffer: int

    def encode(self) -> list[memoryview]:
        """Returns the buffers that make up the message."""
        return [memoryview(_NOTICE.pack(NOTICE_MARK, self.buffer, self.step_id))]

    @classmethod
    def decode(cls, message: bytes | bytearray | memoryview) -> MaskNotice:
        """Reads a message. Raises ValueError if it is another one."""
        if not is_notice(message):
            raise ValueError("a plan came where masks were due")
        _, buffer, step_id = _NOTICE.unpack_from(message)
        return cls(step_id, buffer)


def is_notice(message: bytes | bytearray | memoryview) -> bool:
    """Whether a message from the ring of the plans is a `MaskNotice`."""
    return int.from_bytes(message[:4], "little", signed=True) == NOTICE_MARK


def num_mask_buffers(num_stages: int) -> int:
    """Returns the number of steps that have masks in memory: each further stage of a pipeline has
    one more in flight."""
    return NUM_MASK_BUFFERS + num_stages - 1


def buffer_of(step_id: int, num_buffers: int = NUM_MASK_BUFFERS) -> int:
    """Returns which buffer holds the masks of a step."""
    return step_id % num_buffers


class MaskMemory(AnonymousFile):
    """The masks of the steps in flight, in anonymous memory that the engine writes and its workers
    read; pages that no mask touches take no memory.

    Attributes:
        num_buffers: steps that may have masks in it at a time.

    It is made before the workers are spawned, and gets its size when they have reported the size of
    the vocabulary (`resize`). Each process maps it when it first needs it.
    """

    _buffers: I32 | None = None

    def __init__(self, num_buffers: int = NUM_MASK_BUFFERS) -> None:
        super().__init__("aioinfer-masks")
        self.num_buffers = num_buffers

    def resize(self, max_rows: int, vocab_size: int) -> None:
        """Sets the size of the memory, once: for `max_rows` rows of a step."""
        os.ftruncate(self._fd, 4 * self.num_buffers * max_rows * mask_words(vocab_size))

    def buffers(self, max_rows: int, vocab_size: int) -> I32:
        """Returns the masks int32 [num_buffers, max_rows, words]; the sizes are the same as for
        `resize`."""
        if self._buffers is None:
            shape = self.num_buffers, max_rows, mask_words(vocab_size)
            pages = mmap.mmap(self._fd, 4 * shape[0] * shape[1] * shape[2])
            self._buffers = np.frombuffer(pages, np.int32).reshape(shape)
        return self._buffers

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "num_buffers": self.num_buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.num_buffers = state["num_buffers"]

    def close(self) -> None:
        """Closes the descriptor; the memory goes with the last view of it. Safe to call twice."""
        self._buffers = None
        super().close()

"""The messages of the ring: `StepPlan` to the workers and `StepResult` back, and their flat layout.
A section may also go to the workers alone, between plans (`encode_section`).

Layout (version 3; native byte order, since both sides are one machine). Every message is a header
(`_PLAN_HEADER`, `_RESULT_HEADER`), the arrays of its fixed part in the order of the dataclass
fields, each 4 bytes an element, and then its sections (`ipc.sections`): encoding is a handful of
copies, and decoding is views. A request is described once, by a record among `Admissions`, when it
takes a slot; after that a row of four integers a step names it, and its block tables grow by (row,
index, block) triples. Sampled tokens never travel back to the workers: they keep them in the slot.

Bounds. But for appended tokens, 256 KiB at most, and for the block tables of forks, 768 KiB, no
plan exceeds `MAX_PLAN_BYTES`, three quarters of the longest message of a ring of the usual size:
the scheduler counts the bytes of the requests that it admits, and `max_sequence_tokens` limits how
long a single request may be.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from aioinfer.ipc.request_record import NO_ADMISSIONS, RECORD, Admission, Admissions, FreedSlots
from aioinfer.ipc.sections import F32, I32, ArrayReader, Section, as_bytes, decode_sections
from aioinfer.sampling_params import MAX_END_TOKENS, MAX_LOGIT_BIAS

__all__ = [
    "F32",
    "I32",
    "Admission",
    "Admissions",
    "FreedSlots",
    "StepPlan",
    "StepResult",
]

VERSION = 3
#: Version, rows, growth, copies, sections; step id.
_PLAN_HEADER = struct.Struct("=iiiiixxxxq")
#: Version, sampled rows, sections; step id, busy nanoseconds.
_RESULT_HEADER = struct.Struct("=iiixxxxqq")
#: Stands where a plan has its version: the message is one section.
_SECTION_MARK, _SECTION_HEADER = -2, struct.Struct("=i")

#: Three quarters of the longest message (16 MiB) of a ring of the usual size.
MAX_PLAN_BYTES = 12 * 2**20
#: Bytes that the fixed part of a plan may take of it; the rest is for admissions.
MAX_FIXED_BYTES = 2 * 2**20
#: Bytes of a row (four integers, and one more if it is constrained), of an entry of a block table's
#: growth, of a copy of a block, and what lookahead adds to a row.
ROW_BYTES, GROWTH_BYTES, COPY_BYTES, LOOKAHEAD_BYTES = 20, 12, 12, 12

_NONE = np.empty(0, np.int32)
S = TypeVar("S", bound=Section)


def find_section(sections: Sequence[Section], kind: type[S]) -> S | None:
    """Returns the section of a class, or None."""
    for section in sections:
        if type(section) is kind:
            return section
    return None


def max_sequence_tokens(block_size: int, num_groups: int = 1) -> int:
    """Returns the longest sequence that a plan can admit, whatever its parameters are.

    Args:
        block_size: tokens a KV block; a prompt found in the cache brings its whole block tables.
        num_groups: block tables of a request.
    """
    lists = RECORD.itemsize + 8 * MAX_LOGIT_BIAS + 4 * MAX_END_TOKENS
    tables = GROWTH_BYTES * num_groups
    room = MAX_PLAN_BYTES - MAX_FIXED_BYTES - lists - tables - 1024
    return room * block_size // (4 * block_size + tables)


@dataclass(slots=True)
class StepPlan:
    """One step of work. Decodes (rows of one token that are sampled) come before all other rows.

    Attributes:
        step_id: counts up by one; int64.
        slots: int32 [rows], the slot of each row.
        starts: int32 [rows], the position of the row's first token: how many tokens are computed
            already.
        lengths: int32 [rows], tokens to compute.
        samples: int32 [rows], 1 if the row reaches the end of its tokens, so that the next one is
            sampled from its last logits.
        table_rows, table_indices, table_blocks: int32 [growth], `block_table[row, index] = block`,
            applied first; row = group * max_num_seqs + slot, where `group` is the group of the KV
            cache.
        copy_sources, copy_targets: int32 [copies], KV blocks to copy (copy-on-write) before
            anything is computed.
        sections: the parts that only some plans have, at most one of a class; applied before the
            rows.
        copy_groups: int32 [copies], the KV group of each copied block; all 0 if left out.
    """

    step_id: int
    slots: I32
    starts: I32
    lengths: I32
    samples: I32
    table_rows: I32
    table_indices: I32
    table_blocks: I32
    copy_sources: I32
    copy_targets: I32
    sections: Sequence[Section] = ()
    copy_groups: I32 = field(default_factory=lambda: _NONE)

    def __post_init__(self) -> None:
        if len(self.copy_groups) != len(self.copy_sources):
            self.copy_groups = np.zeros_like(self.copy_sources)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.lengths.sum())

    @property
    def admissions(self) -> Admissions:
        """The requests that take a slot in this step; may be empty."""
        found = find_section(self.sections, Admissions)
        return NO_ADMISSIONS if found is None else found

    def section(self, kind: type[S]) -> S | None:
        """Returns the section of a class, or None."""
        return find_section(self.sections, kind)

    def encode(self) -> list[memoryview]:
        """Returns the buffers that make up the message, to be written one after the other."""
        header = _PLAN_HEADER.pack(
            VERSION, len(self.slots), len(self.table_rows), len(self.copy_sources),
            len(self.sections), self.step_id,
        )  # fmt: skip
        arrays = (
            self.slots, self.starts, self.lengths, self.samples,
            self.table_rows, self.table_indices, self.table_blocks,
            self.copy_groups, self.copy_sources, self.copy_targets,
        )  # fmt: skip
        parts = [memoryview(header), *(part.data.cast("B") for part in arrays if len(part))]
        for section in self.sections:
            parts.extend(section.encode())
        return parts

    @classmethod
    def decode(cls, message: bytes | bytearray | memoryview) -> StepPlan:
        """Reads a message; arrays are views into it.

        Raises ValueError on another version or an unknown section.
        """
        version, rows, growth, copies, sections, step_id = _PLAN_HEADER.unpack_from(message)
        _check_version(version, "plan")
        reader = ArrayReader(message, _PLAN_HEADER.size)
        slots, starts, lengths, samples = reader.take(4 * rows).reshape(4, rows)
        table_rows, table_indices, table_blocks = reader.take(3 * growth).reshape(3, growth)
        copy_groups, copy_sources, copy_targets = reader.take(3 * copies).reshape(3, copies)
        return cls(
            step_id, slots, starts, lengths, samples, table_rows, table_indices, table_blocks,
            copy_sources, copy_targets,
            decode_sections(reader, sections, "plan") if sections else (),
            copy_groups,
        )  # fmt: skip


@dataclass(slots=True)
class StepResult:
    """The outcome of a step, for its sampling rows in the order of the plan.

    Attributes:
        step_id: the number of its plan.
        tokens: int32 [sampled]; -1 where the row's logits held NaN, so that nothing could be
            sampled; `lookahead.SKIPPED` for a lookahead row that was not kept.
        sections: the parts that only some results have, at most one of a class.
        busy_ns: nanoseconds that the worker spent on the step.
        take_ns: nanoseconds that the engine's process spent on taking the result from its ring;
            does not travel.
    """

    step_id: int
    tokens: I32
    sections: Sequence[Section] = ()
    busy_ns: int = 0
    take_ns: int = 0

    def section(self, kind: type[S]) -> S | None:
        """Returns the section of a class, or None."""
        return find_section(self.sections, kind)

    def encode(self) -> list[memoryview]:
        """Returns the buffers that make up the message, to be written one after the other."""
        header = _RESULT_HEADER.pack(
            VERSION, len(self.tokens), len(self.sections), self.step_id, self.busy_ns
        )
        parts = [memoryview(header)]
        if len(self.tokens):
            parts.append(as_bytes(self.tokens))
        for section in self.sections:
            parts.extend(section.encode())
        return parts

    @classmethod
    def decode(cls, message: bytes | bytearray | memoryview) -> StepResult:
        """Reads a message into arrays of its own.

        Raises ValueError on another version or an unknown section.
        """
        version, sampled, sections, step_id, busy_ns = _RESULT_HEADER.unpack_from(message)
        _check_version(version, "result")
        # one copy of all: the arrays are views into it, and not into the ring
        reader = ArrayReader(bytes(message), _RESULT_HEADER.size)
        tokens = reader.take(sampled)
        found = decode_sections(reader, sections, "result") if sections else ()
        return cls(step_id, tokens, found, busy_ns)


def encode_section(section: Section) -> list[memoryview]:
    """Returns the buffers that make up the message with one section and no plan, to be written one
    after the other."""
    return [memoryview(_SECTION_HEADER.pack(_SECTION_MARK)), *section.encode()]


def decode_section(message: bytes | bytearray | memoryview) -> Section | None:
    """Reads a message with one section, whose arrays are views into it; None for another message.
    Raises ValueError on an unknown section."""
    if _SECTION_HEADER.unpack_from(message)[0] != _SECTION_MARK:
        return None
    return decode_sections(ArrayReader(message, _SECTION_HEADER.size), 1, "message")[0]


def _check_version(version: int, message: str) -> None:
    if version != VERSION:
        raise ValueError(f"a {message} of version {version}, where {VERSION} is understood")

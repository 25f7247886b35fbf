"""What crosses the ring: `StepPlan` to the workers and `StepResult` back, and their flat layout.

Layout (version 1; native byte order, since both sides are one machine). Every message is a header
of int32 fields followed by its arrays in the order of the dataclass fields, each 4 bytes an
element, so that encoding is a handful of copies and decoding is views. A request is described once,
by an `Admission`, when it takes a slot; after that a row of three integers a step names it, and the
block table grows by (slot, index, block) triples. Sampled tokens never travel back to the workers:
they keep them in the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from aioinfer.sampling_params import SamplingParams

VERSION = 1
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

#: The part of an admission that has a fixed size. `seed` is the 64 bits that key the sampler's
#: noise.
_ADMISSION = np.dtype(
    [
        ("seed", np.uint64),
        ("slot", np.int32),
        ("num_tokens", np.int32),
        ("prompt_len", np.int32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("min_tokens", np.int32),
        ("logprobs", np.int32),  # -1: none wanted
        ("num_bias", np.int32),
        ("num_banned", np.int32),
    ]
)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes a slot, sent whole.

    Attributes:
        slot: the slot, from now on this request's.
        tokens: int32 [num_tokens], the prompt and, after a preemption, what was generated since.
        prompt_len: how many of `tokens` are the prompt (the output counts for min_tokens and
            penalties).
        params: the sampling parameters; of them only what the sampler needs crosses the ring.
        seed: 64 bits that, with the position, key the noise of sampling.
        banned_until_min_tokens: the token ids that may not be chosen before `params.min_tokens`.
    """

    slot: int
    tokens: I32
    prompt_len: int
    params: SamplingParams
    seed: int
    banned_until_min_tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One step of work. Decodes (rows of one token that are sampled) come before all other rows.

    Attributes:
        step_id: counts up by one.
        slots: int32 [rows], the slot of each row.
        starts: int32 [rows], the position of the row's first token: how many tokens are computed
            already.
        lengths: int32 [rows], tokens to compute.
        samples: int32 [rows], 1 if the row reaches the end of its tokens, so that its last logits
            choose the next one.
        table_slots, table_indices, table_blocks: int32 [growth], `block_table[row, index] =
            block`, applied first; the row of a slot in a KV group is group * max_num_seqs + slot.
        copy_sources, copy_targets: int32 [copies], KV blocks to copy (copy-on-write) before
            anything is computed.
        copy_groups: int32 [copies], the KV group of each copy.
        admissions: the requests that take a slot in this step, applied before the rows.
    """

    step_id: int
    slots: I32
    starts: I32
    lengths: I32
    samples: I32
    table_slots: I32
    table_indices: I32
    table_blocks: I32
    copy_sources: I32
    copy_targets: I32
    admissions: list[Admission] = field(default_factory=list)
    copy_groups: I32 = field(default_factory=lambda: np.empty(0, np.int32))

    def __post_init__(self) -> None:
        if len(self.copy_groups) != len(self.copy_sources):
            self.copy_groups = np.zeros(len(self.copy_sources), np.int32)

    @property
    def table_rows(self) -> I32:
        """int32 [growth], group * max_num_seqs + slot."""
        return self.table_slots

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.lengths.sum())

    def encode(self) -> list[memoryview]:
        """Returns the buffers that make up the message, to be written one after the other."""
        rows, growth, copies = len(self.slots), len(self.table_slots), len(self.copy_sources)
        header = np.array(
            [VERSION, self.step_id, rows, growth, copies, len(self.admissions)], np.int32
        )
        arrays = [
            header, self.slots, self.starts, self.lengths, self.samples,
            self.table_slots, self.table_indices, self.table_blocks, self.copy_sources,
            self.copy_targets, self.copy_groups,
        ]  # fmt: skip
        parts = [a.data.cast("B") for a in arrays if len(a)]
        for admission in self.admissions:
            parts.extend(_encode_admission(admission))
        return parts

    @classmethod
    def decode(cls, message: bytes | bytearray | memoryview) -> StepPlan:
        """Reads a message; arrays are views into it. Raises ValueError on another version."""
        version, step_id, rows, growth, copies, admissions = (
            int(x) for x in np.frombuffer(message, np.int32, 6)
        )
        if version != VERSION:
            raise ValueError(f"a plan of version {version}, where {VERSION} is understood")
        reader = _Reader(message, 24)
        slots, starts, lengths, samples = (reader.take(rows) for _ in range(4))
        table_slots, table_indices, table_blocks = (reader.take(growth) for _ in range(3))
        copy_sources, copy_targets, copy_groups = (reader.take(copies) for _ in range(3))
        return cls(
            step_id, slots, starts, lengths, samples, table_slots, table_indices, table_blocks,
            copy_sources, copy_targets,
            [_decode_admission(reader) for _ in range(admissions)], copy_groups,
        )  # fmt: skip


@dataclass(slots=True)
class StepResult:
    """What a step gave, for its sampling rows in the order of the plan.

    Attributes:
        step_id: the plan's.
        tokens: int32 [sampled]; -1 where the row's logits held NaN and nothing could be chosen.
        logprobs: float32 [sampled] of the chosen tokens, or empty when no row asked for them.
        top_tokens: int32 [sampled, K] the likeliest tokens, likeliest first; K may be 0.
        top_logprobs: float32 [sampled, K], theirs.
        busy_ns: nanoseconds that the worker spent on the step.
        take_ns: nanoseconds that the engine's process spent on taking the result from its ring;
            does not travel.
    """

    step_id: int
    tokens: I32
    logprobs: F32 = field(default_factory=lambda: np.empty(0, np.float32))
    top_tokens: I32 = field(default_factory=lambda: np.empty((0, 0), np.int32))
    top_logprobs: F32 = field(default_factory=lambda: np.empty((0, 0), np.float32))
    busy_ns: int = 0
    take_ns: int = 0

    def encode(self) -> list[memoryview]:
        """Returns the buffers that make up the message, to be written one after the other."""
        k = self.top_tokens.shape[1] if self.top_tokens.size else 0
        low, high = self.busy_ns & 0x7FFFFFFF, self.busy_ns >> 31
        header = np.array(
            [VERSION, self.step_id, len(self.tokens), len(self.logprobs), k, low, high], np.int32
        )
        arrays = [
            header,
            self.tokens,
            self.logprobs,
            self.top_tokens.reshape(-1),
            self.top_logprobs.reshape(-1),
        ]
        return [a.data.cast("B") for a in arrays if len(a)]

    @classmethod
    def decode(cls, message: bytes | bytearray | memoryview) -> StepResult:
        """Reads a message into arrays of its own. Raises ValueError on another version."""
        version, step_id, sampled, with_logprobs, k, low, high = (
            int(x) for x in np.frombuffer(message, np.int32, 7)
        )
        if version != VERSION:
            raise ValueError(f"a result of version {version}, where {VERSION} is understood")
        reader = _Reader(message, 28)
        tokens = reader.take(sampled).copy()
        logprobs = reader.take(with_logprobs).view(np.float32).copy()
        top_tokens = reader.take(sampled * k).reshape(sampled, k).copy()
        top_logprobs = reader.take(sampled * k).view(np.float32).reshape(sampled, k).copy()
        return cls(step_id, tokens, logprobs, top_tokens, top_logprobs, low | high << 31)


class _Reader:
    """Takes arrays one after the other from a message."""

    def __init__(self, message: bytes | bytearray | memoryview, offset: int):
        self.message = message
        self.offset = offset

    def take(self, count: int) -> I32:
        """Returns the next `count` int32 as a view."""
        array = np.frombuffer(self.message, np.int32, count, self.offset)
        self.offset += 4 * count
        return array


def _encode_admission(admission: Admission) -> list[memoryview]:
    params = admission.params
    bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
    bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
    banned = np.array(admission.banned_until_min_tokens, np.int32)
    fixed = np.zeros(1, _ADMISSION)
    fixed[0] = (
        admission.seed, admission.slot, len(admission.tokens), admission.prompt_len,
        params.temperature, params.top_k, params.top_p, params.min_p,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
        params.min_tokens, -1 if params.logprobs is None else params.logprobs, len(bias_ids),
        len(banned),
    )  # fmt: skip
    arrays: Sequence[np.ndarray] = [
        fixed.view(np.int32),
        admission.tokens,
        bias_ids,
        bias_values,
        banned,
    ]
    return [np.ascontiguousarray(a).data.cast("B") for a in arrays if len(a)]


def _decode_admission(reader: _Reader) -> Admission:
    fixed = reader.take(_ADMISSION.itemsize // 4).view(_ADMISSION)[0]
    tokens = reader.take(int(fixed["num_tokens"]))
    bias_ids = reader.take(int(fixed["num_bias"]))
    bias_values = reader.take(int(fixed["num_bias"])).view(np.float32)
    banned = reader.take(int(fixed["num_banned"]))
    params = SamplingParams(
        temperature=float(fixed["temperature"]),
        top_k=int(fixed["top_k"]),
        top_p=float(fixed["top_p"]),
        min_p=float(fixed["min_p"]),
        repetition_penalty=float(fixed["repetition_penalty"]),
        presence_penalty=float(fixed["presence_penalty"]),
        frequency_penalty=float(fixed["frequency_penalty"]),
        min_tokens=int(fixed["min_tokens"]),
        logprobs=None if fixed["logprobs"] < 0 else int(fixed["logprobs"]),
        logit_bias=dict(zip(bias_ids.tolist(), bias_values.tolist(), strict=True)),
    )
    return Admission(
        int(fixed["slot"]),
        tokens,
        int(fixed["prompt_len"]),
        params,
        int(fixed["seed"]),
        tuple(banned.tolist()),
    )

"""The wire form of admitted requests: one record each, and their lists packed.

A request is sent whole once, when it is admitted. Its record is the same bytes on the ring, in a
step's upload to the GPU and, field by field, in the tensors of the slots (`worker.slots`); its
layout is derived from the declarations in `sampling_params`, so a new parameter of the sampler is
one line there. Lists (tokens, logit biases, tokens that are banned until `min_tokens`) lie one
behind the other in packed arrays, and records have their places. The n sequences of one request
share the places of the lists that they have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.ipc.sections import F32, I32, Section, array
from aioinfer.sampling_params import PARAMETERS, SamplingParams

#: The fields of a record that are not sampling parameters: the slot; where the packed arrays hold
#: its tokens, biases and banned tokens, and how many; how many of the tokens are the prompt; the 64
#: bits that key the noise of sampling; the first position that may take a banned token; how many
#: tokens are computed already; and what is added to its positions where RoPE is applied, in models
#: that have three positions a token.
_PLACES = (
    ("slot", np.int32), ("first_token", np.int32), ("num_tokens", np.int32),
    ("prompt_len", np.int32), ("seed_low", np.uint32), ("seed_high", np.uint32),
    ("first_bias", np.int32), ("num_bias", np.int32), ("first_banned", np.int32),
    ("num_banned", np.int32), ("banned_until", np.int32), ("num_computed", np.int32),
    ("rotary_offset", np.int32),
)  # fmt: skip
_CROSSING = tuple(each for each in PARAMETERS if each.crosses)

#: A record: fields of 4 bytes.
RECORD = np.dtype(
    [*_PLACES, *((each.name, np.float32 if each.is_float else np.int32) for each in _CROSSING)]
)
RECORD_WORDS = RECORD.itemsize // 4
#: The index of each field in a record of int32.
WORD = {name: index for index, name in enumerate(RECORD.names or ())}

_parameters_of = attrgetter(*(each.name for each in _CROSSING))


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A request that takes a slot, before it is packed.

    Attributes:
        slot: the slot, from now on this request's.
        tokens: int32 [num_tokens], the prompt and, after a preemption, the output so far.
        prompt_len: how many of `tokens` are the prompt (the output counts for min_tokens and
            penalties).
        params: the sampling parameters; only the parameters that the sampler needs go to the
            workers.
        seed: the low 64 bits, with the position, key the noise of sampling.
        banned_until_min_tokens: the token ids that may not be sampled before `params.min_tokens`.
        num_computed: how many of the tokens are in the KV cache.
        rotary_offset: added to the positions of tokens behind its pictures where RoPE is applied.
    """

    slot: int
    tokens: I32
    prompt_len: int
    params: SamplingParams
    seed: int = 0
    banned_until_min_tokens: Collection[int] = ()
    num_computed: int = 0
    rotary_offset: int = 0


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """One request of `Admissions`; arrays are views.

    Attributes:
        slot: the slot.
        record: its record, of dtype `RECORD`.
        tokens: int32 [num_tokens].
        bias_ids, bias_values: int32 and float32 [num_bias].
        banned_ids: int32 [num_banned].
    """

    slot: int
    record: np.void
    tokens: I32
    bias_ids: I32
    bias_values: F32
    banned_ids: I32

    @property
    def prompt_len(self) -> int:
        """How many of the tokens are the prompt."""
        return int(self.record["prompt_len"])

    @property
    def seed(self) -> int:
        """The 64 bits that key the noise of sampling."""
        return int(self.record["seed_high"]) << 32 | int(self.record["seed_low"])


@dataclass(frozen=True, slots=True)
class Admissions(Section):
    """The requests that take a slot in a step. Iteration gives them one by one.

    Attributes:
        records: [A], of dtype `RECORD`.
        tokens, bias_ids, bias_values, banned_ids: [N], the packed lists that the records point
            into.
    """

    records: npt.NDArray[np.void] = array(RECORD)
    tokens: I32 = array(np.int32)
    bias_ids: I32 = array(np.int32)
    bias_values: F32 = array(np.float32)
    banned_ids: I32 = array(np.int32)

    @classmethod
    def of(cls, admissions: Iterable[Admission]) -> Admissions:
        """Packs requests."""
        packer = AdmissionPacker()
        for admission in admissions:
            packer.add(admission)
        return packer.pack()

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[AdmittedRequest]:
        for record in self.records:
            first, count = int(record["first_bias"]), int(record["num_bias"])
            bias = slice(first, first + count)
            first, count = int(record["first_token"]), int(record["num_tokens"])
            tokens = self.tokens[first : first + count]
            first, count = int(record["first_banned"]), int(record["num_banned"])
            banned = self.banned_ids[first : first + count]
            yield AdmittedRequest(
                int(record["slot"]), record, tokens, self.bias_ids[bias], self.bias_values[bias],
                banned,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FreedSlots(Section):
    """Slots of requests that had penalties and have ended or were preempted: workers free the
    penalty counts of these. Applied before admissions, which may name the same slots.

    Attributes:
        slots: int32 [V].
    """

    slots: I32 = array(np.int32)


@dataclass(frozen=True, slots=True)
class AppendedTokens(Section):
    """Tokens of running requests that the workers do not have, since they were not sampled. They
    are entered in the slots before the rows are computed.

    Attributes:
        slots, positions, tokens: int32 [E], `tokens[i]` is at `positions[i]` of `slots[i]`.
        counted: int32 [E], 1 where penalties have to count the token, and 0 where it has been
            sampled.
    """

    slots: I32 = array(np.int32)
    positions: I32 = array(np.int32)
    tokens: I32 = array(np.int32)
    counted: I32 = array(np.int32)


@dataclass(slots=True)
class _Packed:
    """Lists one behind the other; a list that is added twice (the same object) is stored once."""

    dtype: npt.DTypeLike
    parts: list[npt.NDArray[Any]] = field(default_factory=list)
    length: int = 0
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)  # so that no id is used again

    def add(self, owner: object, values: Collection[Any]) -> tuple[int, int]:
        """Returns where the values of `owner` begin, and how many there are."""
        place = self.places.get(id(owner))
        if place is None:
            count = len(values)
            place = self.places[id(owner)] = self.length, count
            self.kept.append(owner)
            self.parts.append(
                values if isinstance(values, np.ndarray) else np.fromiter(values, self.dtype, count)
            )
            self.length += count
        return place

    def to_array(self) -> npt.NDArray[Any]:
        """Returns all values."""
        return np.concatenate(self.parts) if self.parts else np.empty(0, self.dtype)


class AdmissionPacker:
    """Packs the admissions of one plan, and counts their bytes."""

    def __init__(self) -> None:
        self._records: list[tuple[Any, ...]] = []
        self._tokens = _Packed(np.int32)
        self._bias_ids = _Packed(np.int32)
        self._bias_values = _Packed(np.float32)
        self._banned = _Packed(np.int32)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def nbytes(self) -> int:
        """Bytes of all that was added."""
        values = 2 * self._bias_ids.length + self._tokens.length + self._banned.length
        return len(self._records) * RECORD.itemsize + 4 * values

    def add(self, admission: Admission) -> None:
        """Adds a request. Requests that have `tokens`, `params.logit_bias` or banned tokens in one
        and the same object share their place."""
        params, banned, biases = (
            admission.params,
            admission.banned_until_min_tokens,
            admission.params.logit_bias,
        )
        banned_until = admission.prompt_len + params.min_tokens if banned else 0
        self._bias_values.add(biases, biases.values())
        self._records.append(
            (
                admission.slot,
                *self._tokens.add(admission.tokens, admission.tokens),
                admission.prompt_len,
                admission.seed & 0xFFFFFFFF,
                admission.seed >> 32 & 0xFFFFFFFF,
                *self._bias_ids.add(biases, biases.keys()),
                *self._banned.add(banned, banned),
                banned_until,
                admission.num_computed,
                admission.rotary_offset,
                *_parameters_of(params),
            )
        )

    def bytes_of_lists(self, params: SamplingParams, banned: Collection[int]) -> int:
        """Returns the bytes that a request's biases and banned tokens would add."""
        added = 0
        if id(params.logit_bias) not in self._bias_ids.places:
            added += 8 * len(params.logit_bias)
        if id(banned) not in self._banned.places:
            added += 4 * len(banned)
        return added

    def pack(self) -> Admissions:
        """Returns the section."""
        return Admissions(
            np.array(self._records, RECORD), self._tokens.to_array(), self._bias_ids.to_array(),
            self._bias_values.to_array(), self._banned.to_array(),
        )  # fmt: skip


NO_ADMISSIONS = Admissions.of(())

"""The state of the running requests, one slot each, in tensors on the worker's device.

The model runner applies each step's plan to it and derives the step's inputs from it; the sampler
reads how each request wants its tokens chosen. A request is written once, when it is admitted;
after that only its block table and its tokens grow, and the tokens are written on the device:
nothing comes back from the host. (Request state in fixed slots of the GPU is the idea of vLLM's
second model runner.)

On the host there is only what decides which work a step has: `sampling_flags`, `num_logprobs` and a
copy of `banned_until`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import I32, Admission, StepPlan
from aioinfer.sampling_params import SamplingParams

# What a request asks of the sampler beyond the likeliest token; bits of `Slots.sampling_flags`.
RANDOM = 1  # a temperature above 0
FILTERED = 2  # top-k, top-p or min-p, at a temperature above 0
BIASED = 4  # a logit bias
PENALIZED = 8  # a repetition, presence or frequency penalty
BANNED = 16  # tokens that are banned at this position, before min_tokens
LOGPROBS = 32  # log-probabilities

IN_PROMPT = 1 << 30


class LogitBiases:
    """What to add to the logits of some tokens, for those slots that ask.

    The tensors widen when a longer list comes, so their addresses may change with an admission.

    Attributes:
        ids: int64 [max_num_seqs, width], token ids; a list is padded by repeating its first.
        values: float32 [max_num_seqs, width], 0 where padded and for slots that do not ask.
    """

    def __init__(self, max_num_seqs: int, device: torch.device):
        self.ids = torch.zeros((max_num_seqs, 0), dtype=torch.int64, device=device)
        self.values = torch.zeros((max_num_seqs, 0), dtype=torch.float32, device=device)
        self._used: set[int] = set()

    def set(self, slot: int, biases: Mapping[int, float]) -> None:
        """Overwrites the biases of a slot, which may be none."""
        if not biases and slot not in self._used:
            return
        self._used.add(slot)
        ids, values = list(biases), list(biases.values())
        width = self.ids.shape[1]
        if len(ids) > width:
            more = max(len(ids), 2 * width) - width
            self.ids = torch.nn.functional.pad(self.ids, (0, more))
            self.values = torch.nn.functional.pad(self.values, (0, more))
            width += more
        padding = width - len(ids)
        if ids:
            self.ids[slot] = torch.tensor(ids + ids[:1] * padding)
        self.values[slot] = torch.tensor(values + [0.0] * padding)


class Occurrences:
    """Which tokens a request holds, and how often it generated them, for those slots whose requests
    have penalties.

    Attributes:
        rows: int32 [capacity, vocab_size]; the bit `IN_PROMPT` says that the token is in the
            prompt, the bits below it count it in the output. The capacity doubles when it is used
            up.
        row_of_slot: int64 [max_num_seqs], the row of each slot, or -1.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self.rows = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.row_of_slot = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self._row_of_slot: dict[int, int] = {}  # the same on the host
        self._free: list[int] = []

    def start(self, slot: int, tokens: torch.Tensor, prompt_len: int) -> None:
        """Begins the row of a slot with the tokens of its request so far (int32 [n], prompt and
        output)."""
        row = self._row_of_slot.get(slot)
        if row is None:
            if not self._free:
                capacity = len(self.rows)
                self.rows = torch.nn.functional.pad(self.rows, (0, 0, 0, max(4, capacity)))
                self._free = list(range(len(self.rows) - 1, capacity - 1, -1))
            row = self._row_of_slot[slot] = self._free.pop()
            self.row_of_slot[slot] = row
        self.rows[row] = torch.bincount(tokens[prompt_len:], minlength=self.rows.shape[1])
        self.rows[row, tokens[:prompt_len].long()] |= IN_PROMPT

    def stop(self, slot: int) -> None:
        """Gives the row of a slot back, if it has one."""
        row = self._row_of_slot.pop(slot, None)
        if row is not None:
            self.row_of_slot[slot] = -1
            self._free.append(row)

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts one token for each of `slots` (both int64 [n]; no slot twice)."""
        self.rows[self.row_of_slot[slots], tokens] += 1


class Slots:
    """Per-slot request state. S slots; every position is counted from the beginning of the prompt.

    Attributes:
        tokens: int32 [S, max_model_len + 1], prompt and output. One more than a request can have,
            since the last token is chosen but never computed.
        block_tables: int32 [groups * S, blocks of max_model_len], always valid block ids; row
            group * S + slot.
        tables_by_group: the same by KV group, each [S, blocks of max_model_len].
        seeds: int64 [S], the 64 bits that key the sampler's noise.
        top_k: int32 [S], 0 keeps all.
        banned_until: int32 [S], the first position that may take a banned token.
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: float32
            [S].
        integers, numbers: int32 [2, S] and float32 [6, S], of which those fields are the rows, in
            this order.
        bias: the logit biases. banned: the tokens banned before min_tokens, biased by minus
            infinity.
        occurrences: what penalties count.
        sampling_flags: uint8 [S] on the host, which of the bits above apply to the slot.
        num_logprobs: int32 [S] on the host, how many of the likeliest tokens to report.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_groups: int = 1,
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.tokens = zeros(max_num_seqs, max_model_len + 1)
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = zeros(num_groups * max_num_seqs, max_blocks)
        self.tables_by_group = self.block_tables.view(num_groups, max_num_seqs, -1).unbind()
        self.seeds = zeros(max_num_seqs, dtype=torch.int64)
        # One row a field, so that an admission writes one column and a kernel needs one address.
        self.integers = zeros(2, max_num_seqs)
        self.top_k, self.banned_until = self.integers
        self.numbers = zeros(6, max_num_seqs, dtype=torch.float32)
        self.temperature, self.top_p, self.min_p, *penalties = self.numbers
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = penalties
        self.bias = LogitBiases(max_num_seqs, device)
        self.banned = LogitBiases(max_num_seqs, device)
        self.occurrences = Occurrences(max_num_seqs, vocab_size, device)
        self.sampling_flags = np.zeros(max_num_seqs, np.uint8)
        self._banned_until = np.zeros(max_num_seqs, np.int32)
        self.num_logprobs = np.zeros(max_num_seqs, np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Brings the slots up to date with a plan: block tables grow, then admitted requests take
        their slots."""
        if len(plan.table_rows):
            where = self._upload(plan.table_rows).long(), self._upload(plan.table_indices).long()
            self.block_tables[where] = self._upload(plan.table_blocks)
        for admission in plan.admissions:
            self._admit(admission)

    def append(self, slot_ids: I32, positions: I32, tokens: torch.Tensor) -> None:
        """Writes the tokens that a step chose (int32 [n] on the device, -1 where it could not) to
        `positions` of `slot_ids`."""
        # a row that failed must still leave an id that can be embedded
        tokens = tokens.clamp(min=0)
        slots = self._upload(slot_ids).long()
        self.tokens[slots, self._upload(positions).long()] = tokens
        penalized = np.flatnonzero(self.sampling_flags[slot_ids] & PENALIZED)
        if len(penalized):
            rows = self._upload(penalized)
            self.occurrences.add(slots[rows], tokens[rows].long())

    def current_flags(self, slot_ids: I32, positions: I32) -> npt.NDArray[np.uint8]:
        """Returns the sampling_flags (uint8 [n]) that bear on the choice of the tokens at
        `positions` of `slot_ids`."""
        sampling_flags = self.sampling_flags[slot_ids]
        sampling_flags[positions >= self._banned_until[slot_ids]] &= ~np.uint8(BANNED)
        return sampling_flags

    def reset(self) -> None:
        """Forgets everything, as if no request had ever been admitted."""
        for tensor in (self.tokens, self.block_tables, self.seeds, self.integers, self.numbers):
            tensor.zero_()
        for array in (self.sampling_flags, self._banned_until, self.num_logprobs):
            array.fill(0)
        slots, vocab_size = len(self.tokens), self.occurrences.rows.shape[1]
        self.bias = LogitBiases(slots, self.device)
        self.banned = LogitBiases(slots, self.device)
        self.occurrences = Occurrences(slots, vocab_size, self.device)

    def _admit(self, admission: Admission) -> None:
        """Overwrites a slot.

        Its former block table may stay: entries past a request's length are never read.
        """
        slot, params = admission.slot, admission.params
        tokens = self._upload(admission.tokens)
        self.tokens[slot, : len(tokens)] = tokens
        self.seeds[slot] = _as_int64(admission.seed)
        self.integers[:, slot] = torch.tensor([max(0, params.top_k), banned_until(admission)])
        self.numbers[:, slot] = torch.tensor(numbers_of(params))
        self.note(admission)

    def note(self, admission: Admission) -> None:
        """Enters what few requests ask for, and what the host keeps, of a request whose tokens are
        in its slot."""
        slot, params = admission.slot, admission.params
        self.bias.set(slot, params.logit_bias)
        self.banned.set(slot, dict.fromkeys(admission.banned_until_min_tokens, -math.inf))
        if params.has_penalties:
            self.occurrences.start(
                slot, self.tokens[slot, : len(admission.tokens)], admission.prompt_len
            )
        else:
            self.occurrences.stop(slot)
        self.sampling_flags[slot] = _flags_of(params) | BANNED * bool(
            admission.banned_until_min_tokens
        )
        self._banned_until[slot] = banned_until(admission)
        self.num_logprobs[slot] = params.logprobs or 0

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copies an array, which may be a view into the ring, to the device."""
        return torch.tensor(array, device=self.device)


def banned_until(admission: Admission) -> int:
    """Returns the first position at which a request may take a banned token."""
    return (
        admission.prompt_len + admission.params.min_tokens
        if admission.banned_until_min_tokens
        else 0
    )


def numbers_of(params: SamplingParams) -> tuple[float, ...]:
    """Returns what goes into a slot's column of `Slots.numbers`."""
    return (
        params.temperature, params.top_p, params.min_p,
        params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
    )  # fmt: skip


def _flags_of(params: SamplingParams) -> int:
    """Returns the bits of a request's parameters, `BANNED` apart."""
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    return (
        RANDOM * (not params.greedy)
        | FILTERED * (filtered and not params.greedy)
        | BIASED * bool(params.logit_bias)
        | PENALIZED * params.has_penalties
        | LOGPROBS * (params.logprobs is not None)
    )


def _as_int64(seed: int) -> int:
    """Returns the low 64 bits of `seed` as a signed number, as torch stores them."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed

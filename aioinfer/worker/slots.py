"""The state of the running requests, one slot each, in tensors on the worker's device.

The model runner applies each step's plan to it and derives the step's inputs from it; the sampler
reads how each request's tokens are sampled. A request is written once, when it is admitted; after
that only its block tables and its tokens grow, and the tokens are written on the device: nothing
comes back from the host. (Request state in fixed slots of the GPU is the idea of vLLM's second
model runner.)

Two ways lead from a plan to the slots, with the same effect. On a CPU `apply` does it in plain
torch. On a GPU the runner uploads what `stage` gives it together with the other arrays of the step,
and `apply_staged` launches kernels on that: no copy of its own, and nothing that waits for the GPU.

The host has only the values that decide which work a step has: `sampling_flags` and a copy of
`banned_until`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.ipc.request_record import (
    RECORD,
    RECORD_WORDS,
    WORD,
    Admissions,
    AppendedTokens,
    FreedSlots,
)
from aioinfer.sampling_params import FILTERS, GREEDY_TEMPERATURE, MAX_END_TOKENS, MAX_LOGIT_BIAS
from aioinfer.worker.sampling.occurrences import Occurrences

# What a request needs from the sampler beyond the likeliest token; bits of `Slots.sampling_flags`.
RANDOM = 1  # a temperature above 0
FILTERED = 2  # one of `FILTERS` at least, at a temperature above 0
BIASED = 4  # a logit bias
PENALIZED = 8  # a repetition, presence or frequency penalty
BANNED = 16  # tokens that are banned at this position, before min_tokens


class Slots:
    """Per-slot request state. S slots; every position is counted from the beginning of the prompt.

    Attributes:
        tokens: int32 [S, max_model_len + 1], prompt and output. One more than a request can have,
            since the last token is sampled but never computed.
        block_tables: int32 [groups * S, blocks of max_model_len], always valid block ids; row
            group * S + slot.
        tables_by_group: the same by KV group, each [S, blocks of max_model_len].
        seeds: int64 [S], the 64 bits that key the sampler's noise.
        records: int32 [fields of a record, S], the records of the requests field by field.
        params: float32 or int32 [S] by the name of a record's field, views of `records`: all that
            crosses of `SamplingParams`, and "num_bias", "num_banned" and "banned_until", the first
            position that may take a banned token.
        bias_ids, bias_values: int32 and float32 [S, MAX_LOGIT_BIAS]; "num_bias" of a row count.
        banned_ids: int32 [S, MAX_END_TOKENS]; "num_banned" of a row count.
        occurrences: the counts for penalties.
        sampling_flags: uint8 [S] on the host, which of the bits above apply to the slot.
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
        # One row a field: all that a step reads of a field is contiguous.
        self.records = zeros(RECORD_WORDS, max_num_seqs)
        self.params = _fields_of(self.records)
        self.bias_ids = zeros(max_num_seqs, MAX_LOGIT_BIAS)
        self.bias_values = zeros(max_num_seqs, MAX_LOGIT_BIAS, dtype=torch.float32)
        self.banned_ids = zeros(max_num_seqs, MAX_END_TOKENS)
        self.occurrences = Occurrences(max_num_seqs, vocab_size, device)
        self.sampling_flags = np.zeros(max_num_seqs, np.uint8)
        self._banned_until = np.zeros(max_num_seqs, np.int32)

    @staticmethod
    def max_sampling_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Returns the device memory that the requests' sampling parameters can take at their worst,
        beyond what the constructor allocates: the memory of penalties, at every slot."""
        return Occurrences.max_bytes(max_num_seqs, vocab_size)

    # ---------------------------------------------------------------- plans

    def apply(self, plan: StepPlan) -> None:
        """Brings the slots up to date with a plan, in plain torch: block tables grow, then admitted
        requests take their slots."""
        if len(plan.table_rows):
            where = self._upload(plan.table_rows).long(), self._upload(plan.table_indices).long()
            self.block_tables[where] = self._upload(plan.table_blocks)
        if not plan.sections:
            return
        self._account(plan)
        self._admit(plan.admissions)
        appended = plan.section(AppendedTokens)
        if appended is not None:
            self._enter(*(self._upload(part) for part in _columns_of(appended)))

    def _admit(self, admissions: Admissions) -> None:
        if not admissions:
            return
        slots, records = admissions.records["slot"], admissions.records
        at = self._upload(slots).long()
        self.records[:, at] = self._upload(_words_of(admissions).T)
        seeds = records["seed_high"].astype(np.uint64) << np.uint64(32) | records["seed_low"]
        self.seeds[at] = self._upload(seeds.view(np.int64))
        self.occurrences.row_of_slot[at] = self._upload(self.occurrences.host_rows[slots])
        for one in admissions:
            self.tokens[one.slot, : len(one.tokens)] = self._upload(one.tokens)
            self.bias_ids[one.slot, : len(one.bias_ids)] = self._upload(one.bias_ids)
            self.bias_values[one.slot, : len(one.bias_ids)] = self._upload(one.bias_values)
            self.banned_ids[one.slot, : len(one.banned_ids)] = self._upload(one.banned_ids)
        for slot, length, prompt_len in self._penalized(admissions):
            tokens = self.tokens[slot, :length]
            self.occurrences.count(int(self.occurrences.host_rows[slot]), tokens, prompt_len)

    def stage(self, plan: StepPlan) -> list[I32]:
        """Applies the host's part of a plan, and returns the arrays that `apply_staged` needs on
        the device: none for a plan without admissions and appended tokens. Once for each plan, in
        order."""
        if not plan.sections:
            return []
        self._account(plan)
        admissions, appended = plan.admissions, plan.section(AppendedTokens)
        behind = [] if appended is None else [np.stack(_columns_of(appended))]
        if not admissions:
            return behind
        rows = self.occurrences.host_rows[admissions.records["slot"]]
        return [
            _words_of(admissions), rows, admissions.tokens, admissions.bias_ids,
            admissions.bias_values.view(np.int32), admissions.banned_ids, *behind,
        ]  # fmt: skip

    def apply_staged(self, plan: StepPlan, staged: Sequence[torch.Tensor]) -> None:
        """Lets the requests that a plan admits take their slots, with kernels, and enters appended
        tokens.

        Args:
            plan: the step's.
            staged: what `stage` returned for it, as int32 tensors of the same shapes on the device.
        """
        if not staged:
            return
        if plan.admissions:
            self._admit_staged(plan, staged[:6])
        if plan.section(AppendedTokens) is not None:
            self._enter(*staged[-1].unbind())

    def _admit_staged(self, plan: StepPlan, staged: Sequence[torch.Tensor]) -> None:
        from aioinfer.kernels.penalties import count_occurrences
        from aioinfer.kernels.slots import PackedAdmissions, SlotTensors, admit_requests

        admissions, occurrences = plan.admissions, self.occurrences
        slots = SlotTensors(
            self.tokens, self.seeds, self.records, occurrences.row_of_slot, self.bias_ids,
            self.bias_values, self.banned_ids,
        )  # fmt: skip
        longest = int(admissions.records["num_tokens"].max())
        admit_requests(PackedAdmissions(*staged), slots, longest)
        for slot, length, prompt_len in self._penalized(admissions):
            row = occurrences.rows[occurrences.host_rows[slot]]
            count_occurrences(self.tokens[slot, :length], prompt_len, row)

    def _enter(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        counted: torch.Tensor,
    ) -> None:
        """Enters tokens that were not sampled, all int32 [E]; `counted`: the tokens that penalties
        have to count, -1 for all others."""
        self.tokens[slots.long(), positions.long()] = tokens
        self.occurrences.add_many(slots, counted)

    def _account(self, plan: StepPlan) -> None:
        """Brings the values on the host and the rows of occurrences up to date."""
        freed_slots, records = plan.section(FreedSlots), plan.admissions.records
        if freed_slots is not None:
            for slot in freed_slots.slots.tolist():
                self.occurrences.stop(slot)
        flags, slots = _flags_of(records), records["slot"]
        for slot, penalized in zip(slots.tolist(), (flags & PENALIZED).tolist(), strict=True):
            if penalized:
                self.occurrences.start(slot)
            else:
                self.occurrences.stop(slot)
        self.occurrences.fit()
        self.sampling_flags[slots] = flags
        self._banned_until[slots] = records["banned_until"]

    def _penalized(self, admissions: Admissions) -> Iterator[tuple[int, int, int]]:
        """Yields (slot, tokens, prompt tokens) of the requests with penalties."""
        records = admissions.records
        for record in records[self.sampling_flags[records["slot"]] & PENALIZED > 0]:
            yield int(record["slot"]), int(record["num_tokens"]), int(record["prompt_len"])

    def append(self, slot_ids: I32, positions: I32, tokens: torch.Tensor) -> None:
        """Writes the tokens that a step sampled (int32 [n] on the device, -1 where it could not) to
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
        """Returns the flags (uint8 [n]) that bear on sampling the tokens at `positions` of
        `slot_ids`."""
        sampling_flags = self.sampling_flags[slot_ids]
        sampling_flags[positions >= self._banned_until[slot_ids]] &= ~np.uint8(BANNED)
        return sampling_flags

    def reset(self) -> None:
        """Forgets everything, as if no request had ever been admitted."""
        for tensor in (
            self.tokens, self.block_tables, self.seeds, self.records, self.bias_ids,
            self.bias_values, self.banned_ids,
        ):  # fmt: skip
            tensor.zero_()
        for array in (self.sampling_flags, self._banned_until):
            array.fill(0)
        slots, vocab_size = len(self.tokens), self.occurrences.rows.shape[1]
        self.occurrences = Occurrences(slots, vocab_size, self.device)

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copies an array, which may be a view into the ring, to the device."""
        return torch.tensor(array, device=self.device)


def _columns_of(appended: AppendedTokens) -> tuple[I32, I32, I32, I32]:
    """Returns slots, positions, tokens, and the tokens that count for penalties, or -1."""
    counted = np.where(appended.counted == 1, appended.tokens, np.int32(-1))
    return appended.slots, appended.positions, appended.tokens, counted


def _words_of(admissions: Admissions) -> I32:
    """Returns the records as int32 [A, RECORD_WORDS]."""
    return admissions.records.view(np.int32).reshape(-1, RECORD_WORDS)


def _fields_of(records: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the rows of `Slots.records` by the names of the fields, in their dtypes."""
    return {
        name: records[index].view(torch.float32) if RECORD[name] == np.float32 else records[index]
        for name, index in WORD.items()
    }


def _flags_of(records: npt.NDArray[np.void]) -> npt.NDArray[np.uint8]:
    """Returns the sampling flags (uint8 [A]) of records."""
    random = records["temperature"] >= np.float32(GREEDY_TEMPERATURE)
    filtered = np.logical_or.reduce([records[name] != none for name, none in FILTERS.items()])
    penalized = (
        (records["repetition_penalty"] != 1)
        | (records["presence_penalty"] != 0)
        | (records["frequency_penalty"] != 0)
    )
    flags = (
        RANDOM * random
        | FILTERED * (random & filtered)
        | BIASED * (records["num_bias"] > 0)
        | PENALIZED * penalized
        | BANNED * (records["num_banned"] > 0)
    )
    return flags.astype(np.uint8)

"""The state of the running requests, one slot each, in tensors on the worker's device.

The model runner applies each step's plan to it and derives the step's inputs from it; the sampler
reads how each request's tokens are sampled. A request is written once, when it is admitted; after
that only its block tables and its tokens grow, and the tokens are written on the device: nothing
comes back from the host. (Request state in fixed slots of the GPU is the idea of vLLM's second
model runner.)

A plan reaches the slots in two calls. `stage` brings the values on the host up to date, and returns
the arrays that the device needs; the device uploads them, on a GPU together with the other arrays
of the step. `apply` enters them: by kernels, with no copy of its own and nothing that waits for the
GPU, or in plain torch.

The host has only the values that decide which work a step has: `sampling_flags`, a copy of
`banned_until`, and which rows of `Occurrences` are used, so that admissions never wait for the
device.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.ipc.lookahead import SKIPPED
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

# What a request needs from the sampler beyond the likeliest token; bits of `Slots.sampling_flags`.
RANDOM = 1  # a temperature above 0
FILTERED = 2  # one of `FILTERS` at least, at a temperature above 0
BIASED = 4  # a logit bias
PENALIZED = 8  # a repetition, presence or frequency penalty
BANNED = 16  # tokens that are banned at this position, before min_tokens

#: The bit of an occurrence that is set if the token is in the prompt; the bits below count the
#: output. `kernels.penalties` has the same.
IN_PROMPT = 1 << 30
_MIN_ROWS = 4


class Occurrences:
    """The tokens that penalties count: one row over the vocabulary for each request that has
    penalties.

    Memory. Rows are taken from the lowest on, in a tensor whose capacity is one of the sizes
    `ceil(max_num_seqs / 2**i)`. It grows to the next size that holds the rows in use, and shrinks
    when a quarter of it would do: between the two lies a factor of two, so that requests that come
    and go do not reallocate it each time. While it is copied, both sizes exist (`max_bytes`).

    Attributes:
        rows: int32 [capacity, vocab_size] on the device; the bit `IN_PROMPT` is set if the token is
            in the prompt, the bits below it count it in the output.
        row_of_slot: int32 [max_num_seqs] on the device, the row of each slot, or -1. Written by
            `Slots` from `host_rows`.
        host_rows: the same on the host.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self.rows = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.row_of_slot = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self.host_rows = np.full(max_num_seqs, -1, np.int32)
        self._free = list(range(max_num_seqs))  # a heap
        self._used: set[int] = set()

    @staticmethod
    def max_bytes(max_num_seqs: int, vocab_size: int) -> int:
        """Returns the device memory of `rows` at its worst: while it grows to its full size."""
        return (max_num_seqs + -(-max_num_seqs // 2)) * vocab_size * 4

    def start(self, slot: int) -> int:
        """Gives a slot a row, if it has none, and returns its number; `fit` is due before the row
        is written."""
        row = int(self.host_rows[slot])
        if row < 0:
            row = heapq.heappop(self._free)
            self.host_rows[slot] = row
            self._used.add(row)
        return row

    def stop(self, slot: int) -> None:
        """Takes the row of a slot back, if it has one."""
        row = int(self.host_rows[slot])
        if row >= 0:
            self.host_rows[slot] = -1
            self._used.remove(row)
            heapq.heappush(self._free, row)

    def fit(self) -> None:
        """Makes the capacity suit the rows in use; their contents stay."""
        capacity, limit = len(self.rows), len(self.host_rows)
        needed = max(self._used, default=-1) + 1
        if needed > capacity:
            size = _size_for(max(needed, _MIN_ROWS), limit)
        elif 4 * needed <= capacity and capacity > min(_MIN_ROWS, limit):
            size = _size_for(max(2 * needed, _MIN_ROWS), limit)
        else:
            return
        rows = torch.zeros((size, self.rows.shape[1]), dtype=torch.int32, device=self.rows.device)
        kept = min(size, capacity)
        rows[:kept] = self.rows[:kept]
        self.rows = rows

    def count(self, row: int, tokens: torch.Tensor, prompt_len: int) -> None:
        """Begins a row with the tokens of a request so far (int32 [n], prompt and output), in plain
        torch."""
        self.rows[row] = torch.bincount(tokens[prompt_len:], minlength=self.rows.shape[1])
        self.rows[row, tokens[:prompt_len].long()] |= IN_PROMPT

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Counts tokens of slots (both int32 [n]), also several of one slot; skips negative tokens,
        and tokens of slots without a row."""
        if not self._used:
            return
        rows = self.row_of_slot[slots.long()]
        counted = ((rows >= 0) & (tokens >= 0)).to(self.rows.dtype)
        where = rows.clamp(min=0).long(), tokens.clamp(min=0).long()
        self.rows.index_put_(where, counted, accumulate=True)


@dataclass(frozen=True, slots=True)
class LookaheadTensors:
    """What the sampled rows of a step with lookahead have beside their positions, int32 [S] each on
    the device (see `ipc.lookahead`).

    Attributes:
        offsets: the number of the row among the adjacent rows of its slot, 0 for the first.
        inputs: the last token that the row computed: of a row with an offset above 0, its draft.
    """

    offsets: torch.Tensor
    inputs: torch.Tensor

    def select(self, rows: torch.Tensor) -> LookaheadTensors:
        """Returns some of the rows, integers [n] on the device."""
        return LookaheadTensors(
            self.offsets.index_select(0, rows), self.inputs.index_select(0, rows)
        )


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The sampled rows as kernels read them, int32 [S] each.

    Attributes:
        slots, positions: the slot of each row, and the position of the sampled token.
        is_real: 0 for padding, and for rows that are sampled later.
        index: int32 [1], the number of the step's result buffer.
        lookahead: of a step with lookahead; else None.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    is_real: torch.Tensor
    index: torch.Tensor
    lookahead: LookaheadTensors | None = None


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Rows of a step that sample a token. S rows.

    Attributes:
        slot_ids, positions: int32 [S] on the host, the slot of each row, and the position of the
            sampled token.
        index: the number of the step's result buffer.
        places: int32 [S] on the device, the place of each row in the step's results; None where it
            is its number.
        there: the same for kernels; None without them.
        lookahead: of a step with lookahead, without kernels; else None.
    """

    slot_ids: I32
    positions: I32
    index: int
    places: torch.Tensor | None = None
    there: RowTensors | None = None
    lookahead: LookaheadTensors | None = None


class Slots:
    """Per-slot request state. S slots; every position is counted from the beginning of the prompt.

    Attributes:
        tokens: int32 [S, max_model_len + 1], prompt and output. One more than a request can have,
            since the last token is sampled but never computed. Behind the last known token there
            may be drafts, which nothing but their own step reads.
        next_start: int32 [S], the position of the first token that is not computed, which is the
            last known one; written by steps with lookahead (see `ipc.lookahead`).
        block_tables: int32 [groups * S, blocks of max_model_len], valid block ids, or
            of states negative where there is none; row group * S + slot.
        tables_by_group: the same by KV group, each [S, blocks of max_model_len].
        rotary_offsets: int32 [S], added to the positions of a slot's tokens behind its pictures
            where RoPE is applied, in models that have three positions a token; a field of its
            record. None in other models.
        state_lens: int32 [S], the tokens behind which the states of layers are in memory, once the
            steps launched so far have run, in models that keep states and look ahead (see
            `layers.step.Replays`), negative where no inputs are kept; None in others.
        seeds: int64 [S], the 64 bits that key the sampler's noise.
        records: int32 [fields of a record, S], the records of the requests field by field.
        params: float32 or int32 [S] by the name of a record's field, views of `records`: all that
            crosses of `SamplingParams`, and "num_bias", "num_banned" and "banned_until", the first
            position that may take a banned token.
        bias_ids, bias_values: int32 and float32 [S, MAX_LOGIT_BIAS]; "num_bias" of a row count.
        banned_ids: int32 [S, MAX_END_TOKENS]; "num_banned" of a row count.
        occurrences: the counts for penalties.
        sampling_flags: uint8 [S] on the host, which of the bits above apply to the slot.
        uses_kernels: whether Triton kernels write and read the slots, and not plain torch.
        has_token_types: whether the model reads token types, by "second_text" of `params`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_groups: int = 1,
        *,
        uses_kernels: bool = False,
        has_rotary_offsets: bool = False,
        has_state_lens: bool = False,
        has_token_types: bool = False,
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.device = device
        self.uses_kernels = uses_kernels
        self.has_token_types = has_token_types
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.tokens = zeros(max_num_seqs, max_model_len + 1)
        self.next_start = zeros(max_num_seqs)
        max_blocks = -(-max_model_len // block_size)
        # without a KV cache, too, steps are prepared with a block table, which nothing reads
        num_groups = max(1, num_groups)
        self.block_tables = zeros(num_groups * max_num_seqs, max_blocks)
        self.tables_by_group = self.block_tables.view(num_groups, max_num_seqs, -1).unbind()
        self.seeds = zeros(max_num_seqs, dtype=torch.int64)
        # One row a field: all that a step reads of a field is contiguous.
        self.records = zeros(RECORD_WORDS, max_num_seqs)
        self.params = _fields_of(self.records)
        self.rotary_offsets = self.params["rotary_offset"] if has_rotary_offsets else None
        self.state_lens = self.params["num_computed"] if has_state_lens else None
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

    def stage(self, plan: StepPlan) -> list[I32]:
        """Applies the host's part of a plan, and returns the arrays that `apply` needs on the
        device: none for a plan without admissions and appended tokens. Once for each plan, in
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
            admissions.records.view(np.int32).reshape(-1, RECORD_WORDS), rows, admissions.tokens,
            admissions.bias_ids, admissions.bias_values.view(np.int32), admissions.banned_ids,
            *behind,
        ]  # fmt: skip

    def apply(self, plan: StepPlan, staged: Sequence[torch.Tensor]) -> None:
        """Lets the requests that a plan admits take their slots, and enters appended tokens.

        Args:
            plan: the step's.
            staged: what `stage` returned for it, as int32 tensors of the same shapes on the device.
        """
        if not staged:
            return
        admissions = plan.admissions
        if admissions:
            admit = self._admit_with_kernels if self.uses_kernels else self._admit
            admit(admissions, staged[:6])
        if plan.section(AppendedTokens) is not None:
            self._enter(*staged[-1].unbind())

    def _admit(self, admissions: Admissions, staged: Sequence[torch.Tensor]) -> None:
        """Enters admitted requests in plain torch; `staged` as for `_admit_with_kernels`."""
        words, rows, tokens, bias_ids, bias_values, banned_ids = staged
        at = words[:, WORD["slot"]].long()
        self.records[:, at] = words.T
        self.seeds[at] = words[:, WORD["seed_low"] :][:, :2].reshape(-1).view(torch.int64)
        self.occurrences.row_of_slot[at] = rows
        values = bias_values.view(torch.float32)
        lists = (
            (self.tokens, tokens, "first_token", "num_tokens"),
            (self.bias_ids, bias_ids, "first_bias", "num_bias"),
            (self.bias_values, values, "first_bias", "num_bias"),
            (self.banned_ids, banned_ids, "first_banned", "num_banned"),
        )
        for record in admissions.records:
            for of_slots, packed, first, count in lists:
                part = packed[record[first] : record[first] + record[count]]
                of_slots[record["slot"], : len(part)] = part
        for slot, length, prompt_len in self._penalized(admissions):
            row = int(self.occurrences.host_rows[slot])
            self.occurrences.count(row, self.tokens[slot, :length], prompt_len)

    def _admit_with_kernels(self, admissions: Admissions, staged: Sequence[torch.Tensor]) -> None:
        """Enters admitted requests with kernels; `staged` are the arrays of
        `kernels.slots.PackedAdmissions`."""
        from aioinfer.kernels.penalties import count_occurrences
        from aioinfer.kernels.slots import PackedAdmissions, SlotTensors, admit_requests

        occurrences = self.occurrences
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
        self.occurrences.add(slots, counted)

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
        `positions` of `slot_ids`, in plain torch."""
        where = torch.from_numpy(np.stack([slot_ids, positions]).astype(np.int64)).unbind()
        # a row that failed must still leave an id that can be embedded
        self.tokens[where] = tokens.clamp(min=0)

    def accept(
        self, slot_ids: I32, positions: I32, lookahead: LookaheadTensors, tokens: torch.Tensor,
        late: I32 | None = None,
    ) -> None:  # fmt: skip
        """Keeps the tokens that the rows of a step with lookahead sampled (int32 [n], -1 where they
        could not), as long as the drafts of a slot equal the sampled tokens: writes the kept ones
        to `positions` of `slot_ids`, and replaces the others by `SKIPPED`, in place. All but the
        rows `late` (int32 [M]), whose drafts are still to be compared. In plain torch."""
        sampled, offsets = tokens.numpy(), lookahead.offsets.numpy()
        differs = np.zeros(len(sampled), np.bool_)
        differs[1:] = (offsets[1:] > 0) & (lookahead.inputs.numpy()[1:] != sampled[:-1])
        count = np.cumsum(differs)
        is_kept = count == count[np.arange(len(count)) - offsets]
        if late is not None:
            is_kept[late] = False
        kept = np.flatnonzero(is_kept)
        self.append(slot_ids[kept], positions[kept], tokens[torch.from_numpy(kept)])
        # of several rows of a slot the last one counts
        self.next_start.numpy()[slot_ids[kept]] = positions[kept]
        sampled[~is_kept] = SKIPPED

    def current_flags(self, slot_ids: I32, positions: I32) -> npt.NDArray[np.uint8]:
        """Returns the flags (uint8 [n]) that bear on sampling the tokens at `positions` of
        `slot_ids`."""
        sampling_flags = self.sampling_flags[slot_ids]
        sampling_flags[positions >= self._banned_until[slot_ids]] &= ~np.uint8(BANNED)
        return sampling_flags

    def reset(self) -> None:
        """Forgets everything, as if no request had ever been admitted."""
        for tensor in (
            self.tokens, self.next_start, self.block_tables, self.seeds, self.records,
            self.bias_ids, self.bias_values, self.banned_ids,
        ):  # fmt: skip
            tensor.zero_()
        for array in (self.sampling_flags, self._banned_until):
            array.fill(0)
        slots, vocab_size = len(self.tokens), self.occurrences.rows.shape[1]
        self.occurrences = Occurrences(slots, vocab_size, self.device)


def _columns_of(appended: AppendedTokens) -> tuple[I32, I32, I32, I32]:
    """Returns slots, positions, tokens, and the tokens that count for penalties, or -1."""
    counted = np.where(appended.counted == 1, appended.tokens, np.int32(-1))
    return appended.slots, appended.positions, appended.tokens, counted


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


def _size_for(needed: int, limit: int) -> int:
    """Returns the smallest of the sizes `ceil(limit / 2**i)` that is at least `needed`, or
    `limit`."""
    size = limit
    while size > 1 and -(-size // 2) >= needed:
        size = -(-size // 2)
    return size


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a copy of an array, which may be a view into the ring, on a device; a GPU's
    computation is not waited for. Torch keeps the pinned memory until the copy is over."""
    if device.type != "cuda":
        return torch.tensor(array, device=device)
    # torch warns of arrays that may not be written to, as those of a plan that was copied
    source = array if array.flags.writeable else array.copy()
    return torch.from_numpy(source).pin_memory().to(device, non_blocking=True)

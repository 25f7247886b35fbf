"""A worker without arithmetic: it executes plans on a KV cache whose entries show which prefix they
belong to.

In place of keys and values, each cache position holds a hash of all tokens up to and including its
own. A row that attends to anything but its own prefix is found at once, whatever the reason: a
block shared wrongly, reused too early, copied too late, or never written. A block of a group of
states holds one hash, of the tokens before the state. Table entries of states outlive the requests
of a slot, as on a device; a state that two rows of a step use, one of which writes it, is an error:
they run side by side. Lookahead rows leave no state: the state in memory stays behind the first row
of the slot's last step, and the next step writes the states on the way to its own first row, if
that has one token: a row of several begins with the state in memory. The sampled token is a
function of the prefix, so that a request's text does not depend on how it was scheduled; `complete`
gives it directly.

The store of KV has places for blocks, too. A block that is being loaded holds nothing that a row
may read until its load ends, which `load_steps` decides: how many plans later.

Drafts of lookahead rows are what the request is going to sample, or, by `draft_quality`, something
else: a hash of the position says which.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from aioinfer.features.kv_store.sections import KVLoaded, KVMoves
from aioinfer.ipc.kv_spec import KVGroup
from aioinfer.ipc.lookahead import SKIPPED, LookaheadRows
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.ipc.request_record import AppendedTokens
from aioinfer.scheduler.request import Request

VOCABULARY = 50
# Numbers, since the hash of a text differs from process to process: outputs would, too, and with
# them how many tokens a test sees.
_SAMPLED, _IS_RIGHT, _WRONG = 1, 2, 3


def extend(prefix: int, token: int) -> int:
    return hash((prefix, token))


def sample(prefix: int, seed: int) -> int:
    return hash((prefix, seed, _SAMPLED)) % VOCABULARY


def complete(prompt: list[int], max_len: int, end_tokens: frozenset[int], seed: int) -> list[int]:
    """Returns the output that a request must get."""
    prefix = 0
    for token in prompt:
        prefix = extend(prefix, token)
    output: list[int] = []
    while len(prompt) + len(output) < max_len:
        output.append(sample(prefix, seed))
        if output[-1] in end_tokens:
            break
        prefix = extend(prefix, output[-1])
    return output


class SymbolicWorker:
    """Executes encoded plans in order and keeps their results until they are fetched.

    A group of layers with a window attends to its last tokens only.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        draft_quality: float = 0.5,
        num_stored: Sequence[int] = (),
    ):
        self.draft_quality = draft_quality
        self.next_start = [0] * max_num_seqs
        self.num_kept = 0
        self.state_lens = [0] * max_num_seqs
        self.groups = groups
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.caches = [
            [[0] * (1 if group.keeps_states else block_size) for _ in range(count)]
            for group, count in zip(groups, num_blocks, strict=True)
        ]
        self.state_groups = [n for n, group in enumerate(groups) if group.keeps_states]
        self.key_groups = [n for n, group in enumerate(groups) if not group.keeps_states]
        self.tables: list[dict[int, int]] = [{} for _ in range(len(groups) * max_num_seqs)]
        self.tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.seeds = [0] * max_num_seqs
        self.results: deque[StepResult] = deque()
        self.num_copies = 0
        self.places: list[list[list[int]]] = [[[] for _ in range(count)] for count in num_stored]
        self.load_steps: Callable[[], int] = lambda: 0
        #: by ticket: plans to go, and (group, block, contents) of its blocks
        self.loads: dict[int, tuple[int, list[tuple[int, int, list[int]]]]] = {}
        self.ended_early: list[int] = []
        self.files: dict[tuple[int, ...], list[int]] = {}
        self.offered: dict[tuple[int, ...], list[int]] = {}  # what another server has
        self.reads: dict[int, tuple[int, list[tuple[int, int, list[int] | None]]]] = {}
        self.counts: dict[int, int] = {}  # of reads that have ended
        self.is_broken: Callable[[], bool] = lambda: False
        self.num_reads = 0
        self.num_saves = self.num_loads = 0

    def post(self, plan: StepPlan) -> None:
        """Executes a plan that went through its wire format."""
        self.results.append(self._execute(StepPlan.decode(b"".join(plan.encode()))))

    def _execute(self, plan: StepPlan) -> StepResult:
        moves = plan.section(KVMoves)
        assert plan.num_tokens <= self.token_budget
        assert plan.num_tokens or moves is not None
        ended = self._move(moves, plan)
        lookahead = plan.section(LookaheadRows)
        if lookahead is None:
            assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot has two rows"
        for admission in plan.admissions:
            for number in self.key_groups:
                self.tables[number * self.max_num_seqs + admission.slot] = {}
            self.tokens[admission.slot] = admission.tokens.tolist()
            self.seeds[admission.slot] = admission.seed
            self.state_lens[admission.slot] = int(admission.record["num_computed"])
        appended = plan.section(AppendedTokens)
        if appended is not None:
            assert len(
                {*zip(appended.slots.tolist(), appended.positions.tolist(), strict=True)}
            ) == len(appended.slots), "a token is sent twice"
            for slot, position, token in zip(
                appended.slots.tolist(),
                appended.positions.tolist(),
                appended.tokens.tolist(),
                strict=True,
            ):
                del self.tokens[slot][position:]
                assert len(self.tokens[slot]) == position
                self.tokens[slot].append(token)
        for row, index, block in zip(
            plan.table_rows, plan.table_indices, plan.table_blocks, strict=True
        ):
            self.tables[row][int(index)] = int(block)
        self._copy(plan)
        rows = list(
            zip(
                plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(),
                plan.samples.tolist(), strict=True,
            )
        )  # fmt: skip
        if lookahead is not None:
            rows = self._resolve(rows, lookahead)
        self._compute_keys(rows, has_lookahead=lookahead is not None)
        offsets = [0] * len(rows) if lookahead is None else lookahead.offsets.tolist()
        firsts = [row[:3] for row, offset in zip(rows, offsets, strict=True) if not offset]
        kept = {row[0] for row, offset in zip(rows, offsets, strict=True) if offset}
        for number in self.state_groups:
            self._advance_states(number, firsts)
        for slot, start, length in firsts:
            is_kept = slot in kept  # the inputs of its further rows
            self.state_lens[slot] = start + length if is_kept else -1
        if lookahead is None:
            sampled = [
                self._sample(slot, start + length)
                for slot, start, length, samples in rows
                if samples
            ]
        else:
            sampled = self._sample_and_match([row for row in rows if row[3]])
        counts = [self.counts.pop(ticket, -1) for ticket in ended]
        sections = []
        if ended:
            sections.append(
                KVLoaded(*(np.array(each, np.int32) for each in (ended, counts, [-1] * len(ended))))
            )
        return StepResult(plan.step_id, np.array(sampled, np.int32), sections)

    def _move(self, moves: KVMoves | None, plan: StepPlan) -> list[int]:
        """Begins the loads of a plan and makes its saves. Returns the loads that have ended.

        A load is over, too, before a row uses its blocks: a step waits for it.
        """
        awaited = set()
        rows = zip(plan.table_rows.tolist(), plan.table_blocks.tolist(), strict=True)
        used = {(row // self.max_num_seqs, block) for row, block in rows}
        if moves is not None:
            awaited = set(moves.awaited.tolist())
            contents: dict[int, list[tuple[int, int, list[int]]]] = {}
            for group, place, block, ticket in moves.loads.tolist():
                self._finish_before(group, block)
                contents.setdefault(ticket, []).append(
                    (group, block, list(self.places[group][place]))
                )
                self.caches[group][block] = [-1] * len(self.caches[group][block])
                self.num_loads += 1
            for ticket, blocks in contents.items():
                self.loads[ticket] = self.load_steps(), blocks
            for row in moves.reads.tolist():
                group, place, ticket, *name, connector = row
                source = self.offered if connector else self.files
                self.reads.setdefault(ticket, (self.load_steps(), []))[1].append(
                    (group, place, source.get((group, *name)))
                )
            for group, place, block, *name, connectors in moves.saves.tolist():
                self.places[group][place] = list(self.caches[group][block])
                self.num_saves += 1
                if connectors & 2:
                    self.offered[group, *name] = list(self.places[group][place])
                if connectors & 1:
                    self.files[group, *name] = list(self.places[group][place])
            for connector, *name in moves.deletes.tolist():
                if not connector:
                    self.files.pop(tuple(name), None)
        ended = self._read(awaited)
        for ticket, (steps, blocks) in list(self.loads.items()):
            is_used = any((group, block) in used for group, block, _ in blocks)
            if steps <= 0 or is_used or ticket in awaited:
                self._fill(ticket)
                ended.append(ticket)
            else:
                self.loads[ticket] = steps - 1, blocks
        ended += self.ended_early
        self.ended_early.clear()
        return ended

    def _read(self, awaited: set[int]) -> list[int]:
        """Ends reads from the disk whose time has come. Returns their tickets."""
        ended = []
        for ticket, (steps, blocks) in list(self.reads.items()):
            if steps > 0 and ticket not in awaited:
                self.reads[ticket] = steps - 1, blocks
                continue
            count = len(blocks)
            for number, (group, place, contents) in enumerate(blocks):
                is_whole = contents is not None and not self.is_broken()
                self.places[group][place] = list(contents or ()) if is_whole else [-1]
                if is_whole:
                    self.num_reads += 1
                else:
                    count = min(count, number)
            ended.append(ticket)
            self.counts[ticket] = count
            del self.reads[ticket]
        return ended

    def _finish_before(self, group: int, block: int) -> None:
        """Ends the load into a block that another one fills next."""
        for ticket, (_, blocks) in list(self.loads.items()):
            if any((group, block) == (g, b) for g, b, _ in blocks):
                self._fill(ticket)
                self.ended_early.append(ticket)

    def _fill(self, ticket: int) -> None:
        for group, block, contents in self.loads.pop(ticket)[1]:
            self.caches[group][block] = contents

    def _resolve(
        self, rows: list[tuple[int, int, int, int]], lookahead: LookaheadRows
    ) -> list[tuple[int, int, int, int]]:
        """Returns the rows with their positions, and writes their drafts."""
        resolved = []
        last = (-1, 0)  # slot and offset
        for (slot, start, length, samples), offset, settled in zip(
            rows, lookahead.offsets.tolist(), lookahead.settled.tolist(), strict=True
        ):
            assert (slot, offset - 1) == last or not offset, "rows of a slot are not adjacent"
            if offset or slot == last[0]:
                assert offset, "a slot has two first rows"
            last = slot, offset
            if not settled:
                assert start <= self.next_start[slot] + offset, "a row begins too late"
                start = self.next_start[slot] + offset
            if offset:
                self.tokens[slot].append(self._draft(slot, start))
            elif length == 1 and samples:
                del self.tokens[slot][start + 1 :]
            resolved.append((slot, start, length, samples))
        return resolved

    def _draft(self, slot: int, position: int) -> int:
        """Returns the draft at a position."""
        prefix = self._prefixes(slot, position)[-1]
        is_right = hash((prefix, _IS_RIGHT)) % 1000 < 1000 * self.draft_quality
        return sample(prefix, self.seeds[slot]) if is_right else hash((prefix, _WRONG)) % VOCABULARY

    def _sample_and_match(self, rows: list[tuple[int, int, int, int]]) -> list[int]:
        """Samples a token for each row, and skips the rows behind the first wrong draft."""
        sampled: list[int] = []
        index = 0
        while index < len(rows):
            slot, start, length, _ = rows[index]
            end = index + 1
            while end < len(rows) and rows[end][0] == slot:
                end += 1
            inputs = self.tokens[slot][start + length : start + length + end - index - 1]
            prefixes = self._prefixes(slot, start + length + end - index - 1)
            found = [
                sample(prefixes[start + length + offset], self.seeds[slot])
                for offset in range(end - index)
            ]
            kept = 1
            while kept < len(found) and found[kept - 1] == inputs[kept - 1]:
                kept += 1
            self.num_kept += kept - 1
            del self.tokens[slot][start + length :]
            self.tokens[slot] += found[:kept]
            self.next_start[slot] = start + length + kept - 1
            sampled += found[:kept] + [SKIPPED] * (end - index - kept)
            index = end
        return sampled

    def _copy(self, plan: StepPlan) -> None:
        copies = list(
            zip(
                plan.copy_groups.tolist(),
                plan.copy_sources.tolist(),
                plan.copy_targets.tolist(),
                strict=True,
            )
        )
        contents = [list(self.caches[group][source]) for group, source, _ in copies]
        for (group, _, target), block in zip(copies, contents, strict=True):
            self.caches[group][target] = block
        self.num_copies += len(copies)

    def _prefixes(self, slot: int, end: int) -> list[int]:
        """Returns the hashes of the slot's first 0, 1, ..., `end` tokens."""
        prefixes = [0]
        for token in self.tokens[slot][:end]:
            prefixes.append(extend(prefixes[-1], token))
        return prefixes

    def _block(self, group: int, slot: int, index: int) -> list[int]:
        table = self.tables[group * self.max_num_seqs + slot]
        assert index in table, f"slot {slot} has no block {index} in group {group}"
        return self.caches[group][table[index]]

    def _compute_keys(self, rows: list[tuple[int, int, int, int]], *, has_lookahead: bool) -> None:
        """Writes the keys of rows, and checks those that they read.

        Rows may share a block that another one fills in this very step: rows of several tokens
        write before any row reads. Rows of one token write their keys while the others read,
        unless rows look ahead (`kernels.decode_attention`).
        """
        single = [row[:3] for row in rows if row[2] == 1 and not has_lookahead]
        for slot, start, length, _ in rows:
            if length > 1 or has_lookahead:
                self._write(slot, start, length)
        for slot, start, _ in single:
            self._check_keys(slot, start, 0)
        for row in single:
            self._write(*row)
        for slot, start, length, _ in rows:
            self._check_keys(slot, start, length)

    def _write(self, slot: int, start: int, length: int) -> None:
        prefixes = self._prefixes(slot, start + length)
        for number in self.key_groups:
            for position in range(start, start + length):
                block = self._block(number, slot, position // self.block_size)
                block[position % self.block_size] = prefixes[position + 1]

    def _check_keys(self, slot: int, start: int, length: int) -> None:
        """Checks that every key that the row's tokens attend to is that of the row's sequence."""
        prefixes = self._prefixes(slot, start + length)
        for number in self.key_groups:
            window = self.groups[number].window
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, start + length):
                block = self._block(number, slot, position // self.block_size)
                assert block[position % self.block_size] == prefixes[position + 1], (
                    f"slot {slot} reads another sequence's key or none at position {position} "
                    f"in group {number}"
                )

    def state_of(self, slot: int, start: int) -> int:
        """Returns behind how many tokens the state of a slot is, whose next row begins at
        `start`."""
        known = self.state_lens[slot]
        return start if known < 0 else known

    def _advance_states(self, group: int, rows: list[tuple[int, int, int]]) -> None:
        """Checks the state in memory of the slot of each first row (slot, start, length), and
        writes the states at the ends of the blocks from there on and of the row itself."""
        size, cache = self.block_size, self.caches[group]
        used: dict[int, int] = {}  # block -> the row that reads or writes it
        written: dict[int, int] = {}  # block -> state
        for slot, start, length in rows:
            assert length == 1 or self.state_of(slot, start) == start, (
                f"slot {slot} computes several tokens behind kept drafts"
            )
        rows = [(slot, self.state_of(slot, start), start + length) for slot, start, length in rows]
        for slot, start, end in rows:
            table = self.tables[group * self.max_num_seqs + slot]
            prefixes = self._prefixes(slot, end)
            if start:
                entry = (start - 1) // size
                assert table.get(entry, -1) >= 0, f"slot {slot} has no state in entry {entry}"
                state = cache[table[entry]][0]
                assert state == prefixes[start], (
                    f"slot {slot} does not read its state after {start} tokens in group {group}"
                )
                used.setdefault(table[entry], slot)
            for entry in range(start // size, (end - 1) // size + 1):
                assert entry in table, f"slot {slot} was not told of entry {entry}"
                block = table[entry]
                if block < 0:
                    continue
                # a block that was moved on to the next entry is known by both
                assert used.get(block, slot) == slot, f"block {block} is written by two rows"
                written[block] = prefixes[min((entry + 1) * size, end)]
                used[block] = slot
            assert table[(end - 1) // size] >= 0, f"slot {slot} keeps no state"
        for slot, start, _ in rows:
            if start:
                block = self.tables[group * self.max_num_seqs + slot][(start - 1) // size]
                assert block not in written or used[block] == slot, (
                    f"slot {slot} reads a state that another row writes"
                )
        for block, state in written.items():
            cache[block][0] = state

    def _sample(self, slot: int, end: int) -> int:
        token = sample(self._prefixes(slot, end)[-1], self.seeds[slot])
        del self.tokens[slot][end:]
        self.tokens[slot].append(token)
        return token


def expected_output(request: Request) -> list[int]:
    """Returns the output that a request must get once it has ended by itself."""
    return complete(
        request.tokens[: request.prompt_len].tolist(),
        request.max_len,
        request.end_tokens,
        request.seed,
    )

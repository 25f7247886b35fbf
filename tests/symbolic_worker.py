"""A worker without arithmetic: it executes plans on a KV cache whose entries say which prefix they
belong to.

In place of keys and values, each cache position holds a hash of all tokens up to and including its
own. A row that attends to anything but its own prefix is found at once, whatever the reason: a
block shared wrongly, reused too early, copied too late, or never written. The token chosen is a
function of the prefix, so that a request's text does not depend on how it was scheduled; `complete`
gives it directly.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.scheduler.request import Request

VOCABULARY = 50


def extend(prefix: int, token: int) -> int:
    return hash((prefix, token))


def choose(prefix: int, seed: int) -> int:
    return hash((prefix, seed, "chosen")) % VOCABULARY


def complete(prompt: list[int], max_len: int, end_tokens: frozenset[int], seed: int) -> list[int]:
    """Returns the output that a request must get."""
    prefix = 0
    for token in prompt:
        prefix = extend(prefix, token)
    output: list[int] = []
    while len(prompt) + len(output) < max_len:
        output.append(choose(prefix, seed))
        if output[-1] in end_tokens:
            break
        prefix = extend(prefix, output[-1])
    return output


class SymbolicWorker:
    """Executes encoded plans in order and keeps their results until they are fetched."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, token_budget: int):
        self.block_size = block_size
        self.token_budget = token_budget
        self.cache = [[0] * block_size for _ in range(num_blocks)]
        self.tables: list[dict[int, int]] = [{} for _ in range(max_num_seqs)]
        self.tokens: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.seeds = [0] * max_num_seqs
        self.results: deque[StepResult] = deque()
        self.num_copies = 0

    def post(self, plan: StepPlan) -> None:
        """Executes a plan that went through its wire format."""
        self.results.append(self._execute(StepPlan.decode(b"".join(plan.encode()))))

    def _execute(self, plan: StepPlan) -> StepResult:
        assert 0 < plan.num_tokens <= self.token_budget
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot has two rows"
        for admission in plan.admissions:
            self.tables[admission.slot] = {}
            self.tokens[admission.slot] = admission.tokens.tolist()
            self.seeds[admission.slot] = admission.seed
        for slot, index, block in zip(
            plan.table_rows, plan.table_indices, plan.table_blocks, strict=True
        ):
            self.tables[slot][int(index)] = int(block)
        copies = [
            (target, list(self.cache[source]))
            for source, target in zip(plan.copy_sources, plan.copy_targets, strict=True)
        ]
        for target, contents in copies:
            self.cache[target] = contents
            self.num_copies += 1
        rows = list(
            zip(
                plan.slots.tolist(),
                plan.starts.tolist(),
                plan.lengths.tolist(),
                plan.samples.tolist(),
                strict=True,
            )
        )
        for slot, start, length, _ in rows:
            self._write(slot, start, length)
        chosen = [
            self._sample(slot, start + length) for slot, start, length, samples in rows if samples
        ]
        return StepResult(plan.step_id, np.array(chosen, np.int32))

    def _entry(self, slot: int, position: int) -> tuple[list[int], int]:
        return self.cache[
            self.tables[slot][position // self.block_size]
        ], position % self.block_size

    def _write(self, slot: int, start: int, length: int) -> None:
        """Writes before any row reads, as a layer does: a row may share a block that another fills
        in this very step."""
        prefix = 0
        for position in range(start + length):
            prefix = extend(prefix, self.tokens[slot][position])
            if position >= start:
                block, offset = self._entry(slot, position)
                block[offset] = prefix

    def _sample(self, slot: int, end: int) -> int:
        prefix = 0
        for position in range(end):  # every position that attention reads holds this very sequence
            prefix = extend(prefix, self.tokens[slot][position])
            block, offset = self._entry(slot, position)
            assert block[offset] == prefix, (
                f"slot {slot} reads a foreign or unwritten key at position {position}"
            )
        token = choose(prefix, self.seeds[slot])
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

"""What a rank of a pipeline stage sends to others: hidden states to the next stage, and sampled
tokens from the last stage back to the first, whose next step embeds them. Now and then counts of
the experts' tokens follow hidden states (`expert_report`).

Everything goes point to point between ranks of the same tensor-parallel number, through NCCL on
GPUs and gloo on CPUs. Both sides know every plan, so nothing but numbers is sent: the receiver
knows how many there will be, and of which rows.

Nobody waits for a receiver. A send is kept until it must have been received: with `depth` steps in
flight, those before the last `depth` are over. The first stage posts a receive for the tokens of
each step, and waits for them when a plan comes that has a row of one of
their slots. Tokens for a slot that another request has taken meanwhile, or for which others were
forced, are dropped.

On a GPU no call waits on the host: a receive is posted on a stream of its own, so that it may begin
before the step that is being computed ends, and the stream of the computation waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from aioinfer.ipc.masks import ForcedTokens
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.layers.parallel import ParallelGroup, ProcessGroups
from aioinfer.worker.slots import Slots


@dataclass(frozen=True, slots=True)
class _ExpectedTokens:
    """The tokens of a step that the last stage samples: int32 [S] in `tokens` once `work` is done.

    `is_wanted` (bool [S]) becomes false where slot and position are another token's by now.
    """

    slots: I32
    positions: I32
    is_wanted: npt.NDArray[np.bool_]
    tokens: torch.Tensor
    work: Any


class StageLinks:
    """A rank's links to the stages before and behind.

    Attributes:
        is_first, is_last: which stage the rank belongs to.
        waited_ns: nanoseconds that the host has waited for other stages; stays 0 on a GPU.
    """

    def __init__(
        self, groups: ProcessGroups, hidden_size: int, dtype: torch.dtype, device: torch.device
    ):
        """`hidden_size` and `dtype` are those of the residual stream."""
        pipeline = groups.pp
        column = next(ranks for ranks in groups.spec.members("pp") if groups.spec.rank in ranks)
        stage = pipeline.rank
        self.is_first, self.is_last = stage == 0, stage == pipeline.size - 1
        self.waited_ns = 0
        self._before, self._after = column[stage - 1], column[(stage + 1) % pipeline.size]
        self._first, self._last = column[0], column[-1]
        self._hidden_group, self._token_group = pipeline, groups.tokens
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        # the steps in flight, and one to spare
        self._depth = pipeline.size + 2
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._expected: deque[_ExpectedTokens] = deque()
        self._receiving = torch.cuda.Stream(device) if device.type == "cuda" else None
        if device.type == "cuda":
            self._connect()

    def _connect(self) -> None:
        """Sends a message over every link, in the same order on all stages.

        NCCL connects two ranks in their first message, and the host waits until both have posted
        it. In a first step the first stage would post a receive for tokens before it sends hidden
        states, and the last one a receive for hidden states: each would wait for the other.
        """
        if not self.is_first:
            self.receive_counts(1)
        if not self.is_last:
            self.send_counts(torch.zeros(1, dtype=torch.int32, device=self._device))
        if self.is_last:
            self.return_tokens(torch.zeros(1, dtype=torch.int32, device=self._device))
        if self.is_first:
            self._wait(self._post_receive((1,), torch.int32, self._last, self._token_group)[1])

    # ---------------------------------------------------------------- hidden states

    def receive(self, num_tokens: int) -> torch.Tensor:
        """Returns the hidden states [T, hidden_size] of the stage before."""
        shape = num_tokens, self._hidden_size
        hidden, work = self._post_receive(shape, self._dtype, self._before, self._hidden_group)
        self._wait(work)
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        """Sends the hidden states [T, hidden_size] to the next stage; they may be written to as
        soon as this returns."""
        self._post_send(hidden, self._after, self._hidden_group)

    # ---------------------------------------------------------------- tokens of experts

    def receive_counts(self, size: int) -> torch.Tensor:
        """Returns the int32 [size] that the stage before has sent behind its last hidden states."""
        counts, work = self._post_receive((size,), torch.int32, self._before, self._hidden_group)
        self._wait(work)
        return counts

    def send_counts(self, counts: torch.Tensor) -> None:
        """Sends int32 [size] to the next stage, behind the last hidden states."""
        self._post_send(counts, self._after, self._hidden_group)

    # ---------------------------------------------------------------- tokens

    def return_tokens(self, tokens: torch.Tensor) -> None:
        """Sends what the last stage has sampled in a step, int32 [S] with S > 0, to the first."""
        self._post_send(tokens, self._first, self._token_group)

    def expect_tokens(self, plan: StepPlan) -> None:
        """Has the first stage receive what the last one will sample for a plan."""
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return
        tokens, work = self._post_receive((len(rows),), torch.int32, self._last, self._token_group)
        positions = (plan.starts + plan.lengths)[rows]
        is_wanted = np.ones(len(rows), np.bool_)
        self._expected.append(_ExpectedTokens(plan.slots[rows], positions, is_wanted, tokens, work))

    def enter_tokens(self, plan: StepPlan, slots: Slots) -> None:
        """Enters in the slots of the first stage the tokens that a plan's rows begin with, and what
        has come before them; waits for them if it must. Called before the plan is applied."""
        if not self._expected:
            return
        self._drop_replaced(plan)
        num_needed = len(self._expected) - self._depth
        for number, expected in enumerate(self._expected, 1):
            wanted = expected.slots[expected.is_wanted]
            if number > num_needed and np.isin(wanted, plan.slots).any():
                num_needed = number
        for _ in range(num_needed):
            self._enter(self._expected.popleft(), slots)

    def _enter(self, expected: _ExpectedTokens, slots: Slots) -> None:
        self._wait(expected.work)
        rows = np.flatnonzero(expected.is_wanted)
        if not len(rows):
            return
        where = np.stack([rows, expected.slots[rows], expected.positions[rows]]).astype(np.int64)
        uploaded = torch.from_numpy(where)
        if self._device.type == "cuda":
            uploaded = uploaded.pin_memory()
        row, slot, position = uploaded.to(self._device, non_blocking=True)
        # a row that failed must still leave an id that can be embedded
        slots.tokens[slot, position] = expected.tokens[row].clamp(min=0)

    def _drop_replaced(self, plan: StepPlan) -> None:
        """Drops tokens whose slots the plan gives to others, and those that it brings itself."""
        admitted, forced = plan.admissions.records["slot"], plan.section(ForcedTokens)
        for expected in self._expected if len(admitted) or forced is not None else ():
            expected.is_wanted[np.isin(expected.slots, admitted)] = False
            if forced is not None:
                same = expected.slots[:, None] == forced.slots
                same &= expected.positions[:, None] == forced.positions
                expected.is_wanted[same.any(1)] = False

    def drain(self) -> None:
        """Waits for all tokens that are expected, and drops them: the slots are made anew."""
        while self._expected:
            self._wait(self._expected.popleft().work)

    # ---------------------------------------------------------------- messages

    def _post_receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, group: ParallelGroup
    ) -> tuple[torch.Tensor, Any]:
        with self._on_receiving_stream():
            values = torch.empty(shape, dtype=dtype, device=self._device)
            work = dist.irecv(values, src=source, group=group.handle)
        if self._receiving is not None:
            values.record_stream(torch.cuda.current_stream())
        return values, work

    def _on_receiving_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._receiving is None else torch.cuda.stream(self._receiving)

    def _post_send(self, values: torch.Tensor, target: int, group: ParallelGroup) -> None:
        values = values.clone(memory_format=torch.contiguous_format)
        self._sent.append((dist.isend(values, dst=target, group=group.handle), values))
        if len(self._sent) > self._depth:
            self._sent.popleft()[0].wait()

    def _wait(self, work: Any) -> None:
        began = time.perf_counter_ns()
        work.wait()
        self.waited_ns += time.perf_counter_ns() - began if self._receiving is None else 0

"""Links between pipeline stages: hidden states go to the next stage, and sampled tokens from the
last stage back to the first, where the next step embeds them. Now and then counts of the experts'
tokens follow hidden states (`features.expert_load`).

A drafter is on the last stage. In steps with lookahead the streams that it reads before layers of
earlier stages go beside the hidden states, and what it drafts behind the sampled tokens.

Everything goes point to point between ranks of the same tensor-parallel number, over two channels,
each of which keeps the order of its messages: GPUs of one host write into each other's memory
(`MemoryChannel`), others use NCCL, CPUs gloo (`GroupChannel`). Both sides know every plan, so
nothing but numbers is sent: the receiver knows how many there will be, and of which rows.

No call waits on the host for a GPU. With NCCL a receive is posted on a stream of its own, so that
it may begin before the step that is being computed ends; it then holds a multiprocessor until the
message has come, which `MemoryChannel` avoids.

The first stage notes the tokens of each step that it will get, and waits for them when a plan comes
that has a row of one of their slots. Tokens for a slot that another request has taken meanwhile, or
for which a plan brings others, are dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from aioinfer.errors import ConfigError
from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.ipc.request_record import AppendedTokens
from aioinfer.layers.parallel import ParallelGroup, ProcessGroups
from aioinfer.worker.slots import Slots

if TYPE_CHECKING:
    from aioinfer.kernels.peer_messages import PeerChannel

_log = logging.getLogger(__name__)

#: Steps of hidden states that fit into a receiver's memory. One is read as its step begins; the
#: stage before may end the next one meanwhile, and then waits.
_HIDDEN_SLOTS = 2
#: A slot is at least so large: counts of experts' tokens go through it, too.
_MIN_SLOT_BYTES = 1 << 20


#: Receives a message, once: on a GPU its values are there for kernels that are launched after the
#: call.
Receive = Callable[[], torch.Tensor]


class StageChannel(Protocol):
    """A rank's link to the rank that it receives from and to the one that it sends to.

    Attributes:
        waited_ns: nanoseconds that the host has waited for messages; stays 0 on a GPU.
    """

    waited_ns: int

    def send(self, values: torch.Tensor) -> None:
        """Sends a tensor; it may be written to as soon as this returns."""
        ...

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """Returns a callable that receives the next message, of the shape and dtype that are sent.
        These callables are called in the order in which they were made."""
        ...


class GroupChannel:
    """Implements `StageChannel` with point-to-point messages of a process group.

    Args:
        group: the ranks of the pipeline. Another channel needs another group.
        source, target: world ranks, that this one receives from and sends to.
        depth: sends after which an earlier one must have been received.
        device: of this rank.
    """

    def __init__(
        self, group: ParallelGroup, source: int, target: int, depth: int, device: torch.device
    ):
        self.waited_ns = 0
        self._group, self._source, self._target = group.handle, source, target
        self._depth, self._device = depth, device
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._receiving = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, values: torch.Tensor) -> None:
        """See `StageChannel.send`."""
        values = values.clone(memory_format=torch.contiguous_format)
        self._sent.append((dist.isend(values, dst=self._target, group=self._group), values))
        if len(self._sent) > self._depth:
            self._sent.popleft()[0].wait()

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """See `StageChannel.expect`. Posts the receive."""
        with self._on_receiving_stream():
            values = torch.empty(shape, dtype=dtype, device=self._device)
            work: Any = dist.irecv(values, src=self._source, group=self._group)
        if self._receiving is not None:
            values.record_stream(torch.cuda.current_stream())

        def receive() -> torch.Tensor:
            began = time.perf_counter_ns()
            work.wait()
            self.waited_ns += time.perf_counter_ns() - began if self._receiving is None else 0
            return values

        return receive

    def _on_receiving_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._receiving is None else torch.cuda.stream(self._receiving)


class MemoryChannel:
    """Implements `StageChannel` over the memory of two GPUs of this host.

    Args:
        incoming, outgoing: from the rank that this one receives from, and to the one that it sends
            to.
    """

    def __init__(self, incoming: PeerChannel, outgoing: PeerChannel):
        self.waited_ns = 0
        self._incoming, self._outgoing = incoming, outgoing

    def send(self, values: torch.Tensor) -> None:
        """See `StageChannel.send`."""
        self._outgoing.send(values)

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """See `StageChannel.expect`. Nothing is launched before the returned callable is called."""
        return lambda: self._incoming.receive(shape, dtype)


@dataclass(frozen=True, slots=True)
class _ExpectedTokens:
    """The tokens of a step that the last stage samples: `receive` returns them, int32 [S].

    With drafts it returns int32 [S, 1 + drafts], the drafts behind each token.

    `is_wanted` and `wants_drafts` (bool [S]) become false where slot and position belong to another
    token by now, and where the engine has given the slot tokens in the place of the drafts.
    """

    slots: I32
    positions: I32
    is_wanted: npt.NDArray[np.bool_]
    wants_drafts: npt.NDArray[np.bool_]
    receive: Receive


class StageLinks:
    """A rank's links to the stages before and behind.

    Attributes:
        is_first, is_last: which stage the rank belongs to.
        num_drafts: of each request, behind each step with lookahead; 0 without a drafter.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        stream_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_tokens: int,
        *,
        tap_size: int = 0,
        num_drafts: int = 0,
    ):
        """`stream_size` and `dtype`: of the residual stream. `max_tokens`: of a step. `tap_size`:
        channels of a token that a drafter reads before layers, which go beside the stream."""
        stage, size = groups.pp.rank, groups.pp.size
        self.is_first, self.is_last = stage == 0, stage == size - 1
        self.num_drafts, self._tap_size = num_drafts, tap_size
        self._stream_size, self._dtype, self._device = stream_size, dtype, device
        # the steps in flight, and one to spare
        self._depth = size + 2
        self._expected: deque[_ExpectedTokens] = deque()
        self._hidden, self._tokens = self._open_channels(groups, max_tokens)
        self._connect()

    def _open_channels(
        self, groups: ProcessGroups, max_tokens: int
    ) -> tuple[StageChannel, StageChannel]:
        """Returns the channels of hidden states and of tokens. All ranks take the same kind."""
        size = groups.pp.size
        before, after = (groups.pp.rank - 1) % size, (groups.pp.rank + 1) % size
        if self._device.type == "cuda" and groups.spec.is_local:
            try:
                return self._open_memory(groups, max_tokens, before, after)
            except ConfigError as error:
                _log.warning("pipeline stages use NCCL, since memory cannot be shared: %s", error)
        column = next(ranks for ranks in groups.spec.members("pp") if groups.spec.rank in ranks)
        hidden, tokens = (
            GroupChannel(group, column[source], column[target], self._depth, self._device)
            for group, source, target in ((groups.pp, before, after), (groups.tokens, -1, 0))
        )
        return hidden, tokens

    def _open_memory(
        self, groups: ProcessGroups, max_tokens: int, before: int, after: int
    ) -> tuple[StageChannel, StageChannel]:
        from aioinfer.kernels.peer_messages import ChannelLayout, PeerChannel

        row = (self._stream_size + self._tap_size) * self._dtype.itemsize
        hidden = ChannelLayout.of(0, _HIDDEN_SLOTS, max(max_tokens * row, _MIN_SLOT_BYTES))
        # the first stage takes tokens when it needs them, and `_depth` steps later at the latest
        row = (1 + self.num_drafts) * 4
        tokens = ChannelLayout.of(hidden.end, self._depth + 2, max_tokens * row)
        memory = groups.pp.symmetric_buffer(tokens.end)
        ends = (hidden, before, after), (tokens, groups.pp.size - 1, 0)
        channels = [
            MemoryChannel(*(PeerChannel(memory, layout, peer) for peer in (source, target)))
            for layout, source, target in ends
        ]
        return channels[0], channels[1]

    def _connect(self) -> None:
        """Sends a message over every link, in the same order on all stages.

        NCCL connects two ranks in their first message, and the host waits until both have posted
        it. In a first step the first stage would post a receive for tokens before it sends hidden
        states, and the last one a receive for hidden states: each would wait for the other. Where
        messages go through memory, the first one compiles the kernels that send and receive.
        """
        nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
        if not self.is_first:
            self.receive_counts(1)
        if not self.is_last:
            self.send_counts(nothing)
        if self.is_last:
            self._tokens.send(nothing)
        if self.is_first:
            self._tokens.expect((1,), torch.int32)()

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that the host has waited for other stages; stays 0 on a GPU."""
        return self._hidden.waited_ns + self._tokens.waited_ns

    # ---------------------------------------------------------------- hidden states

    def receive(self, plan: StepPlan, taps: torch.Tensor | None) -> torch.Tensor:
        """Returns the hidden states [T, stream_size] of the stage before.

        Args:
            plan: of the step.
            taps: [tokens, taps, hidden_size], gets the streams that a drafter reads in the step, as
                far as stages before have their layers; None where none does.
        """
        has_taps, count = taps is not None and _looks_ahead(plan), plan.num_tokens
        size = self._stream_size + (self._tap_size if has_taps else 0)
        received = self._hidden.expect((count, size), self._dtype)()
        if not has_taps:
            return received
        assert taps is not None
        taps[:count].flatten(1).copy_(received[:, self._stream_size :])
        return received[:, : self._stream_size]

    def send(self, plan: StepPlan, hidden: torch.Tensor, taps: torch.Tensor | None) -> None:
        """Sends the hidden states [T, stream_size] to the next stage, and `taps` as for `receive`;
        both may be written to as soon as this returns."""
        if taps is not None and _looks_ahead(plan):
            hidden = torch.cat((hidden, taps[: len(hidden)].flatten(1)), dim=1)
        self._hidden.send(hidden)

    # ---------------------------------------------------------------- tokens of experts

    def receive_counts(self, size: int) -> torch.Tensor:
        """Returns the int32 [size] that the stage before has sent behind its last hidden states."""
        return self._hidden.expect((size,), torch.int32)()

    def send_counts(self, counts: torch.Tensor) -> None:
        """Sends int32 [size] to the next stage, behind the last hidden states."""
        self._hidden.send(counts)

    # ---------------------------------------------------------------- tokens

    def return_tokens(self, plan: StepPlan, tokens: torch.Tensor, slots: Slots) -> None:
        """Sends the tokens that the last stage has sampled for a plan, int32 [S] with S > 0, to the
        first; behind steps with lookahead those in the slots, with the drafts that follow. A row
        that was skipped has drafts in the place of its token."""
        if self.num_drafts and _looks_ahead(plan):
            rows = np.flatnonzero(plan.samples)
            slot, places = self._followed(plan.slots[rows], _ends(plan)[rows], slots)
            tokens = slots.tokens[slot, places]
        self._tokens.send(tokens)

    def _followed(
        self, slot_ids: I32, positions: I32, slots: Slots
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns slots and positions, int64 [n, 1 + num_drafts] each on the device, of n tokens
        and of the drafts behind each."""
        behind = positions[:, None] + np.arange(1 + self.num_drafts)
        behind = np.minimum(behind, slots.tokens.shape[1] - 1)
        both = np.stack(np.broadcast_arrays(slot_ids[:, None], behind)).astype(np.int64)
        slot, places = self._upload(both)
        return slot, places

    def _upload(self, array: npt.NDArray[np.int64]) -> torch.Tensor:
        uploaded = torch.from_numpy(array)
        if self._device.type == "cuda":
            uploaded = uploaded.pin_memory()
        return uploaded.to(self._device, non_blocking=True)

    def expect_tokens(self, plan: StepPlan) -> None:
        """Makes the first stage receive the tokens that the last one will sample for a plan."""
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            return
        has_drafts = self.num_drafts > 0 and _looks_ahead(plan)
        shape = (len(rows), 1 + self.num_drafts) if has_drafts else (len(rows),)
        receive = self._tokens.expect(shape, torch.int32)
        is_wanted, wants_drafts = np.ones(len(rows), np.bool_), np.full(len(rows), has_drafts)
        self._expected.append(
            _ExpectedTokens(plan.slots[rows], _ends(plan)[rows], is_wanted, wants_drafts, receive)
        )

    def enter_tokens(self, plan: StepPlan, slots: Slots) -> None:
        """Enters in the slots of the first stage the tokens that a plan's rows begin with, and the
        tokens that have come before these; waits for them if it must. Called before the plan is
        applied."""
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
        tokens = expected.receive()
        firsts = tokens if tokens.dim() == 1 else tokens[:, 0]
        rows = np.flatnonzero(expected.is_wanted)
        if len(rows):
            where = np.stack([rows, expected.slots[rows], expected.positions[rows]])
            row, slot, position = self._upload(where.astype(np.int64))
            # a row that failed must still leave an id that can be embedded; one that was skipped
            # is behind the last known token, where the next drafts are written
            slots.tokens[slot, position] = firsts[row].clamp(min=0)
        rows = np.flatnonzero(expected.is_wanted & expected.wants_drafts)
        if len(rows):
            row = self._upload(rows)
            places = self._followed(expected.slots[rows], expected.positions[rows], slots)
            slots.tokens[places] = tokens[row]

    def _drop_replaced(self, plan: StepPlan) -> None:
        """Drops tokens of slots that the plan gives to other requests, and tokens that the plan
        brings itself."""
        admitted, appended = plan.admissions.records["slot"], plan.section(AppendedTokens)
        for expected in self._expected if len(admitted) or appended is not None else ():
            expected.is_wanted[np.isin(expected.slots, admitted)] = False
            if appended is not None:
                same = expected.slots[:, None] == appended.slots
                expected.wants_drafts[same.any(1)] = False
                same &= expected.positions[:, None] == appended.positions
                expected.is_wanted[same.any(1)] = False

    def drain(self) -> None:
        """Waits for all tokens that are expected, and drops them: the slots are made again from
        scratch."""
        while self._expected:
            self._expected.popleft().receive()


def _looks_ahead(plan: StepPlan) -> bool:
    return plan.section(LookaheadRows) is not None


def _ends(plan: StepPlan) -> I32:
    """Returns the positions behind the rows of a plan. In a pipeline the plan has them, since no
    request is in a step before the result of its last one with lookahead rows has come."""
    return plan.starts + plan.lengths

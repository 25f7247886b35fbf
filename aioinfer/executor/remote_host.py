"""The driver's side of other hosts: some ranks of each, which an agent there starts and ends
(`host_agent`), at the other end of a `HostLink`; and the store through which the ranks of all hosts
find each other."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.executor.host_messages import (
    decode_message,
    encode_message,
    failure_report,
    load_report,
)
from aioinfer.executor.host_ranks import RankEvents
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.host_link import FrameKind, HostLink
from aioinfer.ipc.plan import I32
from aioinfer.ipc.sections import as_bytes

#: An agent shows that it lives so often, and counts as lost after so long.
BEAT_S = 1.0
LOST_AFTER_S = 6.0
_END_S = 5.0  # an agent may take so long to end its ranks


class RemoteHost:
    """Implements `WorkerHost` over a link, and passes on the agent's reports.

    Args:
        name: of the host in errors.
        ranks: its ranks, ascending.
        connection: to its agent, behind the handshake.
        heartbeat: gets the records of its ranks.
        events: gets the events of these ranks.
    """

    def __init__(
        self,
        name: str,
        ranks: list[int],
        connection: socket.socket,
        heartbeat: Heartbeat,
        events: RankEvents,
    ):
        self.ranks = ranks
        self._name = name
        self._heartbeat, self._events = heartbeat, events
        self._loop = asyncio.get_running_loop()
        self._link = HostLink(connection, self._take, self._lose)
        self._last_heard = self._last_check = time.monotonic()
        self._is_started = self._is_lost = False
        self._gone = asyncio.Event()
        self._stacks = ""
        self._timer = self._loop.call_later(BEAT_S, self._check)

    @property
    def name(self) -> str:
        """The name of the host in errors."""
        return self._name

    @property
    def is_started(self) -> bool:
        """Whether all ranks of the world serve."""
        return self._is_started

    @is_started.setter
    def is_started(self, value: bool) -> None:
        self._is_started = value
        self._send("started")

    def _send(self, kind: str, **values: Any) -> None:
        self._link.send(FrameKind.MESSAGE, 0, encode_message(kind, **values))

    async def start(self) -> None:
        """Asks the agent to start its ranks."""
        self._send("start")

    def allocate(self, num_blocks: Sequence[int], max_model_len: int, vocab_size: int) -> None:
        """See `HostRanks.allocate`."""
        self._send(
            "allocate",
            num_blocks=list(num_blocks),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )

    def post(self, step_id: int, message: Sequence[memoryview]) -> None:
        """Sends a plan, or a section; the ring of the host takes over there."""
        self._link.send(FrameKind.PLAN, step_id, message)

    def post_masks(self, step_id: int, masks: I32) -> None:
        """Sends the masks of a step, int32 [rows, words]."""
        self._link.send(FrameKind.MASKS, step_id, [as_bytes(masks)])

    def call(self, method: str, arguments: Mapping[str, Any]) -> None:
        """Has the ranks call a method; see `HostRanks.call`."""
        self._send("call", method=method, arguments=dict(arguments))

    # ---------------------------------------------------------------- what comes back

    def _take(self, kind: FrameKind, number: int, payload: memoryview) -> None:
        self._last_heard = time.monotonic()
        if kind is FrameKind.RESULT:
            self._events.on_result(memoryview(bytes(payload)))
        elif kind is FrameKind.BEAT:
            self._heartbeat.mirror(self.ranks, payload, time.monotonic_ns() - number)
        elif kind is FrameKind.MESSAGE:
            self._take_message(decode_message(payload))

    def _take_message(self, message: dict[str, Any]) -> None:
        kind, events = message.pop("kind"), self._events
        if kind == "progress":
            events.on_progress(**message)
        elif kind == "loaded":
            events.on_answer(message["rank"], kind, load_report(message["report"]))
        elif kind == "answer":
            events.on_answer(message["rank"], kind, tuple(message["value"]))
        elif kind == "ready":
            phases = [(name, seconds) for name, seconds in message["phases"]]
            times = [(rows, seconds, ahead) for rows, seconds, ahead in message["step_times"]]
            events.on_answer(message["rank"], kind, (phases, message["graph_bytes"], times))
        elif kind == "failed":
            behind_ns = time.monotonic_ns() - message["now_ns"]
            events.on_report(failure_report(message["report"], behind_ns))
        elif kind == "exit":
            events.on_exit(message["rank"], f"on {self._name} {message['how']}")
        elif kind == "fault":
            events.on_fault(f"{self._name}: {message['fault']}")
        elif kind == "stacks":
            self._stacks = message["stacks"]

    def _check(self) -> None:
        """Checks that the agent still shows that it lives. Time in which this process itself did
        not run does not count."""
        now = time.monotonic()
        if now - self._last_check > 3 * BEAT_S:
            self._last_heard = now
        self._last_check = now
        if now - self._last_heard > LOST_AFTER_S:
            self._link.close()
            self._lose(f"nothing has come from it for {now - self._last_heard:.0f} s")
        else:
            self._timer = self._loop.call_later(BEAT_S, self._check)

    def _lose(self, reason: str) -> None:
        self._is_lost = True
        self._timer.cancel()
        self._gone.set()
        ranks = f"worker{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        self._events.on_fault(
            f"{self._name} with {ranks} was lost, {reason}: "
            + "; ".join(map(self._heartbeat.describe, self.ranks))
        )

    def find_fault(self) -> str:
        """Returns an empty text: the agent reports faults by itself."""
        return ""

    def request_stacks(self) -> None:
        """Asks the ranks for their stacks."""
        self._stacks = ""
        self._send("stacks")

    def read_stacks(self) -> str:
        """Returns the stacks that have come since `request_stacks`."""
        return self._stacks or f"stacks of {self._name}: none came\n"

    # ---------------------------------------------------------------- the end

    def kill(self) -> None:
        """Asks the agent to end its ranks at once, and itself."""
        self._timer.cancel()
        self._send("kill")

    async def end(self) -> None:
        """Asks the agent to end its ranks and itself, and waits for that, though not for long: an
        agent that is cut off ends them, too."""
        self._timer.cancel()
        if not self._is_lost:
            self._events = _NoEvents()
            self._send("end")
            try:
                async with asyncio.timeout(_END_S):
                    await self._gone.wait()
            except TimeoutError:
                pass
        self._link.close()


class _NoEvents:
    """Implements `RankEvents` for a host that has ended: drops all events."""

    def on_progress(self, rank: int, done: int, total: int) -> None: ...

    def on_answer(self, rank: int, kind: str, value: Any) -> None: ...

    def on_result(self, message: memoryview) -> None: ...

    def on_report(self, report: Any) -> None: ...

    def on_exit(self, rank: int, how: str) -> None: ...

    def on_fault(self, fault: str) -> None: ...


def open_store(address: str) -> tuple[Any, int]:
    """Returns a `TCPStore`, through which the ranks of several hosts find each other, and its port.

    It listens at this address alone. Torch's stores know no authentication: whoever reaches the
    port while the engine starts can disturb that, as with everything that torch sends.
    """
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port

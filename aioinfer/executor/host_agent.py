"""The agent of a host that is not the driver's: it starts the host's ranks and relays between them
and the driver, over one `HostLink`.

A plan comes once, whatever the number of ranks, and goes into the ring of this host. The agent ends
its ranks, and itself, when the driver says so or is gone. The executor decides what starts agents:
Ray's actors (`ray`), or torchrun (`torchrun`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aioinfer.config import Config
from aioinfer.executor.host_messages import (
    decode_message,
    encode_message,
    plain_failure,
    plain_report,
)
from aioinfer.executor.host_ranks import HostRanks, RankProcess, spawn
from aioinfer.executor.remote_host import BEAT_S
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.host_link import FrameKind, HostLink, connect_to_driver
from aioinfer.ipc.placement import RankSpec
from aioinfer.ipc.ring import RingFullError
from aioinfer.worker.worker_spec import FailureReport, WorkerSpec


class HostAgent:
    """Takes the `RankEvents` of this host's ranks, and the driver's frames.

    Args:
        config, folder, engine: as in `WorkerSpec`.
        places: of this host's ranks.
        visible_devices, launch: as in `HostRanks`.

    Attributes:
        is_killed: whether it ended because the driver said that all is lost, or was gone.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        engine: int,
        places: Sequence[RankSpec],
        *,
        visible_devices: str | None = None,
        launch: Callable[[WorkerSpec], RankProcess] = spawn,
    ):
        self._config = config
        self._heartbeat = Heartbeat(places[0].world_size, places[0].names_of_all)
        self._ranks = HostRanks(
            config, folder, engine, places, self._heartbeat, self,
            visible_devices=visible_devices, launch=launch,
        )  # fmt: skip
        self.is_killed = False
        self._words = 0  # of a mask
        self._last_step = -1
        self._is_serving = False
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, address: tuple[str, int], secret: bytes, number: int) -> None:
        """Serves the driver at `address` as the host of this number, until the driver ends the
        agent.

        Raises:
            LinkError: the driver cannot be reached, or does not know the secret.
        """
        self._loop = asyncio.get_running_loop()
        try:
            connection = await connect_to_driver(address, secret, number)
            self._link = HostLink(connection, self._take, lambda reason: self._kill())
            beats = self._loop.create_task(self._beat())
            await self._over.wait()
            beats.cancel()
        finally:
            for task in self._tasks:
                task.cancel()
            await self._ranks.end()
            self._heartbeat.close()
        self._link.close()  # the driver waits for this

    async def _beat(self) -> None:
        """Shows the driver that this host lives, and the progress of its ranks."""
        last_fault = ""
        while True:
            records = self._heartbeat.read(self._ranks.ranks)
            self._link.send(FrameKind.BEAT, time.monotonic_ns(), [memoryview(records)])
            if not self._is_serving or not all(
                self._heartbeat.has_finished(rank, self._last_step) for rank in self._ranks.ranks
            ):
                fault = self._ranks.find_fault()
                if fault and fault != last_fault:
                    self.on_fault(fault)
                last_fault = fault
            await asyncio.sleep(BEAT_S)

    # ---------------------------------------------------------------- from the driver

    def _take(self, kind: FrameKind, number: int, payload: memoryview) -> None:
        try:
            if kind is FrameKind.PLAN:
                self._last_step = max(self._last_step, number)  # not of a section alone
                self._ranks.post(number, [payload])
            elif kind is FrameKind.MASKS:
                masks = np.frombuffer(payload, np.int32).reshape(-1, self._words)
                self._ranks.post_masks(number, masks)
            elif kind is FrameKind.MESSAGE:
                self._take_message(decode_message(payload))
        except RingFullError as error:
            self.on_fault(f"step {number} could not be posted: {error}")

    def _take_message(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "start":
            self._run(self._start())
        elif kind == "allocate":
            self._words = (message["vocab_size"] + 31) // 32
            self._ranks.allocate(**message)
        elif kind == "call":
            self._ranks.call(message["method"], message["arguments"])
        elif kind == "started":
            self._ranks.is_started = self._is_serving = True
        elif kind == "stacks":
            self._run(self._send_stacks())
        elif kind == "kill":
            self._kill()
        elif kind == "end":
            self._over.set()

    def _run(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        try:
            await self._ranks.start()
        except Exception as error:
            self.on_fault(f"the ranks could not be started: {error!r}")

    async def _send_stacks(self) -> None:
        self._ranks.request_stacks()
        await asyncio.sleep(0.5)  # the driver reads them after a second
        self._send("stacks", stacks=self._ranks.read_stacks())

    def _kill(self) -> None:
        self.is_killed = True
        self._ranks.kill()
        self._over.set()

    # ---------------------------------------------------------------- from the ranks

    def _send(self, kind: str, **values: Any) -> None:
        self._link.send(FrameKind.MESSAGE, 0, encode_message(kind, **values))

    def on_progress(self, rank: int, done: int, total: int) -> None:
        """See `RankEvents`. One bar stands for all ranks: the others' are not sent."""
        if rank == 0:
            self._send("progress", rank=rank, done=done, total=total)

    def on_answer(self, rank: int, kind: str, value: Any) -> None:
        """See `RankEvents`."""
        if kind == "loaded":
            self._send(kind, rank=rank, report=plain_report(value))
        elif kind == "answer":
            self._send(kind, rank=rank, value=value)
        else:
            phases, graph_bytes, times = value
            self._send(kind, rank=rank, phases=phases, graph_bytes=graph_bytes, step_times=times)

    def on_result(self, message: memoryview) -> None:
        """See `RankEvents`."""
        self._link.send(FrameKind.RESULT, 0, [message])

    def on_report(self, report: FailureReport) -> None:
        """See `RankEvents`."""
        self._send("failed", report=plain_failure(report), now_ns=time.monotonic_ns())

    def on_exit(self, rank: int, how: str) -> None:
        """See `RankEvents`."""
        records = self._heartbeat.read(self._ranks.ranks)
        self._link.send(FrameKind.BEAT, time.monotonic_ns(), [memoryview(records)])
        self._send("exit", rank=rank, how=how)

    def on_fault(self, fault: str) -> None:
        """See `RankEvents`."""
        self._send("fault", fault=fault)

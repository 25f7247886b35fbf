"""Reports of a replica to gateways, and the port that serves them: a stream of `cluster.reports`
for each gateway.

The reported hashes are the prefix cache's own: a block that is evicted is reported, and so is a
block that holds generated tokens. Beside them goes the load of the schedulers.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.cluster.reports import ReplicaLoad, Report, divided, encode
from aioinfer.engine.recovery import EngineState
from aioinfer.scheduler.block_pool import BlockPool
from aioinfer.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from aioinfer.engine.engine import Engine
    from aioinfer.engine.frontend import Frontend
    from aioinfer.scheduler.block_pool import BlockPool

#: Reports are at least so far apart.
INTERVAL_S = 0.05
#: A report is sent after this long even if nothing has changed.
HEARTBEAT_S = 1.0
#: Reports that may wait for a gateway that does not read; beyond that, the gateway must start again
#: with a first report.
_MAX_WAITING = 64


class Reporter:
    """Watches the engines of a process while a gateway listens.

    Attributes:
        is_leaving: whether reports ask gateways to send no more requests.
    """

    def __init__(self, frontend: Frontend):
        self.is_leaving = False
        self._frontend = frontend
        self._readers: set[asyncio.Queue[bytes]] = set()
        self._pools: list[BlockPool] = []
        self._task: asyncio.Task[None] | None = None
        self._last = ReplicaLoad()
        self._beat = 0.0

    def load(self) -> ReplicaLoad:
        """Returns the current load of the engines."""
        return load_of(engine.scheduler for engine in self._living())

    def leave(self) -> None:
        """Tells gateways at once to send no more requests."""
        self.is_leaving = True
        self._send(self._report())

    async def close(self) -> None:
        """Stops watching."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._unwatch()

    def subscribe(self) -> asyncio.Queue[bytes]:
        """Returns a queue of encoded reports, which begins with all hashes; `unsubscribe` has to
        follow. Empty bytes mean that the reader was too slow."""
        if not self._readers:
            self._watch()
            self._task = asyncio.create_task(self._run())
        else:
            self._tick()  # what has changed until now is for the others: this one gets all
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        hashes = {h for pool in self._pools for h in pool.hashes()}
        for report in divided(self._report(added=list(hashes), is_first=True)):
            queue.put_nowait(encode(report))
        self._readers.add(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[bytes]) -> None:
        """Ends a subscription."""
        self._readers.discard(queue)
        if not self._readers:
            self._unwatch()
            if self._task is not None:
                self._task.cancel()

    # ---------------------------------------------------------------- watching

    def _living(self) -> list[Engine]:
        return [e for e in self._frontend.engines if e.state is not EngineState.DEAD]

    def _watch(self) -> None:
        caches = [engine.scheduler.kv_cache for engine in self._living()]
        self._pools = [cache.found_pool for cache in caches if cache.prefix_caching]
        for pool in self._pools:
            pool.changed = set()

    def _unwatch(self) -> None:
        for pool in self._pools:
            pool.changed = None
        self._pools = []

    def _report(
        self, added: list[bytes] | None = None, removed: list[bytes] | None = None, **more: bool
    ) -> Report:
        scheduler = self._frontend.engines[0].scheduler
        cache = scheduler.kv_cache
        return Report(
            self.load(),
            added or (),
            removed or (),
            scheduler.limits.block_size if cache.prefix_caching else 0,
            is_leaving=self.is_leaving or not self._frontend.is_healthy(),
            of_snapshots=cache.finds_states,
            **more,
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._tick()

    def _tick(self) -> None:
        """Sends the changes since the last report, or a heartbeat without changes."""
        watched = {id(engine.scheduler.kv_cache.found_pool) for engine in self._living()}
        if not watched >= {id(pool) for pool in self._pools}:
            # workers were restarted, or an engine is dead: the prefix cache is another
            self._unwatch()
            self._watch()
            everything = {h for pool in self._pools for h in pool.hashes()}
            self._send(self._report(added=list(everything), is_first=True))
            return
        held, gone = take_changes(self._pools)
        load, now = self.load(), asyncio.get_running_loop().time()
        if held or gone or load != self._last or now >= self._beat + HEARTBEAT_S:
            self._send(self._report(held, gone))

    def _send(self, report: Report) -> None:
        self._last, self._beat = report.load, asyncio.get_running_loop().time()
        parts = [encode(part) for part in divided(report)]
        for queue in self._readers:
            if queue.qsize() > _MAX_WAITING:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(b"")
            for part in parts:
                queue.put_nowait(part)


class ReportServer:
    """The port at which gateways that have its token get reports."""

    def __init__(self, reporter: Reporter, token: str):
        self.reporter, self._token = reporter, token
        self._runner: web.AppRunner | None = None

    async def start(self, host: str) -> str:
        """Listens on a free port and returns the URL of the reports."""
        app = web.Application()
        app.router.add_get("/reports", self._stream)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0)
        await site.start()
        name, port = self._runner.addresses[0][:2]
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/reports"

    async def close(self) -> None:
        """Ends the reports and their streams."""
        await self.reporter.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        queue = self.reporter.subscribe()
        try:
            while data := await queue.get():
                await response.write(data)
        except ConnectionError:
            pass  # the gateway is gone
        finally:
            self.reporter.unsubscribe(queue)
        return response


def load_of(schedulers: Iterable[Scheduler]) -> ReplicaLoad:
    """Returns the load of some schedulers, added up."""
    total = [0] * len(ReplicaLoad.__struct_fields__)
    for scheduler in schedulers:
        pool, block_size = scheduler.kv_cache.leading_pool, scheduler.limits.block_size
        values = (
            scheduler.num_running,
            scheduler.num_waiting,
            scheduler.num_prefill_tokens,
            (pool.num_blocks - pool.num_free) * block_size,
            scheduler.num_waiting_tokens,
            pool.num_blocks * block_size,
            scheduler.limits.max_num_seqs,
        )
        total = [one + other for one, other in zip(total, values, strict=True)]
    return ReplicaLoad(*total)


def take_changes(pools: Sequence[BlockPool]) -> tuple[list[bytes], list[bytes]]:
    """Returns the changes of the prefix index since the last call (see `BlockPool.changed`): of the
    hashes that have changed, the ones that any of the pools holds, and the ones that none holds any
    more.

    The pools are asked which hashes they hold, so the order of changes does not matter.
    """
    changed: set[bytes] = set()
    for pool in pools:
        if pool.changed:
            changed |= pool.changed
            pool.changed = set()
    held = [h for h in changed if any(pool.has(h) for pool in pools)]
    return held, list(changed.difference(held))

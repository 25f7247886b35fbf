"""The replicas of a deployment, and the streams of their reports.

Another module decides which replicas are members (`deploy.application` asks Ray Serve). A member
gets requests from the first report of its stream on, until the stream ends or says that the replica
leaves. So a replica that is killed gets no more requests as soon as its connections are closed,
whatever Serve has noticed, and one that hangs after `_SILENCE_S`. One that is no member any more is
followed until its requests have ended: it may hang, or its host be lost, before that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

import aiohttp
from yarl import URL

from aioinfer.cluster.reports import ReportReader
from aioinfer.cluster.router import ClusterRouter
from aioinfer.errors import no_answer
from aioinfer.gateway.replica import Address
from aioinfer.tasks import end_tasks

_log = logging.getLogger(__name__)

#: How often members are asked for.
_ASK_S = 1.0
#: After so long without a report, a replica counts as gone; after so long, it gets no request whose
#: replica was lost: what keeps one from reporting may keep all of them.
_SILENCE_S, _DOUBT_S = 5.0, 3.0
#: Before a stream that has ended is opened again.
_PAUSE_S = 0.5


class Members:
    """Follows the reports of a deployment's replicas and passes them to the router.

    Attributes:
        urls: of the members, by name.
    """

    def __init__(
        self,
        discover: Callable[[], Awaitable[Iterable[Address]]],
        token: str,
        router: ClusterRouter,
        http: aiohttp.ClientSession,
        on_block_size: Callable[[int], None],
        on_silence: Callable[[str], None],
        is_busy: Callable[[str], bool],
    ):
        """`discover` returns the replicas that serve. `on_silence` is called with the name of a
        replica that has not reported for too long; `is_busy` returns whether a replica has requests
        under way."""
        self.urls: dict[str, str] = {}
        self._discover, self._token, self._router, self._http = discover, token, router, http
        self._on_block_size, self._on_silence = on_block_size, on_silence
        self._is_busy = is_busy
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._warned: dict[str, str] = {}
        self._heard: dict[str, float] = {}  # when each replica that is routed to reported last

    def start(self) -> None:
        """Begins to ask for members."""
        self._asking = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stops."""
        await end_tasks([*self._followed.values(), *filter(None, [self._asking])])

    def in_doubt(self) -> set[str]:
        """Returns the replicas that are routed to and have been silent for some time."""
        before = time.monotonic() - _DOUBT_S
        return {name for name, heard in self._heard.items() if heard < before}

    def targets(self) -> list[dict[str, Any]]:
        """Returns the replicas in the form of Prometheus' HTTP service discovery: where each shows
        its `/metrics`, and its name as the label `replica`."""
        return [
            {"targets": [URL(url).authority], "labels": {"replica": name}}
            for name, url in sorted(self.urls.items())
        ]

    async def _run(self) -> None:
        while True:
            try:
                self._update(await self._discover())
            except Exception as error:  # asked again in a second; known replicas go on
                self._warn("", f"the replicas could not be asked for: {error!r}")
            await asyncio.sleep(_ASK_S)

    def _warn(self, name: str, text: str) -> None:
        """Logs a warning about a replica, unless it is the same as the last one."""
        if self._warned.get(name) != text:
            self._warned[name] = text
            _log.warning(text)

    def _update(self, found: Iterable[Address]) -> None:
        addresses = {address.name: address for address in found}
        for name in self._followed.keys() - addresses.keys():
            self._router.leave(name)
            self.urls.pop(name, None)
            if not self._is_busy(name):
                self._unfollow(name)
        for name in addresses.keys() - self.urls.keys():
            self._unfollow(name)  # it was a member before
            self.urls[name] = addresses[name].url
            self._followed[name] = asyncio.create_task(self._follow(addresses[name]))

    def _unfollow(self, name: str) -> None:
        if (task := self._followed.pop(name, None)) is not None:
            task.cancel()
        self._warned.pop(name, None)

    async def _follow(self, address: Address) -> None:
        """Hands the reports of a replica to the router, as long as it is a member."""
        while True:
            try:
                await (self._read(address) if address.reports_url else self._watch(address))
            except TimeoutError:  # of connecting, or of a report
                self._warn(address.name, f"replica {address.name} is silent")
                self._on_silence(address.name)
            except aiohttp.ClientResponseError as error:
                self._warn(address.name, f"replica {address.name} answers {error.status}")
            except aiohttp.ClientError as error:
                reason = no_answer(address.reports_url or address.url, error)
                self._warn(address.name, f"replica {address.name} reports no more: {reason}")
            except ValueError as error:
                self._warn(address.name, f"replica {address.name} reports no more: {error!r}")
            finally:
                self._router.leave(address.name)
                self._heard.pop(address.name, None)
            await asyncio.sleep(_PAUSE_S)

    async def _watch(self, address: Address) -> None:
        """Has a replica without reports get requests while it says that it is ready."""
        timeout, is_known = aiohttp.ClientTimeout(total=_SILENCE_S), False
        while True:
            async with self._http.get(f"{address.url}/health/ready", timeout=timeout) as response:
                response.raise_for_status()
            self._heard[address.name] = time.monotonic()
            if not is_known and address.name in self.urls:
                self._router.join(address.name)
                is_known = True
            await asyncio.sleep(_ASK_S)

    async def _read(self, address: Address) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
        headers = {"Authorization": f"Bearer {self._token}"}
        reader, is_known = ReportReader(), False
        with suppress(aiohttp.ClientPayloadError):  # the stream was cut off: the replica is gone
            async with self._http.get(
                address.reports_url, headers=headers, timeout=timeout, raise_for_status=True
            ) as response:
                async for data in response.content.iter_any():
                    self._heard[address.name] = time.monotonic()
                    for report in reader.feed(data):
                        if not (is_known or report.is_leaving) and address.name in self.urls:
                            self._on_block_size(report.block_size)
                            self._router.join(address.name)
                            is_known = True
                        self._router.report(address.name, report)

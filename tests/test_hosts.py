"""Which names a request may be addressed to."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from aioinfer.api.http.access import AllowedHosts
from tests.test_server import make_server

LOCAL = AllowedHosts.of([], "127.0.0.1", is_loopback=True)


@pytest.mark.parametrize(
    "header",
    [
        "localhost", "localhost:8000", "LocalHost:1", "localhost.", "localhost:", "a.b.localhost",
        "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:80", "::1", None,
    ],
)  # fmt: skip
def test_names_of_this_machine(header: str | None) -> None:
    assert LOCAL.admits(header)


@pytest.mark.parametrize(
    "header",
    [
        "", "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
        "notlocalhost", "127.0.0.2", "[::2]", "[::1", "localhost:80:80", "localhost@evil.example",
        "evil.example#localhost", "\udcff", "[]", "[evil.example]",
    ],
)  # fmt: skip
def test_other_names(header: str) -> None:
    assert not LOCAL.admits(header)


def test_configured_names_replace_the_default() -> None:
    hosts = AllowedHosts.of(["API.example.org", "*.inner.example"], "127.0.0.1", is_loopback=True)
    assert hosts.admits("api.example.org:443")
    assert hosts.admits("a.b.inner.example")
    assert not hosts.admits("inner.example")
    assert not hosts.admits("xinner.example")
    assert not hosts.admits("localhost")
    assert AllowedHosts(["[fd00::1]"]).admits("[FD00:0::1]:80")
    assert AllowedHosts(["fd00::1"]).admits("[fd00::1]")
    assert AllowedHosts.of(["*"], "127.0.0.1", is_loopback=True).admits("evil.example")


def test_the_default_depends_on_the_address() -> None:
    assert AllowedHosts.of([], "0.0.0.0", is_loopback=False).admits("any.example")
    assert AllowedHosts.of([], "127.0.0.2", is_loopback=True).admits("127.0.0.2:80")


async def answer(url: str, host: str, path: str = "/version") -> tuple[int, str | None]:
    """Returns the status and the error's code."""
    async with (
        aiohttp.ClientSession(url) as http,
        http.get(path, headers={"Host": host}) as response,
    ):
        return response.status, (await response.json()).get("error", {}).get("code")


@pytest.mark.parametrize(
    ("settings", "admitted"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": ""}, True),
        ({"allowed_hosts": ["rebound.example"]}, True),
    ],
)
async def test_a_server_answers_421_to_other_names(
    settings: dict[str, object], admitted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(**settings)
    url = URL(await server.start())
    if url.host in ("0.0.0.0", "::"):
        url = url.with_host("localhost")
    own = "localhost" if not settings.get("allowed_hosts") else "rebound.example"
    assert await answer(str(url), f"{own}:{url.port}") == (200, None)
    for path in ("/version", "/nowhere", "/health", "/v1/models/x"):
        status, code = await answer(str(url), "rebound.example", path)
        assert (status == 421) == (not admitted)
        assert (code == "host_not_allowed") == (not admitted)
    await server.close()
    lines = [re.sub("from .*", "from", message) for message in caplog.messages]
    counts = ("1", "3")  # the first at once, the others together
    kind, code = "requests refused by their heads", "host_not_allowed"
    expected = [f"{kind}: {count}, the last ({code}) from" for count in counts]
    assert lines == ([] if admitted else expected)
    assert "rebound" not in caplog.text


async def test_a_unix_socket_answers_to_any_name(tmp_path: Path) -> None:
    server = make_server(unix_socket=str(tmp_path / "socket"))
    await server.start()
    connector = aiohttp.UnixConnector(str(tmp_path / "socket"))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get("http://any.example/version") as response,
    ):
        assert response.status == 200
    await server.close()


async def test_a_missing_host_is_refused_in_http_1_1_only() -> None:
    server = make_server()
    url = await server.start()
    for version, status in ((b"1.0", b"200"), (b"1.1", b"400")):
        reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
        writer.write(b"GET /health HTTP/%s\r\n\r\n" % version)
        assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status
        writer.close()
    await server.close()

"""API keys, CORS, request ids and the names of the server, over a socket and without a model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDictProxy
from yarl import URL

from aioinfer.api.admin.page import PAGE_PATHS
from aioinfer.api.http.listener import AllowedHosts
from tests.test_server import make_server, serve

PAGE = "https://page.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


@asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with serve(**settings) as (_, url), aiohttp.ClientSession(url) as http:
        yield http


async def fetch(
    http: aiohttp.ClientSession,
    path: str = "/version",
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> tuple[int, CIMultiDictProxy[str]]:
    async with http.request(method, path, headers=headers) as response:
        return response.status, response.headers


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- keys


async def test_every_key_opens_and_nothing_else_does(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text('# comment\n[a]\nkey = "from-file-1"\n[b]\nkey = "from-file-2"\n')
    async with client(api_keys=str(file)) as http:
        for key in ("from-file-1", "from-file-2"):
            assert (await fetch(http, headers=bearer(key)))[0] == 200, key
    async with client(api_keys=["one", "two"]) as http:
        for key in ("one", "two"):
            assert (await fetch(http, headers=bearer(key)))[0] == 200, key
        assert (await fetch(http, headers={"Authorization": "bearer  one"}))[0] == 200
        for header in (
            "Bearer on",
            "Bearer onee",
            "Bearer ",
            "Bearer",
            "one",
            "Basic one",
            "Bearer [a]",
            "Bearer \xff",
            "",
        ):
            assert (await fetch(http, headers={"Authorization": header}))[0] == 401, header


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/version"),
        ("GET", "/nothing"),
        ("POST", "/v1/completions"),
        ("OPTIONS", "/version"),
    ],
)
async def test_without_a_key_nothing_is_answered(method: str, path: str) -> None:
    async with (
        client(api_keys=["secret-key"]) as http,
        http.request(method, path, headers=bearer("secret-kez")) as response,
    ):
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = (await response.json())["error"]
        found = (error["type"], error["param"], error["code"])
        assert found == ("invalid_request_error", None, "invalid_api_key")
        assert "secret" not in error["message"]


async def test_health_needs_no_key() -> None:
    async with client(api_keys=["key"]) as http:
        assert (await fetch(http, "/health"))[0] == 200
        assert (await fetch(http, "/health/"))[0] == 401
        assert (await fetch(http, "/version"))[0] == 401


async def test_only_monitoring_and_the_page_need_no_key() -> None:
    """Every route of the application is requested without a key."""
    monitoring = {"/health", "/health/live", "/health/ready", "/metrics"}
    open_paths = {*monitoring, "/openapi.json", *PAGE_PATHS} - {""}
    async with (
        serve(api_keys=["key"], admin_key="admin") as (server, url),
        aiohttp.ClientSession(url) as http,
    ):
        assert server._application is not None
        routes = server._application.app.router.routes()
        paths = {route.resource.canonical for route in routes if route.resource}
        assert open_paths < paths
        for path in paths:
            for method in ("GET", "POST"):
                status, _ = await fetch(http, path.replace("{id}", "x"), method)
                assert (status == 401) == (path not in open_paths), (method, path)


async def test_without_keys_every_request_is_accepted() -> None:
    async with client() as http:
        for headers in ({}, bearer("any"), {"Authorization": "nonsense"}):
            assert (await fetch(http, headers=headers))[0] == 200


# ---------------------------------------------------------------- CORS


async def test_no_page_may_read_unless_configured() -> None:
    async with client() as http:
        status, headers = await fetch(http, headers={"Origin": PAGE})
        assert status == 200
        assert not [name for name in headers if name.startswith("Access-Control") or name == "Vary"]
        assert (await fetch(http, method="OPTIONS", headers=PREFLIGHT | {"Origin": PAGE}))[0] == 405


async def test_pages_of_one_origin() -> None:
    async with client(cors_origins=[PAGE, "null"]) as http:
        for path, expected in (("/version", 200), ("/nothing", 404)):
            status, headers = await fetch(http, path, headers={"Origin": PAGE})
            found = (status, headers["Access-Control-Allow-Origin"], headers["Vary"])
            assert found == (expected, PAGE, "Origin")
            assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]
        for origin in (
            {"Origin": "https://other.example"},
            {"Origin": f"{PAGE}.other.example"},
            {},
        ):
            status, headers = await fetch(http, headers=origin)
            assert status == 200
            assert "Access-Control-Allow-Origin" not in headers
            assert headers["Vary"] == "Origin"


async def test_a_preflight_needs_no_key() -> None:
    async with client(cors_origins=[PAGE], api_keys=["key"]) as http:
        status, headers = await fetch(
            http, "/v1/completions", "OPTIONS", PREFLIGHT | {"Origin": PAGE}
        )
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, PAGE)
        assert "POST" in headers["Access-Control-Allow-Methods"]
        assert headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        assert (
            await fetch(
                http, "/v1/completions", "OPTIONS", PREFLIGHT | {"Origin": "https://other.example"}
            )
        )[0] == 401
        status, headers = await fetch(http, headers={"Origin": PAGE})
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, PAGE), (
            "the page may read why"
        )


async def test_all_origins() -> None:
    async with client(cors_origins=["*"]) as http:
        status, headers = await fetch(http, headers={"Origin": "https://any.example"})
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "*")
        assert "Vary" not in headers


# ---------------------------------------------------------------- request ids


async def test_request_ids_come_back() -> None:
    async with client(api_keys=["key"]) as http:
        for given in ("abc", "a b/~!", "x" * 128):
            for path, headers in (("/health", {}), ("/nothing", bearer("key")), ("/version", {})):
                assert (await fetch(http, path, headers=headers | {"X-Request-Id": given}))[1][
                    "X-Request-Id"
                ] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "ä", "a\tb"])
async def test_other_request_ids_are_made_up(given: str | None) -> None:
    async with client() as http:
        headers = {} if given is None else {"X-Request-Id": given}
        made = [(await fetch(http, headers=headers))[1].getall("X-Request-Id") for _ in range(2)]
    (first,), (second,) = made
    assert first != second
    assert len(first) == 24


# ---------------------------------------------------------------- names of the server


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
        ({}, False), ({"host": "::1"}, False), ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True), ({"host": ""}, True),
        ({"allowed_hosts": ["rebound.example"]}, True),
    ],
)  # fmt: skip
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
    server = make_server(host=f"unix:{tmp_path}/socket")
    await server.start()
    connector = aiohttp.UnixConnector(str(tmp_path / "socket"))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get("http://any.example/version") as response,
    ):
        assert response.status == 200
    await server.close()


async def test_a_missing_host_is_refused_in_http_1_1_only() -> None:
    async with serve() as (_, url):
        for version, status in ((b"1.0", b"200"), (b"1.1", b"400")):
            reader, writer = await asyncio.open_connection("127.0.0.1", URL(url).port)
            writer.write(b"GET /health HTTP/%s\r\n\r\n" % version)
            assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status
            writer.close()

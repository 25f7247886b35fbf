"""API keys, CORS and request ids, over a socket and without a model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from multidict import CIMultiDictProxy

from aioinfer.api.admin.page import PAGE_PATHS
from tests.test_server import make_server

PAGE = "https://page.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}


@asynccontextmanager
async def client(**settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    server = make_server(**settings)
    async with aiohttp.ClientSession(await server.start()) as http:
        yield http
    await server.close()


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
    file.write_text("# comment\nfrom-file-1\n\n  from-file-2  \n")
    async with client(api_keys=["one", "two"], api_key_file=str(file)) as http:
        for key in ("one", "two", "from-file-1", "from-file-2"):
            assert (await fetch(http, headers=bearer(key)))[0] == 200, key
        assert (await fetch(http, headers={"Authorization": "bearer  one"}))[0] == 200
        for header in (
            "Bearer on",
            "Bearer onee",
            "Bearer ",
            "Bearer",
            "one",
            "Basic one",
            "Bearer # comment",
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
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            None,
            "invalid_api_key",
        )
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
    server = make_server(api_keys=["key"], admin_key="admin")
    async with aiohttp.ClientSession(await server.start()) as http:
        assert server._application is not None
        routes = server._application.app.router.routes()
        paths = {route.resource.canonical for route in routes if route.resource}
        assert open_paths < paths
        for path in paths:
            for method in ("GET", "POST"):
                status, _ = await fetch(http, path.replace("{id}", "x"), method)
                assert (status == 401) == (path not in open_paths), (method, path)
    await server.close()


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
            assert (status, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (
                expected,
                PAGE,
                "Origin",
            )
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

"""`/openapi.json`: that it describes every route, and that the server does what it says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

from aioinfer.api.admin.page import PAGE_PATHS
from aioinfer.api.fields import NO_EFFECT
from aioinfer.api.routes import ROUTES
from tests.test_page import serve
from tests.test_server import make_server

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parent / "schemathesis.toml"
#: Endpoints whose calls let later requests wait: `/page/live` has no end, and after the others no
#: step is planned until a call of another endpoint, or until a trainer has joined.
WITHOUT_END = (
    "/page/live", "/pause", "/sleep", "/start_weight_update", "/init_weight_transfer_engine",
)  # fmt: skip
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_headers_conformance", "response_schema_conformance", "unsupported_method",
    "allow_header_conformance",
)  # fmt: skip


async def document(**settings: Any) -> dict[str, Any]:
    server = make_server(**settings)
    async with (
        aiohttp.ClientSession(await server.start()) as http,
        http.get("/openapi.json") as response,
    ):
        assert response.status == 200
        found: dict[str, Any] = await response.json()
    await server.close()
    return found


async def test_every_endpoint_is_described() -> None:
    found = await document()
    described = {
        (method.upper(), path) for path, methods in found["paths"].items() for method in methods
    }
    assert described == {(r.method, r.path.replace(":.+", "")) for r in ROUTES}
    operations = [operation for m in found["paths"].values() for operation in m.values()]
    assert all(operation["summary"] for operation in operations)
    assert len({operation["operationId"] for operation in operations}) == len(operations)


async def test_every_other_route_is_a_file_of_the_page() -> None:
    server = make_server()
    await server.start()
    assert server._application is not None
    served = {
        (route.method, route.resource.canonical)
        for route in server._application.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    await server.close()
    known = {(r.method, r.path.replace(":.+", "")) for r in ROUTES}
    assert known | {("GET", path or "/") for path in PAGE_PATHS} == served


async def test_bodies_are_those_that_check_the_requests() -> None:
    found = await document(api_keys=["key"])
    body = found["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    schema = found["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    assert schema["required"] == ["prompt"]
    assert {"temperature", "logit_bias", "stop"} <= schema["properties"].keys()
    for fields in found["components"]["schemas"].values():
        if "service_tier" in fields.get("properties", {}):
            why = fields["properties"]["service_tier"]["description"]
            assert why == f"It has no effect: {NO_EFFECT['service_tier']}."
    assert found["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "security" not in found["paths"]["/health"]["get"]
    message = found["components"]["schemas"]["Message"]["properties"]
    assert "assistant" in message["role"]["enum"]  # or random chats are never answered
    # every reference leads somewhere
    names = set(re.findall(r"#/components/schemas/(\w+)", str(found)))
    assert names <= found["components"]["schemas"].keys()


async def test_names_and_replies_that_a_reader_sees() -> None:
    found = await document()
    assert not [name for name in found["components"]["schemas"] if name.startswith("_")]
    reply = found["paths"]["/rerank"]["post"]["responses"]["200"]["content"]["application/json"]
    kinds = [each.get("type", "object") for each in reply["schema"]["anyOf"]]
    assert sorted(kinds) == ["array", "object"]
    # a chat in one piece and its chunks have fields of their own
    schemas = found["components"]["schemas"]
    whole, chunk = (set(schemas[name]["properties"]) for name in ("ChatCompletion", "ChatChunk"))
    assert (whole - chunk, chunk - whole) == ({"prompt_logprobs"}, {"prompt_progress", "timings"})
    choices = [set(schemas[name]["properties"]) for name in ("ChatChoice", "ChatChunkChoice")]
    assert choices[0] ^ choices[1] == {"message", "delta"}


async def test_it_is_a_document_of_openapi_3_1() -> None:
    found = await document()
    assert found["openapi"] == "3.1.0"
    for schema in found["components"]["schemas"].values():
        whole = schema | {"components": found["components"]}
        jsonschema_rs.validator_for(whole)  # raises for what is no JSON schema


@pytest.mark.extended
async def test_the_server_does_what_it_says(tmp_path: Path) -> None:
    """Random requests by schemathesis, for half a minute at most. By hand, for thousands of cases
    and with a model: `scripts/check_requests.py`."""
    settings: dict[str, Any] = {
        "server.files_folder": str(tmp_path), "server.admin_key": "admin",
        "server.api_keys": ["admin"], "server.request_timeout_s": 20.0, "logging.requests": False,
    }  # fmt: skip
    async with serve(**settings) as (_, _, url):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
            *("run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)),
            *("--header", "Authorization: Bearer admin"),
            *(f"--exclude-path={path}" for path in WITHOUT_END),
            # the worker here has no hidden states
            *("--exclude-path-regex", "embed|pooling|classify|score|rerank"),
            *("--phases", "fuzzing", "--max-examples", "4", "--no-shrink"),
            *("--generation-database", "none", "--request-timeout", "25", "--no-color"),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text
    generated = re.search(r"(\d+) generated", text)
    assert generated is not None, text
    assert int(generated[1]) > 25

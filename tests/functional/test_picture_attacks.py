"""Broken and hostile files as pictures: each is answered 400 with its place, or read; none holds
the event loop up or takes much memory, and the server goes on."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.functional.conftest import Served, serve
from tests.hostile_files import Make, at_bounded_cost, nothing_left, params
from tests.hostile_pictures import BROKEN, CASES, LARGEST, NO, PNG, RGB
from tests.vision_models import as_url, save_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

AT = "messages[0].content[{}].image_url"
MAX_PICTURES, PLAIN = 4, as_url(RGB)
#: Of URLs: what they are, and the message.
URLS: dict[str, tuple[str, str]] = {
    "a long type": (PLAIN.replace("image/png", "a/" * 99_999), "and no picture"),
    "parameters": (PLAIN.replace("png", "png;a=b" * 99_999), ""),
    "no type": (PLAIN.replace("image/png", ""), ""),
    "capitals": (PLAIN.replace("data:image", "DATA:IMAGE"), ""),
    "a percent": (PLAIN[:-1] + "%3D", "base64"),
    "URL-safe": (PLAIN[:60] + "-_" + PLAIN[62:], "base64"),
    "a padding within": (PLAIN[:58] + "Q=" + PLAIN[60:], "base64"),
    "percents": ("data:image/png," + "".join(f"%{byte:02x}" for byte in PNG), ""),
    "percents alone": ("data:image/png," + "%" * 10**6, NO),
    "many percents": ("data:," + "%00" * 10**6, NO),
    "a device": ("file:///dev/zero", "allowed_sources"),
    "an address": ("http://169.254.169.254/", "allowed_sources"),
    "a login": ("http://a:b@localhost/", "allowed_sources"),
    "a large file": ("data:," + "A" * 3_200_001, "has more than 3200000 bytes"),
}  # fmt: skip
#: JSON in the place of URLs.
VALUES = {
    "a number": "5", "a URL that is null": '{"url":null}', "a URL of URLs": '{"url":{"url":"a"}}',
    **{f"{depth} deep": '{"url":' * depth + "1" + "}" * depth for depth in (50, 900, 20_000)},
    "a surrogate": r'"\ud800"', "a deep list": "[" * 9999 + "]" * 9999,
}  # fmt: skip


def body(*urls: str, tokens: int = 1) -> bytes:
    """Returns a request with pictures, given JSON for each."""
    parts = ",".join(f'{{"type":"image_url","image_url":{url}}}' for url in urls)
    messages = f'[{{"role":"user","content":[{parts}]}}]'
    return f'{{"messages":{messages},"max_tokens":{tokens},"temperature":0}}'.encode()


def body_of(*files: bytes | Make, tokens: int = 1) -> bytes:
    """Returns a request with files."""
    made = (file if isinstance(file, bytes) else file() for file in files)
    urls = (f'"data:image/png;base64,{base64.b64encode(data).decode()}"' for data in made)
    return body(*urls, tokens=tokens)


async def sent(server: Served, data: bytes) -> tuple[int, Any]:
    """Returns the status and the reply."""
    headers = {"Content-Type": "application/json"}
    path = "/v1/chat/completions"
    async with server.http.post(path, data=io.BytesIO(data), headers=headers) as response:
        return response.status, await response.json()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sighted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    save_model("qwen3_vl", folder)
    settings: dict[str, Any] = {
        "parallel.executor": "inline", "model.path": str(folder), "model.dtype": "float32",
        "model.max_model_len": 2048, "media.max_pictures": MAX_PICTURES,
        "media.max_bytes": 3_200_000, "cache.cpu_memory_gib": 0.05,
    }  # fmt: skip
    async with serve(**settings) as served:
        plain = body_of(PNG, tokens=4)
        before = await sent(served, plain)
        async with nothing_left():
            yield served
        after = await sent(served, plain)
        assert before[0] == after[0] == 200
        assert before[1]["choices"] == after[1]["choices"]


async def check(server: Served, data: bytes, message: str | None, number: int = 0) -> None:
    """Sends a request, which is to be answered, or refused for the picture of a number."""
    status, reply = await at_bounded_cost(lambda: sent(server, data))
    if message is not None:
        assert status == (400 if message else 200), reply
    if status != 200:
        error = reply["error"]
        assert (status, error["param"]) == (400, AT.format(number))
        assert (message or "") in error["message"]


#: Each with the message with which it is refused: see `params`.
FILES = {name: case if isinstance(case, tuple) else (case, None) for name, case in CASES.items()}


@pytest.mark.parametrize("name", params({name: case[1] for name, case in FILES.items()}))
async def test_a_file_is_refused_or_read(name: str, sighted: Served) -> None:
    file, message = FILES[name]
    await check(sighted, await asyncio.to_thread(body_of, file), message)


# these take up to 250 MB, to which a process that has run other tests may add the rest:
# `make test-extended` has a process for them
@pytest.mark.extended
@pytest.mark.parametrize("name", LARGEST)
async def test_one_of_the_largest_is_refused_or_read(name: str, sighted: Served) -> None:
    await check(sighted, await asyncio.to_thread(body_of, LARGEST[name][0]), LARGEST[name][1])


@pytest.mark.parametrize("name", URLS)
async def test_a_url_is_refused_or_read(name: str, sighted: Served) -> None:
    url, message = URLS[name]
    await check(sighted, await asyncio.to_thread(body, json.dumps(url)), message)


@pytest.mark.parametrize("name", VALUES)
async def test_a_value_that_is_no_url(name: str, sighted: Served) -> None:
    status, reply = await at_bounded_cost(lambda: sent(sighted, body(VALUES[name])))
    assert status == 400
    assert reply["error"]["message"]


@pytest.mark.parametrize("count", [MAX_PICTURES, MAX_PICTURES + 1, 500])
async def test_the_last_of_several_is_refused(count: int, sighted: Served) -> None:
    message = BROKEN if count == MAX_PICTURES else "is one too many"
    data = await asyncio.to_thread(body_of, *[PNG] * (count - 1), PNG[:-60])
    await check(sighted, data, message, min(count - 1, MAX_PICTURES))


@pytest.mark.extended  # as the largest
async def test_several_at_a_time(sighted: Served) -> None:
    names = "png: 260000 chunks", "gif: 500000 comments", "jpeg: CMYK", "png: a ribbon"
    cases = [case[0] for name in names if isinstance(case := CASES[name], tuple)]
    bodies = [await asyncio.to_thread(body_of, case) for case in cases]
    replies = await at_bounded_cost(
        lambda: asyncio.gather(*(sent(sighted, each) for each in bodies))
    )
    assert {status for status, _ in replies} == {200, 400}

"""Pictures that clients send: where their bytes may come from, and files of all kinds, broken and
hostile ones among them."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from aioinfer.config import MediaConfig
from aioinfer.errors import FieldError
from aioinfer.media.picture import decode_picture
from aioinfer.media.source import MediaReader, MediaSource, is_public
from tests.hostile_pictures import png
from tests.vision_models import as_file, picture
from tests.watching import memory_watched

CONFIG = MediaConfig(max_bytes=2**20)
RGB = picture(64, 48, 1)
PNG, JPEG = as_file(RGB), as_file(RGB, "JPEG")


def read(url: str, config: MediaConfig = CONFIG, *, is_base64: bool = False) -> bytes:
    source = MediaSource("messages[0].content[1].image_url", url, is_base64)
    return asyncio.run(MediaReader(config).read(source))


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def decode(data: bytes, config: MediaConfig = CONFIG) -> Image.Image:
    return decode_picture(data, config, "place")


# -------------------------------------------------------------------- sources


@pytest.mark.parametrize("kind", ["image/png", "IMAGE/PNG", "", "application/octet-stream"])
def test_a_data_url(kind: str) -> None:
    assert read(data_url(PNG, kind)) == PNG


def test_a_data_url_without_base64_and_base64_without_a_url() -> None:
    assert read("data:image/bmp,%00%01a") == b"\0\1a"
    assert read(base64.b64encode(PNG).decode(), is_base64=True) == PNG
    data = (PNG * 2**14)[:600_000]  # of several pieces
    lines = base64.encodebytes(data).decode()
    for text in (lines, lines.replace("\n", "\r\n")):
        assert read(text, is_base64=True) == data


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (data_url(b"<svg/>", "image/svg+xml"), "is of the type 'image/svg\\+xml', and no picture"),
        (data_url(b"x", "text/html"), "and no picture"),
        ("data:image/png;base64,@@@@", "is not valid base64"),
        ("data:image/png;base64,YW==\nYWJj", "is not valid base64"),
        ("data:image/png;base64,YWJ", "is not valid base64"),
        ("data:image/png;base64,é", "is not valid base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64", "without a comma"),
        ("data:,", "is empty"),
        (data_url(bytes(2**20 + 1)), "has more than 1048576 bytes"),
        ("data:image/png," + "a" * (2**20 + 1), "has more than 1048576 bytes"),
        ("data:image/png," + "a" * (3 * 2**20 + 1), "has more than 1048576 bytes"),
        ("file:///etc/passwd", "media.allowed_sources has no folder"),
        ("http://example.com/a.png", "media.allowed_sources"),
        ("http://127.0.0.1/a.png", "media.allowed_sources"),
        ("https://[::1", "valid URL"),
        ("ftp://example.com/a.png", "must be a data URL"),
        ("javascript:alert(1)", "must be a data URL"),
        ("", "must be a data URL"),
        ("/etc/passwd", "must be a data URL"),
    ],
)
def test_a_source_that_is_refused(url: str, message: str) -> None:
    with pytest.raises(FieldError, match=message) as caught:
        read(url)
    assert caught.value.param == "messages[0].content[1].image_url"


def test_base64_that_is_wrong() -> None:
    for text in ("data:image/png;base64,YWJj", "not base64!", "A" * 2_000_000):
        with pytest.raises(FieldError):
            read(text, is_base64=True)


def test_files_below_the_allowed_folder_alone(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside.png"
    (allowed / "below").mkdir(parents=True)
    (allowed / "below" / "a b.png").write_bytes(PNG)
    outside.write_bytes(PNG)
    (allowed / "link.png").symlink_to(outside)
    (allowed / "large.png").write_bytes(bytes(2**20 + 1))
    os.mkfifo(allowed / "pipe.png")
    config = MediaConfig(max_bytes=2**20, allowed_sources=[str(allowed)])
    assert read(f"file://{allowed}/below/a%20b.png", config) == PNG
    assert read(f"file://localhost{allowed}/below/a%20b.png", config) == PNG
    for path in (
        outside, f"{allowed}/../outside.png", f"{allowed}/%2e%2e/outside.png", "/etc/passwd",
        f"{allowed}/link.png", f"{allowed}/missing.png", allowed, f"{allowed}/pipe.png",
        f"{allowed}/a%00.png", f"{allowed}2/a.png",
    ):  # fmt: skip
        with pytest.raises(FieldError, match="is no file below a folder"):
            read(f"file://{path}", config)
    with pytest.raises(FieldError, match="is no file below a folder"):
        read(f"file://elsewhere{allowed}/below/a%20b.png", config)
    with pytest.raises(FieldError, match="has more than"):
        read(f"file://{allowed}/large.png", config)


@asynccontextmanager
async def host() -> AsyncIterator[int]:
    """A host with a picture, and with other answers."""

    async def stall(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await asyncio.sleep(30)
        return response

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(bytes(65536))

    async def found(request: web.Request) -> web.Response:
        return web.Response(body=PNG)

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound("/a.png")

    app = web.Application()
    for path, handler in (
        ("/a.png", found), ("/stall", stall), ("/endless", endless), ("/moved", moved)
    ):  # fmt: skip
        app.router.add_get(path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def test_pictures_from_allowed_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.media.source.FETCH_TIMEOUT_S", 1.0)
    config = MediaConfig(max_bytes=2**20, allowed_sources=["LocalHost."])

    async def run() -> None:
        async with host() as port:
            reader = MediaReader(config, lambda address: address == "127.0.0.1")
            url = f"http://localhost:{port}"
            assert await reader.read(MediaSource("x", f"{url}/a.png")) == PNG
            for path, message in (
                ("/missing", "status 404"), ("/moved", "status 302"), ("/endless", "has more than"),
                ("/stall", "within 1 s"),
            ):  # fmt: skip
                with pytest.raises(FieldError, match=message):
                    await reader.read(MediaSource("x", url + path))
            for other in (
                f"http://127.0.0.1:{port}/a.png", f"http://a@localhost:{port}/a.png",
                f"http://localhost.evil:{port}/a.png", f"http://evil@localhost:{port}/a.png",
            ):  # fmt: skip
                with pytest.raises(FieldError, match="allowed_sources"):
                    await reader.read(MediaSource("x", other))
            with pytest.raises(FieldError, match="could not be fetched"):  # a private address
                await MediaReader(config).read(MediaSource("x", f"{url}/a.png"))

    asyncio.run(run())


def test_public_addresses() -> None:
    assert all(map(is_public, ("93.184.216.34", "2606:2800:220:1::1")))
    private = (
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0",
        "100.64.0.1", "::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "224.0.0.1", "name",
    )  # fmt: skip
    assert not any(map(is_public, private))


# -------------------------------------------------------------------- files


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_changed_bytes_never_raise_anything_else(format: str) -> None:
    source = np.random.default_rng(5)
    whole = as_file(picture(40, 30, 2), format)
    for _ in range(60):
        data = bytearray(whole)
        for place in source.integers(0, len(data), 4):
            data[place] = source.integers(0, 256)
        with suppress(FieldError):
            assert decode(bytes(data)).mode == "RGB"


def same(image: Image.Image, expected: Image.Image, within: int = 0) -> bool:
    pair = [np.asarray(each.convert("RGB"), np.int32) for each in (image, expected)]
    return pair[0].shape == pair[1].shape and int(np.abs(pair[0] - pair[1]).max()) <= within


def test_modes_of_pictures() -> None:
    assert same(decode(PNG), RGB)
    assert same(decode(as_file(RGB, "WEBP", lossless=True)), RGB)
    assert same(decode(as_file(RGB, "BMP")), RGB)
    grey = RGB.convert("L")
    assert same(decode(as_file(grey)), grey)
    assert same(decode(as_file(RGB.convert("1"))), RGB.convert("1"))
    assert same(decode(as_file(grey.convert("LA"))), grey)
    clear = RGB.copy()
    clear.putalpha(7)
    assert same(decode(as_file(clear)), RGB)  # the colour counts, as in transformers
    palette = RGB.quantize(16)
    assert same(decode(as_file(palette)), palette)
    assert same(decode(as_file(palette, "GIF")), palette)
    assert same(decode(as_file(palette, transparency=b"\0\5\7")), palette)
    assert same(decode(as_file(RGB.convert("CMYK"), "JPEG", quality=100)), RGB, within=16)
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert deep.mode.startswith("I")
    assert same(decode(as_file(deep)), grey)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_turned_picture_is_turned_back(format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a right angle
    options: dict[str, Any] = {"JPEG": {"quality": 100}, "WEBP": {"lossless": True}}.get(format, {})
    found = decode(as_file(RGB, format, exif=exif, **options))
    assert same(found, RGB.transpose(Image.Transpose.ROTATE_270), within=40 if options else 0)


def test_a_bomb_takes_neither_memory_nor_time() -> None:
    buffer = io.BytesIO()
    Image.new("1", (12_000, 12_000)).save(buffer, "PNG")
    bombs = [buffer.getvalue(), png(65_000, 65_000, pixels=bytes(16 * 2**20))]
    assert all(len(bomb) < 2**18 for bomb in bombs)
    with memory_watched() as memory:
        began = time.thread_time()
        for bomb in bombs:
            with pytest.raises(FieldError, match="pixels"):
                decode(bomb, MediaConfig())
        took = time.thread_time() - began
    assert took < 0.2
    assert memory.most < 50 * 2**20


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_allowed_address_that_is_not_public_is_not_connected_to(host: str) -> None:
    async def fetch() -> int:
        connections = 0

        async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            writer.close()

        server = await asyncio.start_server(count, host.strip("[]"), 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            reader = MediaReader(MediaConfig(allowed_sources=[host.strip("[]")]))
            with pytest.raises(FieldError, match="could not be fetched"):
                await reader.read(MediaSource("url", f"http://{host}:{port}/a.png"))
        return connections

    assert asyncio.run(fetch()) == 0

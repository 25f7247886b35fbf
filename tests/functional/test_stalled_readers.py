"""Readers that stop reading cost bounded memory and delay nobody; when they read on, nothing of
their text is missing.

The worker computes nothing, so that streams outrun what the system buffers; a long model name makes
every event 2 KB.
"""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
import uvloop
from yarl import URL

from aioinfer.api.server import HttpServer
from bench_loop import make_frontend

FAST, STALLED, TOKENS = 200, 50, 500
NAME = "m" * 2000
#: Bytes that the server holds for a connection at most: the handler's writes wait above 64 KiB.
MAX_WAITING = 128 * 1024


async def connect(url: str, *, stalls: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request.

    One that stalls has a small window, and a reader that takes no more than the test reads.
    """
    plain = socket.socket()
    plain.setblocking(False)
    if stalls:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(plain, ("127.0.0.1", URL(url).port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=4096 if stalls else 2**20)
    body = json.dumps(
        {
            "prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }
    ).encode()  # fmt: skip
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    return reader, writer


async def read_all(reader: asyncio.StreamReader) -> tuple[str, int]:
    """Returns the text of a stream and the number of its events."""
    data = bytearray()
    while part := await reader.read(65536):
        data += part
    assert data.startswith(b"HTTP/1.1 200")
    events = [line for line in bytes(data).split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]"
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices), len(choices)


async def serve() -> None:
    frontend = await make_frontend(FAST + STALLED, 0.02, {"server.served_model_names": [NAME]})
    server = HttpServer(frontend.config, frontend)
    url = await server.start()
    assert server._listener is not None
    # connections take after it; the system would buffer megabytes
    for listening in server._listener._sockets:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    stalled = [await connect(url, stalls=True) for _ in range(STALLED)]
    await asyncio.sleep(0)
    fast = [await connect(url, stalls=False) for _ in range(FAST)]
    texts = await asyncio.wait_for(asyncio.gather(*(read_all(reader) for reader, _ in fast)), 60)
    assert all(events >= 0.95 * TOKENS for _, events in texts)
    assert len({text for text, _ in texts}) > 1  # each slot has a text of its own
    # the stalled ones were computed to their ends as well
    assert frontend.engines[0].scheduler.is_idle
    assert server._connections is not None
    waiting = [
        handler.transport.get_write_buffer_size()
        for handler in server._connections.connections
        if handler.transport is not None
    ]
    assert len(waiting) >= STALLED
    assert 0 < max(waiting) < MAX_WAITING < TOKENS * len(NAME)
    late = await asyncio.wait_for(asyncio.gather(*(read_all(reader) for reader, _ in stalled)), 60)
    lengths = {len(frontend.tokenizer.encode(text, False)) for text, _ in late}
    assert min(lengths) > 0.9 * TOKENS
    # what they did not fetch merged
    assert all(len(text) > 0 and events < TOKENS for text, events in late)
    for _, writer in (*fast, *stalled):
        writer.close()
    await server.close()
    await frontend.close()


@pytest.mark.timeout(150)
def test_fast_readers_beside_stalled_ones() -> None:
    uvloop.run(serve())

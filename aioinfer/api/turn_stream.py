"""How a turn reaches clients of other APIs than OpenAI's chat: as blocks, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from aioinfer.api.blocks import BlockKind, Blocks
from aioinfer.api.delivery import ChoiceEvents, DirectSink
from aioinfer.api.sse import STREAM_HEADERS
from aioinfer.engine.chat_turn import SHORT_TEXT, Turn, make_parser
from aioinfer.text.message_parser import MessageParser

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta, RequestOutput


def named_event(fields: Mapping[str, Any]) -> bytes:
    """Returns an event whose name is its `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(fields["type"]).encode(), orjson.dumps(fields))


class BlockEvents(ChoiceEvents):
    """The events of a message in blocks. Subclasses write them.

    Attributes:
        content_type: of the stream.
        blocks: of the message.
        num_tokens: tokens that have come.
    """

    returns_token_ids = False
    content_type = STREAM_HEADERS["Content-Type"]

    def __init__(self, parser: MessageParser, new_id: Callable[[BlockKind], str]):
        self.blocks = Blocks(new_id)
        self.num_tokens = 0
        self._parser = parser
        self._is_open = False

    def opening(self) -> bytes:
        """Returns the events before the first block."""
        raise NotImplementedError

    def change(self, kind: str, block: Any, text: str) -> bytes:
        """Returns the events of a `BlockChange`."""
        raise NotImplementedError

    def closing(self, reason: str, stop_reason: int | str | None) -> bytes:
        """Returns the events behind the last block."""
        raise NotImplementedError

    def failure(self, error: Exception) -> bytes:
        """Returns the events that end a stream in which something failed."""
        raise NotImplementedError

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceEvents.events`."""
        self.num_tokens += len(delta.token_ids)
        return self._events(delta.text, delta.finish_reason, delta.stop_reason)

    def token_frame(self, text: str, reason: str | None, stop_reason: int | str | None) -> bytes:
        """See `ChoiceEvents.token_frame`; nothing, where the token has no event."""
        self.num_tokens += 1
        data = self._events(text, reason, stop_reason)
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""

    def _events(self, text: str, reason: str | None, stop_reason: int | str | None) -> bytes:
        parts = []
        if not self._is_open:
            self._is_open = True
            parts.append(self.opening())
        parts += [self.change(*change) for change in self.blocks.take(self._parser.feed(text))]
        if reason is not None:
            parts += [self.change(*change) for change in self.blocks.take(self._parser.flush())]
            parts += [self.change(*change) for change in self.blocks.end()]
            parts.append(self.closing(reason, stop_reason))
        return b"".join(parts)


async def stream_blocks(
    request: web.Request,
    output: RequestOutput,
    events: BlockEvents,
) -> web.StreamResponse:
    """Sends the events of an output's only choice, the later ones from the step loop
    (`DirectSink`)."""
    response = web.StreamResponse(headers=STREAM_HEADERS | {"Content-Type": events.content_type})
    await response.prepare(request)
    sink: DirectSink | None = None
    try:
        async for delta in output:
            if sink is not None:
                sink.handler_writes = True
            await response.write(events.events(delta))
            if sink is not None:
                sink.handler_writes = False
            elif (
                response.headers.get("Transfer-Encoding") == "chunked"
                and request.transport is not None
            ):
                sink = DirectSink(request.transport, [events])
                output.attach(sink)
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:
        await response.write(events.failure(error))
    return response


async def read_blocks(
    frontend: Frontend, turn: Turn, delta: Delta, new_id: Callable[[BlockKind], str]
) -> Blocks:
    """Returns the blocks of a message whose text is complete."""
    parser, blocks = make_parser(frontend, turn), Blocks(new_id)

    def parse() -> None:
        for part in (parser.feed(delta.text), parser.flush()):
            for _ in blocks.take(part):
                pass

    if len(delta.text) <= SHORT_TEXT:
        parse()
    else:
        await asyncio.to_thread(parse)
    return blocks

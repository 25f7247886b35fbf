"""Delivery of a turn to clients of APIs other than OpenAI's chat: as blocks, streamed or whole."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from aioinfer.api.blocks import BlockKind, Blocks
from aioinfer.api.delivery import ChoiceEvents, DirectSink
from aioinfer.api.event_stream import EventStream
from aioinfer.api.logprobs import are_many, formatted, logprob_entry
from aioinfer.api.sse import STREAM_HEADERS
from aioinfer.engine.chat_turn import SHORT_TEXT, Turn, make_parser
from aioinfer.text.message_parser import MessageParser

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import Delta, RequestOutput
    from aioinfer.features.logprobs.planning import TokenLogprob
    from aioinfer.text.tokenizer import Tokenizer


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

    def __init__(
        self,
        parser: MessageParser,
        new_id: Callable[[BlockKind], str],
        tokenizer: Tokenizer | None = None,
    ):
        """`tokenizer` gives the texts of tokens with log-probabilities."""
        self.blocks = Blocks(new_id)
        self._tokenizer = tokenizer
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
        end = delta.finish_reason, delta.stop_reason
        if not delta.logprobs:
            return self._events(delta.text, *end)
        last = len(delta.logprobs) - 1
        return b"".join(
            self._events(token.text, *(end if index == last else (None, None)), token)
            for index, token in enumerate(delta.logprobs)
        )

    def token_frame(self, text: str, reason: str | None, stop_reason: int | str | None) -> bytes:
        """See `ChoiceEvents.token_frame`; nothing, where the token has no event."""
        self.num_tokens += 1
        data = self._events(text, reason, stop_reason)
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""

    def _events(
        self,
        text: str,
        reason: str | None,
        stop_reason: int | str | None,
        token: TokenLogprob | None = None,
    ) -> bytes:
        parts = []
        if not self._is_open:
            self._is_open = True
            parts.append(self.opening())
        logprob = None if token is None else logprob_entry(self._tokenizer, token)
        changes = self.blocks.take(self._parser.feed(text), logprob)
        parts += [self.change(*change) for change in changes]
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
    response = EventStream(request, [output], events.content_type)
    await response.prepare(request)
    sink: DirectSink | None = None
    try:
        async for delta in output:
            if sink is not None:
                sink.handler_writes = True
            made = await formatted(delta.logprobs or (), partial(events.events, delta))
            await response.write_delta(delta, made)
            if sink is not None:
                sink.handler_writes = False
            elif (
                response.headers.get("Transfer-Encoding") == "chunked"
                and request.transport is not None
            ):
                sink = DirectSink(request.transport, [events], is_marked=response.is_marked)
                output.attach(sink)
    except ConnectionError:  # the client is gone
        raise
    except Exception as error:
        await response.write_failure(error, events.failure(error))
    return response


async def read_blocks(
    frontend: Frontend, turn: Turn, delta: Delta, new_id: Callable[[BlockKind], str]
) -> Blocks:
    """Returns the blocks of a message whose text is complete."""
    parser, blocks = make_parser(frontend, turn), Blocks(new_id)
    tokens = delta.logprobs or ()

    def parse() -> None:
        parts: Iterable[tuple[str, dict[str, Any] | None]] = [(delta.text, None)]
        if tokens:
            parts = ((token.text, logprob_entry(frontend.tokenizer, token)) for token in tokens)
        for text, logprob in parts:
            deque(blocks.take(parser.feed(text), logprob), maxlen=0)
        deque(blocks.take(parser.flush()), maxlen=0)

    if len(delta.text) <= SHORT_TEXT and not are_many(tokens):
        parse()
    else:
        await asyncio.to_thread(parse)
    return blocks

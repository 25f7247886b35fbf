"""Stream events of a chat choice whose text is parsed: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from aioinfer.api.delivery import ChoiceEvents, LogprobsFormat
from aioinfer.api.sse import Envelope, role_event
from aioinfer.text.message_parser import MessageDelta, MessageParser

if TYPE_CHECKING:
    from aioinfer.engine.output import Delta


def finish_reason(reason: str, num_calls: int) -> str:
    """Returns OpenAI's reason for the end of a message."""
    return "tool_calls" if num_calls and reason == "stop" else reason


class MessageEvents(ChoiceEvents):
    """The events of one choice, whose text goes through a parser. A token whose text is held back
    has no event."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        parser: MessageParser,
        new_id: Callable[[], str],
        format_logprobs: LogprobsFormat,
        *,
        opening: bytes | None = None,
        returns_token_ids: bool = False,
    ):
        """Makes the events of choice `index`; `new_id` makes the id of a call."""
        self.returns_token_ids = returns_token_ids
        self._head = envelope.head() + b'{"index":%d,"delta":' % index
        self._tail = b"}" + envelope.tail()
        self._opening = opening if opening is not None else role_event(envelope, index)
        self._parser = parser
        self._new_id = new_id
        self._format_logprobs = format_logprobs
        self._echoed = None

    def events(self, delta: Delta) -> bytes:
        """See `ChoiceEvents.events`."""
        extra: dict[str, Any] = {}
        if delta.logprobs:
            extra["logprobs"] = self._format_logprobs(delta.logprobs, 0)
        if self.returns_token_ids:
            extra["token_ids"] = delta.token_ids
        return self._events(delta.text, delta.finish_reason, delta.stop_reason, extra)

    def token_frame(self, text: str, reason: str | None, stop_reason: int | str | None) -> bytes:
        """See `ChoiceEvents.token_frame`; nothing, where the token has no event."""
        data = self._events(text, reason, stop_reason, {})
        # a frame without data would end the body
        return b"%x\r\n%b\r\n" % (len(data), data) if data else b""

    def _events(
        self, text: str, reason: str | None, stop_reason: int | str | None, extra: dict[str, Any]
    ) -> bytes:
        data, self._opening = self._opening, b""
        delta = self._parser.feed(text)
        if delta or extra:
            data += self._chunk(delta, extra)
        if reason is None:
            return data
        if last := self._parser.flush():
            data += self._chunk(last, {})
        end = {
            "logprobs": None,
            "finish_reason": finish_reason(reason, self._parser.num_calls),
            "stop_reason": stop_reason,
        }
        return data + self._head + b"{}," + orjson.dumps(end)[1:-1] + self._tail

    def _chunk(self, delta: MessageDelta, extra: dict[str, Any]) -> bytes:
        fields = {"logprobs": None} | extra | {"finish_reason": None}
        return b"".join(
            (
                self._head,
                orjson.dumps(self._delta(delta)),
                b",",
                orjson.dumps(fields)[1:-1],
                self._tail,
            )
        )

    def _delta(self, delta: MessageDelta) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        if delta.reasoning:
            parts["reasoning_content"] = parts["reasoning"] = delta.reasoning
        if delta.content:
            parts["content"] = delta.content
        if delta.calls:
            parts["tool_calls"] = [
                {"index": call.index, "function": {"arguments": call.arguments}}
                if call.name is None
                else {
                    "index": call.index,
                    "id": self._new_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in delta.calls
            ]
        return parts

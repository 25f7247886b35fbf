"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API.

Errors come in Anthropic's shape from `errors`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import orjson
from aiohttp import web
from msgspec import Struct

from aioinfer.api.anthropic.body import CountTokensRequest, MessagesRequest
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import answer
from aioinfer.api.errors import AnthropicError, describe, json_response
from aioinfer.api.generation import error_event, named_event
from aioinfer.api.message_events import Block, BlockKind, MessageDialect
from aioinfer.engine.chat_turn import call_input, encode_turn, new_call_id
from aioinfer.text.message_parser import ToolUse

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend


_TEXT_EVENT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
    b'"delta":{"type":"text_delta","text":%b}}\n\n'
)


class MessageUsage(Struct, kw_only=True):
    """Tokens of a message. Cached tokens are not among the input's."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageReply(Struct, kw_only=True):
    """The reply of `/v1/messages`. A stream has events that change it."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct, kw_only=True):
    """The number of tokens of a conversation."""

    input_tokens: int


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    return await answer(request, AnthropicDialect)


async def count_tokens(request: web.Request) -> web.Response:
    """Returns the number of tokens of a conversation."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, CountTokensRequest)
    (prompt,) = await AnthropicDialect.encode(frontend, body, body.tool_use())
    return json_response(TokenCount(input_tokens=len(prompt)))


class AnthropicDialect(MessageDialect[MessagesRequest]):
    """Anthropic's words."""

    body_type = MessagesRequest
    id_prefix = "msg_"

    @property
    def field_names(self) -> Mapping[str, str]:
        """See `Dialect.field_names`."""
        return {"stop": "stop_sequences"}

    @property
    def thought_budget(self) -> int | None:
        """See `Dialect.thought_budget`: clients must name one, also where reasoning has none."""
        thinking = self.body.thinking
        bounds = thinking is not None and self.frontend.message_format.bounds_thoughts
        return thinking.budget_tokens if thinking is not None and bounds else None

    @classmethod
    async def encode(
        cls, frontend: Frontend, body: CountTokensRequest, use: ToolUse
    ) -> list[list[int]]:
        """See `Dialect.encode`."""
        messages = list(body.conversation())
        continues = messages[-1]["role"] == "assistant"  # a text that the answer goes on with
        prompt = await encode_turn(
            frontend,
            messages,
            use,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            template_kwargs=body.template_kwargs(),
        )
        return [prompt]

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`."""
        return new_call_id(self.frontend, "toolu_") if kind == "call" else secrets.token_hex(8)

    def opening(self) -> bytes:
        """See `MessageDialect.opening`."""
        start = {"type": "message_start", "message": self._message([], 1)}
        return named_event(start) + named_event({"type": "ping"})

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        if kind == "delta" and block.kind == "text":  # most tokens
            return _TEXT_EVENT % (block.index, orjson.dumps(text))
        event: dict[str, Any] = {"type": f"content_block_{kind}", "index": block.index}
        if kind == "start":
            event["content_block"] = _content(block)
        elif kind == "delta":
            event["delta"] = {
                "reasoning": {"type": "thinking_delta", "thinking": text},
                "call": {"type": "input_json_delta", "partial_json": text},
            }[block.kind]
        return named_event(event)

    def closing(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        ended, sequence = self._stop(reason, stop_reason)
        end = {
            "type": "message_delta",
            "delta": {"stop_reason": ended, "stop_sequence": sequence},
            "usage": self._usage(num_tokens),
        }
        return named_event(end) + named_event({"type": "message_stop"})

    def failure(self, error: Exception) -> bytes:
        """See `Dialect.failure`."""
        return b"event: error\n" + error_event(AnthropicError.of(*describe(error)))

    def message(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> MessageReply:
        """See `MessageDialect.message`."""
        reply = self._message([_content(block) for block in self.blocks.all], num_tokens)
        reply.stop_reason, reply.stop_sequence = self._stop(reason, stop_reason)
        return reply

    def _message(self, content: list[dict[str, Any]], num_tokens: int) -> MessageReply:
        return MessageReply(
            id=self.id,
            model=self.frontend.config.served_model_names[0],
            content=content,
            usage=self._usage(num_tokens),
        )

    def _usage(self, num_tokens: int) -> MessageUsage:
        cached = self.output.num_cached_tokens
        return MessageUsage(
            input_tokens=len(self.output.prompt_token_ids) - cached,
            cache_read_input_tokens=cached,
            output_tokens=num_tokens,
        )

    def _stop(self, reason: str, stop_reason: int | str | None) -> tuple[str, str | None]:
        """Returns why a message has ended, in Anthropic's words, and its stop sequence."""
        if isinstance(stop_reason, str):
            return "stop_sequence", stop_reason
        if reason == "length":
            return "max_tokens", None
        called = any(block.kind == "call" for block in self.blocks.all)
        return "tool_use" if called else "end_turn", None


def _content(block: Block) -> dict[str, Any]:
    """Returns a block as Anthropic's clients expect it: with the text that it has so far."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": call_input(block.text)}

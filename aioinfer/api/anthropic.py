"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's Messages API.

Errors come in Anthropic's shape from `errors`.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from aiohttp import web

from aioinfer.api.access import request_id
from aioinfer.api.admission import admit
from aioinfer.api.anthropic_body import CountTokensRequest, MessagesRequest
from aioinfer.api.blocks import Block, BlockKind
from aioinfer.api.context import FRONTEND, read_body
from aioinfer.api.delivery import collect, submitted
from aioinfer.api.errors import anthropic_error, describe, json_response, renamed
from aioinfer.api.turn_stream import BlockEvents, named_event, read_blocks, stream_blocks
from aioinfer.engine.chat_turn import call_input, encode_turn, make_parser, make_turn, new_call_id

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput
    from aioinfer.text.message_parser import MessageParser


async def create_message(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, MessagesRequest)
    admit(request, body.timeout_s)
    prompt = await encode_body(frontend, body)
    with renamed({"stop": "stop_sequences"}):
        turn = await make_turn(
            frontend,
            prompt,
            body.sampling_fields(),
            body.tool_use(),
            shows_thoughts=body.shows_thoughts,
            # for clients that must name a budget: elsewhere reasoning has none
            thought_budget=body.thought_budget if frontend.message_format.bounds_thoughts else None,
        )
    name = f"msg_{request_id(request)}"
    async with submitted(
        request, [prompt], turn.params, name=name, priority=body.priority
    ) as outputs:
        new_id = _id_maker(frontend)
        head = _Head(name, frontend.config.served_model_names[0], outputs[0])
        if body.stream:
            events = _MessageEvents(head, make_parser(frontend, turn), new_id)
            return await stream_blocks(request, outputs[0], events)
        (delta,) = (await collect(outputs)).choices
    blocks = (await read_blocks(frontend, turn, delta, new_id)).all
    reply = head.message([_content(block) for block in blocks], len(delta.token_ids))
    reply |= _stop(delta.finish_reason or "stop", delta.stop_reason, blocks)
    return json_response(reply)


async def count_tokens(request: web.Request) -> web.Response:
    """Returns the number of tokens of a conversation."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, CountTokensRequest)
    return json_response({"input_tokens": len(await encode_body(frontend, body))})


async def encode_body(frontend: Frontend, body: CountTokensRequest) -> list[int]:
    """Returns the prompt of a body. Raises `RequestError`."""
    messages = list(body.conversation())
    continues = messages[-1]["role"] == "assistant"  # a text that the answer goes on with
    return await encode_turn(
        frontend,
        messages,
        body.tool_use(),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_kwargs=body.template_kwargs(),
    )


def _id_maker(frontend: Frontend) -> Any:
    def new_id(kind: BlockKind) -> str:
        return new_call_id(frontend, "toolu_") if kind == "call" else secrets.token_hex(8)

    return new_id


class _Head:
    """The fields that the parts of a reply have in common."""

    def __init__(self, name: str, model: str, output: RequestOutput):
        self._name, self._model, self._output = name, model, output

    def message(self, content: list[Any], output_tokens: int) -> dict[str, Any]:
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(output_tokens),
        }

    def usage(self, output_tokens: int) -> dict[str, int]:
        """Returns Anthropic's usage: cached tokens are not among the input's."""
        cached = self._output.num_cached_tokens
        return {
            "input_tokens": len(self._output.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }


class _MessageEvents(BlockEvents):
    """Anthropic's events."""

    def __init__(self, head: _Head, parser: MessageParser, new_id: Any):
        super().__init__(parser, new_id)
        self._head = head

    def opening(self) -> bytes:
        start = {"type": "message_start", "message": self._head.message([], 1)}
        return named_event(start) + named_event({"type": "ping"})

    def change(self, kind: str, block: Block, text: str) -> bytes:
        event: dict[str, Any] = {"type": f"content_block_{kind}", "index": block.index}
        if kind == "start":
            event["content_block"] = _content(block)
        elif kind == "delta":
            event["delta"] = {
                "reasoning": {"type": "thinking_delta", "thinking": text},
                "text": {"type": "text_delta", "text": text},
                "call": {"type": "input_json_delta", "partial_json": text},
            }[block.kind]
        return named_event(event)

    def closing(self, reason: str, stop_reason: int | str | None) -> bytes:
        end = {
            "type": "message_delta",
            "delta": _stop(reason, stop_reason, self.blocks.all),
            "usage": self._head.usage(self.num_tokens),
        }
        return named_event(end) + named_event({"type": "message_stop"})

    def failure(self, error: Exception) -> bytes:
        return named_event(anthropic_error(*describe(error)))


def _content(block: Block) -> dict[str, Any]:
    """Returns a block as Anthropic's clients expect it: with the text that it has so far."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": call_input(block.text)}


def _stop(reason: str, stop_reason: int | str | None, blocks: list[Block]) -> dict[str, Any]:
    """Returns why a message has ended, in Anthropic's words."""
    if isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    if reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    called = any(block.kind == "call" for block in blocks)
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}

"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/show` and `/api/version`, as desktop clients
know them from Ollama. Streams are lines of JSON; replies are streamed unless `stream` is false.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from aioinfer import __version__
from aioinfer.api.access import request_id
from aioinfer.api.admission import admit
from aioinfer.api.blocks import Block
from aioinfer.api.context import FRONTEND, STARTED, read_body
from aioinfer.api.delivery import collect, submitted
from aioinfer.api.errors import describe, json_response
from aioinfer.api.ollama_body import OllamaBody, OllamaChat, OllamaGenerate, ShowRequest
from aioinfer.api.turn_stream import BlockEvents, stream_blocks
from aioinfer.engine.chat_turn import (
    Turn,
    call_input,
    encode_turn,
    make_parser,
    make_turn,
    new_call_id,
)
from aioinfer.engine.tools import NO_TOOLS

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput
    from aioinfer.text.message_parser import MessageParser


async def chat(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, OllamaChat)
    admit(request, body.timeout_s)
    use = body.tool_use()
    prompt = await encode_turn(
        frontend, body.conversation(), use, body.tools, template_kwargs=body.template_kwargs()
    )
    turn = await make_turn(frontend, prompt, body.sampling_fields(), use)
    return await _answer(request, frontend, body, turn, _ChatEvents)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answers a prompt as a conversation of one message, or completes it if it is `raw`."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("prompt")
    body = await read_body(request, OllamaGenerate)
    admit(request, body.timeout_s)
    if not body.prompt:  # how clients have a model loaded
        head = _head(frontend) | {"response": "", "done": True, "done_reason": "load"}
        return json_response(head)
    fields = body.sampling_fields()
    if body.raw:
        prompt = await frontend.encode(body.prompt)
        turn = Turn(prompt, frontend.defaults.sampling_params(**fields), NO_TOOLS, parses=False)
    else:
        prompt = await encode_turn(
            frontend, body.conversation(), NO_TOOLS, template_kwargs=body.template_kwargs()
        )
        turn = await make_turn(frontend, prompt, fields)
    return await _answer(request, frontend, body, turn, _GenerateEvents)


async def list_tags(request: web.Request) -> web.Response:
    """Lists the model."""
    frontend, started = request.app[FRONTEND], request.app[STARTED]
    names = frontend.config.served_model_names
    modified = datetime.fromtimestamp(started, UTC).isoformat()
    models = [
        {"name": name, "model": name, "modified_at": modified, "size": 0, "digest": "",
         "details": _DETAILS}
        for name in names
    ]  # fmt: skip
    return json_response({"models": models})


async def show(request: web.Request) -> web.Response:
    """Describes the model as far as clients look at it."""
    frontend = request.app[FRONTEND]
    await read_body(request, ShowRequest)
    tokenizer = frontend.tokenizer
    reply = {
        "modelfile": "",
        "parameters": "",
        "template": tokenizer.chat_template_text if tokenizer is not None else "",
        "details": _DETAILS,
        "model_info": {
            "general.architecture": "aioinfer",
            "aioinfer.context_length": frontend.max_model_len,
        },
        "capabilities": ["completion", "tools"],
    }
    return json_response(reply)


async def version(request: web.Request) -> web.Response:
    """Returns the server's version."""
    return json_response({"version": __version__})


_DETAILS: Mapping[str, Any] = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}


async def _answer(
    request: web.Request,
    frontend: Frontend,
    body: OllamaBody,
    turn: Turn,
    kind: type[_LineEvents],
) -> web.StreamResponse:
    name = f"ollama-{request_id(request)}"
    async with submitted(request, [turn.prompt], turn.params, name=name, priority=None) as outputs:
        events = kind(frontend, make_parser(frontend, turn), outputs[0])
        if body.stream is not False:
            return await stream_blocks(request, outputs[0], events)
        (delta,) = (await collect(outputs)).choices
    return json_response(events.whole(events.events(delta)))


def _head(frontend: Frontend) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": frontend.config.served_model_names[0], "created_at": now}


class _LineEvents(BlockEvents):
    """Lines of JSON. A call is one line: its arguments are an object."""

    content_type = "application/x-ndjson"

    def __init__(self, frontend: Frontend, parser: MessageParser, output: RequestOutput):
        super().__init__(parser, lambda kind: new_call_id(frontend))
        self._frontend = frontend
        self._output = output
        self._began = time.perf_counter_ns()
        self._first = 0

    def _line(self, part: Mapping[str, Any], **fields: Any) -> bytes:
        shaped = self.shape(part)
        return orjson.dumps({**_head(self._frontend), **shaped, "done": False, **fields}) + b"\n"

    def shape(self, part: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a part of a message (content, thinking, tool_calls) as a line has it."""
        raise NotImplementedError

    def opening(self) -> bytes:
        self._first = time.perf_counter_ns()
        return b""

    def change(self, kind: str, block: Block, text: str) -> bytes:
        if block.kind == "call":
            if kind != "stop":
                return b""
            function = {"name": block.name, "arguments": call_input(block.text)}
            return self._line({"tool_calls": [{"id": block.id, "function": function}]})
        name = "content" if block.kind == "text" else "thinking"
        return self._line({name: text}) if kind == "delta" else b""

    def closing(self, reason: str, stop_reason: int | str | None) -> bytes:
        now = time.perf_counter_ns()
        return self._line(
            {},
            done=True,
            done_reason=reason,
            total_duration=now - self._began,
            load_duration=0,
            prompt_eval_count=len(self._output.prompt_token_ids),
            prompt_eval_duration=self._first - self._began,
            eval_count=self.num_tokens,
            eval_duration=now - self._first,
        )

    def failure(self, error: Exception) -> bytes:
        return orjson.dumps({"error": describe(error)[1]["error"]["message"]}) + b"\n"

    def whole(self, lines: bytes) -> dict[str, Any]:
        """Returns all lines of a reply as one."""
        last: dict[str, Any] = orjson.loads(lines.splitlines()[-1])
        message: dict[str, Any] = {}
        for block in self.blocks.all:
            if block.kind == "call":
                function = {"name": block.name, "arguments": call_input(block.text)}
                call = {"id": block.id, "function": function}
                message.setdefault("tool_calls", []).append(call)
            else:
                name = "content" if block.kind == "text" else "thinking"
                message[name] = message.get(name, "") + block.text
        return last | self.shape(message)


class _ChatEvents(_LineEvents):
    def shape(self, part: Mapping[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", **part}}


class _GenerateEvents(_LineEvents):
    def shape(self, part: Mapping[str, Any]) -> dict[str, Any]:
        thinking = {"thinking": part["thinking"]} if "thinking" in part else {}
        return {"response": part.get("content", ""), **thinking}

"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show` and `/api/version`, as desktop
clients know them from Ollama. Streams are lines of JSON; replies are streamed unless `stream` is
false.
"""

from __future__ import annotations

import asyncio
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
from aioinfer.api.record import RECORD
from aioinfer.api.timings import timings
from aioinfer.api.turn_stream import BlockEvents, stream_blocks
from aioinfer.checkpoint.source import weight_files
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
    from aioinfer.config import ParallelConfig
    from aioinfer.engine.frontend import Frontend
    from aioinfer.engine.output import RequestOutput
    from aioinfer.executor.base import WorkerReport
    from aioinfer.text.message_parser import MessageParser


async def chat(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    frontend = request.app[FRONTEND]
    frontend.require_tokenizer("messages")
    body = await read_body(request, OllamaChat)
    admit(request, body.timeout_s)
    if not body.messages:
        return _loaded(frontend, _ChatEvents)
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
    if not body.prompt:
        return _loaded(frontend, _GenerateEvents)
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
    """Lists the model, with the size of its weights' files."""
    names = request.app[FRONTEND].config.served_model_names
    card = await _card(request.app)
    return json_response({"models": [{"name": name, "model": name} | card for name in names]})


async def list_running(request: web.Request) -> web.Response:
    """Lists the model under its first name, with the memory that its workers have taken. It stays
    loaded, which Ollama says by a time long from now."""
    frontend = request.app[FRONTEND]
    name = frontend.config.served_model_names[0]
    card = await _card(request.app)
    sizes = [_memory(engine.report, frontend.config.parallel) for engine in frontend.engines]
    is_on_host = frontend.engines[0].report.device.startswith("cpu")
    model = {
        "name": name,
        "model": name,
        "size": sum(sizes),
        "digest": card["digest"],
        "details": card["details"],
        "expires_at": _iso(request.app[STARTED] + _FOREVER_S),
        "size_vram": 0 if is_on_host else sum(sizes),
        "context_length": frontend.max_model_len,
    }
    return json_response({"models": [model]})


async def _card(app: web.Application) -> dict[str, Any]:
    """Returns the fields with which Ollama describes a model's files."""
    frontend = app[FRONTEND]
    files = await asyncio.to_thread(weight_files, frontend.config.model, frontend.folder)
    return {
        "modified_at": _iso(files.modified or app[STARTED]),
        "size": files.size,
        "digest": files.digest,
        "details": {**_DETAILS, "format": files.format},
    }


def _memory(report: WorkerReport, parallel: ParallelConfig) -> int:
    """Returns the bytes of weights, KV cache and CUDA graphs of an engine's ranks, as if all had as
    much as the largest."""
    in_stage = parallel.tensor_parallel_size
    ranks = in_stage * parallel.pipeline_parallel_size
    weights = sum(size for _, size in report.stages) * in_stage or report.weights_bytes * ranks
    return weights + (report.kv_cache_bytes + report.graph_bytes) * ranks


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def show(request: web.Request) -> web.Response:
    """Describes the model as far as clients look at it."""
    frontend = request.app[FRONTEND]
    await read_body(request, ShowRequest)
    tokenizer, card = frontend.tokenizer, await _card(request.app)
    reply = {
        "modelfile": "",
        "parameters": "",
        "template": tokenizer.chat_template_text if tokenizer is not None else "",
        "details": card["details"],
        "modified_at": card["modified_at"],
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


#: How long a model stays that is not to be unloaded, as a duration's largest value says in Ollama.
_FOREVER_S = 292 * 365 * 24 * 3600
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
        arrived = request[RECORD].arrived
        events = kind(frontend, make_parser(frontend, turn), outputs[0], arrived)
        if body.stream is not False:
            return await stream_blocks(request, outputs[0], events)
        (delta,) = (await collect(outputs)).choices
    return json_response(events.whole(events.events(delta)))


def _loaded(frontend: Frontend, kind: type[_LineEvents]) -> web.Response:
    """Answers a request for nothing, by which clients have a model loaded."""
    end = {"done": True, "done_reason": "load"}
    return json_response(_head(frontend) | kind.shape({}) | end)


def _head(frontend: Frontend) -> dict[str, Any]:
    return {"model": frontend.config.served_model_names[0], "created_at": _iso(time.time())}


class _LineEvents(BlockEvents):
    """Lines of JSON. A call is one line: its arguments are an object."""

    content_type = "application/x-ndjson"

    def __init__(
        self, frontend: Frontend, parser: MessageParser, output: RequestOutput, arrived: float
    ):
        """`arrived` is when the request came, of `time.perf_counter`."""
        super().__init__(parser, lambda kind: new_call_id(frontend))
        self._frontend = frontend
        self._output = output
        self._arrived = arrived

    def _line(self, part: Mapping[str, Any], **fields: Any) -> bytes:
        shaped = self.shape(part)
        return orjson.dumps({**_head(self._frontend), **shaped, "done": False, **fields}) + b"\n"

    @staticmethod
    def shape(part: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a part of a message (content, thinking, tool_calls) as a line has it."""
        raise NotImplementedError

    def opening(self) -> bytes:
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
        measured = timings(self._output, 0, self.num_tokens)
        return self._line(
            {},
            done=True,
            done_reason=reason,
            total_duration=_nanoseconds((time.perf_counter() - self._arrived) * 1e3),
            load_duration=0,
            prompt_eval_count=len(self._output.prompt_token_ids),
            prompt_eval_duration=_nanoseconds(measured["prompt_ms"]),
            eval_count=self.num_tokens,
            eval_duration=_nanoseconds(measured["predicted_ms"]),
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


def _nanoseconds(milliseconds: float) -> int:
    # clients divide by it, and the last token may be the first
    return max(1, round(milliseconds * 1e6))


class _ChatEvents(_LineEvents):
    @staticmethod
    def shape(part: Mapping[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": "", **part}}


class _GenerateEvents(_LineEvents):
    @staticmethod
    def shape(part: Mapping[str, Any]) -> dict[str, Any]:
        thinking = {"thinking": part["thinking"]} if "thinking" in part else {}
        return {"response": part.get("content", ""), **thinking}

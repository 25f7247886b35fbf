"""`/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show` and `/api/version`, as desktop
clients know them from Ollama. Streams are lines of JSON; replies are streamed unless `stream` is
false.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from aioinfer import __version__
from aioinfer.api.admin.info import Version
from aioinfer.api.context import FRONTEND, STARTED, encode, read_body
from aioinfer.api.delivery import answer
from aioinfer.api.errors import OllamaError, describe, json_response
from aioinfer.api.generation import Generation, timings
from aioinfer.api.http.request_log import RECORD
from aioinfer.api.message_events import Block, BlockKind, MessageDialect
from aioinfer.api.ollama.body import OllamaBody, OllamaChat, OllamaGenerate, ShowRequest
from aioinfer.checkpoint.source import weight_files
from aioinfer.engine.chat_turn import Turn, call_input, encode_turn, new_call_id
from aioinfer.engine.tools import NO_TOOLS
from aioinfer.text.message_parser import ToolUse

if TYPE_CHECKING:
    from aioinfer.config import ParallelConfig
    from aioinfer.engine.frontend import Frontend
    from aioinfer.executor.base import WorkerReport

OB = TypeVar("OB", bound=OllamaBody)


class Answer(Struct, kw_only=True):
    """The message of a line of `/api/chat`."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Line(Struct, kw_only=True):
    """The reply of `/api/chat`, which has a `message`, and of `/api/generate`, which has a
    `response`. A stream is lines of these. The last line, and a reply in one piece, have the counts
    of tokens and the durations, in nanoseconds."""

    model: str
    created_at: str
    message: Answer | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


async def chat(request: web.Request) -> web.StreamResponse:
    """Answers a conversation."""
    return await answer(request, ChatDialect)


async def generate(request: web.Request) -> web.StreamResponse:
    """Answers a prompt as a conversation of one message, or completes it if it is `raw`."""
    return await answer(request, GenerateDialect)


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
    return json_response(Version(version=__version__))


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


def _line(frontend: Frontend, **fields: Any) -> Line:
    name = frontend.config.served_model_names[0]
    return Line(model=name, created_at=_iso(time.time()), **fields)


class OllamaDialect(MessageDialect[OB]):
    """Ollama's words: lines of JSON. A call is one line: its arguments are an object."""

    content_type = "application/x-ndjson"
    id_prefix = "ollama-"

    def __init__(self, request: web.Request, body: OB):
        super().__init__(request, body)
        self._arrived = request[RECORD].arrived

    def loaded(self) -> web.Response:
        """Answers a request for nothing, by which clients have a model loaded."""
        return json_response(self._line(done=True, done_reason="load"))

    def new_id(self, kind: BlockKind) -> str:
        """See `MessageDialect.new_id`."""
        return new_call_id(self.frontend)

    def opening(self) -> bytes:
        """Returns nothing."""
        return b""

    def change(self, kind: str, block: Block, text: str) -> bytes:
        """See `MessageDialect.change`."""
        if block.kind == "call":
            return self._event(self._line(calls=[block])) if kind == "stop" else b""
        if kind != "delta":
            return b""
        is_text = block.kind == "text"
        return self._event(self._line(text if is_text else "", UNSET if is_text else text))

    def closing(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> bytes:
        """See `MessageDialect.closing`."""
        return self._event(self._line(**self._end(reason, num_tokens)))

    def failure(self, error: Exception) -> bytes:
        """See `Dialect.failure`."""
        return self._event(OllamaError.of(*describe(error)))

    def message(self, reason: str, stop_reason: int | str | None, num_tokens: int) -> Line:
        """See `MessageDialect.message`."""
        blocks = self.blocks.all
        texts = "".join(block.text for block in blocks if block.kind == "text")
        thoughts = "".join(block.text for block in blocks if block.kind == "reasoning")
        calls = [block for block in blocks if block.kind == "call"]
        return self._line(texts, thoughts or UNSET, calls, **self._end(reason, num_tokens))

    @staticmethod
    def _event(line: Line | OllamaError) -> bytes:
        return encode(line) + b"\n"

    def _line(
        self,
        content: str = "",
        thinking: str | UnsetType = UNSET,
        calls: Sequence[Block] = (),
        **fields: Any,
    ) -> Line:
        if not isinstance(self.body, OllamaChat):
            return _line(self.frontend, response=content, thinking=thinking, **fields)
        answer = Answer(content=content, thinking=thinking)
        if calls:
            answer.tool_calls = [
                {
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call_input(call.text)},
                }
                for call in calls
            ]
        return _line(self.frontend, message=answer, **fields)

    def _end(self, reason: str, num_tokens: int) -> dict[str, Any]:
        measured = timings(self.output, 0, num_tokens)
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _nanoseconds((time.perf_counter() - self._arrived) * 1e3),
            "load_duration": 0,
            "prompt_eval_count": len(self.output.prompt_token_ids),
            "prompt_eval_duration": _nanoseconds(measured["prompt_ms"]),
            "eval_count": num_tokens,
            "eval_duration": _nanoseconds(measured["predicted_ms"]),
        }


class ChatDialect(OllamaDialect[OllamaChat]):
    """The words of `/api/chat`."""

    body_type = OllamaChat

    @classmethod
    async def encode(cls, frontend: Frontend, body: OllamaChat, use: ToolUse) -> list[list[int]]:
        """See `Dialect.encode`."""
        variables = body.template_kwargs()
        return [
            await encode_turn(
                frontend, body.conversation(), use, body.tools, template_kwargs=variables
            )
        ]

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`."""
        return await super().decode() if self.body.messages else self.loaded()


class GenerateDialect(OllamaDialect[OllamaGenerate]):
    """The words of `/api/generate`."""

    body_type = OllamaGenerate
    text_field = "prompt"

    @classmethod
    async def encode(
        cls, frontend: Frontend, body: OllamaGenerate, use: ToolUse
    ) -> list[list[int]]:
        """See `Dialect.encode`."""
        if body.raw:
            return [await frontend.encode(body.prompt)]
        variables = body.template_kwargs()
        return [await encode_turn(frontend, body.conversation(), use, template_kwargs=variables)]

    async def decode(self) -> Generation | web.StreamResponse:
        """See `Dialect.decode`."""
        if not self.body.prompt:
            return self.loaded()
        if not self.body.raw:
            return await super().decode()
        params = self.frontend.defaults.sampling_params(**self.body.sampling_fields())
        self.turn = Turn(await self.prompt(NO_TOOLS), params, NO_TOOLS, parses=False)
        return self.generation([self.turn.prompt], params)


def _nanoseconds(milliseconds: float) -> int:
    # clients divide by it, and the last token may be the first
    return max(1, round(milliseconds * 1e6))

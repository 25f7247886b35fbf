"""`/openapi.json`: a description of all endpoints (OpenAPI 3.1), and `/docs`, a page that shows it.

Request bodies are described by the types that check them, and replies by the types that are sent,
so they cannot disagree with the server. `OPERATIONS` has an entry for every route (a test compares
them), `EXAMPLES` a body for most types of bodies, with which the page lets its reader try a call.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
from aiohttp import web

from aioinfer import __version__
from aioinfer.api.admin.control import AbortReply, AbortRequest
from aioinfer.api.admin.experts import MAX_COPIES, MAX_RANKS, ExpertLoads, Placement
from aioinfer.api.admin.info import Load, Model, ModelList, Status, Version
from aioinfer.api.admin.page import PAGE_PATHS
from aioinfer.api.anthropic.body import CountTokensRequest, MessagesRequest
from aioinfer.api.anthropic.endpoints import MessageReply, TokenCount
from aioinfer.api.batch.batches import BatchObject, CreateBatch
from aioinfer.api.batch.conversations import (
    Conversation,
    CreateConversation,
    CreateItems,
    UpdateObject,
)
from aioinfer.api.batch.file_store import FileObject
from aioinfer.api.batch.files import Deleted
from aioinfer.api.batch.object_store import Page
from aioinfer.api.context import FRONTEND
from aioinfer.api.errors import (
    LLAMA_CPP_PATHS,
    PREFIX,
    AnthropicError,
    ErrorReply,
    LlamaError,
    OllamaError,
)
from aioinfer.api.fields import NO_EFFECT
from aioinfer.api.http.access import ADMIN_PATHS, OPEN_PATHS
from aioinfer.api.llama_cpp.body import InfillRequest, LlamaCompletion, LlamaEmbedding
from aioinfer.api.llama_cpp.endpoints import LlamaSlot, LlamaVectors, TemplateReply
from aioinfer.api.llama_cpp.replies import LlamaReply
from aioinfer.api.ollama.body import OllamaChat, OllamaGenerate, ShowRequest
from aioinfer.api.ollama.endpoints import Line
from aioinfer.api.openai.chat import ChatCompletion
from aioinfer.api.openai.completions import Completion
from aioinfer.api.openai.pooling import (
    Classes,
    Embeddings,
    OllamaEmbedding,
    OllamaEmbeddings,
    PoolingReply,
    Reranked,
    RerankedText,
    Scores,
)
from aioinfer.api.openai.pooling_bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from aioinfer.api.openai.response_events import Response
from aioinfer.api.openai.responses import InputTokens
from aioinfer.api.openai.responses_body import ResponseRequest
from aioinfer.api.openai.tokenization import DetokenizeReply, TokenizeReply
from aioinfer.api.protocol import (
    NO_EFFECT_TEXT,
    AnyObject,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

#: llama.cpp's: one prompt has one reply, several have a list.
_LlamaReplies = LlamaReply | list[LlamaReply]
#: With `texts` the reply is a list.
_Reranked = Reranked | list[RerankedText]
_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of a route besides its handler.

    Attributes:
        body: the type that checks the request's body.
        reply: the type of a reply with status 200; None where `content_type` says it all.
        content_type: of that reply.
        streams: whether the reply may be a stream instead, of the type `stream_type`.
        query: parameters of the query with their schemas.
    """

    body: type | None = None
    reply: Any = None
    content_type: str = "application/json"
    streams: bool = False
    stream_type: str = "text/event-stream"
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)


_LIMIT = {"type": "integer", "minimum": 1, "maximum": 100}
_TEXT = {"type": "string"}
_LINES = "application/x-ndjson"
_ORDER = {"type": "string", "enum": ["asc", "desc"]}
_PAGE: dict[str, dict[str, Any]] = {"limit": _LIMIT, "after": _TEXT, "order": _ORDER}

#: By method and path.
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(CompletionRequest, Completion, streams=True),
    ("POST", "/v1/chat/completions"): Operation(ChatRequest, ChatCompletion, streams=True),
    ("POST", "/v1/messages"): Operation(MessagesRequest, MessageReply, streams=True),
    ("POST", "/v1/messages/count_tokens"): Operation(CountTokensRequest, TokenCount),
    ("POST", "/v1/responses"): Operation(ResponseRequest, Response, streams=True),
    ("POST", "/responses"): Operation(ResponseRequest, Response, streams=True),
    ("POST", "/v1/responses/input_tokens"): Operation(ResponseRequest, InputTokens),
    ("GET", "/v1/responses/{id}/input_items"): Operation(reply=Page, query=_PAGE),
    ("GET", "/v1/responses/{id}"): Operation(
        reply=Response,
        streams=True,
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}},
    ),
    ("POST", "/v1/conversations"): Operation(CreateConversation, Conversation),
    ("GET", "/v1/conversations/{id}"): Operation(reply=Conversation),
    ("POST", "/v1/conversations/{id}"): Operation(UpdateObject, Conversation),
    ("DELETE", "/v1/conversations/{id}"): Operation(),
    ("POST", "/v1/conversations/{id}/items"): Operation(CreateItems, Page),
    ("GET", "/v1/conversations/{id}/items"): Operation(reply=Page, query=_PAGE),
    ("GET", "/v1/conversations/{id}/items/{item_id}"): Operation(),
    ("DELETE", "/v1/conversations/{id}/items/{item_id}"): Operation(reply=Conversation),
    ("GET", "/v1/chat/completions"): Operation(reply=Page, query=_PAGE | {"model": _TEXT}),
    ("GET", "/v1/chat/completions/{id}"): Operation(reply=ChatCompletion),
    ("POST", "/v1/chat/completions/{id}"): Operation(UpdateObject, ChatCompletion),
    ("DELETE", "/v1/chat/completions/{id}"): Operation(),
    ("GET", "/v1/chat/completions/{id}/messages"): Operation(reply=Page, query=_PAGE),
    ("DELETE", "/v1/responses/{id}"): Operation(),
    ("POST", "/v1/responses/{id}/cancel"): Operation(reply=Response),
    ("POST", "/api/chat"): Operation(OllamaChat, Line, streams=True, stream_type=_LINES),
    ("POST", "/api/generate"): Operation(OllamaGenerate, Line, streams=True, stream_type=_LINES),
    ("POST", "/api/show"): Operation(ShowRequest),
    ("GET", "/api/tags"): Operation(),
    ("GET", "/api/ps"): Operation(),
    ("GET", "/api/version"): Operation(reply=Version),
    ("POST", "/api/embed"): Operation(OllamaEmbedRequest, OllamaEmbeddings),
    ("POST", "/api/embeddings"): Operation(OllamaEmbeddingsRequest, OllamaEmbedding),
    ("POST", "/v1/embeddings"): Operation(EmbeddingRequest, Embeddings),
    ("POST", "/pooling"): Operation(PoolingRequest, PoolingReply),
    ("POST", "/classify"): Operation(ClassifyRequest, Classes),
    ("POST", "/score"): Operation(ScoreRequest, Scores),
    ("POST", "/v1/score"): Operation(ScoreRequest, Scores),
    ("POST", "/rerank"): Operation(RerankRequest, _Reranked),
    ("POST", "/v1/rerank"): Operation(RerankRequest, _Reranked),
    ("POST", "/v2/rerank"): Operation(RerankRequest, _Reranked),
    ("POST", "/chat/completions"): Operation(ChatRequest, ChatCompletion, streams=True),
    ("POST", "/completion"): Operation(LlamaCompletion, _LlamaReplies, streams=True),
    ("POST", "/completions"): Operation(LlamaCompletion, _LlamaReplies, streams=True),
    ("POST", "/infill"): Operation(InfillRequest, _LlamaReplies, streams=True),
    ("POST", "/embedding"): Operation(LlamaEmbedding, list[LlamaVectors]),
    ("POST", "/apply-template"): Operation(ChatRequest, TemplateReply),
    ("GET", "/props"): Operation(),
    ("GET", "/slots"): Operation(reply=list[LlamaSlot]),
    ("GET", "/models"): Operation(reply=ModelList),
    ("POST", "/tokenize"): Operation(TokenizeRequest, TokenizeReply),
    ("POST", "/detokenize"): Operation(DetokenizeRequest, DetokenizeReply),
    ("GET", "/v1/models"): Operation(reply=ModelList),
    ("GET", "/v1/models/{id}"): Operation(reply=Model),
    ("GET", "/health"): Operation(reply=Status),
    ("GET", "/health/live"): Operation(reply=Status),
    ("GET", "/health/ready"): Operation(reply=Status),
    ("GET", "/version"): Operation(reply=Version),
    ("GET", "/load"): Operation(reply=Load),
    ("GET", "/server_info"): Operation(),
    ("GET", "/tokenizer_info"): Operation(),
    ("GET", "/openapi.json"): Operation(),
    ("GET", "/page/info"): Operation(),
    ("GET", "/metrics"): Operation(content_type="text/plain"),
    ("GET", "/page/live"): Operation(content_type="text/event-stream"),
    ("POST", "/pause"): Operation(reply=Status),
    ("POST", "/resume"): Operation(reply=Status),
    ("POST", "/reset_prefix_cache"): Operation(reply=Status),
    ("GET", "/experts"): Operation(reply=ExpertLoads),
    ("GET", "/experts/placement"): Operation(
        reply=Placement,
        query={
            "ranks": {"type": "integer", "minimum": 1, "maximum": MAX_RANKS},
            "copies": {"type": "integer", "minimum": 0, "maximum": MAX_COPIES},
        },
    ),
    ("POST", "/abort"): Operation(AbortRequest, AbortReply),
    ("POST", "/v1/files"): Operation(reply=FileObject),
    ("GET", "/v1/files"): Operation(
        reply=Page,
        query={
            "purpose": _TEXT,
            "limit": _LIMIT | {"maximum": 10_000},
            "after": _TEXT,
            "order": _ORDER,
        },
    ),
    ("GET", "/v1/files/{file_id}"): Operation(reply=FileObject),
    ("DELETE", "/v1/files/{file_id}"): Operation(reply=Deleted),
    ("GET", "/v1/files/{file_id}/content"): Operation(content_type="application/octet-stream"),
    ("POST", "/v1/batches"): Operation(CreateBatch, BatchObject),
    ("GET", "/v1/batches"): Operation(reply=Page, query=_PAGE),
    ("GET", "/v1/batches/{batch_id}"): Operation(reply=BatchObject),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation(reply=BatchObject),
}


_PROMPT = "The capital of France is"
_MESSAGES = [{"role": "user", "content": "Name a river."}]

#: By type of a body: one that the server answers.
EXAMPLES: dict[type, dict[str, Any]] = {
    CompletionRequest: {"prompt": _PROMPT, "max_tokens": 16, "temperature": 0},
    ChatRequest: {"messages": _MESSAGES, "max_tokens": 32},
    MessagesRequest: {"messages": _MESSAGES, "max_tokens": 32},
    CountTokensRequest: {"messages": _MESSAGES},
    ResponseRequest: {"input": "Name a river.", "max_output_tokens": 32},
    CreateConversation: {"items": _MESSAGES, "metadata": {"topic": "rivers"}},
    UpdateObject: {"metadata": {"topic": "hills"}},
    CreateItems: {"items": _MESSAGES},
    OllamaChat: {"messages": _MESSAGES, "options": {"num_predict": 32}},
    OllamaGenerate: {"prompt": "Name a river.", "options": {"num_predict": 32}},
    ShowRequest: {},
    OllamaEmbedRequest: {"input": ["a river", "a stream"], "dimensions": 8},
    OllamaEmbeddingsRequest: {"prompt": "a river"},
    EmbeddingRequest: {"input": ["a river", "a stream"], "dimensions": 8},
    PoolingRequest: {"input": "a river", "pooling_type": "mean"},
    ClassifyRequest: {"input": "a river"},
    ScoreRequest: {"text_1": "a river", "text_2": ["a stream", "the price of a loaf of bread"]},
    RerankRequest: {"query": "a river", "documents": ["the price of a loaf of bread", "a stream"]},
    LlamaCompletion: {"prompt": _PROMPT, "n_predict": 16},
    InfillRequest: {"input_prefix": "def add(a, b):\n", "input_suffix": "\n", "n_predict": 16},
    LlamaEmbedding: {"content": "a river"},
    TokenizeRequest: {"prompt": "Hello, world!", "return_token_strs": True},
    DetokenizeRequest: {"tokens": [1, 2, 3]},
    AbortRequest: {"request_id": "cmpl-…"},
    CreateBatch: {
        "input_file_id": "file-…",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
}


def _error_of(path: str) -> type:
    """Returns the shape of errors at a path; see `errors.error_response`."""
    if path.startswith("/v1/messages"):
        return AnthropicError
    if path in LLAMA_CPP_PATHS:
        return LlamaError
    return OllamaError if path.startswith("/api/") else ErrorReply


_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}


def describe(app: web.Application) -> dict[str, Any]:
    """Returns the OpenAPI document of an application."""
    types = {t for o in OPERATIONS.values() for t in (o.body, o.reply) if t is not None}
    errors = {ErrorReply, AnthropicError, LlamaError, OllamaError}
    ordered = sorted(types | errors, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schema_of = dict(zip(ordered, schemas, strict=True))
    for schema in components.values():
        _say_why(schema.get("properties", {}))
    del components[AnyObject.__name__]  # which only those fields refer to
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler in _routes(app):
        operation = OPERATIONS.get((method, path), Operation())
        paths.setdefault(path, {})[method.lower()] = _describe(
            method, path, handler, operation, schema_of
        )
    root = app[FRONTEND].config.server.root_path.strip("/")
    below = (f"/{root}" if root else "") + app[PREFIX]()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "aioinfer",
            "version": __version__,
            "description": "An OpenAI-compatible server for a large language model.",
        },
        "servers": [{"url": below or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _say_why(properties: dict[str, Any]) -> None:
    """Describes fields without effect by the reason, in place of their types: any type is
    accepted."""
    for name, schema in properties.items():
        if str(schema.get("description", "")).startswith(NO_EFFECT_TEXT):
            reason = f": {NO_EFFECT[name]}" if name in NO_EFFECT else ""
            properties[name] = {"description": f"{NO_EFFECT_TEXT}{reason}.", "default": None}


def _routes(app: web.Application) -> Iterator[tuple[str, str, Any]]:
    """Yields method, path and handler of each route, except the routes of the page's files; paths
    are relative to the application."""
    prefix = app[PREFIX]()
    for route in app.router.routes():
        resource = route.resource
        if resource is None or route.method == "HEAD":
            continue
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", resource.canonical.removeprefix(prefix))
        if path not in PAGE_PATHS:
            yield route.method, path, route.handler


def _describe(
    method: str, path: str, handler: Any, operation: Operation, schema_of: Mapping[type, Any]
) -> dict[str, Any]:
    summary, _, rest = (inspect.getdoc(handler) or "").partition("\n\n")
    content: dict[str, Any] = {operation.content_type: {}}
    if operation.content_type == "application/json":
        schema = {"type": "object"} if operation.reply is None else schema_of[operation.reply]
        content = {"application/json": {"schema": schema}}
    if operation.streams:
        content[operation.stream_type] = {}
    error = {"content": {"application/json": {"schema": schema_of[_error_of(path)]}}}
    found: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', path)}".rstrip("_"),
        "summary": " ".join(summary.split()),
        "responses": {
            "200": {"description": "Success", "content": content},
            "4XX": {"description": "The request is at fault", **error},
            "5XX": {"description": "The server cannot answer it, now or at all", **error},
        },
    }
    if rest:
        found["description"] = " ".join(rest.split())
    if path in ADMIN_PATHS or path not in OPEN_PATHS:
        found["security"] = [{"key": []}]
    if parameters := _parameters(path, operation):
        found["parameters"] = parameters
    if operation.body is not None:
        body = {"schema": schema_of[operation.body], "example": EXAMPLES[operation.body]}
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
    elif (method, path) == ("POST", "/v1/files"):
        form = {"multipart/form-data": {"schema": _FORM}}
        found["requestBody"] = {"required": True, "content": form}
    return found


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    return found + [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]


_DOCUMENT: web.AppKey[list[bytes]] = web.AppKey("openapi")


def add_openapi(app: web.Application) -> None:
    """Adds `/openapi.json`. `page` has the page that shows it."""
    app[_DOCUMENT] = []
    app.router.add_get("/openapi.json", show_openapi)


async def show_openapi(request: web.Request) -> web.Response:
    """Returns this description."""
    made = request.app[_DOCUMENT]
    if not made:
        made.append(await asyncio.to_thread(lambda: orjson.dumps(describe(request.app))))
    return web.Response(body=made[0], content_type="application/json")

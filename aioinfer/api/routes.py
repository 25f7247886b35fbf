"""The endpoints: which function answers which path, the type that checks its body, and the type of
its reply. The application's routes and `/openapi.json` are both made from this table; `page` adds
the files of the page at "/".
"""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from aioinfer.api import anthropic, llama_cpp, ollama
from aioinfer.api.admin import control, info, metrics, openapi, page
from aioinfer.api.admin.control import (
    MAX_COPIES,
    MAX_RANKS,
    AbortReply,
    AbortRequest,
    ExpertLoads,
    LoadAdapter,
    Paused,
    Placement,
    Sleeping,
    UnloadAdapter,
)
from aioinfer.api.admin.info import Load, Model, ModelList, ServerInfo, Status, Version
from aioinfer.api.admin.openapi import Route
from aioinfer.api.admin.page import PageInfo
from aioinfer.api.anthropic import CountTokensRequest, TokenCount
from aioinfer.api.batch import batches, objects
from aioinfer.api.batch.batches import CreateBatch
from aioinfer.api.batch.objects import (
    BATCHES,
    CHATS,
    CONVERSATIONS,
    FILES,
    Conversation,
    CreateConversation,
    CreateItems,
    Deleted,
    UpdateObject,
)
from aioinfer.api.batch.store import BatchObject, FileObject, Page
from aioinfer.api.context import defer_continue
from aioinfer.api.decoding import prepare
from aioinfer.api.delivery import answer, handler_of
from aioinfer.api.errors import PREFIX, Handler
from aioinfer.api.generation import Dialect
from aioinfer.api.llama_cpp import (
    LlamaProps,
    LlamaSlot,
    TemplateReply,
)
from aioinfer.api.ollama import (
    ModelTags,
    RunningModels,
    ShownModel,
    ShowRequest,
)
from aioinfer.api.openai import chat, completions, pooling, responses, tokenization
from aioinfer.api.openai.chat import ChatCompletion
from aioinfer.api.openai.responses import ResponseDialect
from aioinfer.api.openai.responses_body import InputTokens, Response, ResponseRequest
from aioinfer.api.openai.tokenization import DetokenizeReply, TokenizeReply
from aioinfer.api.protocol import (
    ChatRequest,
    DetokenizeRequest,
    TokenizeRequest,
)


def _get(path: str, handler: Handler, reply: Any = None, **more: Any) -> Route:
    return Route("GET", path, handler, reply=reply, **more)


_post = partial(Route, "POST")


def _generate(path: str, kind: type[Dialect[Any]]) -> Route:
    handler, stream = handler_of(kind, answer), kind.content_type.partition(";")[0]
    return _post(path, handler, kind.body_type, kind.reply_type, stream=stream)


def _pool(path: str, kind: type[pooling.PoolingDialect[Any]]) -> Route:
    handler = handler_of(kind, pooling.answer_pooled)
    return _post(path, handler, kind.body_type, kind.reply_type)


def _delete(path: str, handler: Handler, reply: Any = None) -> Route:
    return Route("DELETE", path, handler, reply=reply)


_SSE = "text/event-stream"
_TEXT: dict[str, Any] = {"type": "string"}
_LIMIT = {"type": "integer", "minimum": 1, "maximum": 100}
_PAGE = {"limit": _LIMIT, "after": _TEXT, "order": _TEXT | {"enum": ["asc", "desc"]}}
_CHATS = _PAGE | {"model": _TEXT}
_FILES = {"purpose": _TEXT} | _PAGE | {"limit": _LIMIT | {"maximum": 10_000}}
_REPLAY = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0}}
_PLACEMENT = {
    "ranks": {"type": "integer", "minimum": 1, "maximum": MAX_RANKS},
    "copies": {"type": "integer", "minimum": 0, "maximum": MAX_COPIES},
}

ROUTES: tuple[Route, ...] = (
    # OpenAI
    _generate("/v1/completions", completions.CompletionDialect),
    _generate("/v1/chat/completions", chat.ChatDialect),
    _generate("/chat/completions", chat.ChatDialect),
    _get("/v1/chat/completions", CHATS.list, Page, query=_CHATS),
    _get("/v1/chat/completions/{id}/messages", CHATS.list_items, Page, query=_PAGE),
    _get("/v1/chat/completions/{id}", CHATS.get, ChatCompletion),
    _post("/v1/chat/completions/{id}", CHATS.update, UpdateObject, ChatCompletion),
    _delete("/v1/chat/completions/{id}", CHATS.delete, Deleted),
    _generate("/v1/responses", ResponseDialect),
    _generate("/responses", ResponseDialect),
    _post("/v1/responses/input_tokens", responses.count_input_tokens, ResponseRequest, InputTokens),
    _get("/v1/responses/{id}", responses.get_response, Response, stream=_SSE, query=_REPLAY),
    _delete("/v1/responses/{id}", responses.delete_response, Deleted),
    _post("/v1/responses/{id}/cancel", responses.cancel_response, None, Response),
    _get("/v1/responses/{id}/input_items", responses.list_input_items, Page, query=_PAGE),
    _post("/v1/conversations", objects.create_conversation, CreateConversation, Conversation),
    _post("/v1/conversations/{id}/items", objects.create_items, CreateItems, Page),
    _get("/v1/conversations/{id}/items", CONVERSATIONS.list_items, Page, query=_PAGE),
    _get("/v1/conversations/{id}/items/{item_id}", objects.get_item),
    _delete("/v1/conversations/{id}/items/{item_id}", objects.delete_item, Conversation),
    _get("/v1/conversations/{id}", CONVERSATIONS.get, Conversation),
    _post("/v1/conversations/{id}", CONVERSATIONS.update, UpdateObject, Conversation),
    _delete("/v1/conversations/{id}", CONVERSATIONS.delete, Deleted),
    _post("/v1/files", objects.upload_file, None, FileObject),
    _get("/v1/files", FILES.list, Page, query=_FILES),
    _get("/v1/files/{file_id}", FILES.get, FileObject),
    _get(
        "/v1/files/{file_id}/content", objects.get_content, content_type="application/octet-stream"
    ),
    _delete("/v1/files/{file_id}", FILES.delete, Deleted),
    _post("/v1/batches", batches.create_batch, CreateBatch, BatchObject),
    _get("/v1/batches", BATCHES.list, Page, query=_PAGE),
    _get("/v1/batches/{batch_id}", BATCHES.get, BatchObject),
    _post("/v1/batches/{batch_id}/cancel", batches.cancel_batch, None, BatchObject),
    # Anthropic
    _generate("/v1/messages", anthropic.AnthropicDialect),
    _post("/v1/messages/count_tokens", anthropic.count_tokens, CountTokensRequest, TokenCount),
    # Ollama
    _generate("/api/chat", ollama.ChatDialect),
    _generate("/api/generate", ollama.GenerateDialect),
    _post("/api/show", ollama.show, ShowRequest, ShownModel),
    _get("/api/tags", ollama.list_tags, ModelTags),
    _get("/api/ps", ollama.list_running, RunningModels),
    _get("/api/version", info.version, Version),
    _pool("/api/embed", pooling.OllamaEmbedDialect),
    _pool("/api/embeddings", pooling.OllamaEmbeddingDialect),
    # llama.cpp
    _generate("/completion", llama_cpp.LlamaDialect),
    _pool("/embedding", llama_cpp.LlamaEmbedDialect),
    _post("/apply-template", llama_cpp.apply_template, ChatRequest, TemplateReply),
    _get("/props", llama_cpp.props, LlamaProps),
    _get("/slots", llama_cpp.slots, list[LlamaSlot]),
    # Embeddings and the like, tokens
    _pool("/v1/embeddings", pooling.EmbeddingDialect),
    _pool("/pooling", pooling.StatesDialect),
    _pool("/classify", pooling.ClassifyDialect),
    _pool("/score", pooling.ScoreDialect),
    _pool("/v1/score", pooling.ScoreDialect),
    _pool("/rerank", pooling.RerankDialect),
    _pool("/v1/rerank", pooling.RerankDialect),
    _pool("/v2/rerank", pooling.RerankDialect),
    _post("/tokenize", tokenization.tokenize, TokenizeRequest, TokenizeReply),
    _post("/detokenize", tokenization.detokenize, DetokenizeRequest, DetokenizeReply),
    # The server and its model
    _get("/v1/models", info.list_models, ModelList),
    _get("/v1/models/{id:.+}", info.get_model, Model),
    _get("/models", info.list_models, ModelList),
    _get("/health", info.health, Status),
    _get("/health/live", info.live, Status),
    _get("/health/ready", info.ready, Status),
    _get("/version", info.version, Version),
    _get("/load", info.show_load, Load),
    _get("/server_info", info.server_info, ServerInfo),
    _get("/tokenizer_info", info.tokenizer_info),
    _get("/metrics", metrics.show_metrics, content_type="text/plain"),
    _post("/abort", control.abort, AbortRequest, AbortReply),
    _post("/v1/load_lora_adapter", control.load_adapter, LoadAdapter, Status),
    _post("/v1/unload_lora_adapter", control.unload_adapter, UnloadAdapter, Status),
    _post("/pause", control.pause, None, Status, query=control.PAUSE_QUERY),
    _post("/resume", control.resume, None, Status),
    _get("/is_paused", control.show_paused, Paused),
    _post("/sleep", control.sleep, None, Status, query=control.SLEEP_QUERY),
    _post("/wake_up", control.wake_up, None, Status, query=control.WAKE_QUERY),
    _get("/is_sleeping", control.show_sleeping, Sleeping),
    _post("/reset_prefix_cache", control.reset_prefix_cache, None, Status),
    _get("/experts", control.show_experts, ExpertLoads),
    _get("/experts/placement", control.make_placement, Placement, query=_PLACEMENT),
    # This description of them, and the page at "/"
    _get("/openapi.json", openapi.show_openapi),
    _get("/page/info", page.show_info, PageInfo),
    _get("/page/live", page.stream_live, content_type=_SSE),
)


def add_routes(app: web.Application) -> None:
    """Adds all of them to an application."""
    for route in ROUTES:
        if route.body is not None:
            prepare(route.body)
        if route.method == "GET":  # answers HEAD as well
            added = app.router.add_get(route.path, route.handler)
        else:
            added = app.router.add_route(
                route.method, route.path, route.handler, expect_handler=defer_continue
            )
    last = added.resource
    assert last is not None
    # where an application is mounted in another one, its resources change
    app[PREFIX] = lambda: last.canonical.removesuffix(ROUTES[-1].path)
    app[openapi.DOCUMENT] = openapi.document(app, ROUTES)

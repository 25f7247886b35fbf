"""The endpoints: which function answers which path. What a function declares is what its endpoint
does: its second parameter is the body or the query, which is read and checked before it is called,
and what it returns is written as JSON. The application's routes and `/openapi.json` are both made
from this table; `page` adds the files of the page at "/".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, partial, wraps
from typing import Any, get_type_hints

import msgspec
import orjson
from aiohttp import web

from aioinfer.api import anthropic, llama_cpp, ollama
from aioinfer.api.admin import control, info, metrics, openapi, page
from aioinfer.api.admin.info import Status
from aioinfer.api.admin.openapi import Route
from aioinfer.api.batch import batches, objects
from aioinfer.api.batch.objects import BATCHES, CONVERSATIONS, FILES
from aioinfer.api.batch.store import BatchObject, FileObject
from aioinfer.api.context import (
    MODELS,
    ModelQuery,
    defer_continue,
    frontend_of,
    read_body,
    read_query,
)
from aioinfer.api.decoding import Body, prepare
from aioinfer.api.delivery import answer
from aioinfer.api.errors import PREFIX, json_response
from aioinfer.api.generation import Dialect
from aioinfer.api.http import limits
from aioinfer.api.openai import audio, chat, completions, pooling, responses, scoring, tokenization
from aioinfer.api.openai.audio import (
    TranscriptDelta,
    TranscriptDone,
    Transcription,
    TranscriptionForm,
)
from aioinfer.api.openai.responses_body import Response
from aioinfer.errors import RequestError
from aioinfer.features import load_halves
from aioinfer.features.serving import Endpoint


def _endpoint(
    method: str,
    path: str,
    function: Callable[..., Awaitable[Any]],
    reply: Any = None,
    query: Any = None,
    **more: Any,
) -> Route:
    """Returns the endpoint of a function of a request, and of its body or its query. `reply` is
    given where the function does not declare the type of its reply in one piece, `query` where it
    reads the query itself."""
    hints = get_type_hints(function)
    kind, asked, declared = hints.get("body"), hints.get("query"), hints["return"]
    if reply is None and not (
        isinstance(declared, type) and issubclass(declared, web.StreamResponse)
    ):
        reply = declared

    @wraps(function)
    async def handle(request: web.Request) -> web.StreamResponse:
        arguments: list[Any] = [] if kind is None else [await read_body(request, kind)]
        if asked is not None:
            arguments.append(read_query(request, asked))
        found = await function(request, *arguments)
        return found if isinstance(found, web.StreamResponse) else json_response(found)

    return Route(method, path, handle, kind, reply, query=asked or query, **more)


_get, _post, _delete = (partial(_endpoint, method) for method in ("GET", "POST", "DELETE"))


def _dialect(path: str, kind: type[Dialect[Any]]) -> Route:
    """Returns the endpoint of a dialect, whose docstring describes it."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request, kind)

    handle.__doc__ = kind.__doc__
    events = kind.event_types
    return Route(
        "POST",
        path,
        handle,
        kind.body_type,
        kind.reply_type,
        stream=kind.content_type.partition(";")[0] if events else None,
        events=events,
    )


def _of_feature(endpoint: Endpoint) -> Route:
    """Returns the endpoint of a feature, about a variant of the model."""
    fields = [(f.name, f.type, f.default) for f in msgspec.structs.fields(endpoint.body)]
    doc = {"__doc__": endpoint.body.__doc__}
    kind: Any = msgspec.defstruct(
        endpoint.body.__name__, fields, bases=(Body,), namespace=doc, kw_only=True
    )

    async def handle(request: web.Request) -> web.StreamResponse:
        body, models = await read_body(request, kind), request.app[MODELS]
        frontend = frontend_of(request)
        found = models.find(getattr(body, endpoint.variant))
        if endpoint.makes and found not in (None, frontend):
            raise RequestError("another model has this name", param=endpoint.variant)
        serving = (found or frontend).variants.named(endpoint.feature)
        return json_response(Status(status=await endpoint.answer(serving, body)))

    handle.__doc__ = endpoint.answer.__doc__
    return Route("POST", endpoint.path, handle, kind, Status, example=endpoint.example)


_SSE = "text/event-stream"
_OF_AUDIO: Any = {
    "form": TranscriptionForm,
    "stream": _SSE,
    "events": (TranscriptDelta, TranscriptDone),
}
_OF_RESPONSES: Any = {"stream": _SSE, "events": responses.ResponseDialect.event_types}

#: What acts on the whole server, for holders of an admin key.
_OF_ADMINS = (
    _post("/abort", control.abort),
    *(_of_feature(each) for half in load_halves("endpoints") for each in half.ENDPOINTS),
    _post("/pause", control.pause),
    _post("/resume", control.resume, query=ModelQuery),
    _get("/is_paused", control.show_paused, query=ModelQuery),
    _post("/sleep", control.sleep),
    _post("/wake_up", control.wake_up),
    _get("/is_sleeping", control.show_sleeping, query=ModelQuery),
    _get("/weight_info", control.show_weights, query=ModelQuery),
    _post("/update_weight_version", control.update_version),
    _post("/update_weights_from_disk", control.update_from_disk),
    _post("/init_weight_transfer_engine", control.join_group),
    _post("/start_weight_update", control.start_update),
    _post("/update_weights", control.update_weights),
    _post("/finish_weight_update", control.finish_update),
    _post("/collective_rpc", control.call_workers),
    _post("/reset_prefix_cache", control.reset_prefix_cache),
    _get("/experts/placement", control.make_placement),
)
ADMIN_PATHS = frozenset(route.path for route in _OF_ADMINS)

ROUTES: tuple[Route, ...] = (
    # OpenAI
    _dialect("/v1/completions", completions.CompletionDialect),
    _dialect("/v1/chat/completions", chat.ChatDialect),
    _dialect("/chat/completions", chat.ChatDialect),
    _dialect("/v1/responses", responses.ResponseDialect),
    _dialect("/responses", responses.ResponseDialect),
    _post("/v1/responses/input_tokens", responses.count_input_tokens),
    _get("/v1/responses/{id}", responses.get_response, Response, **_OF_RESPONSES),
    _delete("/v1/responses/{id}", responses.delete_response),
    _post("/v1/responses/{id}/cancel", responses.cancel_response),
    _get("/v1/responses/{id}/input_items", responses.list_input_items),
    _post("/v1/conversations", objects.create_conversation),
    _post("/v1/conversations/{id}/items", objects.create_items),
    _get("/v1/conversations/{id}/items", objects.list_items),
    _get("/v1/conversations/{id}/items/{item_id}", objects.get_item),
    _delete("/v1/conversations/{id}/items/{item_id}", objects.delete_item),
    _get("/v1/conversations/{id}", CONVERSATIONS.get, objects.Conversation),
    _post("/v1/conversations/{id}", objects.update_conversation),
    _delete("/v1/conversations/{id}", CONVERSATIONS.delete),
    _post("/v1/files", objects.upload_file, form=objects.UploadForm),
    _get("/v1/files", FILES.list, query=FILES.query),
    _get("/v1/files/{file_id}", FILES.get, FileObject),
    _get(
        "/v1/files/{file_id}/content", objects.get_content, content_type="application/octet-stream"
    ),
    _delete("/v1/files/{file_id}", FILES.delete),
    _post("/v1/batches", batches.create_batch),
    _get("/v1/batches", BATCHES.list, query=BATCHES.query),
    _get("/v1/batches/{batch_id}", BATCHES.get, BatchObject),
    _post("/v1/batches/{batch_id}/cancel", batches.cancel_batch),
    _post("/v1/audio/transcriptions", audio.transcribe, Transcription, **_OF_AUDIO),
    _post("/v1/audio/translations", audio.translate, Transcription, **_OF_AUDIO),
    # Anthropic
    _dialect("/v1/messages", anthropic.AnthropicDialect),
    _post("/v1/messages/count_tokens", anthropic.count_tokens),
    # Ollama
    _dialect("/api/chat", ollama.ChatDialect),
    _dialect("/api/generate", ollama.GenerateDialect),
    _post("/api/show", info.show_model),
    _get("/api/tags", info.list_tags),
    _get("/api/ps", info.list_running),
    _get("/api/version", info.version),
    _dialect("/api/embed", ollama.EmbedDialect),
    _dialect("/api/embeddings", ollama.EmbeddingDialect),
    # llama.cpp
    _dialect("/completion", llama_cpp.LlamaDialect),
    _dialect("/embedding", llama_cpp.LlamaEmbedDialect),
    _post("/apply-template", llama_cpp.apply_template),
    _get("/props", llama_cpp.props, query=ModelQuery),
    _get("/slots", llama_cpp.slots, query=ModelQuery),
    # Embeddings and the like, tokens
    _dialect("/v1/embeddings", pooling.EmbeddingDialect),
    _dialect("/pooling", pooling.StatesDialect),
    _dialect("/classify", pooling.ClassifyDialect),
    _dialect("/score", scoring.ScoreDialect),
    _dialect("/v1/score", scoring.ScoreDialect),
    _dialect("/rerank", scoring.RerankDialect),
    _dialect("/v1/rerank", scoring.RerankDialect),
    _dialect("/v2/rerank", scoring.RerankDialect),
    _post("/tokenize", tokenization.tokenize),
    _post("/detokenize", tokenization.detokenize),
    # The server and its model
    _get("/v1/models", info.list_models),
    _get("/v1/models/{id:.+}", info.get_model),
    _get("/models", info.list_models),
    _get("/health", info.health),
    _get("/health/live", info.live),
    _get("/health/ready", info.ready),
    _get("/version", info.version),
    _get("/load", info.show_load),
    _get("/tokenizer_info", info.tokenizer_info, query=ModelQuery),
    _get("/metrics", metrics.show_metrics, content_type="text/plain"),
    *_OF_ADMINS,
    # This description of them, and the page at "/"
    _get("/openapi.json", openapi.show_openapi),
    _get("/page/info", page.show_info, query=ModelQuery),
    _get("/page/live", page.stream_live, stream=_SSE, events=(page.LiveState,)),
)


def add_routes(app: web.Application) -> None:
    """Adds all of them to an application."""
    app[limits.ADMIN_PATHS] = ADMIN_PATHS
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
    document: Callable[[], bytes] = cache(lambda: orjson.dumps(openapi.describe(app, ROUTES)))
    app[openapi.DOCUMENT] = document

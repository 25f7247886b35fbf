"""`/openapi.json`: a description of all endpoints (OpenAPI 3.1), and `/docs`, a page that shows it.

Request bodies are described by the types that check them, and replies and the events of streams by
the types that are sent, so they cannot disagree with the server. `api.routes` has a `Route` for
every endpoint, and `EXAMPLES` a body of each type, with which the page lets its reader try a call.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from aioinfer import __version__
from aioinfer.api.context import MODELS
from aioinfer.api.errors import DONE, ERROR_SHAPES, PREFIX, Handler, error_shape
from aioinfer.api.fields import NO_EFFECT
from aioinfer.api.http.limits import MONITORING_PATHS
from aioinfer.api.protocol import NO_EFFECT_TEXT, AnyObject


@dataclass(frozen=True, slots=True)
class Route:
    """An endpoint; its handler's docstring says what it is for.

    Attributes:
        method: of the requests that it answers; GET answers HEAD as well.
        path: of them, with names in braces for the parts that vary.
        handler: the function that answers them.
        body: the type that checks the request's body.
        reply: the type of a reply with status 200, if it has one.
        content_type: of that reply.
        stream: the content type of the stream that the reply is, or may be instead.
        events: the types of the stream's events, but for a failure.
        query: the type of the parameters of the query.
        form: the type of the fields of a form, beside its file, where the body is one.
        example: of a body, if `EXAMPLES` has none.
    """

    method: str
    path: str
    handler: Handler
    body: type | None = None
    reply: Any = None
    content_type: str = "application/json"
    stream: str | None = None
    events: Sequence[type] = ()
    query: type | None = None
    form: type | None = None
    example: Mapping[str, Any] | None = None


_REF = "#/components/schemas/{name}"
_PROMPT = "The capital of France is"
_MESSAGES = [{"role": "user", "content": "Name a river."}]

#: By the name of a body's type: one that the server answers.
EXAMPLES: dict[str, dict[str, Any]] = {
    "CompletionRequest": {"prompt": _PROMPT, "max_tokens": 16, "temperature": 0},
    "ChatRequest": {"messages": _MESSAGES, "max_tokens": 32},
    "MessagesRequest": {"messages": _MESSAGES, "max_tokens": 32},
    "CountTokensRequest": {"messages": _MESSAGES},
    "ResponseRequest": {"input": "Name a river.", "max_output_tokens": 32},
    "CreateConversation": {"items": _MESSAGES, "metadata": {"topic": "rivers"}},
    "UpdateObject": {"metadata": {"topic": "hills"}},
    "CreateItems": {"items": _MESSAGES},
    "OllamaChat": {"messages": _MESSAGES, "options": {"num_predict": 32}},
    "OllamaGenerate": {"prompt": "Name a river.", "options": {"num_predict": 32}},
    "ShowRequest": {},
    "UpdateFromDisk": {"model_path": "/checkpoints/step-200", "weight_version": "step-200"},
    "JoinGroup": {
        "init_info": {"master_address": "127.0.0.1", "master_port": 29500, "world_size": 2}
    },
    "UpdateWeights": {
        "update_info": {
            "names": ["model.norm.weight"],
            "dtype_names": ["bfloat16"],
            "shapes": [[4096]],
        }
    },
    "FinishUpdate": {"weight_version": "step-200"},
    "CallWorkers": {"method": "report", "args": [1]},
    "NewVersion": {"new_version": "step-200"},
    "OllamaEmbedRequest": {"input": ["a river", "a stream"], "dimensions": 8},
    "OllamaEmbeddingsRequest": {"prompt": "a river"},
    "EmbeddingRequest": {"input": ["a river", "a stream"], "dimensions": 8},
    "PoolingRequest": {"input": "a river", "pooling_type": "mean"},
    "ClassifyRequest": {"input": "a river"},
    "ScoreRequest": {"text_1": "a river", "text_2": ["a stream", "the price of a loaf of bread"]},
    "RerankRequest": {
        "query": "a river",
        "documents": ["the price of a loaf of bread", "a stream"],
    },
    "LlamaCompletion": {"prompt": _PROMPT, "n_predict": 16},
    "LlamaEmbedding": {"content": "a river"},
    "TokenizeRequest": {"prompt": "Hello, world!", "return_token_strs": True},
    "DetokenizeRequest": {"tokens": [1, 2, 3]},
    "AbortRequest": {"request_id": "cmpl-…"},
    "CreateBatch": {
        "input_file_id": "file-…",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    },
}


def describe(app: web.Application, routes: Sequence[Route]) -> dict[str, Any]:
    """Returns the OpenAPI document of an application that has these routes."""
    types = {t for r in routes for t in (r.body, r.reply, *r.events) if t is not None}
    ordered = sorted(types | set(ERROR_SHAPES), key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    schema_of = dict(zip(ordered, schemas, strict=True))
    for schema in components.values():
        _say_why(schema.get("properties", {}))
    del components[AnyObject.__name__]  # which only those fields refer to
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _describe(route, path, schema_of)
    below = app[MODELS].first.config.server.path_prefix + app[PREFIX]()
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


def _describe(route: Route, path: str, schema_of: Mapping[type, Any]) -> dict[str, Any]:
    """Returns the description of an endpoint, whose path is `path` in OpenAPI's notation."""
    summary, _, rest = (inspect.getdoc(route.handler) or "").partition("\n\n")
    content: dict[str, Any] = {}
    if route.reply is not None:
        content["application/json"] = {"schema": schema_of[route.reply]}
    elif route.content_type != "application/json":
        content[route.content_type] = {}
    elif route.stream is None:
        content["application/json"] = {"schema": {"type": "object"}}
    if route.stream is not None:
        content[route.stream] = {"schema": _event(route, path, schema_of)}
    error = {"content": {"application/json": {"schema": schema_of[error_shape(path)]}}}
    found: dict[str, Any] = {
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', path)}".rstrip("_"),
        "summary": " ".join(summary.split()),
        "responses": {
            "200": {"description": "Success", "content": content},
            "4XX": {"description": "The request is at fault", **error},
            "5XX": {"description": "The server cannot answer it, now or at all", **error},
        },
    }
    if rest:
        found["description"] = " ".join(rest.split())
    if path not in MONITORING_PATHS:
        found["security"] = [{"key": []}]
    if parameters := _parameters(route, path):
        found["parameters"] = parameters
    if route.body is not None:
        body = {
            "schema": schema_of[route.body],
            "example": route.example or EXAMPLES[route.body.__name__],
        }
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
    elif route.form is not None:
        form = {"multipart/form-data": {"schema": _form_of(route.form)}}
        found["requestBody"] = {"required": True, "content": form}
    return found


def _event(route: Route, path: str, schema_of: Mapping[type, Any]) -> dict[str, Any]:
    """Returns the schema of an event of a stream: of a line of JSON, or, as in OpenAPI 3.2, of the
    fields of a server-sent event, whose `data` is a text. A stream may end with a failure."""
    failure = error_shape(path)
    event = {"anyOf": [schema_of[kind] for kind in (*route.events, failure)]}
    if route.stream != "text/event-stream":
        return event
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    data["contentSchema"] = event
    if DONE in failure.event:
        data = {"anyOf": [{"enum": ["[DONE]"]}, data]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _schema_of(kind: type) -> dict[str, Any]:
    """Returns the schema of a type of texts, with its parts within it."""
    (found,), parts = msgspec.json.schema_components([kind])
    schema: dict[str, Any] = parts[found["$ref"].rpartition("/")[2]]
    return schema


def _form_of(kind: type) -> dict[str, Any]:
    """Returns the schema of a form of a file and the fields of a type."""
    schema = _schema_of(kind)
    properties = {
        f"{name}[]" if each.get("type") == "array" else name: each
        for name, each in schema["properties"].items()
    }
    file = {"type": "string", "format": "binary"}
    return {
        "type": "object",
        "properties": {"file": file, **properties},
        "required": ["file", *schema["required"]],
        "additionalProperties": False,
    }


def _parameters(route: Route, path: str) -> list[dict[str, Any]]:
    found = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    asked = {} if route.query is None else _schema_of(route.query)["properties"]
    return found + [{"name": name, "in": "query", "schema": each} for name, each in asked.items()]


#: Makes the description of an application's endpoints as JSON, when it is first called.
DOCUMENT: web.AppKey[Callable[[], bytes]] = web.AppKey("openapi")


async def show_openapi(request: web.Request) -> web.Response:
    """Returns this description."""
    data = await asyncio.to_thread(request.app[DOCUMENT])
    return web.Response(body=data, content_type="application/json")

"""Error replies in OpenAI's JSON shape, or in the shape of the API that the path belongs to.

`json_errors` is the application's outermost middleware. `error_event` is for errors in a stream,
whose status line has been sent.

`PREFIX` is the path below which the application may be mounted in another one.
"""

from __future__ import annotations

import errno
import logging
import os
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, ClassVar, Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from aioinfer import errors

_log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

#: The value of the `Server` header. It names no versions, which would tell attackers what to try.
SERVER_NAME = "aioinfer"
#: The code in the body of an error response.
ERROR_CODE = web.ResponseKey("error_code", str)
#: The message of an error response, as the request log has it.
ERROR_REASON = web.ResponseKey("error_reason", str)

#: Codes of a file system that takes no more data.
_NO_SPACE = frozenset([errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
#: Messages may quote what a client sent, and the client may have sent megabytes.
_MAX_MESSAGE_CHARS = 400


#: Ends a stream of OpenAI's APIs but for Responses.
DONE = b"data: [DONE]\n\n"


class ErrorDetail(Struct, kw_only=True):
    """The details of an error; `param` names the field of the request."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(Struct, kw_only=True):
    """The body of an error, but for the paths of other APIs."""

    #: What ends a stream in which something failed, around the error: some clients wait for
    #: `[DONE]`.
    event: ClassVar[bytes] = b"data: %b\n\n" + DONE

    error: ErrorDetail

    @classmethod
    def of(cls, status: int, body: ErrorReply) -> ErrorReply:
        """Returns the body of an error (see `describe`) in the shape of this API."""
        return body


class AnthropicDetail(Struct, kw_only=True):
    """The details of an error, in the terms of Anthropic's API."""

    type: str
    message: str


class AnthropicError(Struct, kw_only=True):
    """The body of an error below `/v1/messages`. Its messages name the field."""

    event: ClassVar[bytes] = b"event: error\ndata: %b\n\n"

    type: Literal["error"] = "error"
    error: AnthropicDetail

    @classmethod
    def of(cls, status: int, body: ErrorReply) -> AnthropicError:
        """See `ErrorReply.of`."""
        message, param = body.error.message, body.error.param
        if param is not None and param not in message:
            message = f"{param}: {message}"
        kind = "invalid_request_error" if status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(status, kind)
        return cls(error=AnthropicDetail(type=kind, message=message))


class LlamaDetail(Struct, kw_only=True):
    """The details of an error, in the terms of llama.cpp's server: the code is the HTTP status."""

    code: int
    message: str
    type: str
    param: str | None


class LlamaError(Struct, kw_only=True):
    """The body of an error at llama.cpp's paths."""

    event: ClassVar[bytes] = b"data: %b\n\n"

    error: LlamaDetail

    @classmethod
    def of(cls, status: int, body: ErrorReply) -> LlamaError:
        """See `ErrorReply.of`."""
        error, message = body.error, body.error.message
        kind = _LLAMA_CPP_TYPES.get(status, error.type)
        if error.code == "unsupported_parameter":
            kind = "not_supported_error"
        if error.code == "context_length_exceeded":
            kind = "exceed_context_size_error"
            message += " The request exceeds the available context size."
        return cls(error=LlamaDetail(code=status, message=message, type=kind, param=error.param))


class OllamaError(Struct, kw_only=True):
    """The body of an error below `/api`."""

    event: ClassVar[bytes] = b"%b\n"

    error: str

    @classmethod
    def of(cls, status: int, body: ErrorReply) -> OllamaError:
        """See `ErrorReply.of`."""
        return cls(error=body.error.message)


ERROR_SHAPES = ErrorReply, AnthropicError, LlamaError, OllamaError
ErrorShape = type[ErrorReply] | type[AnthropicError] | type[LlamaError] | type[OllamaError]

#: Anthropic's types of errors by HTTP status.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: llama.cpp's types of errors by HTTP status.
_LLAMA_CPP_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    503: "unavailable_error",
}
#: Paths of llama.cpp's API.
_LLAMA_CPP_PATHS = frozenset(("/apply-template", "/completion", "/embedding", "/props", "/slots"))


def error_shape(path: str) -> ErrorShape:
    """Returns the type of the errors of the API that a path belongs to."""
    if path.startswith("/v1/messages"):
        return AnthropicError
    if path in _LLAMA_CPP_PATHS:
        return LlamaError
    return OllamaError if path.startswith("/api/") else ErrorReply


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> ErrorReply:
    """Returns the body of an error; its type follows from the HTTP status, and so does a code that
    is missing. Of a long message only the beginning and the end are kept."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if code is None:
        phrase = HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")
        code = "invalid_value" if status == 400 and param else phrase
    param = None if param is None else shorten(param)
    return ErrorReply(
        error=ErrorDetail(message=shorten(message), type=kind, param=param, code=code)
    )


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Has errors name the fields of a body of another API: `names` has them by the names that the
    engine knows."""
    try:
        yield
    except errors.RequestError as error:
        known, name = error.param or "", names.get(error.param or "")
        if name is not None:
            error.param = name
            if error.message.startswith(f"{known} "):
                error.message = f"{name}{error.message.removeprefix(known)}"
        raise


def shorten(text: str) -> str:
    """Returns a text of a client's as messages quote it: of a long one, its beginning and end."""
    if len(text) <= _MAX_MESSAGE_CHARS:
        return text
    half = _MAX_MESSAGE_CHARS // 2 - 2
    return f"{text[:half]} … {text[-half:]}"


def describe(error: Exception) -> tuple[int, ErrorReply]:
    """Returns the HTTP status and the body that answer an exception.

    An unexpected exception is logged and not shown; its message, which may quote a prompt, is
    neither logged nor shown.
    """
    match error:
        case errors.RequestError():
            body = error_body(error.status, error.message, param=error.param, code=error.code)
            if isinstance(error, errors.RateLimitError):
                body.error.type = error.kind  # as OpenAI has it
            return error.status, body
        case errors.EngineDeadError() | errors.GenerationError() | errors.WorkerCallError():
            return error.status, error_body(error.status, str(error), code=error.code)
        case web.HTTPRequestEntityTooLarge():
            return 413, error_body(413, "the body is too large", code="request_too_large")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            return 405, error_body(
                405, f"{error.method} is not allowed here; use {allowed}", code="method_not_allowed"
            )
        case web.HTTPException():
            return error.status, error_body(error.status, error.text or error.reason)
        case web.RequestPayloadError():
            return 400, error_body(400, "the body does not follow its Transfer-Encoding")
        case OSError() if error.errno in _NO_SPACE:
            message = f"the server cannot store it: {os.strerror(error.errno)}"
            _log.error("a request was answered 507: %s", message)
            return 507, error_body(507, message)
    _log.error("a handler failed; the last line is the kind of exception:\n%s", _trace(error))
    return 500, error_body(500, "internal error; the server's log says more")


def _trace(error: BaseException | None) -> str:
    """Returns where an exception and its causes were raised, and their types."""
    parts: list[str] = []
    while error is not None:
        parts += [f"{type(error).__name__}\n", *reversed(traceback.format_tb(error.__traceback__))]
        error = error.__cause__ or error.__context__
    return "".join(reversed(parts)).rstrip()


def error_event(error: Exception, path: str) -> bytes:
    """Returns what ends a stream of the path's API in which something failed."""
    shape = error_shape(path)
    return shape.event % msgspec.json.encode(shape.of(*describe(error)))


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers every failure of a handler, and every unknown path, with the JSON body of
    `error_body`."""
    try:
        return await handler(request)
    # the client is gone: aiohttp handles the error, and an error reply would not be read
    except ConnectionError:
        raise
    except web.HTTPNotFound:
        return error_response(_unknown_path(request), local_path(request))
    except Exception as error:
        return error_response(error, local_path(request))


def _unknown_path(request: web.Request) -> errors.RequestError:
    """Returns the error that answers a path at which there is nothing, with the one that was meant
    where it is clear: a missing or a doubled `/v1`, further slashes, capital letters."""
    prefix = request.app[PREFIX]()
    known = {
        resource.canonical.removeprefix(prefix).lower(): resource.canonical
        for resource in request.app.router.resources()
    }
    path = "/" + "/".join(part for part in local_path(request).lower().split("/") if part)
    bare = path
    while bare.startswith("/v1/"):
        bare = bare.removeprefix("/v1")
    near = [known[name] for name in (path, f"/v1{bare}", bare) if name in known and name != "/"]
    hint = f"; did you mean {near[0]}?" if near else ""
    return errors.RequestError(
        f"there is nothing at the path {shorten(request.path)}{hint}", status=404
    )


def error_response(error: Exception, path: str = "") -> web.Response:
    """Returns the response that answers an exception, in the shape of the path's API."""
    status, body = describe(error)
    shown = error_shape(path).of(status, body)
    response = json_response(shown, status=status, headers=_headers(status, error))
    response[ERROR_CODE] = body.error.code
    logged = error.logged if isinstance(error, errors.RequestError) else body.error.message
    response[ERROR_REASON] = shorten(logged)
    return response


def _headers(status: int, error: Exception) -> dict[str, str]:
    """Returns the headers that tell a client what to do about an error."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        return {"Allow": error.headers["Allow"]}
    if (seconds := getattr(error, "retry_after_s", None)) is not None:
        return {"Retry-After": str(seconds)}
    return {"WWW-Authenticate": "Bearer"} if status == 401 else {}


def raw_response(status: int, body: Any, headers: bytes = b"") -> bytes:
    """Returns a whole JSON response of HTTP/1.1 that closes its connection, for where there is no
    request that aiohttp could answer. `headers` are further lines, each with its line end."""
    data = msgspec.json.encode(body)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nServer: {SERVER_NAME}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    return head.encode() + headers + b"Connection: close\r\n\r\n" + data


def json_response(
    body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Returns `body`, which may hold msgspec structs, as a JSON response."""
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        headers=headers,
        content_type="application/json",
    )


#: The prefix of all paths where the application is mounted in another one; else empty.
PREFIX: web.AppKey[Callable[[], str]] = web.AppKey("prefix")


def local_path(request: web.Request) -> str:
    """Returns a request's path within the application, whatever it is mounted below."""
    return request.path.removeprefix(request.app[PREFIX]())

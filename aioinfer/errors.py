"""The errors that cross module borders: a request that is at fault, and an engine that is gone."""

from __future__ import annotations

import os


class AioinferError(Exception):
    """The base of every error that aioinfer raises on purpose."""


class ConfigError(AioinferError):
    """The configuration is wrong. The message names the key and a right value."""


class RequestError(AioinferError, ValueError):
    """A request is at fault; nothing of it was scheduled.

    Attributes:
        param: the request's parameter that is wrong (`"temperature"`), if one can be named.
        status: the HTTP status to answer with (400 unless something more exact fits).
        code: a machine-readable reason (`"context_length_exceeded"`), if there is one.
        logged: the message as logs have it: without the text of a value that may be a prompt.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        logged: str | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.logged = message if logged is None else logged
        self.param = param
        self.status = status
        self.code = code


class FieldError(RequestError):
    """A field of a request is at fault. The message begins with its name, as in "n must be 1"."""

    def __init__(self, param: str, text: str, code: str | None = None):
        super().__init__(f"{param} {text}", param=param, code=code)


class UnsupportedFieldError(FieldError):
    """A field, or what it asks for, is known and not supported."""

    def __init__(self, param: str, text: str = "is not supported here"):
        super().__init__(param, text, "unsupported_parameter")


class OverloadedError(RequestError):
    """As much work waits as may; the same request may be taken on after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1):
        super().__init__(message, status=503, code="overloaded")
        self.retry_after_s = retry_after_s


class NotReadyError(RequestError):
    """The server is starting or shutting down; another one may take the request on, or this one
    after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int = 1):
        super().__init__(message, status=503, code="not_ready")
        self.retry_after_s = retry_after_s


class RateLimitError(RequestError):
    """An API key has used up one of its limits; the same request may pass after `retry_after_s`
    seconds.

    Attributes:
        kind: which limit: "requests", "tokens" or "concurrency".
    """

    def __init__(self, message: str, *, kind: str, retry_after_s: int):
        super().__init__(message, status=429, code="rate_limit_exceeded")
        self.kind = kind
        self.retry_after_s = retry_after_s


class EngineDeadError(AioinferError):
    """A worker died or hung, or the engine was closed: no request can be served any more. A server
    that is started in its place may take the request on after `retry_after_s` seconds."""

    status, code, retry_after_s = 503, "engine_dead", 10  # of the reply


class WorkerCallError(AioinferError):
    """The workers refused a call, or it failed on one of them; they go on as before."""

    status, code = 400, "worker_call_failed"  # of the reply


class IntegrityError(AioinferError, AssertionError):
    """Records of the scheduler or the engine contradict each other: a fault of aioinfer itself."""


class GenerationError(AioinferError):
    """One request failed while it ran (its logits held NaN, say); the others go on."""

    status, code = 500, "generation_failed"  # of the reply


class NoTokenError(GenerationError):
    """The restrictions of a request excluded every token at some place of its output."""

    status, code = 400, "no_token_allowed"


def no_answer(url: str, error: Exception) -> str:
    """Returns the sentence that says that a connection to the server at `url` failed or broke off.

    Args:
        url: as the user knows it.
        error: of the system, or of an HTTP client that wraps one as its `os_error`.
    """
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    if (tls := getattr(cause, "reason", None)) is not None:  # of `ssl.SSLError`
        reason = f"TLS fails ({getattr(cause, 'verify_message', '') or tls})"
    elif number is not None and number > 0:
        reason = os.strerror(number).lower()
    else:  # of a name, which has numbers of its own
        reason = (getattr(cause, "strerror", None) or "").lower()
    return f"nothing answers at {url}{f': {reason}' if reason else ''}"

"""The path prefix of the application, which may be mounted below a path of another one."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

#: The prefix of all paths where the application is mounted in another one; else empty.
PREFIX: web.AppKey[Callable[[], str]] = web.AppKey("prefix")


def local_path(request: web.Request) -> str:
    """Returns a request's path within the application, whatever it is mounted below."""
    return request.path.removeprefix(request.app[PREFIX]())

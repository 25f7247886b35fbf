"""What the server reports about itself: `/v1/models`, `/v1/models/{id}`, `/version`, `/health` and
what is below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from aioinfer import __version__
from aioinfer.api.context import FRONTEND, STARTED, check_model
from aioinfer.api.errors import json_response
from aioinfer.errors import EngineDeadError, NotReadyError


@dataclass(slots=True)
class Readiness:
    """Whether load balancers should send requests.

    Attributes:
        obstacle: why not; None when they should.
    """

    obstacle: str | None = None


READINESS = web.AppKey("readiness", Readiness)


async def list_models(request: web.Request) -> web.Response:
    """Lists the names under which the model is served."""
    frontend = request.app[FRONTEND]
    return json_response(
        {
            "object": "list",
            "data": [_card(request.app, name) for name in frontend.config.served_model_names],
        }
    )


async def get_model(request: web.Request) -> web.Response:
    """Describes the model under one of its names; 404 for any other."""
    name = request.match_info["id"]
    check_model(request.app[FRONTEND].config, name)
    return json_response(_card(request.app, name))


async def health(request: web.Request) -> web.Response:
    """Answers 200 while requests can be served, and 503 with the reason once they cannot."""
    frontend = request.app[FRONTEND]
    if not frontend.is_healthy():
        raise EngineDeadError(frontend.dead_reason)
    return json_response({"status": "ok"})


async def live(request: web.BaseRequest) -> web.Response:
    """Answers 200 as long as the process answers at all: while the model is being loaded, when
    requests end, and when the engine is dead."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Answers 200 while requests should be sent to this server, and 503 with the reason before and
    after that."""
    if (obstacle := request.app[READINESS].obstacle) is not None:
        raise NotReadyError(obstacle)
    return await health(request)


async def version(request: web.Request) -> web.Response:
    """Returns the version of aioinfer."""
    return json_response({"version": __version__})


def _card(app: web.Application, name: str) -> dict[str, Any]:
    frontend = app[FRONTEND]
    return {
        "id": name,
        "object": "model",
        "created": app[STARTED],
        "owned_by": "aioinfer",
        "root": frontend.config.model.path,
        "parent": None,
        "max_model_len": frontend.max_model_len,
    }

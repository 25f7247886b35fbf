"""What the server reports about itself: `/v1/models`, `/v1/models/{id}`, `/version`, `/health` and
what is below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web

from aioinfer import __version__
from aioinfer.api.context import FRONTEND, STARTED, check_model
from aioinfer.api.errors import json_response
from aioinfer.engine.recovery import EngineState
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
    """Answers 200 while an engine lives, and 503 with the reason once none does.

    Where not all serve, the reply has the state of each (see `EngineState`).
    """
    frontend = request.app[FRONTEND]
    if not frontend.is_healthy():
        raise EngineDeadError(frontend.dead_reason)
    states = [engine.state for engine in frontend.engines]
    if all(state is EngineState.SERVING for state in states):
        return json_response({"status": "ok"})
    return json_response({"status": "degraded", "engines": [state.value for state in states]})


async def live(request: web.BaseRequest) -> web.Response:
    """Answers 200 as long as the process answers at all: while the model is being loaded, when
    requests end, and when the engine is dead."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Answers 200 while requests should be sent to this server, and 503 with the reason before and
    after that, and while no engine serves."""
    if (obstacle := request.app[READINESS].obstacle) is not None:
        raise NotReadyError(obstacle)
    frontend = request.app[FRONTEND]
    if frontend.is_healthy() and not frontend.is_ready():
        raise NotReadyError("the workers of all engines are being started anew")
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

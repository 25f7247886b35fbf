"""What the server reports about itself: `/v1/models`, `/v1/models/{id}`, `/health`, `/version`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from aioinfer import __version__
from aioinfer.api.context import FRONTEND, STARTED, check_model
from aioinfer.api.errors import json_response
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import EngineDeadError


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

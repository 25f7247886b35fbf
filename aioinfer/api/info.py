"""What the server says about itself: `/v1/models`, `/v1/models/{id}`, `/health`, `/version`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from aioinfer import __version__
from aioinfer.api.context import ENGINE, STARTED, check_model
from aioinfer.api.errors import json_response
from aioinfer.errors import EngineDeadError


async def list_models(request: web.Request) -> web.Response:
    """Lists the names under which the model is served."""
    engine = request.app[ENGINE]
    return json_response({"object": "list", "data": [_card(request.app, name) for name in engine.config.served_model_names]})


async def get_model(request: web.Request) -> web.Response:
    """Describes one of them."""
    name = request.match_info["id"]
    check_model(request.app[ENGINE].config, name)
    return json_response(_card(request.app, name))


async def health(request: web.Request) -> web.Response:
    """Answers 200 while requests can be served, and 503 with the reason once they cannot."""
    engine = request.app[ENGINE]
    if not engine.is_healthy():
        raise EngineDeadError(engine.dead_reason)
    return json_response({"status": "ok"})


async def version(request: web.Request) -> web.Response:
    """Returns the version of aioinfer."""
    return json_response({"version": __version__})


def _card(app: web.Application, name: str) -> dict[str, Any]:
    engine = app[ENGINE]
    return {
        "id": name,
        "object": "model",
        "created": app[STARTED],
        "owned_by": "aioinfer",
        "root": engine.config.model.path,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }

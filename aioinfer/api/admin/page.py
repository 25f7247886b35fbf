"""The page at `/`: a chat with the served model, and a live view of the engines; `/docs`: the
endpoints.

Its files are in `aioinfer/page` and are sent as they are, but for the common head of the two pages,
which is put before each; `aioinfer/page/vendor` holds code of others, with its licences. All their
URLs are relative, so they work below any path. `GET /page/info` returns the data that the page
needs for a chat, and `GET /page/live` streams the state of the engines for as long as the page is
visible. `server` adds the routes and ends the streams; `limits` asks no key for the files,
since a browser has none before the page has asked the user for it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from aiohttp import web
from msgspec import Struct

from aioinfer.api.admin.control import expert_load
from aioinfer.api.admission import DEADLINE
from aioinfer.api.context import MODELS, STREAM_HEADERS, frontend_of
from aioinfer.api.generation import data_event
from aioinfer.config_sections import SAMPLING_DEFAULTS
from aioinfer.engine.engine import Engine
from aioinfer.engine.recovery import EngineState
from aioinfer.features.expert_load.planning import ExpertLoad, imbalance
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS

_FOLDER = Path(__file__).parents[2] / "page"
_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}


#: Each path with its file and its content type: all but the bodies of the pages. Nothing else of
#: the folder is served.
_FILES = {
    f"/page/{file.relative_to(_FOLDER).as_posix()}": (file, _TYPES[file.suffix])
    for file in sorted(_FOLDER.rglob("*.*"))
    if file.suffix in _TYPES
}
#: Each page with its name, which its body and script have, and its title.
_PAGES = {"/": ("page", "aioinfer"), "/docs": ("docs", "aioinfer: endpoints")}
#: The style sheets of each page, in their order.
_STYLES = {"page": ("base", "answer", "engine", "page"), "docs": ("base", "docs")}
#: The paths of all files and pages, and the path of a mounted application itself.
PAGE_PATHS = frozenset((*_FILES, *_PAGES, ""))
#: A model's output is hostile text. Nothing runs and nothing is loaded but the page's own files,
#: and no script can make HTML or code of a string (Trusted Types: the page builds single nodes);
#: pictures may also be data, which is what a message's pictures are.
_FILE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
#: Read once: a page is small, and put together before it is sent.
_HEAD = Template((_FOLDER / "head.html").read_text("utf-8"))
_BODIES = {name: (_FOLDER / f"{name}.html").read_bytes() for name, _ in _PAGES.values()}
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
#: Seconds from one event of the live stream to the next.
_INTERVAL_S = 0.5
_ENDED = web.AppKey("live_streams_ended", asyncio.Event)


def _file_handler(file: Path, content_type: str) -> Handler:
    headers = _FILE_HEADERS | {"Content-Type": content_type}

    async def send_file(request: web.BaseRequest) -> web.StreamResponse:
        return web.FileResponse(file, headers=headers)

    return send_file


def _page_handler(name: str, title: str) -> Handler:
    styles = "\n".join(
        f'  <link rel="stylesheet" href="page/{style}.css">' for style in _STYLES[name]
    )
    head = _HEAD.substitute(name=name, title=title, styles=styles)
    body = head.encode() + _BODIES[name]
    tag = hashlib.sha256(body).hexdigest()[:16]
    headers = _FILE_HEADERS | {"Content-Type": "text/html; charset=utf-8", "ETag": f'"{tag}"'}

    async def send_page(request: web.BaseRequest) -> web.StreamResponse:
        if any(known.value in (tag, "*") for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    return send_page


#: The handler of each path of the pages and their files. They need no model: the server answers
#: them while it loads one, too, and the page shows how far it is.
HANDLERS: dict[str, Handler] = {
    **{path: _file_handler(file, kind) for path, (file, kind) in _FILES.items()},
    **{path: _page_handler(name, title) for path, (name, title) in _PAGES.items()},
}


class LiveState(Struct, kw_only=True):
    """An event of the live stream: the state of each engine at a `time` in seconds."""

    time: float
    engines: list[dict[str, Any]]


class PageInfo(Struct, kw_only=True):
    """What the chat page needs to know of the server.

    Attributes:
        tokenizer: whether texts can be sent at all.
        chat: whether the model has a chat template.
        max_model_len: tokens of a request.
        defaults: the sampling parameters of a request that brings none; `max_tokens` is null where
            it depends on the endpoint.
    """

    tokenizer: bool
    chat: bool
    max_model_len: int
    defaults: dict[str, float | None]


def add_page(app: web.Application) -> None:
    """Adds the routes of the page's files to an application; `routes` has the others."""
    app[_ENDED] = asyncio.Event()
    for path, handler in HANDLERS.items():
        app.router.add_get(path, handler)
    # The path of an application that is mounted below one. By itself it is "/" once more, where the
    # page comes first.
    app.router.add_get("", add_slash)
    app.on_shutdown.append(end_live_streams)


async def end_live_streams(app: web.Application) -> None:
    """Ends the live streams that are open and the ones still to come, so that they do not delay the
    server's end."""
    app[_ENDED].set()


async def add_slash(request: web.BaseRequest) -> web.Response:
    """Redirects `/llm` to `/llm/`: relative URLs of the page begin there."""
    last = request.rel_url.raw_path.rpartition("/")[2]
    return web.Response(status=308, headers={"Location": f"./{last}/"})


async def show_info(request: web.Request) -> PageInfo:
    """Returns the settings and capabilities that the chat page needs."""
    frontend = frontend_of(request)
    defaults = frontend.defaults
    params = defaults.sampling_params()
    values = {name: getattr(params, name) for name in SAMPLING_DEFAULTS if name != "max_tokens"}
    # a float32 as a person writes it: 0.7, and not 0.699999988
    shown = {name: float(f"{value:.7g}") for name, value in values.items()}
    return PageInfo(
        tokenizer=frontend.tokenizer is not None,
        chat=frontend.tokenizer is not None and frontend.tokenizer.has_chat_template,
        max_model_len=frontend.max_model_len,
        defaults=shown | {"max_tokens": defaults.max_tokens},
    )


async def stream_live(request: web.Request) -> web.StreamResponse:
    """Streams the state of the engines twice a second, until the client goes away or the server
    stops.

    An event has the `time` in seconds, and in `engines` the state of each; of
    several models also the `model` of an engine, and whether it is `asleep`. A client that does not
    keep up misses events, and nothing is queued for it.
    """
    request[DEADLINE].lift()  # a live stream has none
    models, ended = request.app[MODELS], request.app[_ENDED]
    owners = [each for each in models for _ in each.engines]
    engines = [engine for each in models for engine in each.engines]
    response = web.StreamResponse(headers=STREAM_HEADERS)
    await response.prepare(request)
    last_steps, last_reports = [-1] * len(engines), [0] * len(engines)
    with ExitStack() as watching:
        for engine in engines:
            watching.enter_context(engine.metrics.steps.watched())
        while not ended.is_set():
            if request.transport is not None and not request.transport.get_write_buffer_size():
                states = [
                    engine_state(engine, *last)
                    for engine, *last in zip(engines, last_steps, last_reports, strict=True)
                ]
                if len(models) > 1:
                    for state, owner in zip(states, owners, strict=True):
                        state["model"] = owner.config.name
                        state["asleep"] = owner.control.sleep_level > 0
                event = LiveState(time=time.perf_counter(), engines=states)
                await response.write(data_event(event))
                last_steps = [
                    state["log"][-1].step_id if state["log"] else last
                    for state, last in zip(states, last_steps, strict=True)
                ]
                last_reports = [expert_load(engine).version for engine in engines]
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _INTERVAL_S)
    return response


def engine_state(engine: Engine, last_step: int, last_report: int) -> dict[str, Any]:
    """Returns the state of an engine as the page reads it. It costs some microseconds, and nothing
    that grows with the load.

    `dead` says why the engine is dead, if it is; `restart` is `[attempt, attempts]` while the
    workers are restarted; `stages` has `[busy, idle]` of each pipeline stage in seconds
    (`StageTime`), where there are several. `preemptions` and all that follow up to `finished` are
    totals since the start. `log` has the steps after `last_step`, and `experts` is None if no
    tokens of experts were reported since report `last_report`.
    """
    scheduler, metrics = engine.scheduler, engine.metrics
    cache, totals = scheduler.kv_cache, scheduler.stats
    return {
        "dead": engine.dead_reason,
        "restart": _restart(engine),
        "slots": scheduler.limits.max_num_seqs,
        "running": scheduler.num_running,
        "waiting": scheduler.num_waiting,
        "blocks": cache.num_blocks,
        "block_size": scheduler.limits.block_size,
        "blocks_used": cache.num_blocks - cache.num_free,
        "blocks_cached": cache.num_free_cached,
        "preemptions": totals.preemptions,
        "steps": totals.steps,
        "wasted_rows": totals.wasted_rows,
        "prefix_queried": totals.prefix_queried,
        "prefix_hit": totals.prefix_hit,
        "draft_tokens": metrics.counts[DRAFT_TOKENS],
        "accepted_tokens": metrics.counts[ACCEPTED],
        "prompt_tokens": metrics.prompt_tokens,
        "generation_tokens": metrics.generation_tokens,
        "finished": metrics.finished,
        "stages": engine.stage_times(),
        "log": metrics.steps.since(last_step),
        "experts": expert_state(expert_load(engine), last_report),
    }


def expert_state(load: ExpertLoad, last_report: int) -> dict[str, Any] | None:
    """Returns how the tokens of the last minutes were spread over the experts, if that was reported
    since report `last_report`.

    `layer` is the one whose busiest expert has the most tokens by the mean of its layer, and
    `imbalance` this quotient; `rank_imbalance` is that of ranks, if they have experts of their own.
    `cells` has a byte for each expert, layer by layer, in base64: its tokens by the mean of its
    layer, in 64ths, 255 at most.
    """
    if load.version == last_report:
        return None
    tokens = load.by_expert(load.recent)
    uneven, of_ranks = imbalance(tokens), load.by_rank(load.recent)
    mean = np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9)
    worst = int(uneven.argmax())
    return {
        "layers": len(load.layers),
        "experts": load.num_experts,
        "layer": load.layers[worst],
        "imbalance": float(uneven[worst]),
        "rank_imbalance": float(imbalance(of_ranks).max()) if of_ranks.shape[1] else None,
        "cells": base64.b64encode(np.minimum(tokens / mean * 64, 255).astype(np.uint8)).decode(),
    }


def _restart(engine: Engine) -> tuple[int, int] | None:
    """Returns the number of the current attempt to restart the workers, and the maximum number of
    attempts; None if the engine is not restarting."""
    if engine.state is not EngineState.RESTARTING:
        return None
    # a plan may have failed in this very iteration of the loop: the first attempt is to begin
    policy = engine.recovery.policy
    return max(1, policy.num_restarts), policy.max_restarts

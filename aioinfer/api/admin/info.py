"""Information about the server and its models: `/v1/models`, `/v1/models/{id}`, the same as Ollama
has it (`/api/tags`, `/api/ps`, `/api/show`), `/version`, `/health` and the paths below it, `/load`
and `/tokenizer_info`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from aioinfer import __version__
from aioinfer.api.context import MODELS, STARTED, frontend_of, iso_time, name_model
from aioinfer.api.ollama import ShowRequest
from aioinfer.checkpoint.source import WeightFiles, weight_files
from aioinfer.config import ParallelConfig
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_turns import ModelTurns
from aioinfer.engine.recovery import OUTAGE_RETRY_S, EngineState
from aioinfer.errors import EngineDeadError, NotReadyError
from aioinfer.executor.base import WorkerReport


@dataclass(slots=True)
class Readiness:
    """Whether load balancers should send requests.

    Attributes:
        obstacle: why not; None when they should.
    """

    obstacle: str | None = None


#: Sections of the configuration that a text may depend on: how rows are batched decides how sums
#: are rounded.
_SETTINGS_OF_TEXT = ("model", "chat", "cache", "scheduler", "parallel")

#: The header that all of Anthropic's clients send.
_ANTHROPIC = "anthropic-version"

#: How long a model stays that is not to be unloaded, as a duration's largest value says in Ollama.
_FOREVER_S = 292 * 365 * 24 * 3600

READINESS = web.AppKey("readiness", Readiness)


def fingerprint(frontend: Frontend) -> str:
    """Returns an identifier of the software and the settings that a reply's text depends on: `fp_`
    and ten hexadecimal digits. A seed gives the same text as long as the identifier is the same."""
    config = frontend.config
    settings = [asdict(getattr(config, name)) for name in _SETTINGS_OF_TEXT]
    reports = [
        (report.device, report.dtype, report.cache_dtype, report.implementation)
        for report in (engine.report for engine in frontend.engines)
    ]
    known = repr((__version__, settings, reports)).encode()
    return f"fp_{hashlib.sha256(known).hexdigest()[:10]}"


class Status(Struct, kw_only=True):
    """Confirmation that a check or an action has succeeded, with the state of each engine where not
    all serve."""

    status: str
    engines: list[str] | UnsetType = UNSET


class ModelStatus(Struct, kw_only=True):
    """Whether a model is awake, in the words of llama.cpp's router."""

    value: Literal["loaded", "unloaded"]


class Model(Struct, kw_only=True):
    """A name under which a model is served; `status` where there are several models; the type, the
    name to be shown and the time for Anthropic's clients."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "aioinfer"
    root: str | None
    parent: str | None = None
    max_model_len: int | None
    input_modalities: list[str]
    status: ModelStatus | UnsetType = UNSET
    type: Literal["model"] | UnsetType = UNSET
    display_name: str | UnsetType = UNSET
    created_at: str | UnsetType = UNSET


class ModelList(Struct, kw_only=True):
    """All names under which models are served; the whole list is one of Anthropic's pages."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool | UnsetType = UNSET
    first_id: str | UnsetType = UNSET
    last_id: str | UnsetType = UNSET


class ModelDetails(Struct, kw_only=True):
    """The kind of a model, as far as it is known: the format of its files."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class NamedModel(Struct, kw_only=True):
    """A name of a model, with the bytes of its files, or of the memory that it takes."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails


class ListedModel(NamedModel, kw_only=True):
    """A model that can be used, with the bytes of its files."""

    modified_at: str


class ModelTags(Struct, kw_only=True):
    """The reply of `/api/tags`."""

    models: list[ListedModel]


class RunningModel(NamedModel, kw_only=True):
    """A model that is loaded, with the bytes that it takes."""

    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Struct, kw_only=True):
    """The reply of `/api/ps`."""

    models: list[RunningModel]


class ShownModel(Struct, kw_only=True):
    """The reply of `/api/show`."""

    modelfile: str = ""
    parameters: str = ""
    template: str
    details: ModelDetails
    modified_at: str
    model_info: dict[str, Any]
    capabilities: Sequence[str]


class Version(Struct, kw_only=True):
    """The version of aioinfer."""

    version: str


class Load(Struct, kw_only=True):
    """The numbers of queued and running requests."""

    server_load: int
    running: int
    waiting: int
    kv_cache_usage: float
    paused: bool


async def list_models(request: web.Request) -> ModelList:
    """Lists the names under which models are served, and variants of them."""
    cards = [
        _card(request, frontend, name)
        for frontend in request.app[MODELS]
        for name in frontend.model_names()
    ]
    found = ModelList(data=cards)
    if _ANTHROPIC in request.headers:
        found.has_more, found.first_id, found.last_id = False, cards[0].id, cards[-1].id
    return found


async def get_model(request: web.Request) -> Model:
    """Describes a model under one of its names; 404 for any other."""
    name = request.match_info["id"]
    return _card(request, name_model(request, name), name)


async def list_tags(request: web.Request) -> ModelTags:
    """Lists the models, with the size of their weights' files."""
    app, models = request.app, list[ListedModel]()
    for frontend in app[MODELS]:
        files = await _files(frontend)
        modified_at = iso_time(files.modified or app[STARTED])
        models += [
            ListedModel(**_named(name, files, files.size), modified_at=modified_at)
            for name in frontend.config.served_model_names
        ]
    return ModelTags(models=models)


async def list_running(request: web.Request) -> RunningModels:
    """Lists the models that are awake under their first names, with the memory that their workers
    have taken. They stay loaded, which Ollama says by a time long from now."""
    models = [await _running(request, each) for each in request.app[MODELS].awake]
    return RunningModels(models=models)


async def _running(request: web.Request, frontend: Frontend) -> RunningModel:
    files = await _files(frontend)
    name = frontend.config.name
    size = sum(_memory(engine.report, frontend.config.parallel) for engine in frontend.engines)
    is_on_host = frontend.engines[0].report.device.startswith("cpu")
    return RunningModel(
        **_named(name, files, size),
        expires_at=iso_time(request.app[STARTED] + _FOREVER_S),
        size_vram=0 if is_on_host else size,
        context_length=frontend.max_model_len,
    )


def _named(name: str, files: WeightFiles, size: int) -> dict[str, Any]:
    """Returns the fields of `NamedModel`."""
    details = ModelDetails(format=files.format)
    return {"name": name, "model": name, "size": size, "digest": files.digest, "details": details}


async def _files(frontend: Frontend) -> WeightFiles:
    return await asyncio.to_thread(weight_files, frontend.config.model, frontend.folder)


def _memory(report: WorkerReport, parallel: ParallelConfig) -> int:
    """Returns the bytes of weights, KV cache and CUDA graphs of an engine's ranks, as if all had as
    much as the largest."""
    in_stage = parallel.tensor_parallel_size
    ranks = in_stage * parallel.pipeline_parallel_size
    weights = sum(size for _, size in report.stages) * in_stage or report.weights_bytes * ranks
    return weights + (report.kv_cache_bytes + report.graph_bytes) * ranks


async def show_model(request: web.Request, body: ShowRequest) -> ShownModel:
    """Describes the model as far as clients look at it."""
    frontend = frontend_of(request)
    tokenizer, files = frontend.tokenizer, await _files(frontend)
    reads = frontend.input_modalities
    capabilities = [
        *(["completion", "tools"] if "text" in reads else []),
        *(["vision"] if "image" in reads else []),
    ]
    return ShownModel(
        template=tokenizer.chat_template_text if tokenizer is not None else "",
        details=ModelDetails(format=files.format),
        modified_at=iso_time(files.modified or request.app[STARTED]),
        model_info={
            "general.architecture": "aioinfer",
            "aioinfer.context_length": frontend.max_model_len,
        },
        capabilities=capabilities if frontend.generates else ["embedding"],
    )


async def health(request: web.Request) -> Status:
    """Answers 200 while an engine of every model lives, and 503 with the reason once none does, or
    while the workers of all have been lost for too long.

    Where not all serve, the reply has the state of each (see `EngineState`).
    """
    models = request.app[MODELS]
    if not models.is_healthy():
        raise EngineDeadError(models.dead_reason)
    if (outage := next(filter(None, (each.control.outage for each in models)), None)) is not None:
        raise NotReadyError(outage, retry_after_s=OUTAGE_RETRY_S)
    states = [engine.state for each in models for engine in each.engines]
    if all(state is EngineState.SERVING for state in states):
        return Status(status="ok")
    return Status(status="degraded", engines=[state.value for state in states])


async def live(request: web.BaseRequest) -> Status:
    """Answers 200 as long as the process answers at all: while the model is being loaded, when
    requests end, and when the engine is dead."""
    return Status(status="ok")


async def ready(request: web.Request) -> Status:
    """Answers 200 while requests should be sent to this server, and 503 with the reason before and
    after that, and while no engine serves."""
    if (obstacle := request.app[READINESS].obstacle) is not None:
        raise NotReadyError(obstacle)
    obstacles = [_obstacle(turns) for turns in request.app[MODELS].turns]
    if all(obstacles):
        raise NotReadyError(obstacles[0])
    return await health(request)


def _obstacle(turns: ModelTurns) -> str:
    """Returns why requests should be sent to none of these models; "" if they should."""
    frontend = turns.awake
    if frontend.control.sleep_level and not turns.is_swapping:
        return "the model sleeps"
    if frontend.control.is_paused and not turns.is_swapping:
        return "the server is paused"
    if frontend.is_healthy() and not frontend.is_ready():
        return "the workers of all engines are being restarted"
    return ""


async def version(request: web.Request) -> Version:
    """Returns the version of aioinfer."""
    return Version(version=__version__)


async def show_load(request: web.Request) -> Load:
    """Returns the numbers of queued and running requests on all engines: `server_load`, as in vLLM,
    is their sum. The rest is of the models that are awake: the fullest cache, and whether all are
    paused."""
    models = request.app[MODELS]
    found = [each.stats() for each in models]
    running, queued = (int(sum(each[name] for each in found)) for name in ("running", "waiting"))
    return Load(
        server_load=running + queued,
        running=running,
        waiting=queued,
        kv_cache_usage=max(each.stats()["kv_cache_usage"] for each in models.awake),
        paused=all(
            turns.awake.control.is_paused and not turns.is_swapping for turns in models.turns
        ),
    )


async def tokenizer_info(request: web.Request) -> dict[str, Any]:
    """Describes the tokenizer: its special tokens, which vLLM's clients read as `eos_token` and the
    like, and its chat template."""
    frontend = frontend_of(request)
    described = frontend.require_tokenizer().describe()
    sizes = {"vocab_size": frontend.vocab_size, "max_model_len": frontend.max_model_len}
    return described["special_tokens"] | described | sizes


def _card(request: web.Request, frontend: Frontend, name: str) -> Model:
    app = request.app
    is_awake, variant = frontend in app[MODELS].awake, frontend.variants.find(name)
    card = Model(
        id=name,
        created=app[STARTED],
        root=frontend.config.model.path if variant is None else variant.root,
        parent=None if variant is None else frontend.config.name,
        max_model_len=frontend.max_model_len,
        input_modalities=frontend.input_modalities,
        status=UNSET
        if len(app[MODELS]) == 1
        else ModelStatus(value="loaded" if is_awake else "unloaded"),
    )
    if _ANTHROPIC in request.headers:
        card.type, card.display_name = "model", name
        card.created_at = iso_time(card.created)
    return card

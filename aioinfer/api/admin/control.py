"""Endpoints behind an admin key: what acts on the whole server (`POST /pause`, `/resume`, `/sleep`,
`/wake_up`, `/abort` and `/reset_prefix_cache`), and `GET /experts/placement`, which makes a file
for `parallel.expert_parallel` of the load of a mixture's experts.

`limits` checks the key before a handler sees the request.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from aiohttp import web
from msgspec import Meta, Struct
from msgspec.structs import asdict

from aioinfer.api.admin.info import Status
from aioinfer.api.context import MODEL, MODELS, ModelQuery, frontend_of
from aioinfer.api.decoding import NO_CONTROLS, Body
from aioinfer.checkpoint.source import resolve_model
from aioinfer.engine.engine import Engine
from aioinfer.engine.model_control import Mode, ModelControl, Tag
from aioinfer.errors import ConfigError, FieldError, RequestError
from aioinfer.features.expert_load.planning import ExpertLoad, Planning, place_experts
from aioinfer.ipc.expert_placement import ExpertPlacement

#: The name of weights. Responses have it as a header, where control characters are forbidden.
Version = Annotated[str, Meta(max_length=256, pattern=NO_CONTROLS)]


class PauseQuery(ModelQuery, kw_only=True):
    """The query of `/pause`."""

    mode: Mode = "keep"
    clear_cache: bool = False


class SleepQuery(Struct, kw_only=True):
    """The query of `/sleep`."""

    level: Literal[1, 2] = 1
    mode: Mode = "keep"


class WakeQuery(Struct, kw_only=True):
    """The query of `/wake_up`."""

    tags: list[Tag] = []


class PlacementQuery(Struct, kw_only=True):
    """The query of `/experts/placement`; the bounds, above what any server has, bound the time that
    a reply takes."""

    ranks: Annotated[int, Meta(ge=1, le=1024)] | None = None
    copies: Annotated[int, Meta(ge=0, le=4096)] = 0


class AbortRequest(Body, kw_only=True):
    """`POST /abort`. `request_id` is the `X-Request-Id` of a request, or the `id` of its reply."""

    request_id: str


class AbortReply(Struct, kw_only=True):
    """The number of aborted requests: one for each prompt of the body."""

    status: Literal["aborted"] = "aborted"
    count: int


class UpdateFromDisk(Body, kw_only=True):
    """`POST /update_weights_from_disk`. `model_path` is a folder of the server, a hub id or
    `package:NAME/FOLDER`; `weight_version` names the weights in answers, by default the number of
    updates. `mode` is that of `/pause`."""

    model_path: Annotated[str, Meta(min_length=1)]
    weight_version: Version | None = None
    mode: Mode = "keep"


class GroupInfo(Struct, kw_only=True):
    """A process group of a trainer, rank 0, which listens at the address, and the workers, which
    are the ranks from `rank_offset` on. `backend` is torch's, by default NCCL on GPUs and gloo on
    CPUs; whoever does not join or send within `timeout_s` seconds is given up."""

    master_address: str
    master_port: Annotated[int, Meta(ge=1, le=65535)]
    world_size: Annotated[int, Meta(ge=2)]
    rank_offset: Annotated[int, Meta(ge=1)] = 1
    group_name: Annotated[str, Meta(min_length=1, max_length=256)] = "weight_update_group"
    backend: Literal["nccl", "gloo"] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=240)] = 120.0


class JoinGroup(Body, kw_only=True):
    """`POST /init_weight_transfer_engine`."""

    init_info: GroupInfo


class TensorInfo(Struct, kw_only=True):
    """Tensors of a checkpoint, whole, with torch's names of types. With `ipc_handles`, of each a
    handle by GPU (`aioinfer.worker.tensor_handles` makes them), they are read from another process
    on the same GPU; without, rank `source` of the group broadcasts them in this order."""

    names: Annotated[list[str], Meta(min_length=1, max_length=16384)]
    dtype_names: list[str]
    shapes: list[list[Annotated[int, Meta(ge=0)]]]
    ipc_handles: list[dict[str, dict[str, Any]]] | None = None
    source: Annotated[int, Meta(ge=0)] = 0


class UpdateWeights(Body, kw_only=True):
    """`POST /update_weights`."""

    update_info: TensorInfo


class FinishUpdate(Body, kw_only=True):
    """`POST /finish_weight_update`. `weight_version` as in `/update_weights_from_disk`."""

    may_be_absent: ClassVar[bool] = True

    weight_version: Version | None = None


class CallWorkers(Body, kw_only=True):
    """`POST /collective_rpc`: a method of `parallel.worker_extension`, and its arguments. Workers
    that have not answered after `timeout` seconds are replaced."""

    method: Annotated[str, Meta(min_length=1)]
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    timeout: Annotated[float, Meta(gt=0, le=3600)] | None = None


class CallResults(Struct, kw_only=True):
    """The results of a method, by rank, engine by engine; as text if JSON has nothing like it."""

    results: list[Any]


class NewVersion(Body, kw_only=True):
    """`POST /update_weight_version`."""

    new_version: Version


class WeightInfo(Struct, kw_only=True):
    """The version of the weights."""

    weight_version: str


class UpdateReply(WeightInfo, kw_only=True):
    """The version of the new weights; `message` is for people."""

    success: Literal[True] = True
    message: str = "the weights are updated"


class Paused(Struct, kw_only=True):
    """`GET /is_paused`."""

    is_paused: bool


class Sleeping(Struct, kw_only=True):
    """`GET /is_sleeping`."""

    is_sleeping: bool


class Placement(Struct, kw_only=True):
    """The content of a file for `parallel.expert_parallel`: by layer, the experts of each rank."""

    version: int
    layers: dict[str, list[list[int]]]


async def pause(request: web.Request, query: PauseQuery) -> Status:
    """Lets requests wait until `/resume`: no further step is planned. What happens to requests that
    run says `mode`: they stop where they are ("keep", the default), are finished first ("wait"), or
    end with what they have ("abort"). With `clear_cache` all KV blocks are forgotten. New requests
    are taken, and `/health/ready` is 503 meanwhile."""
    control = _control(request)
    await control.pause(query.mode, clear_cache=query.clear_cache)
    if control.sleep_level and len(request.app[MODELS]) > 1:
        # another model took its place meanwhile; held, it would keep all waiting in its next turn
        await control.end_pause(wakes=False)
        _control(request)
    return Status(status="paused")


async def resume(request: web.Request) -> Status:
    """Goes on with all requests after `/pause`. 409 while the model sleeps."""
    _control(request).resume()
    return Status(status="running")


async def show_paused(request: web.Request) -> Paused:
    """Returns whether requests wait for `/resume` or `/wake_up`."""
    return Paused(is_paused=frontend_of(request).control.is_paused)


async def sleep(request: web.Request, query: SleepQuery) -> Status:
    """Frees the device's memory of weights and KV cache until `/wake_up`; `level` 1 keeps the
    weights in memory of the host, 2 drops them. `mode` is that of `/pause`. New requests wait;
    after "abort" they are answered 503. Does nothing for a model that sleeps."""
    _refuse_turns(request)
    await _control(request).sleep(query.level, query.mode)
    return Status(status="sleeping")


async def wake_up(request: web.Request, query: WakeQuery) -> Status:
    """Takes memory again for what `tags` name, "weights" or "kv_cache", by default for both; then
    requests go on, unless `/pause` was called. After level 2 the weights are loaded again, unless
    there are tags: then an update brings them. Does nothing for a model that is awake."""
    _refuse_turns(request)
    control = _control(request)
    await control.wake_up(query.tags or None)
    return Status(status="sleeping" if control.sleep_level else "awake")


async def show_sleeping(request: web.Request) -> Sleeping:
    """Returns whether weights or KV cache have no memory on the device."""
    return Sleeping(is_sleeping=frontend_of(request).control.sleep_level > 0)


async def mark_version(request: web.Request, response: web.StreamResponse) -> None:
    """Names the version of the weights in a response's head."""
    frontend = request.get(MODEL) or request.app[MODELS].first
    response.headers["X-Weight-Version"] = frontend.control.weight_version


async def show_weights(request: web.Request) -> WeightInfo:
    """Returns the version of the weights, which answers name as well."""
    return WeightInfo(weight_version=frontend_of(request).control.weight_version)


async def update_version(request: web.Request, body: NewVersion) -> UpdateReply:
    """Gives the weights another version, as which answers name them from now on."""
    _control(request).name_weights(body.new_version)
    return UpdateReply(weight_version=body.new_version)


async def update_from_disk(request: web.Request, body: UpdateFromDisk) -> UpdateReply:
    """Loads the weights of a checkpoint of the same model; requests that run go on with them, by
    default with the KV blocks that they have. The prefix cache is emptied. 400 for a checkpoint
    that does not go with the model: nothing has changed then."""
    frontend = frontend_of(request)
    options = replace(frontend.config.model, path=body.model_path)
    try:
        folder = await asyncio.to_thread(resolve_model, options)
    except ConfigError as error:
        raise RequestError(str(error), param="model_path") from error
    control = _control(request)
    await control.update_from_disk(folder, version=body.weight_version, mode=body.mode)
    return UpdateReply(weight_version=control.weight_version)


async def join_group(request: web.Request, body: JoinGroup) -> Status:
    """Has all workers join a process group with a trainer, between two steps, and answers when it
    has formed. 400 if it does not in time."""
    options = asdict(body.init_info)
    await _control(request).join_group(options, options.pop("rank_offset"))
    return Status(status="joined")


async def start_update(request: web.Request) -> Status:
    """Begins an update of the weights: requests that run stop until `/finish_weight_update`."""
    await _control(request).begin_update()
    return Status(status="updating")


async def update_weights(request: web.Request, body: UpdateWeights) -> Status:
    """Loads tensors, of which all are checked before any is. Once a layer has all of its tensors it
    computes with them. 400 for tensors that do not go with the model, or do not come in time."""
    info, control = body.update_info, _control(request)
    known = {"names": info.names, "dtype_names": info.dtype_names, "shapes": info.shapes}
    handles = info.ipc_handles
    lists: list[Any] = [*known.values(), info.names if handles is None else handles]
    if len(set(map(len, lists))) > 1:
        raise FieldError("update_info", "has lists of different lengths")
    if handles is None:
        await control.update("receive_weights", **known, source=info.source)
    else:
        await control.update("open_weights", **known, handles=handles)
    return Status(status="updating")


async def finish_update(request: web.Request, body: FinishUpdate) -> UpdateReply:
    """Ends an update. Requests go on with the new weights, and by default with the KV blocks that
    they have, unless `/pause` was called before; the prefix cache is emptied. 400 if layers lack
    tensors: these have their former weights, and the server stays paused."""
    control = _control(request)
    await control.end_update(body.weight_version)
    return UpdateReply(weight_version=control.weight_version)


async def call_workers(request: web.Request, body: CallWorkers) -> CallResults:
    """Returns the results of a method of `parallel.worker_extension`, called on every worker
    between two steps. 400 if there is no such method, or it fails."""
    control, timeout = _control(request), body.timeout
    results = await control.call_extension(body.method, body.args, body.kwargs, timeout_s=timeout)
    return CallResults(results=results)


def _control(request: web.Request) -> ModelControl:
    """Returns the control of the model that a request names. Raises `RequestError` (409) for one of
    several that sleeps: only requests that name it wake it up."""
    control, models = frontend_of(request).control, request.app[MODELS]
    if len(models) > 1 and control.sleep_level:
        raise RequestError(
            "the model sleeps: a prompt for it wakes it up", status=409, param="model"
        )
    return control


def _refuse_turns(request: web.Request) -> None:
    """Raises `RequestError` (409) if there are several models, which the server has sleep and
    wake up."""
    if len(request.app[MODELS]) > 1:
        raise RequestError(
            "this server has several models, and has them sleep and wake up itself", status=409
        )


async def abort(request: web.Request, body: AbortRequest) -> AbortReply:
    """Aborts a request: its client gets the tokens generated so far, with "abort" as the finish
    reason.

    404 for one that is not known, or has ended.
    """
    wanted = body.request_id

    def is_meant(request_id: str) -> bool:
        # such as cmpl-ID-0: the kind of reply, the request's own id, and the number of the prompt
        reply_id = request_id.rpartition("-")[0]
        return wanted in (request_id, reply_id, reply_id.partition("-")[2])

    count = sum(each.abort(is_meant) for each in request.app[MODELS]) if wanted else 0
    if not count:
        raise RequestError(
            "no request of this id is queued or runs",
            param="request_id",
            status=404,
            code="request_not_found",
        )
    return AbortReply(count=count)


async def reset_prefix_cache(request: web.Request) -> Status:
    """Clears the prefix cache: the next prompts are computed from scratch. Running requests go
    on."""
    for each in request.app[MODELS]:
        each.reset_prefix_cache()
    return Status(status="reset")


def expert_load(engine: Engine) -> ExpertLoad:
    """Returns the load of an engine's experts."""
    return engine.features.of(Planning).load


async def make_placement(request: web.Request, query: PlacementQuery) -> Placement:
    """Returns a placement of the experts for the tokens that they were given since the start, on
    all engines together, for `ranks` tensor-parallel ranks (by default as many as there are), with
    `copies` further copies of experts in each layer (by default none).

    404 where nothing was counted yet, or the model has no experts.
    """
    frontend = frontend_of(request)
    ranks, copies = query.ranks or frontend.config.parallel.tensor_parallel_size, query.copies
    loads = [expert_load(engine) for engine in frontend.engines]
    known = [load for load in loads if load.version]
    if not known:
        raise RequestError("no tokens of experts were counted", status=404, code="nothing_counted")
    tokens = np.sum([load.by_expert(load.totals) for load in known], axis=0)
    if ranks > tokens.shape[1] + copies:
        raise RequestError(f"there are fewer experts than {ranks} ranks", param="ranks")
    placement = await asyncio.to_thread(
        lambda: ExpertPlacement(
            {
                layer: place_experts(row, ranks, copies)
                for layer, row in zip(known[0].layers, tokens.tolist(), strict=True)
            }
        )
    )
    return Placement(**placement.to_json())

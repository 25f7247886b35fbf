"""The endpoints that add and remove adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from aioinfer.errors import ConfigError, RequestError
from aioinfer.features.serving import Endpoint

if TYPE_CHECKING:
    from aioinfer.features.adapters.serving import Serving


class LoadAdapter(Struct, kw_only=True):
    """`POST /v1/load_lora_adapter`. `lora_path` is a folder of the server, a hub id or
    `package:NAME/FOLDER`; with `load_inplace` it replaces an adapter with its name."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool = False


class UnloadAdapter(Struct, kw_only=True):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


async def load_adapter(serving: Serving, body: LoadAdapter) -> str:
    """Adds an adapter: requests name it as their `model`. 400 for one that is not there or does not
    go with the model, or whose name is taken without `load_inplace`."""
    try:
        await serving.add(body.lora_name, body.lora_path, replaces=body.load_inplace)
    except ConfigError as error:
        raise RequestError(str(error), param="lora_path") from error
    return "loaded"


async def unload_adapter(serving: Serving, body: UnloadAdapter) -> str:
    """Removes an adapter; running requests keep it. 404 for one that is not there."""
    serving.remove(body.lora_name)
    return "unloaded"


ENDPOINTS = (
    Endpoint(
        "/v1/load_lora_adapter", "adapters", LoadAdapter, "lora_name", load_adapter, makes=True,
        example={"lora_name": "rivers", "lora_path": "/adapters/rivers"},
    ),
    Endpoint(
        "/v1/unload_lora_adapter", "adapters", UnloadAdapter, "lora_name", unload_adapter,
        example={"lora_name": "rivers"},
    ),
)  # fmt: skip

"""The small messages between the driver of an engine and its other hosts, in JSON: how ranks start,
and how they fail.

JSON holds data alone: what reads it cannot be made to run code.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import orjson

from aioinfer import errors
from aioinfer.errors import AioinferError, EngineDeadError
from aioinfer.ipc.kv_spec import AttentionSpec, KVGroup, KVSpec, LatentSpec, StateSpec
from aioinfer.worker.worker_spec import FailureReport

_SPECS: dict[str, type[KVSpec]] = {
    spec.__name__: spec for spec in (AttentionSpec, LatentSpec, StateSpec)
}


def encode_message(kind: str, **values: Any) -> list[memoryview]:
    """Returns the buffers of a message. Values have JSON's types, or are dataclasses."""
    return [memoryview(orjson.dumps({"kind": kind, **values}))]


def decode_message(payload: bytes | memoryview) -> dict[str, Any]:
    """Returns the values of a message, `kind` among them. Raises ValueError."""
    message = orjson.loads(payload)
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("a message without a kind")
    return message


def plain_report(report: Any) -> dict[str, Any]:
    """Returns a `LoadReport` as plain values."""
    groups = [
        {"type": type(group.spec).__name__, "spec": group.spec, "layers": group.layers}
        for group in report.groups
    ]
    ranges = {
        name: {"range": [value.start, value.stop]}
        for name, value in _fields(report).items()
        if isinstance(value, range)
    }
    return _fields(report) | ranges | {"groups": groups}


def load_report(plain: dict[str, Any]) -> Any:
    """Returns the `LoadReport` of plain values."""
    from aioinfer.worker.worker import LoadReport

    groups = tuple(
        KVGroup(_spec(group["type"], group["spec"]), tuple(group["layers"]))
        for group in plain["groups"]
    )
    values = {name: _restored(value) for name, value in plain.items()}
    return LoadReport(**values | {"groups": groups})


def _spec(kind: str, fields: dict[str, Any]) -> KVSpec:
    """Returns the specification of a KV group of plain values."""
    return _SPECS[kind](**{name: _restored(value) for name, value in fields.items()})


def _restored(value: Any) -> Any:
    """Returns a field as it was before JSON, which knows neither tuples nor ranges."""
    if isinstance(value, dict) and "range" in value:
        return range(*value["range"])
    return tuple(value) if isinstance(value, list) else value


def plain_failure(report: FailureReport) -> dict[str, Any]:
    """Returns a rank's failure as plain values."""
    error = report.error and [type(report.error).__name__, str(report.error)]
    return _fields(report) | {"error": error}


def failure_report(plain: dict[str, Any], behind_ns: int) -> FailureReport:
    """Returns a rank's failure of plain values, from a host whose clock is `behind_ns` behind this
    one's."""
    error: AioinferError | None = None
    if plain["error"] is not None:
        name, text = plain["error"]
        found = getattr(errors, name, None)
        is_plain = isinstance(found, type) and issubclass(found, AioinferError)
        error = found(text) if is_plain and found is not None else EngineDeadError(text)
    return FailureReport(**plain | {"error": error, "at_ns": plain["at_ns"] + behind_ns})


def _fields(value: Any) -> dict[str, Any]:
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}

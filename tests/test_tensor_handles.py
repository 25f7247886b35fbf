"""Handles of a GPU's memory are data, and are checked before they are opened."""

from __future__ import annotations

import base64
from typing import Any

import pytest
import torch

from aioinfer.errors import WorkerCallError
from aioinfer.worker.tensor_handles import open_tensor, read_handle


def handle(**changed: Any) -> dict[str, Any]:
    field = base64.b64encode(bytes(64)).decode()
    values = {
        "stride": [8, 1], "offset": 16, "storage_bytes": 160, "storage_offset": 512,
        "counter_offset": 0, "needs_event": True, "storage": field, "counter": field,
        "event": field,
    }  # fmt: skip
    return values | changed


def test_a_tensor_lies_within_its_storage() -> None:
    assert read_handle(handle(), torch.float32, [3, 8])["storage"] == bytes(64)
    for changed in (
        {"offset": 17}, {"stride": [9, 1]}, {"storage_bytes": 159}, {"stride": [1]},
        {"offset": -1}, {"storage": "%"}, {"stride": [8, -1]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"storage|shape|base64|[Ii]nvalid"):
            read_handle(handle(**changed), torch.float32, [3, 8])
    with pytest.raises(KeyError):
        read_handle({}, torch.float32, [3, 8])


def test_workers_on_a_cpu_open_none() -> None:
    with pytest.raises(WorkerCallError, match="need workers on that GPU"):
        open_tensor({"GPU-1": handle()}, torch.float32, [3, 8], torch.device("cpu"))

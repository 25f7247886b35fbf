"""Handles of the memory of a GPU, by which another process of the host reads a tensor in place:
CUDA inter-process communication, as torch has it, in plain data.

A trainer on the same GPU describes its tensors by `describe_tensors`; workers open them by
`open_tensor`. A handle is data alone: nothing is unpickled. Whoever may send handles can have the
worker read memory of processes of the same user, so the endpoint needs an admin key.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing import reductions

from aioinfer.errors import WorkerCallError

#: The fields of a handle that are bytes, as base64, and those that are integers, beside "stride".
_BYTES = ("storage", "counter", "event")
_INTEGERS = ("offset", "storage_bytes", "storage_offset", "counter_offset")


def describe_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Returns what `POST /update_weights` takes as `update_info` for tensors on a GPU, by name. The
    tensors have to stay as they are until the reply."""
    found: dict[str, Any] = {"names": [], "dtype_names": [], "shapes": [], "ipc_handles": []}
    for name, tensor in tensors:
        _, args = reductions.reduce_tensor(tensor.detach())
        (
            _, size, stride, offset, _, dtype, device, storage, storage_bytes, storage_offset, _,
            counter, counter_offset, event, needs_event,
        ) = args  # fmt: skip
        handle = {
            "stride": list(stride), "offset": offset, "storage_bytes": storage_bytes,
            "storage_offset": storage_offset, "counter_offset": counter_offset,
            "needs_event": bool(needs_event),
        }  # fmt: skip
        for field, value in zip(_BYTES, (storage, counter, event), strict=True):
            handle[field] = base64.b64encode(value or b"").decode()
        found["names"].append(name)
        found["dtype_names"].append(str(dtype).removeprefix("torch."))
        found["shapes"].append(list(size))
        found["ipc_handles"].append({device_id(torch.device("cuda", device)): handle})
    return found


def device_id(device: torch.device) -> str:
    """Returns what names a GPU in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def open_tensor(
    handles: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Returns a tensor of another process, on this device, given its handles by GPU.

    Raises:
        WorkerCallError: there is no handle for this GPU, or it cannot be used.
    """
    if device.type != "cuda":
        raise WorkerCallError("handles of a GPU's memory need workers on that GPU")
    own = handles.get(device_id(device))
    if own is None:
        raise WorkerCallError(f"there is no handle for GPU {device_id(device)} of {device}")
    try:
        return _rebuild(read_handle(own, dtype, shape), dtype, shape, device)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        first = str(error).partition("\n")[0]
        raise WorkerCallError(f"a handle cannot be opened: {first}") from error


def read_handle(
    handle: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[int]
) -> dict[str, Any]:
    """Returns the values of a handle, checked: the tensor lies within its storage. Raises
    `ValueError` or `KeyError`."""
    values: dict[str, Any] = {name: int(handle[name]) for name in _INTEGERS}
    values |= {name: base64.b64decode(handle[name], validate=True) for name in _BYTES}
    values["stride"] = [int(each) for each in handle["stride"]]
    values["needs_event"] = bool(handle["needs_event"])
    numbers = [*shape, *values["stride"], *(values[name] for name in _INTEGERS)]
    if len(values["stride"]) != len(shape) or any(number < 0 for number in numbers):
        raise ValueError("strides and offsets do not go with the shape")
    last = values["offset"] + sum(
        (length - 1) * stride for length, stride in zip(shape, values["stride"], strict=True)
    )
    if math.prod(shape) and (last + 1) * dtype.itemsize > values["storage_bytes"]:
        raise ValueError("the tensor does not lie within its storage")
    return values


def _rebuild(
    values: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    index = torch.cuda.current_device() if device.index is None else device.index
    tensor: torch.Tensor = reductions.rebuild_cuda_tensor(
        torch.Tensor, torch.Size(shape), tuple(values["stride"]), values["offset"],
        torch.UntypedStorage, dtype, index, values["storage"], values["storage_bytes"],
        values["storage_offset"], False, values["counter"], values["counter_offset"],
        values["event"], values["needs_event"],
    )  # fmt: skip
    return tensor

"""The tensors that objects refer to, and their move to other memory, in place: weights get memory
that can be given back (`worker.rank_memory`), or that several layers have in turn (`offload`)."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.extension import Extending
from aioinfer.layers.parallel import ParallelGroup

#: Where tensors begin in a range, in bytes: kernels load 128 bits at a time, and TMA needs 128.
_ALIGNMENT = 512
#: What models refer to and does not belong to them.
_FOREIGN = (Backend, ParallelGroup, Extending, type, types.ModuleType, weakref.ref)
_Found = TypeVar("_Found")
_PLAIN = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


def padded(size: int) -> int:
    """Returns `size` bytes, rounded up to where the next tensor begins."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def find_tensors(owners: Iterable[object]) -> list[torch.Tensor]:
    """Returns all tensors that objects refer to; see `find_all`."""
    return find_all(owners, torch.Tensor)


def find_all(owners: Iterable[object], kind: type[_Found]) -> list[_Found]:
    """Returns all objects of a class that objects are or refer to, directly or through other
    objects: through attributes, containers, closures and bound arguments, but not through
    `_FOREIGN` ones, tensors, or what is found."""
    seen: set[int] = set()
    found: list[_Found] = []
    stack: list[Any] = list(owners)[::-1]
    while stack:
        each = stack.pop()
        if isinstance(each, _PLAIN) or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            found.append(each)
        elif not isinstance(each, (torch.Tensor, *_FOREIGN)):
            stack.extend(_referents(each))
    return found


def _referents(owner: Any) -> Iterator[Any]:
    """Yields what an object refers to."""
    if isinstance(owner, dict):
        yield from owner.values()
    elif isinstance(owner, list | tuple | set | frozenset):
        yield from owner
    elif isinstance(owner, functools.partial):
        yield from (owner.func, owner.args, owner.keywords)
    elif isinstance(owner, types.MethodType):
        yield owner.__self__
    elif isinstance(owner, types.FunctionType):
        for cell in owner.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not set yet
                continue
    else:
        yield from getattr(owner, "__dict__", {}).values()
        for kind in type(owner).__mro__:
            slots = getattr(kind, "__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield getattr(owner, name, None)


def group_by_storage(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Returns the tensors that have memory, those that share any together."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            address = tensor.untyped_storage().data_ptr()
            if address:
                groups.setdefault(address, []).append(tensor)
    return list(groups.values())


@torch.inference_mode()
def move_tensors(group: Sequence[torch.Tensor], memory: torch.Tensor, begin: int) -> None:
    """Moves tensors that share a storage to `memory` (uint8 [n]), from byte `begin` on: each stays
    the same object, with the same values."""
    storage = group[0].untyped_storage()
    old = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    memory[begin : begin + len(old)].copy_(old)
    for tensor in group:
        offset = tensor.storage_offset() + begin // tensor.itemsize
        shape, strides = tensor.shape, tensor.stride()
        tensor.set_(memory.untyped_storage(), offset, shape, strides)

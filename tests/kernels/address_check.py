"""Checks in Triton's interpreter that a kernel reads and writes the memory of its arguments alone.
On a GPU another address fails only where nothing lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.runtime import interpreter


class _Memory:
    """The memory of a launch's arguments, as ranges of addresses."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}
        self.checked = 0

    def enter(self, argument: Any) -> None:
        """Enters a launch's argument, if it is a tensor."""
        if isinstance(argument, torch.Tensor):
            storage = argument.untyped_storage()
            self._ranges[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()

    def check(self, pointers: Any, mask: Any) -> None:
        """Raises IndexError unless all addresses that are not masked are in a range."""
        addresses = np.asarray(pointers.data, np.uint64)
        wanted = addresses[np.broadcast_to(np.asarray(mask.data, bool), addresses.shape)]
        self.checked += wanted.size
        size, left = pointers.get_element_ty().primitive_bitwidth // 8, np.ones(wanted.shape, bool)
        for start, end in self._ranges.items():
            left &= (wanted < start) | (wanted + size > end)
        if left.any():
            raise IndexError(f"{left.sum()} of {wanted.size} addresses are of no argument")


@contextmanager
def checked_addresses() -> Iterator[None]:
    """Context in which launches are checked. Raises `InterpreterError` at the first address that is
    out of the arguments' memory."""
    memory, builder, grid = _Memory(), interpreter.interpreter_builder, interpreter.GridExecutor
    load, store, rmw = (
        builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw,
    )  # fmt: skip
    launch = grid.__call__

    def launch_checked(self: Any, *arguments: Any, **options: Any) -> None:
        for argument in (*arguments, *options.values()):
            memory.enter(argument)
        launch(self, *arguments, **options)

    def load_checked(pointers: Any, mask: Any, *others: Any) -> Any:
        memory.check(pointers, mask)
        return load(pointers, mask, *others)

    def store_checked(pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        memory.check(pointers, mask)
        return store(pointers, value, mask, *others)

    def rmw_checked(operation: Any, pointer: Any, value: Any, mask: Any, *others: Any) -> Any:
        memory.check(pointer, mask)
        return rmw(operation, pointer, value, mask, *others)

    with (
        patch.object(grid, "__call__", launch_checked),
        patch.object(builder, "create_masked_load", load_checked),
        patch.object(builder, "create_masked_store", store_checked),
        patch.object(builder, "create_atomic_rmw", rmw_checked),
    ):
        yield
    assert memory.checked, "no launch was checked"

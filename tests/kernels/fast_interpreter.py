"""Triton's interpreter without what takes half of its time and tells these tests nothing.

The interpreter (3.6) replaces the functions of `triton.language` when a kernel is launched, and
again whenever a kernel calls another function: once a launch is enough. It also computes every sum
and product of integers a second time in 64 bits, to find overflows, which tiny sizes never have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter

#: The global names (by `id`) of functions that were called since the last launch.
_prepared: set[int] = set()
_launch = interpreter.GridExecutor.__call__


def install() -> None:
    """Makes launches and calls of functions do only what is needed."""
    interpreter.GridExecutor.__call__ = _launch_kernel
    interpreter.InterpretedFunction.__call__ = _call_function
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", False)


def _launch_kernel(grid: Any, *arguments: Any, **options: Any) -> None:
    _prepared.clear()
    _launch(grid, *arguments, **options)


def _call_function(function: Any, *arguments: Any, **options: Any) -> Any:
    """Stands in for `InterpretedFunction.__call__`."""
    names = id(function.fn.__globals__)
    if names not in _prepared:
        interpreter._patch_lang(function.fn)
        _prepared.add(names)
    rewritten: Callable[..., Any] = function.rewrite()
    try:
        return rewritten(*arguments, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error

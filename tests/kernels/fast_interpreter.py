"""Triton's interpreter without what takes most of its time and tells these tests nothing.

The interpreter (3.6) replaces the functions of `triton.language` when a kernel is launched, and
again whenever a kernel calls another function: once a launch is enough. It computes every sum and
product of integers a second time in 64 bits, to find overflows, which tiny sizes never have. And it
describes each intermediate tensor by a type that it makes and checks, and by one object for each
number of its shape, although a kernel has few shapes and few types: here these are made once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

#: The global names of functions that were called since the last launch, and the modules and classes
#: whose functions were replaced, by `id`.
_prepared: set[int] = set()
#: Types whose numbers stay what they are in every operation with numbers of the same type.
_KEPT = frozenset({"fp32", "fp64", "int1", "int8", "int16", "int32", "int64"})
_launch = interpreter.GridExecutor.__call__
_numpy_type = interpreter._get_np_dtype
_broadcast = TritonSemantic.broadcast_impl_value
_check_operands = TritonSemantic.binary_op_type_checking_impl
#: Of a tensor without dimensions: its shape and its number of elements.
_SCALAR = (core.tuple(()), tl.constexpr(1))


def install() -> None:
    """Makes launches, calls of functions and operations do only what is needed."""
    interpreter.GridExecutor.__call__ = _launch_kernel
    interpreter.InterpretedFunction.__call__ = _call_function
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", False)
    interpreter._get_np_dtype = _get_numpy_type
    interpreter._patch_builtin = _replace_functions
    core.block_type.__init__ = _describe_block
    core.tensor.__init__ = _describe_tensor
    TritonSemantic.broadcast_impl_value = _broadcast_operands
    TritonSemantic.binary_op_type_checking_impl = _prepare_operands


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


#: The functions of the language by their names, as they were before any launch.
_functions: dict[Any, list[tuple[str, Any]]] = {
    owner: [each for each in inspect.getmembers(owner) if core.is_builtin(each[1])]
    for owner in (tl, core, tl.math, core.tensor, core.tensor_descriptor_base)
}


def _replace_functions(owner: Any, builder: Any, scope: Any) -> None:
    """Stands in for `_patch_builtin`: gives the functions of a module or class of the language the
    interpreter's semantics."""
    if id(owner) not in _prepared:
        _prepared.add(id(owner))
        for name, member in _functions[owner]:
            scope.set_attr(owner, name, _interpreted(member, builder))


@cache
def _interpreted(member: Any, builder: Any) -> Callable[..., Any]:
    semantic = _semantic_of(builder)

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = semantic
        return member(*arguments, **options)

    return call


@cache
def _semantic_of(builder: Any) -> TritonSemantic:
    return TritonSemantic(builder)


_numpy_types: dict[str, np.dtype[Any]] = {}


def _get_numpy_type(kind: Any) -> np.dtype[Any]:
    """Stands in for `_get_np_dtype`, which makes a table of all types at each call."""
    if isinstance(kind, tl.block_type):
        kind = kind.element_ty
    found = _numpy_types.get(kind.name)
    if found is None:
        found = _numpy_types[kind.name] = _numpy_type(kind)
    return found


@cache
def _block_of(numbers: tuple[int, ...], element: str) -> tuple[Any, int, tuple[Any, Any], str]:
    """Returns a block's shape, its number of elements, both as a tensor has them, and the name of
    its type.

    Raises:
        ValueError: a number is no power of two, or there are too many elements.
    """
    if not numbers:
        raise TypeError("0d block_type is forbidden")
    count = core.validate_block_shape(numbers)
    in_tensor = (
        core.tuple([tl.constexpr(number) for number in numbers]),
        tl.constexpr(math.prod(numbers)),
    )
    return core.tuple(list(numbers)), count, in_tensor, f"<{numbers}, {element}>"


def _describe_block(kind: Any, element_ty: Any, shape: Any) -> None:
    """Stands in for `block_type.__init__`."""
    numbers = tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
    kind.element_ty = element_ty
    described = _block_of(numbers, element_ty.name)
    kind.shape, kind.numel, kind.in_tensor, kind.name = described


def _describe_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    """Stands in for `tensor.__init__`."""
    tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
    tensor.shape, tensor.numel = kind.in_tensor if kind.is_block() else _SCALAR


def _broadcast_operands(semantic: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Stands in for `broadcast_impl_value`: operands of one shape stay as they are."""
    if left.shape is right.shape:
        return left, right
    found: tuple[Any, Any] = _broadcast(semantic, left, right)
    return found


def _prepare_operands(
    semantic: Any, left: Any, right: Any, *flags: Any, **options: Any
) -> tuple[Any, Any]:
    """Stands in for `binary_op_type_checking_impl`, which would cast each operand to the type that
    both have."""
    if (
        isinstance(left, core.tensor)
        and isinstance(right, core.tensor)
        and left.dtype is right.dtype
        and left.dtype.name in _KEPT
    ):
        return _broadcast_operands(semantic, left, right)
    found: tuple[Any, Any] = _check_operands(semantic, left, right, *flags, **options)
    return found

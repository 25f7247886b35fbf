"""Triton's interpreter without what takes most of its time and tells these tests nothing.

The interpreter (3.6) replaces the functions of `triton.language` when a kernel is launched, and
again whenever a kernel calls another function: once a launch is enough. It computes every sum and
product of integers a second time in 64 bits, to find overflows, which tiny sizes never have. It
describes each intermediate tensor by a type that it makes and checks, and by one object for each
number of its shape, although a kernel has few shapes and few types: here these are made once. And
it copies an operand of another shape to the shape of the result, which numpy's operations do not
need, and makes an array of a number each time that a kernel computes with it.
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
_KEPT_INTEGERS = frozenset({"int8", "int16", "int32", "int64"})
#: Of these types, the kinds of Python's numbers that take the type of a tensor that they meet.
_TAKEN: dict[str, tuple[type, ...]] = {
    "fp32": (float, int, bool), "fp64": (float, int, bool), "int1": (bool,),
    "int8": (int, bool), "int16": (int, bool), "int32": (int, bool), "int64": (int, bool),
}  # fmt: skip
_launch = interpreter.GridExecutor.__call__
_numpy_type = interpreter._get_np_dtype
_broadcast = TritonSemantic.broadcast_impl_value
_check_operands = TritonSemantic.binary_op_type_checking_impl
_make_tensor = TritonSemantic.to_tensor
_where = TritonSemantic.where
_expand_others = TritonSemantic.expand_dims
_COMPARISONS = {
    "greater_than": np.greater, "greater_equal": np.greater_equal, "less_than": np.less,
    "less_equal": np.less_equal, "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip
_OPERATIONS = _COMPARISONS | {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_unwrap_all = core._unwrap_if_constexpr
#: Types whose objects contain no `constexpr`.
_PLAIN = frozenset({
    core.tensor, core.dtype, core.pointer_type, core.block_type, int, float, bool, str, slice,
    type(None),
})  # fmt: skip
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
    core.block_type.with_element_ty = _with_element
    core.dtype.__eq__ = _equal_types
    core._unwrap_if_constexpr = _unwrap
    core.tensor.__init__ = _describe_tensor
    TritonSemantic.broadcast_impl_value = _broadcast_operands
    TritonSemantic.binary_op_type_checking_impl = _prepare_operands
    TritonSemantic.to_tensor = _keep_tensor
    TritonSemantic.where = _select
    TritonSemantic.expand_dims = _expand
    for name, operation in _OPERATIONS.items():
        setattr(TritonSemantic, name, _operate(name, operation))
    interpreter.TensorHandle.__init__ = _describe_handle
    interpreter.InterpreterBuilder.binary_op = _compute


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
    # what core.builtin wraps checks no more than that there is a `_semantic`
    member = getattr(member, "__wrapped__", member)

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
def _shape_of(numbers: tuple[int, ...]) -> tuple[Any, int, tuple[Any, Any]]:
    """Returns a block's shape, its number of elements, and both as a tensor has them: one object
    for all tensors of this shape.

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
    return core.tuple(list(numbers)), count, in_tensor


@cache
def _name_of(numbers: tuple[int, ...], element: str) -> str:
    return f"<{numbers}, {element}>"


def _describe_block(kind: Any, element_ty: Any, shape: Any) -> None:
    """Stands in for `block_type.__init__`."""
    numbers = tuple([each.value if isinstance(each, tl.constexpr) else each for each in shape])
    kind.element_ty = element_ty
    kind.shape, kind.numel, kind.in_tensor = _shape_of(numbers)
    kind.name = _name_of(numbers, element_ty.name)


def _block(element: Any, numbers: tuple[int, ...]) -> Any:
    """Returns the type of a block of elements."""
    made = core.block_type.__new__(core.block_type)
    made.element_ty = element
    made.shape, made.numel, made.in_tensor = _shape_of(numbers)
    made.name = _name_of(numbers, element.name)
    return made


def _with_element(kind: Any, element: Any) -> Any:
    """Stands in for `block_type.with_element_ty`."""
    return _block(element, tuple(kind.shape.values))


def _equal_types(kind: Any, other: Any) -> bool:
    """Stands in for `dtype.__eq__`, of types that are neither blocks nor pointers."""
    if kind is other:
        return True
    other = _unwrap(other)
    return isinstance(other, core.dtype) and kind.name == other.name


def _describe_tensor(tensor: Any, handle: Any, kind: Any) -> None:
    """Stands in for `tensor.__init__`."""
    tensor.handle, tensor.type = handle, kind
    if type(kind) is core.block_type:
        tensor.dtype = kind.element_ty
        tensor.shape, tensor.numel = kind.in_tensor
    else:
        tensor.dtype = kind.scalar
        tensor.shape, tensor.numel = _SCALAR


def _unwrap(value: Any) -> Any:
    """Stands in for `_unwrap_if_constexpr`."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap_all(value)


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
    both have, and copy each to the shape that both have."""
    left_is_tensor, right_is_tensor = type(left) is core.tensor, type(right) is core.tensor
    if left_is_tensor and right_is_tensor:
        kept, other = left.dtype.name, right.dtype.name
        if kept in _KEPT and other == kept:
            return _give_shape(left, right)
        if other in _KEPT_INTEGERS:
            if kept in _KEPT_INTEGERS:
                return _give_shape(*_widen(left, right))
            if flags[:1] == (True,) and left.dtype.is_ptr():
                return _give_shape(left, right)
    elif left_is_tensor:
        if type(right) in _TAKEN.get(left.dtype.name, ()):
            return left, core.tensor(_number(right, left.dtype), left.type)
        if flags[:1] == (True,) and left.dtype.is_ptr() and type(right) is int:
            return left, core.tensor(_number(right, tl.int64), left.type.with_element_ty(tl.int64))
    elif right_is_tensor and type(left) in _TAKEN.get(right.dtype.name, ()):
        return core.tensor(_number(left, right.dtype), right.type), right
    found: tuple[Any, Any] = _check_operands(semantic, left, right, *flags, **options)
    return found


def _widen(left: Any, right: Any) -> tuple[Any, Any]:
    """Returns two tensors of signed integers as tensors of the wider type."""
    if left.dtype.int_bitwidth < right.dtype.int_bitwidth:
        return _widen(right, left)[::-1]
    kind = left.dtype
    data = right.handle.data.astype(_get_numpy_type(kind))
    widened = core.tensor(interpreter.TensorHandle(data, kind), right.type.with_element_ty(kind))
    return left, widened


def _operate(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what stands in for a sum, difference, product or comparison of `TritonSemantic`."""
    original = getattr(TritonSemantic, name)
    is_comparison = name in _COMPARISONS
    takes_pointer = name in ("add", "sub")

    def operate(semantic: Any, left: Any, right: Any, *flags: Any, **options: Any) -> Any:
        left, right = _prepare_operands(semantic, left, right, takes_pointer, name == "add")
        kept = left.dtype.name
        if kept not in _KEPT or kept == "int1":
            if name == "add" and left.dtype.is_ptr() and right.dtype.name in _KEPT_INTEGERS:
                return core.tensor(_advance(left.handle, right.handle.data), left.type)
            return original(semantic, left, right, *flags, **options)
        handle = _compute(None, left.handle, right.handle, operation)
        return core.tensor(
            handle, left.type.with_element_ty(tl.int1) if is_comparison else left.type
        )

    return operate


def _advance(pointer: Any, elements: np.ndarray) -> Any:
    """Returns the handle of pointers to elements behind those of a pointer, as `create_addptr`."""
    size = _bytes_of(pointer.dtype.element_ty)
    data = pointer.data + elements.astype(np.uint64) * np.uint64(size)
    return interpreter.TensorHandle(data, pointer.dtype)


def _expand(semantic: Any, tensor: Any, axis: int) -> Any:
    """Stands in for `expand_dims`."""
    if type(tensor.type) is not core.block_type or axis < 0:
        return _expand_others(semantic, tensor, axis)
    numbers = tuple(tensor.type.shape.values)
    data = tensor.handle.data[(slice(None),) * axis + (None,)]
    kind = _block(tensor.dtype, (*numbers[:axis], 1, *numbers[axis:]))
    return core.tensor(interpreter.TensorHandle(data, tensor.handle.dtype.scalar), kind)


def _select(semantic: Any, condition: Any, left: Any, right: Any) -> Any:
    """Stands in for `where`, which would copy each of the three to the shape that all have."""
    if condition.dtype is not tl.int1:
        return _where(semantic, condition, left, right)
    left, right = _prepare_operands(semantic, left, right, True, True)
    condition, left = _give_shape(condition, left)
    left, right = _give_shape(left, right)
    handle = semantic.builder.create_select(condition.handle, left.handle, right.handle)
    return core.tensor(handle, left.type)


def _give_shape(left: Any, right: Any) -> tuple[Any, Any]:
    """Returns two tensors as tensors of the shape that both have together. Their data stay as they
    are: numpy's operations broadcast them in the same way."""
    if left.shape is right.shape:
        return left, right
    key = id(left.shape), id(right.shape)  # of objects that stay: see _shape_of()
    numbers = _common_shapes.get(key)
    if numbers is None:
        of_each = [tuple(each.value for each in of.shape) for of in (left, right)]
        numbers = _common_shapes[key] = np.broadcast_shapes(*of_each)
    shape = _shape_of(numbers)[2][0]
    if left.shape is not shape:
        left = core.tensor(left.handle, _block(left.dtype, numbers))
    if right.shape is not shape:
        right = core.tensor(right.handle, _block(right.dtype, numbers))
    return left, right


#: The shapes of two operands by `id`, and the shape of their result.
_common_shapes: dict[tuple[int, int], tuple[int, ...]] = {}


def _number(value: Any, kind: Any) -> Any:
    """Returns the handle of a number of a type in `_TAKEN`."""
    key = value, kind.name
    data = _numbers.get(key)
    if data is None:
        data = _numbers[key] = np.array([value or 0], _get_numpy_type(kind))
        data.flags.writeable = False
    return interpreter.TensorHandle(data, kind)


_numbers: dict[tuple[Any, str], np.ndarray] = {}


def _keep_tensor(semantic: Any, value: Any, check_type: bool = True) -> Any:
    """Stands in for `to_tensor`, which looks for all kinds of numbers first."""
    return value if type(value) is core.tensor else _make_tensor(semantic, value, check_type)


def _describe_handle(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Stands in for `TensorHandle.__init__`.

    Raises:
        ValueError: the elements of the data are wider than the type.
    """
    handle.data, handle.dtype, handle.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > _bytes_of(dtype):
        raise ValueError(f"data of {data.itemsize} bytes an element for {dtype}")


def _bytes_of(kind: Any) -> int:
    """Returns the largest size of an element of a type's data; an address has eight bytes."""
    try:
        return kind.data_bytes
    except AttributeError:
        kind.data_bytes = 8 if kind.is_ptr() else max(kind.primitive_bitwidth // 8, 1)
        return kind.data_bytes


def _compute(builder: Any, left: Any, right: Any, operation: Any) -> Any:
    """Stands in for `InterpreterBuilder.binary_op`."""
    output, kind = operation(left.data, right.data), left.dtype.scalar
    if output.itemsize > _bytes_of(kind):
        output = output.astype(_get_numpy_type(kind))
    return interpreter.TensorHandle(output, kind)

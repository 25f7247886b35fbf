"""Compiles kernels for Hopper where there is no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
import triton
from aioinfer.kernels.grouped_weight import PackedGroups, pack_groups
from aioinfer.kernels.hopper_pipeline import STEP, WEIGHT_ROWS
from triton._C.libtriton import native_specialize_impl
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # of a thread block


def names_to_types(names_of: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Returns the types of arguments by their names, from the names by type."""
    return {name: kind for kind, names in names_of.items() for name in names}


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    config: Any,
    *,
    divisible: str | tuple[str, ...] = "",
) -> CompiledKernel:
    """Compiles a kernel whose other arguments are integers that 16 divides, but for those that it
    does not specialize, and those whose names do not end in `divisible`."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    unspecialized = kernel.do_not_specialize or ()
    is_divisible = {
        name: name not in unspecialized and name.endswith(divisible)
        for name, kind in signature.items()
        if kind == "i32"
    }
    aligned = [
        name
        for name, kind in signature.items()
        if kind.startswith("*") or is_divisible.get(name, False)
    ]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": config.num_warps, "num_stages": getattr(config, "num_stages", 3)}
    return checked(triton.compile(source, target=HOPPER, options=options))


def adapter_types(kind: gl.dtype, tokens: int, *, adapted: bool) -> dict[str, str]:
    """Returns the types of the adapters of a product of 16-bit operands on Hopper, for tiles of so
    many tokens; without adapters x stands in their place."""
    if not adapted:
        return dict.fromkeys(("shrunk", "up", "blocks"), f"*{kind.name}")
    shrunk, up = box(kind, tokens, STEP), box(kind, WEIGHT_ROWS, STEP)
    return {"shrunk": shrunk, "up": up, "blocks": "*i32"}


def compile_call(kernel: Any, config: Any, **arguments: Any) -> CompiledKernel:
    """Compiles a kernel as a call with these arguments would: its tensors on a CPU (of any size),
    numbers, tuples, and constants where the kernel has `tl.constexpr`."""
    backend = make_backend(HOPPER)
    values = [arguments.pop(name) for name in kernel.arg_names]
    assert not arguments, f"the kernel has no {sorted(arguments)}"
    kinds = [
        ("constexpr", value)
        if param.is_constexpr
        else native_specialize_impl(
            type(backend), value, param.is_const, not param.do_not_specialize,
            not param.do_not_specialize_on_alignment,
        )
        for param, value in zip(kernel.params, values, strict=True)
    ]  # fmt: skip
    signature = {name: kind[0] for name, kind in zip(kernel.arg_names, kinds, strict=True)}
    constants = find_paths_if(list(signature.values()), lambda _, kind: kind == "constexpr")
    attributes = [kind[1] for kind in kinds]
    source = ASTSource(
        kernel,
        signature,
        {path: get_iterable_path(values, path) for path in constants},
        {
            path: backend.parse_attr(get_iterable_path(attributes, path))
            for path in find_paths_if(attributes, lambda _, value: isinstance(value, str))
        },
    )
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": getattr(config, "max_registers", None),
    }
    return checked(triton.compile(source, target=HOPPER, options=options))


def compile_gluon(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    pdl: bool = True,
    aligned: Iterable[str] = (),
    registers: int | None = None,
    num_warps: int = 4,
) -> CompiledKernel:
    """Compiles a kernel in Gluon whose other arguments are integers; 16 divides pointers, and what
    else is `aligned`. A thread has at most so many `registers`, if they are given."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    aligned = {*aligned, *(name for name in names if signature[name].startswith("*"))}
    source = GluonASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "launch_pdl": pdl, "maxnreg": registers}
    return checked(triton.compile(source, target=HOPPER, options=options))


def checked(kernel: CompiledKernel) -> CompiledKernel:
    """Returns the kernel, which must not have what ptxas 12.8 (of Triton 3.6) miscompiles: the
    bytes of a pair of float8 numbers, separated by a shift and packed into two halves of a word.
    The shift then reads the register of the pair before the conversion has written it."""
    pairs = set(re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+(%rs\d+)", kernel.asm["ptx"]))
    shifted = dict(re.findall(r"shr\.u16\s+(%rs\d+), (%rs\d+), 8;", kernel.asm["ptx"]))
    for low, high in re.findall(r"mov\.b32\s+%r\d+, {(%rs\d+), (%rs\d+)};", kernel.asm["ptx"]):
        assert low not in pairs or shifted.get(high) != low, f"{low} is shifted and packed"
    return kernel


def box(kind: gl.dtype, *shape: int) -> str:
    """Returns the type of a descriptor whose boxes have a shape."""
    layout = gl.NVMMASharedLayout.get_default_for(shape, kind)
    return f"tensordesc<{kind}{list(shape)},{layout!r}>"


def _print(kernel: CompiledKernel, tool: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(kernel: CompiledKernel) -> dict[str, int]:
    """Returns the resources of a kernel by the names of `cuobjdump`, for instance REG, registers a
    thread, and STACK, bytes to which registers are spilled."""
    lines = _print(kernel, triton.knobs.nvidia.cuobjdump, "-res-usage").splitlines()
    (usage,) = (line for line in lines if "STACK:" in line)
    return {name: int(number) for name, number in (word.rsplit(":", 1) for word in usage.split())}


def check_fits(kernel: CompiledKernel, *, spilled: int = 0, shared: int = SHARED_MEMORY) -> None:
    """Checks the bytes of each thread's stack and the shared memory of a thread block."""
    assert resources(kernel)["STACK"] <= spilled
    assert kernel.metadata.shared <= shared


def machine_code(kernel: CompiledKernel) -> str:
    """Returns the machine's instructions, one a line."""
    return _print(kernel, triton.knobs.nvidia.nvdisasm, "-c")


@lru_cache(maxsize=8)
def weight_of(
    features: int,
    inputs: int,
    *,
    bits: int = 4,
    group: int | None = 128,
    has_zeros: bool = False,
) -> PackedGroups:
    """Returns a weight of zeros, in groups of inputs: the same one for the same arguments."""
    shape = features, 1 if group is None else -(-inputs // group)
    zeros = torch.zeros(shape) if has_zeros else None
    integers = torch.zeros(features, inputs, dtype=torch.uint8)
    return pack_groups(integers, torch.ones(shape), zeros, bits, group)

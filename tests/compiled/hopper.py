"""Compiles kernels for Hopper where there is no GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
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
    divisible: str = "",
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


def compile_gluon(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    pdl: bool = True,
    aligned: Iterable[str] = (),
    registers: int | None = None,
) -> CompiledKernel:
    """Compiles a kernel in Gluon whose other arguments are integers; 16 divides those that are
    `aligned`. A thread has at most so many `registers`, if they are given."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    source = GluonASTSource(
        kernel,
        signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "launch_pdl": pdl, "maxnreg": registers}
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


def spilled(kernel: CompiledKernel, folder: Path) -> int:
    """Returns the bytes of each thread's stack."""
    (folder / "cubin").write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(folder / "cubin")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", lines)[0])

"""Triton kernels compiled in other processes, for a GPU that need not be there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from aioinfer.worker.compilers import Compilers, _launcher_types, compile_with
from tests.waiting import until

TARGET = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps": 4}


@triton.jit
def _double(x, size: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, size)
    tl.store(x + offsets, 2 * tl.load(x + offsets))


@triton.jit
def _broken(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.no_such_thing(x))


def source_of(kernel: Any, types: dict[str, str], **constants: Any) -> ASTSource:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    return ASTSource(kernel, signature, constants)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return tmp_path


@pytest.fixture
def compilers(folder: Path) -> Iterator[Compilers]:
    made = Compilers(2)
    yield made
    made.close()
    assert not Path(f"/proc/{made._pid}").exists()


def files_of(folder: Path, kernel: Any) -> list[str]:
    return [file.name for file in folder.rglob(f"{kernel.__name__}.cubin")]


def test_a_kernel_is_compiled_elsewhere_and_found(compilers: Compilers, folder: Path) -> None:
    source = source_of(_double, {"x": "*fp32"}, size=64)
    assert compilers.compile(source, TARGET, OPTIONS)
    (file,) = folder.rglob("_double.cubin")
    written = file.stat().st_mtime_ns
    compile_kernel = compile_with(compilers)
    kernel = compile_kernel(source, target=TARGET, options=OPTIONS)
    assert kernel.asm["cubin"] == file.read_bytes()
    assert file.stat().st_mtime_ns == written
    assert len(files_of(folder, _double)) == 1
    compile_kernel(source_of(_double, {"x": "*fp32"}, size=32), target=TARGET, options=OPTIONS)
    assert len(files_of(folder, _double)) == 2


def test_launchers_are_made_once_for_equal_types(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the processes that compile. A launcher is linked with NVIDIA's driver, which need not be
    there: a file stands for it."""

    def make(source: Any, metadata: Any) -> None:
        name = "_".join(source.signature.values()).replace("*", "p")
        (folder / f"{name}.{metadata.name}.{os.getpid()}").touch()

    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", make)
    compilers = Compilers(2)
    compile_kernel = compile_with(compilers)
    for kind, size in (("*fp32", 16), ("*fp32", 32), ("*fp16", 16), ("*fp16", 32)):
        compile_kernel(source_of(_double, {"x": kind}, size=size), target=TARGET, options=OPTIONS)
    compilers.close()
    names, kernels, processes = zip(
        *(file.name.split(".") for file in sorted(folder.glob("p*"))), strict=True
    )
    assert names == ("pfp16_constexpr", "pfp32_constexpr")
    assert kernels == ("_double", "_double")
    assert str(os.getpid()) not in processes


def test_launchers_do_not_depend_on_blocks() -> None:
    def types(*names: str) -> str:
        return _launcher_types(dict(enumerate(names)))

    layout = "NVMMASharedLayout(swizzle_byte_width=128, cga_layout=[])"
    small, large = (f"tensordesc<bf16[{rows}, 64],{layout}>" for rows in (64, 256))
    assert types("i32", small, "*fp32") == types("i32", large, "*fp32")
    assert types(small) != types(f"tensordesc<bf16[1, 64, 64],{layout}>")
    assert types(small) != types(f"tensordesc<fp16[64, 64],{layout}>")
    assert types(small, "i32") != types(small, "i64")


async def test_processes_are_forked_for_the_first_kernel(compilers: Compilers) -> None:
    def count() -> int:
        return len(
            Path(f"/proc/{compilers._pid}/task/{compilers._pid}/children").read_text().split()
        )

    assert count() == 0
    assert compilers.compile(source_of(_double, {"x": "*fp32"}, size=128), TARGET, OPTIONS)
    await until(lambda: count() == 2)  # the second may be forked after the first has answered


def test_processes_that_end_are_noticed(compilers: Compilers) -> None:
    """The system may kill them where memory is short."""
    source = source_of(_double, {"x": "*fp32"}, size=256)
    assert compilers.compile(source, TARGET, OPTIONS)
    children = Path(f"/proc/{compilers._pid}/task/{compilers._pid}/children").read_text()
    os.kill(int(children.split()[-1]), signal.SIGKILL)
    assert sorted(compilers.compile(source, TARGET, OPTIONS) for _ in range(2)) == [False, True]


def test_what_cannot_be_compiled_elsewhere_is_not(compilers: Compilers) -> None:
    """The caller meets the error when it compiles the kernel itself."""
    assert not compilers.compile(source_of(_broken, {"x": "*fp32"}), TARGET, OPTIONS)

    @triton.jit
    def local(x):  # type: ignore[no-untyped-def]  # no function of a module
        tl.store(x, 1.0)

    assert not compilers.compile(source_of(local, {"x": "*fp32"}), TARGET, OPTIONS)
    with pytest.raises(triton.CompilationError):
        compile_with(compilers)(source_of(_broken, {"x": "*fp32"}), target=TARGET, options=OPTIONS)
    assert compilers.compile(source_of(_double, {"x": "*fp32"}, size=16), TARGET, OPTIONS)

"""Products and attention on CPUs by kernels that numba compiles: against float64 and plain torch,
and the same bits for a row whatever stands beside it."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aioinfer.kernels.cpu_compilation import KERNELS, cache_folder, compile_ahead, complete_mark
from aioinfer.kernels.cpu_team import Team, run_in_team
from aioinfer.kernels.cpu_vectors import load_integer
from numba import cfunc, types

from aioinfer.layers.backend import Backend
from aioinfer.layers.compiled_attention import CompiledAttention, supports
from aioinfer.layers.formats.affine import (
    AffineRows,
    CompiledWeight,
    can_gate,
    can_lay_out,
    has_compiled_products,
)
from aioinfer.layers.formats.base import Epilogue
from aioinfer.layers.formats.schemes import AffineScheme
from aioinfer.layers.kv_cache import AttentionShape, KVCache
from aioinfer.layers.norm import RMSNorm
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.rotary import RopeConfig, RotaryTable, apply_rope
from aioinfer.layers.shards import Shard, Source
from aioinfer.layers.torch_attention import TorchAttention
from tests.paged_model import make_step

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
INPUTS = 192
SCHEMES = [AffineScheme(4, 32, True), AffineScheme(4, 32, False), AffineScheme(8, 16, False),
           AffineScheme(8, 32, True)]  # fmt: skip


def backend() -> Backend:
    return Backend(CPU, torch.float32, ParallelGroup.single())


def random_rows(scheme: AffineScheme, rows: int = 96) -> AffineRows:
    part = AffineRows(Source("name", Shard.whole(rows)), Shard.whole(INPUTS), scheme, CPU)
    low, high = (0, 256) if scheme.bits == 4 else (-128, 128)
    part.integers.copy_(torch.randint(low, high, part.integers.shape))
    part.scales.uniform_(0.5, 1.5)
    if part.offsets is not None:
        part.offsets.normal_()
    return part


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_this_machine_compiles_them():
    assert has_compiled_products(backend())
    assert not has_compiled_products(Backend(CPU, torch.bfloat16, ParallelGroup.single()))


# -------------------------------------------------------------------- products


@pytest.mark.parametrize("scheme", [*SCHEMES, None], ids=str)
def test_products_are_as_exact_as_float32_and_rows_do_not_depend_on_each_other(
    scheme: AffineScheme | None,
):
    part = torch.randn(96, INPUTS) if scheme is None else random_rows(scheme)
    numbers = part if isinstance(part, torch.Tensor) else part.dequantized()
    weight, bias, x = CompiledWeight([part], INPUTS), torch.randn(96), torch.randn(47, INPUTS)
    product = weight.multiply(x, Epilogue(bias=bias))
    expected = F.linear(x.double(), numbers.double(), bias.double())
    assert (product - expected).norm() < 1e-6 * expected.norm()
    for rows in range(1, 47, 3):
        assert torch.equal(weight.multiply(x[:rows], Epilogue(bias=bias)), product[:rows])
    total = torch.ones(47, 96)
    assert weight.multiply(x, Epilogue(add_to=total)) is total
    assert torch.allclose(total, expected.float() - bias + 1, rtol=1e-4, atol=1e-3)


def test_parts_of_different_types_and_a_norm_before_them():
    parts = [random_rows(SCHEMES[0]), torch.randn(64, INPUTS), random_rows(SCHEMES[2], 32)]
    norm = RMSNorm("norm", INPUTS, 1e-5, backend())
    norm.weight.normal_()
    x = torch.randn(3, 2, INPUTS)
    numbers = [part if isinstance(part, torch.Tensor) else part.dequantized() for part in parts]
    expected = F.linear(norm(x).double(), torch.cat(numbers).double())
    product = CompiledWeight(parts, INPUTS).multiply(x, Epilogue(norm))
    assert product.shape == (3, 2, 192)
    assert (product - expected).norm() < 1e-6 * expected.norm()
    assert CompiledWeight(parts, INPUTS).multiply(x[:0]).shape == (0, 2, 192)


@pytest.mark.parametrize("rows", [1, 13])
def test_silu_of_the_gate(rows: int):
    parts = [random_rows(SCHEMES[0], 64), random_rows(SCHEMES[0], 64)]
    assert can_gate(parts)
    assert not can_gate([parts[0], random_rows(SCHEMES[1], 64)])
    weight, x = CompiledWeight(parts, INPUTS, gated=True), torch.randn(rows, INPUTS) / 50
    x[0, 0] = 300  # gates beyond the range of exp
    both = F.linear(x, torch.cat([part.dequantized() for part in parts]))
    gate, up = both.chunk(2, dim=-1)
    found, expected = weight.multiply(x, Epilogue(gate="silu")), F.silu(gate) * up
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(weight.multiply(x), both, rtol=1e-4, atol=1e-3)
    x[0, 1] = torch.nan
    found = weight.multiply(x, Epilogue(gate="silu"))
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


def test_what_the_kernels_do_not_take():
    assert not can_lay_out([random_rows(SCHEMES[0], 40)])
    shard = AffineRows(Source("n", Shard.whole(64)), Shard(16, 96, INPUTS), SCHEMES[0], CPU)
    assert not can_lay_out([shard])


# -------------------------------------------------------------------- attention

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 64, 16


def attend(
    rows: list[tuple[int, int]],
    projected: torch.Tensor,
    cached: torch.Tensor,
    window: int | None,
    *,
    is_rotated: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, KVCache, KVCache]:
    """Computes rows (tokens before, tokens in the step) with the kernels and in torch."""
    tables = [list(range(20 * number, 20 * number + 20)) for number in range(len(rows))]
    before, counts = (list(part) for part in zip(*rows, strict=True))
    ids = torch.zeros(sum(counts), dtype=torch.int32)
    step = make_step(tables, before, counts, BLOCK, ids)
    rotary = RotaryTable(RopeConfig(), SIZE, 400, CPU) if is_rotated else None
    shape = AttentionShape(HEADS, KV_HEADS, SIZE, SIZE**-0.5, window)
    caches = [KVCache(*cached.clone()) for _ in range(2)]
    assert supports(shape, rotary, caches[0])
    found = CompiledAttention(shape, 0, caches[0], rotary).rotate_and_attend(projected, step)
    step.memo.clear()
    rotated = projected[:, : HEADS + KV_HEADS]
    if rotary is not None:
        rotated = apply_rope(rotated, *rotary.at_step(step))
    queries, keys = rotated[:, :HEADS], rotated[:, HEADS:]
    values = projected[:, HEADS + KV_HEADS :]
    expected = TorchAttention(shape, 0)(queries, keys, values, caches[1], step)
    return found, expected, *caches


@pytest.mark.parametrize(("window", "is_rotated"), [(None, True), (40, True), (None, False)])
def test_attention_is_that_of_torch_and_decodes_do_not_depend_on_each_other(
    window: int | None, is_rotated: bool
):
    rows = [(0, 1), (15, 1), (16, 1), (77, 1), (250, 1), (30, 7), (0, 20)]
    projected = torch.randn(32, HEADS + 2 * KV_HEADS, SIZE)
    cached = torch.full((2, 160, BLOCK, KV_HEADS, SIZE), torch.nan)
    for number, (before, _) in enumerate(rows):
        for place in range(before):
            cached[:, 20 * number + place // BLOCK, place % BLOCK].normal_()
    found, expected, *caches = attend(rows, projected, cached, window, is_rotated=is_rotated)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip((caches[0].keys, caches[0].values),
                            (caches[1].keys, caches[1].values), strict=True):  # fmt: skip
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    last = random.Random(0).randrange(2, 5)
    some = attend(rows[:last], projected[:last], cached, window, is_rotated=is_rotated)[0]
    assert torch.equal(some, found[:last])


# -------------------------------------------------------------------- compiling ahead


def test_what_is_compiled_is_not_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        started.append(command)
        return actual([sys.executable, "-c", ""], **options)

    actual = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    compile_ahead()
    for thread in threading.enumerate():
        if thread.name == "compile kernels":
            thread.join()
    assert started == [[sys.executable, "-m", "aioinfer.kernels.cpu_compilation"]]
    for kernel in KERNELS:
        assert tmp_path in cache_folder(kernel).parents
        cache_folder(kernel).mkdir(parents=True)
        complete_mark(kernel).touch()
    compile_ahead()
    assert not any(thread.name == "compile kernels" for thread in threading.enumerate())
    assert len(started) == 1


# -------------------------------------------------------------------- the team of threads


class Calls:
    """A task whose body is a Python function: notes which threads call it.

    Args:
        helper_s: how long a helper computes.
    """

    def __init__(self, helper_s: float = 0.0):
        self.team, self.helper_s = Team(), helper_s
        self.threads: list[int] = []
        self._caller = threading.get_ident()
        self._body = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._compute)
        self._run = compiled_caller()

    def _compute(self, task: int) -> None:
        assert task == 7
        self.threads.append(threading.get_ident())
        if threading.get_ident() != self._caller:
            time.sleep(self.helper_s)
        else:  # until a helper has come, if there is one
            end = time.monotonic() + 0.02
            while len(self.threads) < 2 and time.monotonic() < end:
                pass  # a caller that slept would seem to have lost its core

    def run(self, threads: int) -> int:
        """Returns how many threads computed the task."""
        self.threads.clear()
        body = ctypes.cast(self._body, ctypes.c_void_p).value
        arguments = (ctypes.c_int64 * 4)(self.team.address, 7, body or 0, threads)
        self._run(ctypes.addressof(arguments))
        assert self._caller in self.threads
        return len(self.threads)

    def wait_for_helper(self, threads: int) -> float:
        """Runs until a helper has come, once: this machine may be busy. Returns when the last run
        began."""
        first = began = time.monotonic()
        while (count := self.run(threads)) == 1:
            began = time.monotonic()
            assert began < first + 30, "no helper comes"
        assert count == 2
        return began


@cache
def compiled_caller() -> Any:
    def call(arguments):
        team, task = load_integer(arguments), load_integer(arguments + 8)
        run_in_team(team, task, load_integer(arguments + 16), load_integer(arguments + 24))

    return cfunc(types.void(types.int64))(call).ctypes


def test_helpers_that_do_not_come_are_not_waited_for():
    calls = Calls()
    assert calls.run(3) == 1
    calls.team.grow(2)
    assert calls.run(1) == 1
    calls.wait_for_helper(3)


def test_the_caller_goes_on_alone_when_a_helper_is_late():
    calls = Calls(helper_s=0.05)
    calls.team.grow(2)
    began = calls.wait_for_helper(2)
    assert calls.team.times_late
    while time.monotonic() < began + 0.1:  # of 0.25 or less: the 50 ms, and 4 times what is lost
        assert calls.run(2) == 1
    calls.helper_s = 0
    calls.wait_for_helper(2)


def test_a_team_that_waits_uses_no_processor_time():
    calls = Calls()
    calls.team.grow(4)
    calls.run(4)
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.02


def test_products_of_two_threads_at_once_are_right():
    """They share the team, which has more helpers than this machine may have cores."""
    torch.set_num_threads(4)
    x = torch.randn(3, INPUTS)
    weights = [CompiledWeight([torch.randn(640, INPUTS)], INPUTS) for _ in range(2)]
    expected = [weight.multiply(x) for weight in weights]
    wrong: list[int] = []

    def multiply(number: int) -> None:
        for _ in range(1000):
            if not torch.equal(weights[number].multiply(x), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=multiply, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

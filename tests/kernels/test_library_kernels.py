"""Kernels of cuBLAS that are loaded while there is nothing else to do: which products are launched,
on a CPU."""

from __future__ import annotations

import pytest
import torch

from aioinfer.layers.backend import Backend
from aioinfer.layers.formats.base import Epilogue
from aioinfer.layers.formats.kernel_dense import CUBLAS, KernelDenseWeight, KernelHeadWeight
from aioinfer.layers.kernel_choices import Candidate
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.worker import library_kernels
from aioinfer.worker.library_kernels import STRIDE, LibraryKernels

OUT, INPUTS, MAX_ROWS, HEAD_ROWS = 48, 96, 44, 20


def test_products_of_all_sizes_are_launched_where_cublas_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A product of which another kernel computes 16 rows, one that is added to a residual, and the
    head; each turn ends in time."""
    monkeypatch.setattr(library_kernels, "_TURN_S", 0.0)
    backend = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single(), has_kernels=True)
    launched = list[tuple[type, str, int]]()

    def make(kind: type[KernelDenseWeight]) -> KernelDenseWeight:
        source = Source("weight", Shard.whole(OUT))
        made = kind([source], Shard.whole(INPUTS), backend, torch.randn(OUT, INPUTS))
        launch = made.launch

        def note(candidate: Candidate, x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
            assert candidate == CUBLAS
            result = launch(candidate, x, epilogue)
            assert result.shape == (len(x), OUT)
            launched.append((kind, "add" if epilogue.add_to is not None else "", len(x)))
            return result

        made.launch = note  # type: ignore[method-assign]
        return made

    plain, residual, head = (
        make(KernelDenseWeight), make(KernelDenseWeight), make(KernelHeadWeight)
    )  # fmt: skip
    x = torch.randn(30, INPUTS)  # which registers the products
    plain.multiply(x, Epilogue())
    residual.multiply(x, Epilogue(add_to=torch.zeros(30, OUT)))
    launched.clear()
    first, _ = backend.choices.products.values()
    first.choose({16: Candidate("few rows")})
    logits = torch.zeros(HEAD_ROWS, OUT)
    library = LibraryKernels(backend, MAX_ROWS, (head, logits))
    turns = 0
    while library.load_next():
        turns += 1
    rows = range(STRIDE, MAX_ROWS + 1, STRIDE)
    few = next(each for each in range(64) if residual.default("residual", each + 1) == CUBLAS)
    expected = [(KernelDenseWeight, "", each) for each in rows if each != 16]
    expected += [(KernelDenseWeight, "add", each) for each in rows if each > few]
    expected += [(KernelHeadWeight, "", each) for each in rows if few < each <= HEAD_ROWS]
    assert sorted(launched, key=str) == sorted(expected, key=str)
    assert turns >= len(expected) - 1
    assert not library.load_next()


def test_without_memory_the_rest_is_left_to_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(torch.device("cpu"), torch.float32, ParallelGroup.single(), has_kernels=True)
    source = Source("weight", Shard.whole(OUT))
    weight = KernelDenseWeight([source], Shard.whole(INPUTS), backend, torch.randn(OUT, INPUTS))
    weight.multiply(torch.randn(30, INPUTS), Epilogue())
    asked = []

    def fail(*arguments: object) -> torch.Tensor:
        asked.append(arguments)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(weight, "launch", fail)
    library = LibraryKernels(backend, MAX_ROWS)
    assert [library.load_next() for _ in range(3)] == [False] * 3
    assert len(asked) == 1

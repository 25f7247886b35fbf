"""Settings of the tests on a GPU: they are skipped without one, and TF32 is off.

Those of `test_tensor_parallel` and `test_sleep` compare free memory, so nothing else may use their
GPUs meanwhile: run them with `-n 1`. The others may run side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from aioinfer.worker.worker import Worker

# the cases that the interpreter's tests use too
sys.path.append(str(Path(__file__).parent.parent / "kernels"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks everything here `gpu`, and skips it where there is none."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session", autouse=True)
def graphs_are_captured_late() -> Iterator[None]:
    """Has engines in this process capture most graphs when they are needed, as worker processes do:
    to capture all at the start would compile kernels that the warm-up has left out."""
    warm_up = partialmethod(Worker.warm_up, leaves_graphs=True)
    with patch.object(Worker, "warm_up", warm_up):
        yield


@pytest.fixture(autouse=True)
def full_float32() -> None:
    """Seeds random inputs, and switches TF32 off: references are computed in float64, but some
    inputs are prepared in float32."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

"""Prefill and decode on different servers, on GPUs: blocks cross from memory of one server's
host to that of another, and texts are those of one server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional import test_handover as on_cpu
from tests.functional.test_handover import folder, short_prompts  # noqa: F401  # fixtures

GPU: dict[str, Any] = {
    "parallel.device": "cuda", "cache.block_size": 16, "parallel.executor": "multiprocess"
}  # fmt: skip


@pytest.mark.parametrize("folder", ["all tokens", "windows", "states"], indirect=True)
async def test_texts_are_those_of_one_server(folder: Path) -> None:  # noqa: F811
    async with on_cpu.servers(folder, **GPU) as found:
        await on_cpu.compare(found, folder, **GPU)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_two_ranks_on_both_sides(folder: Path) -> None:  # noqa: F811
    settings = GPU | {"parallel.tensor_parallel_size": 2}
    async with on_cpu.servers(folder, **settings) as found:
        await on_cpu.compare(found, folder, **settings)

"""The kernels of messages between GPUs as compiled for Hopper, without a GPU: no registers are
spilled, 16 bytes move at a time, and epochs are released and acquired for other GPUs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from aioinfer.kernels import peer_messages

from tests.compiled.hopper import check_fits, compile_kernel

TYPES = {
    "source": "*i32", "target": "*i32", "addresses": "*i64", "state": "*i32", "chunks": "i32",
    "rank": "i32", "peer": "i32", "at": "i32", "slot_bytes": "i32",
}  # fmt: skip


@pytest.mark.parametrize("name", ["send", "receive"])
def test_kernels(name: str) -> None:
    kernel = getattr(peer_messages, f"_{name}_kernel")
    constants = {"SLOTS": 2, "CHUNKS": 512}
    found = compile_kernel(kernel, TYPES, constants, SimpleNamespace(num_warps=4))
    check_fits(found)
    for pattern in (
        r"ld\.global\.sys\.acquire",
        r"atom\.global\.sys\.release\.exch",
        r"st\.global\.v4",
        r"ld\.global\.v4",
    ):
        assert re.search(pattern, found.asm["ptx"]), pattern
    # beside chunks only the state is written
    assert len(re.findall(r"st\.global\.b32", found.asm["ptx"])) == 2

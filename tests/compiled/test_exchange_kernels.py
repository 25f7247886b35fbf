"""The kernels of the exchange of tokens between ranks as compiled for Hopper, without a GPU: no
registers are spilled, rows move 16 bytes at a time, and flags are released and acquired for other
GPUs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from aioinfer.kernels import expert_exchange

from tests.compiled.hopper import check_fits, compile_kernel

pytestmark = pytest.mark.extended

TYPES = {
    "x": "*bf16", "pairs": "*bf16", "out": "*bf16", "residual": "*bf16", "experts": "*i32",
    "weights": "*fp32", "firsts": "*i32", "addresses": "*i64", "epochs": "*i32", "ticket": "*i32",
    "counts": "*i32", "buckets": "*i32", "few": "*i32", "many": "*i32", "added": "*bf16",
}  # fmt: skip
ACQUIRE, RELEASE = r"ld\.global\.sys\.acquire", r"atom\.global\.sys\.release"
STORE, LOAD = r"st\.global\.v4", r"ld\.global\.v4"
ROW = {"WIDTH": 2048, "BLOCK": 2048, "TOP_K": 8}
LONG_ROW = {"WIDTH": 7168, "BLOCK": 8192, "TOP_K": 8}


@pytest.mark.parametrize(
    ("name", "constants", "patterns"),
    [
        ("send", {**ROW, "K_PAD": 8}, [STORE, LOAD, RELEASE]),
        (
            "receive",
            {"TOKENS": 64, "TOP_K": 8, "K_PAD": 8, "PLACES": 64, "PLACES_PAD": 64},
            [ACQUIRE],
        ),
        ("return", {**ROW, "PLACES": 64, "PLACES_PAD": 64}, [STORE, LOAD, RELEASE]),
        ("send", {**LONG_ROW, "K_PAD": 8}, [STORE, LOAD, RELEASE]),
        ("return", {**LONG_ROW, "PLACES": 64, "PLACES_PAD": 64}, [STORE, LOAD, RELEASE]),
        ("add", {**ROW, "K_PAD": 8, "HAS_ADDED": False}, [LOAD, STORE, ACQUIRE]),
        ("add", {**ROW, "K_PAD": 8, "HAS_ADDED": True}, [LOAD, STORE, ACQUIRE]),
    ],
)
def test_kernels(name: str, constants: dict[str, int], patterns: list[str]) -> None:
    kernel = getattr(expert_exchange, f"_{name}_kernel")
    warps = 8 if constants.get("BLOCK", 0) > 2048 else 4
    found = compile_kernel(
        kernel, TYPES, {"RANK": 1, "SIZE": 2, **constants}, SimpleNamespace(num_warps=warps)
    )
    check_fits(found)
    for pattern in patterns:
        assert re.search(pattern, found.asm["ptx"]), pattern
    narrow = r"(ld|st)\.global\.b16"
    assert not re.search(narrow, found.asm["ptx"])

"""The kernels of the all-reduce as compiled for Hopper, without a GPU: no registers are spilled,
and what is quantized is written two numbers at a time."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import triton.language as tl
from aioinfer.kernels import all_reduce

from tests.compiled.hopper import check_fits, compile_kernel
from tests.pairs import pairwise

TYPES = {
    "partial": "*i32", "residual": "*i32", "weight": "*i32", "scales": "*fp32",
    "static_scale": "*fp32", "addresses": "*i64", "epochs": "*i32", "eps": "fp32",
}  # fmt: skip
PLAIN = {"SCALED": 0, "IS_STATIC": False, "MAXIMUM": 0.0, "VALUE": tl.int8}
FLOAT8 = {"IS_STATIC": False, "MAXIMUM": 448.0, "VALUE": tl.float8e4nv}


@pairwise(name=["push", "two_shot"], hidden=[4096, 5120], format=["none", "tokens", "groups"])
def test_kernels(name: str, hidden: int, format: str) -> None:
    width = hidden // 2
    block = 2048 if width == 2048 else 4096
    kinds: dict[str, dict[str, Any]] = {
        "none": PLAIN, "tokens": {"SCALED": block, **FLOAT8}, "groups": {"SCALED": 64, **FLOAT8},
    }  # fmt: skip
    constants = kinds[format] | {
        "RANK": 0, "SIZE": 2, "WIDTH": width, "BLOCK": block, "PAIRS": True, "ELEMENT": tl.bfloat16,
        "HAS_RESIDUAL": True, "HAS_NORM": True, "PDL": True, "TINY": 1e-12,
    }  # fmt: skip
    types = TYPES | {"normed": "*i32" if format == "none" else "*i16"}
    warps = min(16 if name == "push" else 8, block // 128)
    kernel = getattr(all_reduce, f"_{name}_kernel")
    found = compile_kernel(kernel, types, constants, SimpleNamespace(num_warps=warps))
    check_fits(found)
    is_quantized = format != "none"
    assert bool(re.search(r"cvt\.rn\.satfinite\.e4m3x2", found.asm["ptx"])) == is_quantized
    assert not re.search(r"st\.global\.b8", found.asm["ptx"])

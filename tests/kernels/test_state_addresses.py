"""The kernels of states read and write the memory of their arguments alone, in every configuration:
the first program of a launch and the last, rows that begin and end anywhere, blocks that are not
there, decodes and padding."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from address_check import checked_addresses
from aioinfer.kernels.delta_prefill import DeltaPrefillConfig
from delta_cases import DeltaCase, Row, decode, prefill
from mamba_cases import MambaCase, run
from triton.runtime.errors import InterpreterError

ROWS = [
    Row(1, 1), Row(70, 70), Row(2, 2), Row(1, 65), Row(66, 130, (0,)), Row(3, 0), Row(64, 64),
    Row(17, 64), Row(1, 64), Row(0, 0),
]  # fmt: skip


def case(**fields: object) -> DeltaCase:
    torch.manual_seed(0)
    return DeltaCase(**{"dtype": torch.float32, "device": "cpu", "block_size": 64, **fields})


@pytest.mark.parametrize("values", [16, 32])
@pytest.mark.parametrize("by_channel", [False, True])
def test_prefill_by_the_delta_rule(by_channel: bool, values: int) -> None:
    config = DeltaPrefillConfig(values, 4, 1, 4)
    fields = {"value": 32, "group": 1, "key_heads": 1, "by_channel": by_channel}
    with checked_addresses():
        assert max(prefill(case(**fields), ROWS, config=config)) < 1e-5


@pytest.mark.parametrize("by_channel", [False, True])
def test_decodes_by_the_delta_rule(by_channel: bool) -> None:
    with checked_addresses():
        assert max(decode(case(group=1, key=24, by_channel=by_channel), ROWS)) < 1e-5


@pytest.mark.parametrize("is_prefill", [True, False])
def test_mamba(is_prefill: bool) -> None:
    with checked_addresses():
        mamba = MambaCase(block_size=64, state_size=24, head_size=8)
        assert max(run(mamba, ROWS, prefill=is_prefill)) < 1e-5


@triton.jit
def _copy_kernel(x, out, SIZE: tl.constexpr):  # noqa: N803
    tl.store(out + tl.arange(0, SIZE), tl.load(x + tl.arange(0, SIZE)))


def test_an_address_behind_the_end_is_found() -> None:
    x, out = torch.zeros(8), torch.zeros(7)
    with pytest.raises(InterpreterError, match="1 of 8 addresses"), checked_addresses():
        _copy_kernel[(1,)](x, out, SIZE=8)

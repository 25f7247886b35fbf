"""Kernels of layers with a state on a GPU, against float64 recurrences: the gated delta rule at
Qwen3.5's sizes, on one rank and on two, with decodes inside a CUDA graph; Kimi delta attention at
Kimi-Linear's; Mamba-2 at Nemotron's and Falcon-H1's."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from aioinfer.kernels.delta_decode import DeltaDecodeConfig, delta_decode, make_tickets
from aioinfer.kernels.delta_prefill import DeltaPrefillConfig
from aioinfer.kernels.gated_norm import gated_norm
from cases import error
from delta_cases import DeltaCase, DeltaProblem, Row, decode, prefill
from mamba_cases import MIXED, MambaCase, run

REAL = DeltaCase(
    torch.bfloat16, "cuda", key_heads=16, group=2, key=128, value=128, block_size=64
)  # fmt: skip
KIMI = DeltaCase(
    torch.bfloat16, "cuda", key_heads=32, group=1, key=128, value=128, block_size=64,
    by_channel=True,
)  # fmt: skip
LENGTHS = [1, 2, 63, 64, 65, 128, 300, 1]
#: Rows of one chunk, of several, from zero and not, with snapshots; decodes and padding.
ROWS = [
    Row(1, 70), Row(2, 2), Row(63, 63), Row(130, 200, (1, 2)), Row(64, 128), Row(2, 65),
    Row(200, 203, (0,)), Row(1, 5), Row(3, 0),
]  # fmt: skip


#: One decay a head on one rank and on more of them, and decays by channel.
CASES = [
    *(replace(REAL, key_heads=heads) for heads in (1, 8, 16)),
    *(replace(KIMI, key_heads=heads) for heads in (16, 32)),
]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decodes(case: DeltaCase, state_dtype: torch.dtype) -> None:
    case = replace(case, state_dtype=state_dtype)
    output, windows, matrices = decode(case, [Row(1, length) for length in LENGTHS])
    assert output < 4e-3
    assert windows == 0
    assert matrices < (1e-5 if state_dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("config", [DeltaDecodeConfig(4, None), DeltaDecodeConfig(16, None)])
def test_decodes_in_other_configurations(config: DeltaDecodeConfig) -> None:
    output, windows, matrices = decode(REAL, [Row(1, n) for n in LENGTHS], config=config)
    assert output < 4e-3
    assert windows == 0
    assert matrices < 1e-5


def test_decodes_of_many_rows() -> None:
    """Programs of a key head run in any order: the windows that they share are still right."""
    rng = random.Random(0)
    rows = [Row(1, rng.choice([0, *range(1, 600)])) for _ in range(300)]
    output, windows, matrices = decode(REAL, rows)
    assert output < 4e-3
    assert windows == 0
    assert matrices < 1e-5


def test_decodes_in_a_graph() -> None:
    """Replayed token by token over a block's end, the graph gives what single launches give."""
    rows = [Row(1, 62, (1,)), Row(1, 0), Row(1, 100)]  # the first has its next block already
    problems = []
    for _ in range(2):
        torch.manual_seed(1)
        problems.append(DeltaProblem(REAL, rows))

    def run(problem: DeltaProblem, tickets: torch.Tensor) -> None:
        delta_decode(
            problem.inputs, problem.weights, problem.windows.states, problem.matrices.states,
            problem.seq_lens, tickets, problem.out, block_size=64,
        )  # fmt: skip

    tickets = make_tickets(3, 16, torch.device("cuda"))
    run(DeltaProblem(REAL, rows), tickets)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(problems[0], tickets)
    for _ in range(4):
        graph.replay()
        run(problems[1], tickets)
        for problem in problems:
            problem.seq_lens += (problem.seq_lens > 0).int()
    torch.cuda.synchronize()
    first, second = problems
    for a, b in (
        (first.out, second.out),
        (first.windows.states.states, second.windows.states.states),
        (first.matrices.states.states, second.matrices.states.states),
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def check_prefill(case: DeltaCase, limit: float = 1e-2, **options: Any) -> None:
    output, windows, matrices = prefill(case, ROWS, **options)
    assert max(output, matrices) < limit
    assert windows == 0


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_prefill(case: DeltaCase, block_size: int) -> None:
    check_prefill(replace(case, block_size=block_size))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        # the gated norm follows the scan, or is part of it
        (REAL, DeltaPrefillConfig(32, 4, 2, 8)),
        (REAL, DeltaPrefillConfig(128, 8, 1, 4)),
        *((case, DeltaPrefillConfig(128, 8, 1, 8)) for case in (REAL, KIMI)),
        *(
            pytest.param(
                case, DeltaPrefillConfig(32, 4, 1, 4),
                marks=pytest.mark.xfail(reason="wrong on Hopper, and used by no layer", run=False),
            )
            for case in (REAL, KIMI)
        ),
    ],
    ids=str,
)  # fmt: skip
def test_prefill_in_other_configurations(case: DeltaCase, config: DeltaPrefillConfig) -> None:
    check_prefill(case, config=config)


@pytest.mark.parametrize(
    ("case", "a_log", "shift"),
    [
        *((case, (-9.0, -8.0), -4.0) for case in (REAL, KIMI)),
        *((case, (2.0, 2.8), 30.0) for case in (REAL, KIMI)),
        (KIMI, (-3.0, 3.0), 2.0),
    ],
    ids=str,
)
def test_prefill_with_decays_near_one_and_zero(
    case: DeltaCase, a_log: tuple[float, float], shift: float
) -> None:
    check_prefill(replace(case, a_log=a_log, shift=shift), 2e-2)


@pytest.mark.timeout(600)  # products in float32 at this size are compiled slowly
@pytest.mark.parametrize("case", [REAL, KIMI], ids=["one decay", "by channel"])
def test_prefill_in_float32(case: DeltaCase) -> None:
    check_prefill(replace(case, dtype=torch.float32, key_heads=2), 1e-5)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes",
    [
        (64, 8, 64, 128),
        pytest.param(
            (48, 1, 64, 256),
            marks=pytest.mark.xfail(
                reason="illegal accesses on Hopper, used by no layer", run=False
            ),
        ),
        (80, 1, 80, 128),
    ],
)
def test_mamba(sizes: tuple[int, int, int, int], state_dtype: torch.dtype) -> None:
    """Heads, groups, channels of a head and of its state."""
    heads, groups, head_size, state_size = sizes
    case = MambaCase(
        torch.bfloat16, "cuda", groups, heads, head_size, state_size, block_size=64,
        state_dtype=state_dtype,
    )  # fmt: skip
    assert max(run(case, MIXED, prefill=False)) < 4e-3
    rows = [*ROWS, Row(200, 500)]
    assert max(run(case, rows, prefill=True)) < 1e-2


@pytest.mark.timeout(600)  # products in float32 at this size are compiled slowly
def test_mamba_in_float32() -> None:
    case = MambaCase(torch.float32, "cuda", 2, 8, 64, 128, block_size=64)
    assert max(run(case, MIXED, prefill=False)) < 1e-5
    output, matrices = run(case, ROWS, prefill=True)
    assert output < 1e-5
    assert matrices < 1e-4


@pytest.mark.parametrize(("channels", "groups"), [(4096, 8), (8192, 1), (3072, 1)])
@pytest.mark.parametrize("gates_first", [True, False])
def test_gates_and_norms_of_mamba(gates_first: bool, channels: int, groups: int) -> None:
    x = torch.randn(33, channels, device="cuda")
    gates = torch.randn(33, channels + 64, device="cuda").bfloat16()[:, 64:]
    weight, out = torch.randn(channels, device="cuda").bfloat16(), torch.empty_like(gates)
    gated_norm(x, gates, out, weight=weight, groups=groups, eps=1e-5, gates_first=gates_first)
    factors, expected = F.silu(gates.double()), x.double()
    expected = expected * factors if gates_first else expected
    by_group = expected.unflatten(1, (groups, -1))
    squares = by_group.square().mean(-1, keepdim=True)
    expected = (by_group / (squares + 1e-5).sqrt()).flatten(1) * weight
    assert error((out, expected if gates_first else expected * factors)) < 4e-3

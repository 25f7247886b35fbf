"""Cases of `bench_kernels.py` for the gated delta rule, at the shape of Qwen3.5 35B-A3B and 9B, and
for Kimi delta attention at Kimi-Linear's: decodes of a layer, and prefill, as a whole and launch by
launch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from aioinfer.kernels.delta_arguments import DeltaInputs, DeltaShape, DeltaWeights
from aioinfer.kernels.delta_decode import (
    DeltaDecodeConfig,
    delta_decode,
    delta_decode_config,
    make_tickets,
)
from aioinfer.kernels.delta_prefill import (
    DeltaPrefill,
    DeltaPrefillConfig,
    DeltaWorkspace,
    delta_prefill,
    delta_prefill_config,
    plans_of,
)
from aioinfer.kernels.states import StateTables, plan_chunks

from benchlib.kernel_cases import DEVICE, Case, ints, random_tensor

HEADS, SIZE, WIDTH, BLOCK = 32, 128, 4, 64
SHAPES = {
    "delta": DeltaShape(16, 2, SIZE, SIZE, SIZE, SIZE, WIDTH, BLOCK),
    "kimi": DeltaShape(HEADS, 1, SIZE, SIZE, SIZE, SIZE, WIDTH, BLOCK, by_channel=True),
}
STATE_NUMBERS = HEADS * SIZE * SIZE
#: Of the states of decodes.
STATE_DTYPES = {"": torch.float32, " bf16": torch.bfloat16}


def _channels(shape: DeltaShape) -> int:
    """Returns the channels of the convolution."""
    return (2 * shape.key_heads + HEADS) * SIZE


@dataclass(slots=True)
class Layer:
    """Inputs of T tokens as parts of one projection, weights, and states of `blocks` blocks."""

    inputs: DeltaInputs
    weights: DeltaWeights
    windows: torch.Tensor
    matrices: torch.Tensor
    out: torch.Tensor

    @classmethod
    def random(
        cls, shape: DeltaShape, tokens: int, blocks: int, state_dtype: torch.dtype = torch.float32
    ) -> Layer:
        """Returns a layer of random numbers."""
        channels, decays = _channels(shape), HEADS * SIZE if shape.by_channel else HEADS
        wide = random_tensor(tokens, channels + HEADS * SIZE)
        gates = random_tensor(tokens, HEADS + decays)
        weights = DeltaWeights(
            random_tensor(channels, WIDTH), torch.zeros(HEADS, device=DEVICE),
            torch.ones(decays, device=DEVICE), random_tensor(SIZE), 1e-6,
        )  # fmt: skip
        return cls(
            DeltaInputs(
                wide[:, :channels], wide[:, channels:].unflatten(1, (HEADS, SIZE)),
                gates[:, :HEADS], gates[:, HEADS:],
            ),
            weights,
            random_tensor(blocks, channels, WIDTH - 1),
            (torch.randn(blocks, HEADS, SIZE, SIZE, device=DEVICE) * 0.1).to(state_dtype),
            random_tensor(tokens, HEADS * SIZE),
        )  # fmt: skip


def delta_cases(tune: bool) -> Iterator[Case]:
    """Decodes of 1 to 256 rows, whose states do not fit the L2 cache, and prefill."""
    for name, shape in SHAPES.items():
        for rows, states in itertools.product((1, 8, 32, 128, 256), STATE_DTYPES):
            yield from _decode_cases(name, shape, rows, states, tune)
        for rows, tokens in ((1, 512), (1, 4096), (2, 4096), (4, 4096), (16, 4096), (64, 128)):
            yield from _prefill_cases(name, shape, rows, tokens, tune)


def _decode_cases(
    name: str, shape: DeltaShape, rows: int, states: str, tune: bool
) -> Iterator[Case]:
    state_bytes = STATE_NUMBERS * STATE_DTYPES[states].itemsize
    copies = max(1, 2**28 // (rows * state_bytes))
    layer = Layer.random(shape, rows, rows * copies, STATE_DTYPES[states])
    tables = torch.randperm(rows * copies, device=DEVICE).int().view(copies, rows, 1)
    lens, tickets = (
        ints([BLOCK // 2] * rows),
        make_tickets(rows, shape.key_heads, torch.device(DEVICE)),
    )
    configs = [delta_decode_config(shape)]
    if tune:
        limits = (None, 64, 96, 128, 168)
        configs = [DeltaDecodeConfig(*option) for option in itertools.product((4, 8, 16), limits)]
    for config in configs:

        def run(table: torch.Tensor, layer=layer, lens=lens, tickets=tickets, config=config):
            windows, matrices = (
                StateTables(layer.windows, table),
                StateTables(layer.matrices, table),
            )
            delta_decode(
                layer.inputs, layer.weights, windows, matrices, lens, tickets, layer.out,
                block_size=BLOCK, config=config,
            )  # fmt: skip

        channels = _channels(shape)
        of_row = 2 * (state_bytes + channels * (WIDTH - 1) * 2) + (channels + 2 * HEADS * SIZE) * 2
        yield Case(
            name, f"decode {rows}{states}", f"w{config.num_warps} r{config.max_registers}",
            [lambda table=table, run=run: run(table) for table in tables], bytes=rows * of_row,
        )  # fmt: skip


def _prefill_cases(
    name: str, shape: DeltaShape, rows: int, tokens: int, tune: bool
) -> Iterator[Case]:
    layer, device = Layer.random(shape, rows * tokens, rows), torch.device(DEVICE)
    tables = torch.full((rows, tokens // BLOCK), -1, dtype=torch.int32, device=DEVICE)
    tables[:, -1] = torch.arange(rows, device=DEVICE)
    starts, lens = ints([row * tokens for row in range(rows + 1)]), ints([tokens] * rows)
    total = rows * tokens
    workspace = DeltaWorkspace.empty(
        total, rows, _channels(shape), HEADS, SIZE, BLOCK, layer.out.dtype, device,
        by_channel=shape.by_channel,
    )  # fmt: skip
    plans = plans_of(rows, total, BLOCK, device)
    for plan in plans:
        plan_chunks(plan, starts, lens, total)
    arguments = (
        layer.inputs, layer.weights, StateTables(layer.windows, tables),
        StateTables(layer.matrices, tables), starts, lens,
    )  # fmt: skip
    default = delta_prefill_config(shape, 2)
    of_token = (_channels(shape) + 2 * HEADS * SIZE) * 2
    flops = total * HEADS * 2 * SIZE * (3 * SIZE + 5 * BLOCK)
    values = (32, 64, 128) if tune else (default.values,)
    options = itertools.product(values, (4, 8), (1, 2, 3)) if tune else [default[:3]]
    for option in options:
        config = DeltaPrefillConfig(*option, default.chunk_warps)

        def run(arguments=arguments, plans=plans, workspace=workspace, out=layer.out,
                config=config) -> None:  # fmt: skip
            delta_prefill(*arguments, *plans, workspace, out, block_size=BLOCK, config=config)

        variant = f"v{config.values} w{config.scan_warps} s{config.scan_stages}"
        yield Case(name, f"prefill {rows}x{tokens}", variant, [run], bytes=total * of_token,
                   flops=flops, repeats=5)  # fmt: skip
    for warps in (4, 8) if tune else (default.chunk_warps,):
        launches = DeltaPrefill(
            *arguments, 0, *plans, workspace, layer.out, shape,
            default._replace(chunk_warps=warps), False,
        )  # fmt: skip
        for part in ("convolution", "chunks", "scan", "norm"):
            if warps == default.chunk_warps or part == "chunks":
                yield Case(
                    name, f"{part} {rows}x{tokens}", f"w{warps}" if part == "chunks" else "",
                    [getattr(launches, f"launch_{part}")], bytes=total * of_token, repeats=5,
                )  # fmt: skip

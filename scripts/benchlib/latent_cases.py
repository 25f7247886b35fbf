"""Cases of `bench_kernels.py` for latent attention: DeepSeek's heads on one of 8 ranks and on one
GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from aioinfer.kernels.decode_plan import DecodeConfig, plan_decode
from aioinfer.kernels.latent_attention import (
    latent_config,
    latent_decode,
    make_latent_workspace,
)
from aioinfer.kernels.latent_prefill import (
    PrefillState,
    TileConfig,
    latent_prefill,
    plan_segments,
    tile_config,
)

from benchlib.kernel_cases import DEVICE, Case, ints, paged, random_tensor
from tests.kernels.references import latent_decode_reference

LATENT, ROTARY, PLAIN, VALUE = 512, 64, 128, 128
SCALE = (PLAIN + ROTARY) ** -0.5


def latent_cases(tune: bool) -> Iterator[Case]:
    """Decodes over paged latents, and prefill over expanded keys and values."""
    yield from _decode_cases(tune)
    yield from _prefill_cases(tune)


def _decode_cases(tune: bool) -> Iterator[Case]:
    shapes = {
        "256x1k": [1024] * 256,
        "64x2k": [2048] * 64,
        "8x8k": [8192] * 8,
        "1x32k": [32768],
        "1x512": [512],
        "1x32k+200x256": [32768] + [256] * 200,
    }
    for num_heads, (name, keys) in itertools.product((16, 128), shapes.items()):
        configs = [latent_config(num_heads, 2)]
        if tune:
            options = itertools.product((16, 32, 64), (4, 8), (2, 3, 4, 5, 6), (1, 2), (1,))
            configs = [DecodeConfig(*option) for option in options]
        latents, _, tables = paged(keys, 1, LATENT + ROTARY, 64)
        # as many caches as exceed the L2 cache together
        caches = [latents[:, :, 0].clone() for _ in range(max(1, 2**28 // latents.nbytes))]
        lens, rows = ints(keys), len(keys)
        absorbed = random_tensor(rows, num_heads, LATENT)
        rotated = random_tensor(rows, num_heads, ROTARY)
        for config in configs:
            workspace = make_latent_workspace(num_heads, LATENT, caches[0], config=config)
            plan_decode(workspace, lens)

            def run(
                cache=caches[0], absorbed=absorbed, rotated=rotated, tables=tables, lens=lens,
                workspace=workspace,
            ) -> torch.Tensor:  # fmt: skip
                return latent_decode(absorbed, rotated, cache, tables, lens, workspace, scale=SCALE)

            def check(
                run=run, cache=caches[0], absorbed=absorbed, rotated=rotated, tables=tables,
                lens=lens,
            ) -> float:  # fmt: skip
                wide = (absorbed[-1:].double(), rotated[-1:].double(), cache.double())
                expected = latent_decode_reference(*wide, tables[-1:], lens[-1:], scale=SCALE)
                return float((run()[-1:].double() - expected).norm() / expected.norm())

            variant = f"h{num_heads} {config.tile} w{config.num_warps} s{config.num_stages}"
            yield Case(
                "latent", name, f"{variant} p{config.programs_per_sm}",
                [lambda cache=cache, run=run: run(cache) for cache in caches],
                bytes=sum(keys) * (LATENT + ROTARY) * 2,
                flops=2 * sum(keys) * num_heads * (2 * LATENT + ROTARY),
                check=check,
            )  # fmt: skip


def _prefill_cases(tune: bool) -> Iterator[Case]:
    num_heads = 16
    shapes = {"1x4k": [(4096, 4096)], "8x1k": [(1024, 1024)] * 8, "1k after 7k": [(1024, 8192)]}
    configs = [tile_config(2)]
    if tune:
        options = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
        configs = [TileConfig(*option) for option in options]
    for name, rows in shapes.items():
        counts, lengths = [count for count, _ in rows], [length for _, length in rows]
        tokens, context = sum(counts), sum(lengths)
        queries = random_tensor(tokens, num_heads, PLAIN + ROTARY)
        expanded = random_tensor(context, num_heads * (PLAIN + VALUE))
        keys = random_tensor(context, ROTARY)
        out = torch.empty(tokens, num_heads, VALUE, dtype=queries.dtype, device=DEVICE)
        state = PrefillState.empty(tokens, num_heads, VALUE, queries.device)
        pairs = sum(count * (length - (count - 1) / 2) for count, length in rows)
        for config in configs:
            (segment,) = plan_segments(counts, lengths, 0, context, config.rows, queries.device)

            def run(
                queries=queries, expanded=expanded, keys=keys, segment=segment, state=state,
                out=out, config=config,
            ) -> None:  # fmt: skip
                latent_prefill(
                    queries, expanded, keys, segment, state, out, plain_size=PLAIN, scale=SCALE,
                    config=config,
                )  # fmt: skip

            variant = f"{config.rows}x{config.tile} w{config.num_warps} s{config.num_stages}"
            yield Case(
                "latent", name, variant, [run],
                bytes=2.0 * (queries.numel() + expanded.numel() + keys.numel() + out.numel()),
                flops=2 * pairs * num_heads * (PLAIN + ROTARY + VALUE),
            )  # fmt: skip

"""The cases of `bench_kernels.py`: the GPU kernels at the models' shapes, beside torch's operations
where these exist, with checks of the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from aioinfer.kernels.activation import gated_activation
from aioinfer.kernels.attention_tiles import ScoreArguments
from aioinfer.kernels.decode_attention import launch_decode
from aioinfer.kernels.decode_plan import (
    MIN_JOINED_ROWS,
    DecodeConfig,
    DecodeWorkspace,
    decode_config,
    plan_decode,
)
from aioinfer.kernels.few_rows_dense import FewRowsConfig, few_rows_dense
from aioinfer.kernels.gated_product import (
    GatedConfig,
    candidates,
    gated_config,
    gated_product,
)
from aioinfer.kernels.logprobs import token_logprobs
from aioinfer.kernels.norm import add_rms_norm
from aioinfer.kernels.prefill_attention import PrefillConfig, launch_prefill, prefill_config
from aioinfer.kernels.prefill_hopper import ROWS, launch_prefill_hopper
from aioinfer.kernels.prefill_plan import PrefillPlan, plan_prefill
from aioinfer.kernels.prepare import PreparedInputs, prepare_inputs
from aioinfer.kernels.projection import Projection, Rotation
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from aioinfer.kernels.sampling import SamplingState, sample_tokens

from tests.kernels.references import product_reference

DEVICE = "cuda"
BF16 = torch.bfloat16
LOG2_E = 1.4426950408889634
#: Of heads of 128 channels.
SCORES = ScoreArguments(128**-0.5 * LOG2_E)


@dataclass(slots=True)
class Case:
    """A kernel call to time. `runs` are called one after the other, so that their inputs together
    exceed the L2 cache.

    Attributes:
        bytes, flops: the minimum that one run has to move and compute.
        check: returns the error of a run's result; None where the tests suffice.
        rate_factor: how much faster than bf16 the tensor cores compute it.
    """

    family: str
    name: str
    variant: str
    runs: list[Callable[[], object]]
    bytes: float
    flops: float = 0.0
    check: Callable[[], float] | None = None
    repeats: int = 20
    rate_factor: float = 1.0


def random_tensor(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Returns bf16 normal numbers."""
    return torch.empty(shape, dtype=BF16, device=DEVICE).normal_(0, scale)


def ints(values: object) -> torch.Tensor:
    """Returns an int32 tensor on the device."""
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


def paged(
    keys: list[int], kv_heads: int, head_size: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns caches for these rows and their block tables, blocks in random places."""
    counts = [-(-k // block_size) for k in keys]
    blocks = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
    tables = torch.zeros(len(keys), max(counts), dtype=torch.int32, device=DEVICE)
    taken = 0
    for row, count in enumerate(counts):
        tables[row, :count] = blocks[taken : taken + count]
        taken += count
    return (
        random_tensor(len(blocks), block_size, kv_heads, head_size),
        random_tensor(len(blocks), block_size, kv_heads, head_size),
        tables,
    )


def attention_check(
    q: torch.Tensor,
    out: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    tokens: list[int],
    keys: list[int],
) -> float:
    """Returns the relative error of the last row of `out` against float64."""
    row, count = len(keys) - 1, tokens[-1]
    take = min(count, 200)
    blocks = tables[row, : -(-keys[row] // k.shape[1])].long()
    wide_k, wide_v = (c[blocks].flatten(0, 1)[: keys[row]].double() for c in (k, v))
    group = q.shape[1] // k.shape[2]
    wide_q = q[-take:].double().unflatten(1, (k.shape[2], group))
    scores = torch.einsum("qhgd,khd->hgqk", wide_q, wide_k) * q.shape[2] ** -0.5
    position = torch.arange(keys[row] - take, keys[row], device=DEVICE)
    scores.masked_fill_(
        torch.arange(keys[row], device=DEVICE)[None, :] > position[:, None], float("-inf")
    )
    expected = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), wide_v).flatten(1, 2)
    return float((out[-take:].double() - expected).norm() / expected.norm())


#: Query heads, KV heads, and channels of a head: Qwen3-8B's and Qwen3.5 35B-A3B's.
DECODE_HEADS = {"": (32, 8, 128), " heads of 256": (16, 2, 256)}
#: The keys of each row.
DECODE_SHAPES = {
    "256x1k": [1024] * 256,
    "64x2k": [2048] * 64,
    "8x8k": [8192] * 8,
    "1x8k": [8192],
    "1x32k": [32768],
    "8x32k": [32768] * 8,
    "1x512": [512],
    "256x256": [256] * 256,
    "1x32k+200x256": [32768] + [256] * 200,
}


def decode_cases(tune: bool) -> Iterator[Case]:
    """Decode attention from projections, with norms and RoPE, over blocks of 64 tokens, as in the
    layers of a model; in as many caches as exceed the L2 cache together."""
    for (kind, heads), (name, keys) in itertools.product(
        DECODE_HEADS.items(), DECODE_SHAPES.items()
    ):
        q_heads, kv_heads, size = heads
        num_bytes = sum(keys) * kv_heads * size * 4
        caches = [paged(keys, kv_heads, size, 64) for _ in range(max(1, 2**28 // num_bytes))]
        lens, qkv = ints(keys), random_tensor(len(keys), (q_heads + 2 * kv_heads) * size)
        # a rotation by no angle: the check takes the queries as they are, normed
        angles = torch.tensor([1.0, 0.0], device=DEVICE).repeat_interleave(size // 2)
        weight = torch.ones(size, dtype=BF16, device=DEVICE)
        rotation = Rotation(angles.expand(max(keys), -1).contiguous(), weight, weight)
        queries = qkv[:, : q_heads * size].view(-1, q_heads, size)
        normed = torch.nn.functional.rms_norm(queries.float(), (size,), eps=1e-6)
        for config in _decode_configs(size, tune):
            workspace = DecodeWorkspace.create(q_heads, caches[0][0], config=config)
            plan_decode(workspace, lens)
            out = torch.full_like(queries, float("nan"))
            run = partial(
                launch_decode, queries, seq_lens=lens, out=out, workspace=workspace,
                scores=ScoreArguments(size**-0.5 * LOG2_E), projection=Projection(qkv, rotation),
            )  # fmt: skip
            runs = [partial(run, k, v, tables) for k, v, tables in caches]
            variant = (
                f"tile {config.tile} w{config.num_warps} s{config.num_stages} "
                f"p{config.programs_per_sm} t{config.part_tiles}"
            )
            yield Case(
                "decode", f"{name}{kind}", variant, runs, num_bytes,
                4 * size * q_heads * sum(keys),
                partial(attention_check, normed, out, *caches[0], [1] * len(keys), keys),
            )  # fmt: skip


#: Sequences, rows of each, and its keys: a row has one more than the row before it.
LOOKAHEAD_SHAPES = (
    (1, 4, 300),
    (1, 4, 8192),
    (8, 4, 300),
    (32, 4, 300),
    (128, 2, 300),
    (16, 4, 8192),
)


def lookahead_cases(tune: bool) -> Iterator[Case]:
    """Decode attention of rows that look ahead, one by one and joined: adjacent rows of a sequence
    in one tile."""
    for (kind, heads), (count, ahead, most) in itertools.product(
        DECODE_HEADS.items(), LOOKAHEAD_SHAPES
    ):
        q_heads, kv_heads, size = heads
        num_bytes = count * most * kv_heads * size * 4
        caches = [
            paged([most] * count, kv_heads, size, 64) for _ in range(max(1, 2**28 // num_bytes))
        ]
        keys = [most + 1 - ahead + offset for _ in range(count) for offset in range(ahead)]
        lens, offsets = ints(keys), ints([*range(ahead)] * count)
        queries = random_tensor(len(keys), q_heads, size)
        workspace = DecodeWorkspace.create(q_heads, caches[0][0], max_rows=len(keys))
        joined = workspace.for_lookahead(q_heads, size, MIN_JOINED_ROWS * size // 128)
        of_rows = [(k, v, t.repeat_interleave(ahead, 0).contiguous()) for k, v, t in caches]
        for variant, space in (("one by one", workspace), ("joined", joined)):
            plan_decode(space, lens, offsets=offsets)
            out = torch.full_like(queries, float("nan"))
            run = partial(
                launch_decode, queries, seq_lens=lens, out=out, workspace=space,
                scores=ScoreArguments(size**-0.5 * LOG2_E),
            )  # fmt: skip
            runs = [partial(run, *cache) for cache in of_rows]
            checked = queries, out, *of_rows[0], [1] * len(keys), keys
            yield Case(
                "lookahead", f"{count}x{ahead}@{most}{kind}", variant, runs, num_bytes,
                4 * size * q_heads * sum(keys), partial(attention_check, *checked),
            )  # fmt: skip


def _decode_configs(head_size: int, tune: bool) -> list[DecodeConfig]:
    if not tune:
        return [decode_config(head_size, 2)]
    if head_size == 128:
        options = itertools.product((32, 64), (4, 8), (4, 5, 6, 7, 8), (1, 2, 3), (2, 4, 8))
    else:
        options = itertools.product((16, 32), (2, 4), (4, 6), (2, 4), (2, 4, 8))
    return [DecodeConfig(*option) for option in options]


#: (tokens, keys) of the rows.
PREFILL_SHAPES = {
    "2x4096": [(4096, 4096)] * 2,
    "1x8192": [(8192, 8192)],
    "1x16384": [(16384, 16384)],
    "512@16k": [(512, 16384)],
    "2048@32k": [(2048, 32768)],
    "2048@128k": [(2048, 131072)],
    "32x256": [(256, 256)] * 32,
}


def prefill_variants(tune: bool) -> dict[int, list[tuple[str, PrefillConfig | None]]]:
    """Returns, by the size of a block, the kernels' names and configurations: None is the Hopper
    kernel."""
    plain = [("plain", prefill_config(128, 2))]
    if tune:
        for numbers in (
            (128, 64, 8, 2),
            (128, 64, 8, 3),
            (128, 64, 4, 3),
            (64, 64, 4, 3),
            (128, 128, 8, 2),
        ):
            c = PrefillConfig(*numbers)
            plain.append((f"plain {c.rows} {c.tile} w{c.num_warps} s{c.num_stages}", c))
    return {64: [("hopper b64", None), *plain], 128: [("hopper b128", None)]}


def prefill_cases(tune: bool) -> Iterator[Case]:
    """Causal prefill, Qwen3-8B's heads; `hopper` over blocks of 64 and 128, and the plain kernel
    over blocks of 64."""
    options = {"window": 0, "scores": SCORES}
    for (name, rows), (block_size, variants) in itertools.product(
        PREFILL_SHAPES.items(), prefill_variants(tune).items()
    ):
        tokens, keys = [r[0] for r in rows], [r[1] for r in rows]
        k, v, tables = paged(keys, 8, 128, block_size)
        q, lens = random_tensor(sum(tokens), 32, 128), ints(keys)
        starts = ints([0, *tokens]).cumsum(0).int()
        visible = sum(t * (n - t) + t * (t + 1) / 2 for t, n in rows)
        for variant, config in variants:
            out = torch.full_like(q, float("nan"))
            tile_rows = ROWS if config is None else config.rows
            plan = PrefillPlan.empty(
                len(tokens), len(q), 4, tile_rows, q.device, hopper=config is None
            )
            plan_prefill(plan, starts, lens, 0, len(q))
            arguments = (q, k, v, tables, starts, lens, out, plan)
            if config is None:
                run = partial(launch_prefill_hopper, *arguments, **options)
            else:
                run = partial(launch_prefill, *arguments, config=config, **options)
            yield Case(
                "prefill",
                name,
                variant,
                [run],
                2 * q.nbytes + 2 * sum(keys) * 8 * 128 * 2,
                4 * 128 * 32 * visible,
                partial(attention_check, q, out, k, v, tables, tokens, keys),
                5,
            )


#: Output features, inputs, whether the norm comes before, whether the gate comes after; where
#: neither, a residual is added.
PRODUCTS = {
    "8B qkv": (6144, 4096, True, False),
    "8B o": (4096, 4096, False, False),
    "8B gate_up": (12288, 4096, True, True),
    "8B down": (4096, 12288, False, False),
    "8B lm_head": (151936, 4096, True, False),
    "0.6B qkv": (4096, 1024, True, False),
    "0.6B o": (1024, 2048, False, False),
    "0.6B gate_up": (3072, 1024, True, True),
    "0.6B down": (1024, 3072, False, False),
}


def few_rows_variants(rows: int, inputs: int, tune: bool) -> list[tuple[str, FewRowsConfig | None]]:
    """Returns the table's configuration (None) and, to tune, others."""
    if not tune:
        return [("table", None)]
    if rows == 1:
        step = min(4096, 1 << (inputs - 1).bit_length())
        configs = [
            FewRowsConfig(features, step, warps) for features in (1, 2, 4) for warps in (2, 4, 8)
        ]
    else:
        tiles = (
            (16, 256, 1, 5),
            (16, 256, 2, 5),
            (16, 512, 2, 4),
            (32, 256, 2, 4),
            (32, 256, 4, 4),
            (64, 128, 4, 5),
            (64, 256, 4, 3),
        )
        configs = [FewRowsConfig(*tile) for tile in tiles]
    return [(f"n{c.features} k{c.step} w{c.num_warps} s{c.num_stages}", c) for c in configs]


def few_rows_cases(tune: bool) -> Iterator[Case]:
    """Products of few rows with the fused operations, beside torch's product alone."""
    for name, (features, inputs, normed, gated) in PRODUCTS.items():
        copies = max(1, int(3e8 / (features * (1 + gated) * inputs * 2)))
        weights = [
            random_tensor(features * (1 + gated), inputs, scale=inputs**-0.5) for _ in range(copies)
        ]
        for rows in (1, 2, 4, 8):
            x, norm = random_tensor(rows, inputs), random_tensor(inputs) if normed else None
            residual = None if normed else random_tensor(rows, features)
            size = weights[0].nbytes + x.nbytes + rows * features * 2
            plain = [lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in weights]
            yield Case("few_rows", f"{name} x{rows}", "torch, product alone", plain, size)
            for variant, config in few_rows_variants(rows, inputs, tune):

                def run(
                    w, x=x, norm=norm, residual=residual, gated=gated, config=config
                ) -> torch.Tensor:
                    return few_rows_dense(
                        x, w, norm_weight=norm, residual=residual, gated=gated, config=config
                    )

                def check(
                    run=run, x=x, w=weights[0], norm=norm, residual=residual, gated=gated
                ) -> float:
                    wide = [None if t is None else t.double() for t in (norm, residual)]
                    expected = product_reference(
                        x.double(), w.double(), norm_weight=wide[0], residual=wide[1], gated=gated
                    )
                    return float((run(w).double() - expected).norm() / expected.norm())

                yield Case(
                    "few_rows",
                    f"{name} x{rows}",
                    variant,
                    [lambda w=w, run=run: run(w) for w in weights],
                    size,
                    check=check,
                )


#: Outputs and inputs of gated products; the 8B's also as one of two ranks has it.
GATED = {"8B": (12288, 4096), "8B / 2": (6144, 4096), "0.6B": (3072, 1024)}


def gated_configs(tokens: int, features: int, tune: bool) -> dict[str, GatedConfig]:
    """Returns the table's configuration and, to tune, all others, and the table's with other groups
    of token tiles."""
    best = gated_config(
        tokens, features, torch.cuda.get_device_properties(DEVICE).multi_processor_count
    )
    configs = [best]
    if tune:
        configs += [config for config in candidates(tokens) if config != best]
        configs += [replace(best, group=group) for group in (4, 16) if tokens > 4 * best.tokens]
    return {f"t{c.tokens} c{c.consumers} g{c.group}": c for c in configs}


def gated_cases(tune: bool) -> Iterator[Case]:
    """The gated product as one kernel, beside torch's product followed by `gated_activation`."""
    for name, (features, inputs) in GATED.items():
        copies = max(1, int(3e8 / (4 * features * inputs)))
        weights = [random_tensor(2 * features, inputs, scale=inputs**-0.5) for _ in range(copies)]
        for rows in (9, 16, 24, 33, 64, 100, 128, 192, 256, 300, 512, 1024, 2048, 8192):
            x, product, out = (random_tensor(rows, n) for n in (inputs, 2 * features, features))
            last = slice(max(0, rows - 200), rows)
            expected = product_reference(x[last], weights[0], gated=True)
            size, flops = weights[0].nbytes + x.nbytes + out.nbytes, 4.0 * rows * features * inputs

            def apart(w, x=x, product=product, out=out) -> None:
                gated_activation(torch.mm(x, w.t(), out=product), out=out)

            yield Case(
                "gated",
                f"{name} x{rows}",
                "torch and gated_activation",
                [lambda w=w, f=apart: f(w) for w in weights],
                size,
                flops,
            )
            for variant, config in gated_configs(rows, features, tune).items():
                for pdl in (False, True):

                    def run(w, x=x, out=out, config=config, pdl=pdl) -> None:
                        gated_product(x, w, out=out, config=config, pdl=pdl)

                    def check(
                        run=run, w=weights[0], out=out, last=last, expected=expected
                    ) -> float:
                        run(w)
                        return float((out[last] - expected).norm() / expected.norm())

                    runs = [lambda w=w, run=run: run(w) for w in weights]
                    yield Case(
                        "gated", f"{name} x{rows}", variant + " pdl" * pdl, runs, size, flops, check
                    )


def chain_cases(tune: bool) -> Iterator[Case]:
    """All kernels of one decode step of one stream, in order, with and without programmatic
    dependent launch."""
    for name, layers, hidden, q_heads, width in (
        ("0.6B step", 28, 1024, 16, 3072),
        ("8B step", 36, 4096, 32, 12288),
    ):
        k, v, tables = paged([512], 8, 128, 64)
        weights = [
            [
                random_tensor((q_heads + 16) * 128, hidden, scale=0.02),
                random_tensor(hidden, q_heads * 128, scale=0.02),
                random_tensor(2 * width, hidden, scale=0.02),
                random_tensor(hidden, width, scale=0.02),
            ]
            for _ in range(layers)
        ]
        head = random_tensor(151936, hidden, scale=0.02)
        workspace, lens = DecodeWorkspace.create(q_heads, k), ints([512])
        plan_decode(workspace, lens)
        cos_sin, position, slot = (
            torch.rand(1024, 128, device=DEVICE),
            ints([511]),
            torch.tensor([511], device=DEVICE),
        )
        norm, head_norm, state = random_tensor(hidden), random_tensor(128), random_tensor(1, hidden)
        size = sum(w.nbytes for layer in weights for w in layer) + head.nbytes + layers * 512 * 4096

        def step(
            pdl: bool, weights=weights, head=head, state=state, q_heads=q_heads, k=k, v=v,
            tables=tables, norm=norm, head_norm=head_norm,
            cos_sin=cos_sin, position=position, slot=slot, workspace=workspace, lens=lens,
        ) -> None:  # fmt: skip
            hidden = state
            for qkv_w, o_w, up_w, down_w in weights:
                qkv = few_rows_dense(hidden, qkv_w, norm_weight=norm, pdl=pdl)
                q = qk_norm_rope_cache(
                    Projection(qkv, Rotation(cos_sin, head_norm, head_norm), position),
                    slot,
                    k,
                    v,
                    num_q_heads=q_heads,
                    pdl=pdl,
                )
                out = torch.empty_like(q)
                launch_decode(
                    q,
                    k,
                    v,
                    tables,
                    lens,
                    out,
                    workspace,
                    scores=SCORES,
                    pdl=pdl,
                )
                hidden = few_rows_dense(out.flatten(1), o_w, residual=hidden, pdl=pdl)
                gated = few_rows_dense(hidden, up_w, norm_weight=norm, gated=True, pdl=pdl)
                hidden = few_rows_dense(gated, down_w, residual=hidden, pdl=pdl)
            few_rows_dense(hidden, head, norm_weight=norm, pdl=pdl)

        yield Case(
            "chain", name, "plain launches", [lambda step=step: step(False)], size, repeats=2
        )
        yield Case("chain", name, "pdl", [lambda step=step: step(True)], size, repeats=2)


#: Temperature, top-k, top-p, min-p.
SAMPLING_PARAMS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "T 0.6": (0.6, 0, 1.0, 0.0),
    "top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 1000": (1.0, 1000, 1.0, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}


def sampling_cases(tune: bool) -> Iterator[Case]:
    """Sampling from Qwen3's vocabulary, from flat logits (the hardest) and from peaked ones."""
    for rows in (1, 8, 256):
        slots = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        for kind, spread in (("flat", 2.0), ("peaked", 4.0)):
            logits = torch.randn(rows, 151_936, device=DEVICE) * spread
            for variant, (temperature, top_k, top_p, min_p) in SAMPLING_PARAMS.items():
                numbers = [
                    torch.full((rows,), x, device=DEVICE) for x in (temperature, top_p, min_p)
                ]
                state = SamplingState(
                    torch.arange(rows, device=DEVICE),
                    numbers[0],
                    ints([top_k] * rows),
                    *numbers[1:],
                )
                runs = [lambda a=(logits, slots, slots, state): sample_tokens(*a)]
                yield Case("sampling", f"sample x{rows} {kind}", variant, runs, logits.nbytes)
        yield Case(
            "sampling", f"argmax x{rows}", "torch", [lambda x=logits: x.argmax(-1)], logits.nbytes
        )
        yield Case(
            "sampling",
            f"logprobs x{rows}",
            "top 20",
            [lambda x=logits, s=slots: token_logprobs(x, s, s + 1, 20)],
            logits.nbytes,
        )


def small_cases(tune: bool) -> Iterator[Case]:
    """The memory-bound kernels between the products."""
    for rows in (1, 256, 8192):
        x, residual, weight = (
            random_tensor(rows, 4096),
            random_tensor(rows, 4096),
            random_tensor(4096),
        )
        yield Case(
            "small",
            f"add_rms_norm {rows}x4096",
            "",
            [lambda a=(x, residual, weight): add_rms_norm(*a, 1e-6)],
            4 * x.nbytes,
        )
        gate_up = random_tensor(rows, 24576)
        yield Case(
            "small",
            f"gated_activation {rows}x12288",
            "",
            [lambda g=gate_up: gated_activation(g)],
            1.5 * gate_up.nbytes,
        )
        qkv, cos_sin = random_tensor(rows, 6144), torch.rand(8192, 128, device=DEVICE)
        caches = [
            torch.empty(-(-rows // 64), 64, 8, 128, dtype=BF16, device=DEVICE) for _ in range(2)
        ]
        slots, head_norm = torch.arange(rows, device=DEVICE), random_tensor(128)

        def run(qkv=qkv, slots=slots, cos_sin=cos_sin, caches=caches, weight=head_norm) -> None:
            qk_norm_rope_cache(
                Projection(qkv, Rotation(cos_sin, weight, weight), slots),
                slots,
                *caches,
                num_q_heads=32,
            )

        yield Case("small", f"qk_norm_rope_cache {rows}", "", [run], 2 * qkv.nbytes)
    slots = torch.arange(256, dtype=torch.int32, device=DEVICE)
    tokens, tables = (torch.zeros(256, n, dtype=torch.int32, device=DEVICE) for n in (8192, 128))
    inputs, ones = PreparedInputs.empty(256, 256, 128, DEVICE), torch.ones_like(slots)

    def prepare() -> None:
        prepare_inputs(slots, slots, ones, tokens, tables, inputs, block_size=64, max_length=1)

    yield Case("small", "prepare 256 decodes", "", [prepare], 0)
    workspace = DecodeWorkspace.create(32, torch.empty(1, 64, 8, 128, dtype=BF16, device=DEVICE))
    yield Case("small", "plan_decode 256", "", [lambda: plan_decode(workspace, slots)], 0)


FAMILIES = {
    "decode": decode_cases,
    "lookahead": lookahead_cases,
    "prefill": prefill_cases,
    "few_rows": few_rows_cases,
    "gated": gated_cases,
    "chain": chain_cases,
    "sampling": sampling_cases,
    "small": small_cases,
}

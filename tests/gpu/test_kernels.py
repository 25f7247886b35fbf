"""Every kernel, compiled, against float64 references: random shapes and inputs, outputs filled with
NaN before."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels import logprobs, penalties
from aioinfer.kernels.activation import KINDS
from aioinfer.kernels.decode_plan import DecodeWorkspace, decode_config, plan_decode
from aioinfer.kernels.few_rows_dense import other_configs
from aioinfer.kernels.gated_product import CONFIGS, GatedConfig, gated_product, supports
from aioinfer.kernels.norm import rms_norm
from aioinfer.kernels.paged_attention import make_prefill_plan, paged_attention
from aioinfer.kernels.prefill_plan import plan_prefill
from aioinfer.kernels.prepare import PreparedInputs, append_tokens, embed, prepare_inputs
from aioinfer.kernels.projection import Projection, Rotation
from aioinfer.kernels.qk_norm_rope_cache import qk_norm_rope_cache
from aioinfer.kernels.sampling import SamplingState, sample_tokens
from cases import (
    ROTATIONS,
    AttentionCase,
    RotationCase,
    activation,
    attention,
    dense_rows,
    error,
    norm,
    norm_of_parts,
    normal,
    poisoned,
    projected_attention,
    qk_norm_rope,
    random_rows,
)
from channel_cases import expand_all_words
from references import (
    embed_reference,
    paged_attention_reference,
    penalties_reference,
    prepare_inputs_reference,
    product_reference,
    token_logprobs_reference,
)
from sampling_cases import make_state, sample_and_judge, uniforms_agree

from aioinfer.layers.kv_cache import to_float8

DEVICE = "cuda"
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def check_attention(
    rows: list[tuple[int, int]],
    *shape: int,
    dtype: torch.dtype,
    limit: float | None = None,
    **options: object,
) -> None:
    case = AttentionCase(rows, *shape, dtype=dtype, device=DEVICE, **options)
    assert error(attention(case)) < (limit or LIMIT[dtype]), case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_attention_of_random_batches(head_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(head_size)
    for block_size in (
        (16, 32, 64, 128)
        if (dtype, head_size) == (torch.bfloat16, 128)
        else rng.sample((16, 32, 64, 128), 1)
    ):
        kv_heads = rng.choice([1, 2, 3, 8])
        group = rng.choice([1, 3, 4, 5, 8])
        rows = random_rows(rng.randint(1, 30), 1500, 600, rng)
        check_attention(rows, kv_heads * group, kv_heads, head_size, block_size, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_window_and_soft_cap(dtype: torch.dtype) -> None:
    rng = random.Random(2)
    for window, soft_cap in ((1, 0.0), (100, 0.0), (0, 20.0), (333, 5.0)):
        check_attention(
            random_rows(20, 1200, 400, rng), 8, 2, 128, 64, dtype=dtype, window=window,
            soft_cap=soft_cap,
        )  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 32768)] + [(1, 90)] * 200, [(1, 1000)] * 256, [(1, 5)], [(1, 0), (1, 700), (1, 0)],
        [(1, 64)] * 500,
    ],
)  # fmt: skip
def test_decodes_of_every_distribution(rows: list[tuple[int, int]]) -> None:
    check_attention(rows, 16, 4, 128, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_decodes_from_a_projection_apply_norm_and_rope_and_write_the_cache(
    head_size: int, dtype: torch.dtype
) -> None:
    rng = random.Random(head_size)
    for rows, normed, window in (
        ([(1, rng.randint(0, 900)) for _ in range(40)], True, 0),
        ([(1, 5000), (1, 1), (1, 129)], False, 77),
    ):
        for block_size in (16, 128):
            case = AttentionCase(
                rows, 16, 4, head_size, block_size, dtype=dtype, device=DEVICE, window=window
            )
            assert (
                max(map(error, projected_attention(case, RotationCase(head_size, normed))))
                < LIMIT[dtype]
            ), case


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_rotations(rotation: RotationCase) -> None:
    """None at all, norms that follow it, and positions apart from places: one a token or three."""
    rng = random.Random(3)
    rows = [(1, rng.randint(0, 900)) for _ in range(20)]
    case = AttentionCase(rows, 16, 4, 64, 64, dtype=torch.bfloat16, device=DEVICE)
    assert max(map(error, projected_attention(case, rotation))) < 1e-2
    pairs = qk_norm_rope(700, 16, 4, 64, rotation, torch.bfloat16, DEVICE)
    assert max(map(error, pairs)) < 1e-2


def test_alibi() -> None:
    rng = random.Random(4)
    for options in ({}, {"window": 100}, {"cache_dtype": torch.float8_e4m3fn}):
        rows = random_rows(20, 1200, 400, rng)
        case = AttentionCase(
            rows, 16, 4, 128, 64, torch.bfloat16, DEVICE, has_slopes=True, **options
        )
        assert error(attention(case)) < 1e-2
    decodes = AttentionCase(
        [(1, 5), (1, 3000)], 16, 4, 128, 64, torch.bfloat16, DEVICE, has_slopes=True
    )
    assert max(map(error, projected_attention(decodes, RotationCase(0)))) < 1e-2


@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_attention_over_a_float8_cache(head_size: int) -> None:
    """Against the attention over what the cache holds: rounding is no part of the error."""
    rng = random.Random(head_size)
    options = {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn}
    for block_size, window, soft_cap in ((16, 0, 0.0), (64, 77, 0.0), (128, 0, 20.0)):
        rows = random_rows(12, 900, 300, rng)
        shape = (8, 2, head_size, block_size)
        check_attention(rows, *shape, **options, window=window, soft_cap=soft_cap)
    check_attention([(1, 32768)] + [(1, 90)] * 200, 16, 4, head_size, 128, **options)


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_decodes_from_a_projection_write_a_float8_cache(head_size: int) -> None:
    rows = [(1, random.Random(head_size).randint(0, 900)) for _ in range(40)]
    for normed, window in ((True, 0), (False, 77)):
        case = AttentionCase(
            rows, 16, 4, head_size, 128, torch.bfloat16, DEVICE,
            window=window, cache_dtype=torch.float8_e4m3fn,
        )  # fmt: skip
        assert max(map(error, projected_attention(case, RotationCase(head_size, normed)))) < 1e-2, (
            case
        )


@pytest.mark.parametrize("group", [1, 7, 8, 16])
def test_decodes_from_a_projection_over_a_float8_cache_in_other_groups(group: int) -> None:
    """With five query heads a KV head and more the assembler of Triton 3.6 crashes on the kernel
    that reads single bytes."""
    rows = [(1, keys) for keys in (1, 5, 300, 4000, 64, 129, 0)]
    case = AttentionCase(
        rows, 4 * group, 4, 128, 128, torch.bfloat16, DEVICE, cache_dtype=torch.float8_e4m3fn
    )
    assert max(map(error, projected_attention(case, RotationCase(128, True)))) < 1e-2, case


def test_float8_saturates_and_keeps_nan() -> None:
    """As plain torch does: `layers.kv_cache`."""
    size, scales = 64, torch.ones(4, 1, device=DEVICE)
    caches = torch.zeros(2, 1, 16, 1, size, device=DEVICE).to(torch.float8_e4m3fn)
    values = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 447.0, 449.0, 1e-9])
    qkv = values.to(DEVICE).repeat(size // 8).repeat(3)[None]
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rotation = Rotation(torch.tensor([[1.0, 0.0]], device=DEVICE))
    qk_norm_rope_cache(
        Projection(qkv, rotation, zero), zero.long(), caches[0], caches[1], num_q_heads=1,
        scales=scales,
    )  # fmt: skip
    stored = caches[1, 0, 0, 0, :8].float().cpu()
    expected = torch.tensor([448.0, -448.0, 448.0, -448.0, torch.nan, 448.0, 448.0, 0.0])
    torch.testing.assert_close(stored, expected, equal_nan=True)


def test_a_needle_among_32k_keys_in_float8() -> None:
    """One key of 32 768 outweighs all others together, in float8 as in float64: as a decode, and as
    the last token of a prefill."""
    size, length, block = 128, 32768, 128
    q = torch.randn(5, 1, size, device=DEVICE)
    keys, values = (torch.randn(length, 1, size, device=DEVICE) for _ in range(2))
    goal = (math.log(length) + 4) * size**0.5
    keys[20_000] = q[-1] * goal / q[-1].square().sum()
    scores = (keys[:, 0].double() @ q[-1, 0].double()) * size**-0.5
    expected = scores.softmax(0) @ values[:, 0].double()
    scales = torch.tensor([[1 / 16], [1 / 16], [16.0], [16.0]], device=DEVICE)
    caches = [to_float8(x, scales[2]).view(-1, block, 1, size) for x in (keys, values)]
    tables = torch.arange(length // block, dtype=torch.int32, device=DEVICE)[None]
    lens = torch.tensor([length], dtype=torch.int32, device=DEVICE)
    for tokens in (1, 5):
        mine = q[-tokens:].to(torch.bfloat16)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
        workspace = DecodeWorkspace.create(1, caches[0])
        plan = make_prefill_plan(1, tokens, 1, mine.dtype, *caches)
        if tokens == 1:
            plan_decode(workspace, lens)
        plan_prefill(plan, starts, lens, int(tokens == 1), tokens)
        out = paged_attention(
            mine, *caches, tables, starts, lens, num_decodes=int(tokens == 1),
            workspace=workspace, prefill_plan=plan, scales=scales,
        )  # fmt: skip
        assert error((out[-1, 0], expected)) < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_sinks(dtype: torch.dtype) -> None:
    """The heads of gpt-oss, in the plain kernels; decodes that are split, too."""
    rng = random.Random(6)
    for window, block_size in ((0, 16), (128, 64), (128, 128), (1, 32)):
        rows = [(1, 9000), (1, 0), *random_rows(20, 1500, 400, rng)]
        options = {"window": window, "has_sinks": True}
        check_attention(rows, 64, 8, 64, block_size, dtype=dtype, **options)


def test_sinks_of_decodes_from_a_projection_and_over_a_float8_cache() -> None:
    rows = [(1, keys) for keys in (5, 130, 0, 1, 900, 4000)]
    for window in (0, 128):
        case = AttentionCase(
            rows, 64, 8, 64, 64, torch.bfloat16, DEVICE, window=window, has_sinks=True
        )
        assert max(map(error, projected_attention(case, RotationCase(64, False)))) < 1e-2
    options = {"cache_dtype": torch.float8_e4m3fn, "has_sinks": True, "window": 128}
    mixed = [*rows, (200, 700), (64, 64)]
    check_attention(mixed, 64, 8, 64, 64, dtype=torch.bfloat16, **options)


@needs_hopper
@pytest.mark.parametrize("block_size", [64, 128])
def test_hopper_prefill_with_sinks(block_size: int) -> None:
    rng = random.Random(7)
    for window, soft_cap in ((0, 0.0), (128, 0.0), (1, 0.0), (333, 5.0)):
        rows = [(2, 2), (1100, 1100), *random_rows(20, 1200, 400, rng)]
        options = {"window": window, "soft_cap": soft_cap, "has_sinks": True, "hopper": True}
        check_attention(rows, 64, 8, 64, block_size, dtype=torch.bfloat16, **options)
        check_attention(rows, 10, 2, 128, block_size, dtype=torch.float16, **options)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("block_size", [64, 128])
def test_hopper_prefill(head_size: int, block_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(head_size + block_size)
    for group in (1, 3, 4, 8) if block_size == 128 and head_size > 64 else (5,):
        rows = random_rows(20, 2500, 1100, rng)
        check_attention(rows, 2 * group, 2, head_size, block_size, dtype=dtype, hopper=True)
    check_attention(
        [(1, 9), (4096, 4096), (129, 3000), (2, 2)], 10, 2, head_size, block_size, dtype=dtype,
        hopper=True,
    )  # fmt: skip


@needs_hopper
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_hopper_prefill_over_a_float8_cache(head_size: int, block_size: int) -> None:
    """Chunks behind cached prefixes, lengths that are no multiples of blocks; what no row uses of
    the last blocks is NaN."""
    rng = random.Random(head_size + block_size)
    shape = (10, 2, head_size, block_size)
    options = {"cache_dtype": torch.float8_e4m3fn, "hopper": True, "dtype": torch.bfloat16}
    more = {"window": 100, "soft_cap": 5.0, "has_sinks": True}
    for rows in (
        [(1, 9), (4096, 4096), (129, 3000), (2, 2), (64, 64), (65, 128), (7, 1025), (1100, 1100)],
        [(300, 300)] * 100,
        random_rows(20, 2500, 1100, rng),
    ):
        check_attention(rows, *shape, **options)
        check_attention(rows, *shape, **options, **more)
    if (head_size, block_size) == (128, 128):
        for group in (1, 4, 8):
            check_attention(rows, 2 * group, 2, 128, 128, **options)
        check_attention(rows, *shape, **(options | {"dtype": torch.float16}))


@needs_hopper
@pytest.mark.parametrize("head_size", [64, 128])
def test_prefill_over_a_float8_cache_in_both_kernels(head_size: int) -> None:
    """All 256 bit patterns but NaN, other scales in each head: the Hopper kernel's outputs are the
    plain kernel's."""
    kv_heads, group, block, tokens = 4, 4, 128, 700
    bits = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    numbers = bits[bits & 0x7F != 0x7F]
    shape = (16, block, kv_heads, head_size)
    caches = [
        numbers[torch.randint(len(numbers), shape, device=DEVICE)].view(torch.float8_e4m3fn)
        for _ in range(2)
    ]
    scales = 0.001 + 0.002 * torch.rand(4, kv_heads, device=DEVICE)
    q = torch.randn(tokens, kv_heads * group, head_size, device=DEVICE, dtype=torch.bfloat16)
    tables = torch.randperm(16, device=DEVICE).int()[None]
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([1900], dtype=torch.int32, device=DEVICE)
    workspace = DecodeWorkspace.create(kv_heads * group, caches[0])
    outputs = []
    for hopper in (True, False):
        plan = make_prefill_plan(1, tokens, kv_heads * group, q.dtype, *caches, hopper=hopper)
        assert plan.hopper == hopper
        plan_prefill(plan, starts, lens, 0, tokens)
        outputs.append(
            paged_attention(
                q, *caches, tables, starts, lens, num_decodes=0, workspace=workspace,
                prefill_plan=plan, scales=scales,
            )
        )  # fmt: skip
    assert error((outputs[0], outputs[1])) < 1e-2


@needs_hopper
def test_hopper_prefill_with_window_and_soft_cap() -> None:
    rng = random.Random(4)
    for window, soft_cap in ((1, 0.0), (100, 0.0), (0, 20.0), (333, 5.0)):
        rows = random_rows(20, 1200, 400, rng)
        for head_size in (128, 256):
            check_attention(
                rows, 8, 2, head_size, 128, dtype=torch.bfloat16, hopper=True, window=window,
                soft_cap=soft_cap,
            )  # fmt: skip


def test_decode_in_a_graph_follows_the_lengths() -> None:
    """One capture serves other lengths than it was captured with, up to its number of rows."""
    q = torch.randn(64, 16, 128, device=DEVICE, dtype=torch.bfloat16)
    caches = [torch.randn(600, 64, 4, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    tables = torch.randint(0, 600, (64, 512), dtype=torch.int32, device=DEVICE)
    starts, lens = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (65, 64))
    starts.copy_(torch.arange(65))
    out = torch.empty_like(q)
    workspace = DecodeWorkspace.create(16, caches[0])

    def step() -> None:
        plan_decode(workspace, lens)
        paged_attention(
            q, *caches, tables, starts, lens, num_decodes=64, workspace=workspace, out=out
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ([1] * 64, [30000] + [0] * 63, [7 * i for i in range(64)]):
        lens.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        graph.replay()
        wide = [t.double() for t in (q, *caches)]
        assert error((out, paged_attention_reference(*wide, tables, starts, lens))) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    for rows, hidden in ((1, 1024), (333, 576), (64, 4096), (3, 16384)):
        for pair in norm(rows, hidden, dtype, DEVICE):
            assert error(pair) < LIMIT[dtype]
        for pair in norm_of_parts(4, rows, hidden, dtype, DEVICE):
            assert error(pair) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_activation(kind: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 3072), (100, 12288), (7, 1536)):
        assert error(activation(rows, width, dtype, DEVICE, kind)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope_and_kv_write(dtype: torch.dtype, normed: bool) -> None:
    for tokens, q_heads, kv_heads, head_size, rotary in (
        (1, 32, 8, 128, 128),
        (300, 9, 3, 64, 64),
        (50, 5, 1, 96, 48),
        (17, 4, 4, 256, 64),
    ):
        for pair in qk_norm_rope(
            tokens, q_heads, kv_heads, head_size, RotationCase(rotary, normed), dtype, DEVICE
        ):
            assert error(pair) < LIMIT[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_few_rows_dense(gated: bool, dtype: torch.dtype) -> None:
    few, some = (40, 104) if gated else (37, 100)
    for rows, features, inputs in (
        (1, 4096, 4096),
        (1, 576, 1536),
        (2, few, 12288),
        (4, 1000, 1024),
        (5, 4096, 1024),
        (16, some, 3072),
    ):
        for normed in (True, False):
            assert (
                error(dense_rows(rows, features, inputs, dtype, DEVICE, normed=normed, gated=gated))
                < LIMIT[dtype]
            ), (rows, features, inputs)


@pytest.mark.parametrize("inputs", [3584, 4096, 5120, 14336])
def test_other_configurations_of_one_row(inputs: int) -> None:
    for normed, gated in ((True, True), (True, False), (False, False)):
        configs = other_configs(1, 1000, inputs, normed=normed, gated=gated)
        assert configs
        for config in configs:
            options = {"normed": normed, "gated": gated, "config": config}
            pair = dense_rows(1, 1000, inputs, torch.bfloat16, DEVICE, **options)
            assert error(pair) < LIMIT[torch.bfloat16], (inputs, options)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", CONFIGS)
def test_gated_product(config: GatedConfig, dtype: torch.dtype) -> None:
    """Tiles clipped at every edge; x is a part of wider rows; nothing beyond the output is
    written."""
    for features, inputs in ((8, 64), (104, 512), (3080, 1024), (1000, 4096)):
        wide = poisoned(2048, inputs + 8, dtype=dtype, device=DEVICE)
        x = wide[:, :inputs].normal_()
        weight = (torch.randn(2 * features, inputs, device=DEVICE) * inputs**-0.5).to(dtype)
        reference = product_reference(x, weight, gated=True)
        for rows in (1, 2, 63, 64, 100, 128, 129, 200, 256, 257, 511, 700, 2048):
            buffer = poisoned(rows + 3, features + 8, dtype=dtype, device=DEVICE)
            gated_product(x[:rows], weight, out=buffer[:rows, :features], config=config)
            worst = (buffer[:rows, :features] - reference[:rows]).norm(dim=1) / reference[
                :rows
            ].norm(dim=1)
            assert worst.max() < LIMIT[dtype], (rows, features, inputs)
            assert buffer[rows:].isnan().all()
            assert buffer[:, features:].isnan().all()


@needs_hopper
def test_gated_product_in_a_graph() -> None:
    x, weight = (
        normal(300, 512, dtype=torch.bfloat16, device=DEVICE),
        normal(2 * 1000, 512, dtype=torch.bfloat16, device=DEVICE) * 0.05,
    )
    out = gated_product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gated_product(x, weight, out=out)
    for _ in range(3):
        x.normal_()
        out.fill_(float("nan"))
        graph.replay()
        assert error((out, product_reference(x, weight, gated=True))) < 1e-2


@needs_hopper
@pytest.mark.parametrize("rows", [3, 200, 2048])
def test_gated_products_as_dependents(rows: int) -> None:
    """Each reads what the kernel right before has written, into memory that the one before that has
    read."""
    weights = [(torch.randn(2048, 1024, device=DEVICE) / 32).bfloat16() for _ in range(8)]
    norm_weight = normal(1024, dtype=torch.bfloat16, device=DEVICE)
    first = normal(rows, 1024, dtype=torch.bfloat16, device=DEVICE)

    def chain(pdl: bool) -> torch.Tensor:
        hidden = first
        for weight in weights:
            hidden = gated_product(rms_norm(hidden, norm_weight, 1e-6, pdl=pdl), weight, pdl=pdl)
        return hidden

    chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for _ in range(20):
        first.normal_()
        graph.replay()
        assert torch.equal(out, chain(False))


@needs_hopper
def test_gated_product_rejects_what_tma_cannot_load() -> None:
    x, weight = (torch.zeros(n, 128, dtype=torch.bfloat16, device=DEVICE) for n in (4, 32))
    assert supports(x, weight)
    assert not supports(x[:, :96], weight[:, :96].contiguous())
    assert not supports(x[:, 4:68], weight[:, :64].contiguous())
    assert not supports(x, weight[:24])
    assert not supports(x.float(), weight.float())
    assert gated_product(x[:0], weight).shape == (0, 16)
    with pytest.raises(ValueError, match="out must be"):
        gated_product(x, weight, out=torch.zeros(4, 20, dtype=torch.bfloat16, device=DEVICE)[:, 4:])


def test_input_preparation() -> None:
    rng = random.Random(6)
    for rows in (1, 50, 256, 400):
        lengths = [rng.choice([0, 1, 1, 1, rng.randint(2, 300)]) for _ in range(rows)]
        starts = [rng.randint(0, 700) for _ in range(rows)]
        slots = rng.sample(range(512), rows)
        ints = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, starts, lengths)]
        tokens = torch.randint(0, 99999, (512, 1001), dtype=torch.int32, device=DEVICE)
        tables = torch.randint(0, 99999, (512, 63), dtype=torch.int32, device=DEVICE)
        ours, reference = (
            PreparedInputs.empty(rows, sum(lengths) + 77, 63, DEVICE) for _ in range(2)
        )
        for name in ("input_ids", "positions", "slot_mapping", "query_starts", "seq_lens"):
            getattr(ours, name).fill_(-77)
        prepare_inputs(*ints, tokens, tables, ours, block_size=16, max_length=300)
        prepare_inputs_reference(*ints, tokens, tables, reference, block_size=16)
        for name in set(PreparedInputs.__slots__) - {"rotary"}:
            assert torch.equal(getattr(ours, name), getattr(reference, name)), name


def test_embedding_and_append() -> None:
    weight, ids = (
        torch.randn(1000, 576, device=DEVICE).bfloat16(),
        torch.randint(0, 1500, (333,), dtype=torch.int32, device=DEVICE),
    )
    assert torch.equal(embed(ids, weight, first=200), embed_reference(ids, weight, 200))
    tokens = torch.zeros(300, 50, dtype=torch.int32, device=DEVICE)
    slots, positions = (
        torch.randperm(300, device=DEVICE).int(),
        torch.randint(0, 50, (300,), dtype=torch.int32, device=DEVICE),
    )
    sampled, is_appended = (
        torch.randint(-1, 2, (300,), dtype=torch.int32, device=DEVICE) for _ in range(2)
    )
    append_tokens(sampled + 5, slots, positions, is_appended, tokens)
    expected = torch.zeros_like(tokens)
    expected[slots.long(), positions.long()] = torch.where(is_appended != 0, sampled + 5, 0).int()
    assert torch.equal(tokens, expected)


def test_uniforms_equal_those_of_the_cpu_bit_for_bit() -> None:
    assert uniforms_agree(DEVICE)


@pytest.mark.parametrize("rounded", [False, True])
def test_sampled_tokens_follow_the_rules_of_the_cpu_sampler(rounded: bool) -> None:
    wrong, different = sample_and_judge(
        96, 151_936, make_state(200, DEVICE), DEVICE, rounded=rounded
    )
    assert wrong == 0
    assert different <= 3


def test_a_sampled_token_does_not_depend_on_the_other_rows() -> None:
    state = make_state(64, DEVICE)
    logits = torch.randn(64, 50_000, device=DEVICE) * 3
    slots, positions = (torch.arange(64, dtype=torch.int32, device=DEVICE) for _ in range(2))
    together = sample_tokens(logits, slots, positions, state)
    for i in range(0, 64, 7):
        assert (
            sample_tokens(logits[i : i + 1], slots[i : i + 1], positions[i : i + 1], state).item()
            == together[i].item()
        )


def test_rows_with_nan_or_infinite_logits_give_minus_one() -> None:
    logits = torch.randn(5, 30_000, device=DEVICE)
    logits[0, 3], logits[1, 4], logits[2], logits[3, :29_999] = (
        float("nan"), float("inf"), float("-inf"), float("-inf"),
    )  # fmt: skip
    floats = [torch.tensor(x, device=DEVICE) for x in ([0.0, 0.8], [1.0, 0.9], [0.0, 0.0])]
    state = SamplingState(
        torch.zeros(2, dtype=torch.int64, device=DEVICE),
        floats[0],
        torch.tensor([0, 9], device=DEVICE).int(),
        *floats[1:],
    )
    for slot in (0, 1):
        slots = torch.full((5,), slot, dtype=torch.int32, device=DEVICE)
        tokens = sample_tokens(logits, slots, slots, state).tolist()
        assert tokens[:4] == [-1, -1, -1, 29_999]
        assert tokens[4] >= 0


def test_logprobs() -> None:
    logits = torch.randn(40, 151_936, device=DEVICE)
    sampled = torch.randint(0, 151_936, (40,), dtype=torch.int32, device=DEVICE)
    ours = logprobs.token_logprobs(logits, sampled, torch.ones_like(sampled), 20)
    for mine, theirs in zip(
        ours, token_logprobs_reference(logits.double(), sampled, 20), strict=True
    ):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=0, atol=1e-4)


def test_penalties() -> None:
    tokens = [[random.randrange(60) for _ in range(n)] for n in (200, 31, 5)]
    occurrences = torch.zeros(3, 1000, dtype=torch.int32, device=DEVICE)
    for row, ids in enumerate(tokens):
        penalties.count_occurrences(
            torch.tensor(ids, dtype=torch.int32, device=DEVICE), len(ids) // 2, occurrences[row]
        )
    params = [1.3, 0.8, 1.0], [0.5, -0.5, 0.0], [0.25, 1.0, -2.0]
    logits, rows = (
        torch.randn(3, 1000, device=DEVICE),
        torch.arange(3, dtype=torch.int32, device=DEVICE),
    )
    expected = penalties_reference(
        logits.double().cpu(), tokens, [len(ids) // 2 for ids in tokens], *params
    )
    penalties.apply_penalties(
        logits, rows, rows, occurrences, *(torch.tensor(w, device=DEVICE) for w in params)
    )
    torch.testing.assert_close(logits.double().cpu(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("by_assembly", [False, True])
def test_numbers_of_words_of_two_channels(by_assembly: bool) -> None:
    expand_all_words(DEVICE, by_assembly=by_assembly)


@pytest.mark.parametrize(
    ("paired", "dtype"), [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)]
)
def test_a_float8_cache_multiplied_in_float16(paired: bool, dtype: torch.dtype) -> None:
    rows = [(1, keys) for keys in (1, 5, 300, 4000, 64, 129, 0)]
    config = replace(decode_config(128, 1), fp16_operands=True, paired_channels=paired)
    options = {"dtype": dtype, "cache_dtype": torch.float8_e4m3fn, "config": config}
    check_attention(rows, 16, 4, 128, 128, **options)
    check_attention(rows, 28, 4, 128, 16, **options, window=77)
    case = AttentionCase(rows, 16, 4, 128, 128, device=DEVICE, **options)
    assert max(map(error, projected_attention(case, RotationCase(128, True)))) < 1e-2

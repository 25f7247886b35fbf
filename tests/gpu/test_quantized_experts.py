"""Quantized experts, compiled, at the published models' shapes against float64 references, in CUDA
graphs; the variants of routing; models over them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.expert_configs import SCANNED_TOKENS, TABLES, ExpertConfig
from aioinfer.kernels.expert_product import expert_product, sum_pairs
from aioinfer.kernels.expert_routing import RoutingConfig, RoutingRule, route, tile_config
from aioinfer.kernels.expert_selection import FewTokensConfig
from aioinfer.kernels.expert_weights import PackedExperts, format_name, pack_floats
from aioinfer.kernels.quantize import quantize
from cases import error
from engine_settings import check_nothing_was_compiled, inline_llm, tokens_of, worker_of
from expert_cases import ExpertCase, check_routing, mixture, packed_weight, whole
from random_models import random_model
from references import dequantized

from aioinfer import SamplingParams
from aioinfer.layers.kernel_experts import KernelMixtureMLP
from benchlib.quantized_folder import Format, Groups, awq, gptq, packed, quantize_folder, scaled

DEVICE, BF16 = "cuda", torch.bfloat16
LIMIT = 1e-2
QWEN, GPT_OSS = RoutingRule(128, 8), RoutingRule(32, 4)
#: Hidden size, channels of an expert on a rank, routing.
SHAPES = {
    "Qwen3-30B-A3B": (2048, 768, QWEN),
    "gpt-oss": (2880, 2880, GPT_OSS),
    "gpt-oss / 4": (2880, 736, GPT_OSS),
    "unaligned": (336, 48, RoutingRule(6, 3)),
}
TOKENS = (1, 2, 8, 9, 16, 17, 64, 129, 300, 1025, 3000)
#: Formats of weights, and whether activations are quantized.
FORMATS = [
    ("fp8", False), ("fp8", True), ("fp8 blocks", False), ("fp8 blocks", True), ("int4", False),
    ("int4 rows", False), ("mxfp4", False),
]  # fmt: skip


def case(shape: str, tokens: int, **options: Any) -> ExpertCase:
    hidden, channels, rule = SHAPES[shape]
    values = {"dtype": BF16, **options}
    return ExpertCase(tokens, hidden, channels, rule, device=DEVICE, **values)


def limit_of(quantized: bool) -> float:
    """Activations that are rounded to bfloat16 before they are quantized may get the next number
    in float8."""
    return 3e-2 if quantized else LIMIT


@pytest.mark.parametrize(("format", "quantized"), FORMATS)
@pytest.mark.parametrize("shape", ["Qwen3-30B-A3B", "unaligned"])
def test_mixtures(shape: str, format: str, quantized: bool) -> None:
    for tokens in TOKENS:
        one = case(shape, tokens, format=format, quantized=quantized and tokens > 1)
        assert error(whole(one)) < limit_of(quantized), tokens


@pytest.mark.parametrize("format", ["plain", "mxfp4"])
@pytest.mark.parametrize("shape", ["gpt-oss", "gpt-oss / 4"])
def test_mixtures_with_biases(shape: str, format: str) -> None:
    for tokens in TOKENS:
        assert error(whole(case(shape, tokens, format=format, biased=True))) < LIMIT, tokens


@pytest.mark.parametrize(("format", "quantized"), FORMATS)
def test_ranks_with_some_of_the_experts(format: str, quantized: bool) -> None:
    count = QWEN.num_experts
    for local in (range(count // 2), range(1, count - 1)):
        for tokens in (1, 7, 16, 100, 2000):
            one = case("Qwen3-30B-A3B", tokens, format=format, local=local,
                       quantized=quantized and tokens > 1)  # fmt: skip
            assert error(whole(one)) < limit_of(quantized), (local, tokens)


@pytest.mark.parametrize("tokens", [1, 6, 16, 100, 2000])
@pytest.mark.parametrize("format", ["fp8", "fp8 blocks", "int4", "mxfp4"])
def test_experts_that_get_every_token_and_those_that_get_none(format: str, tokens: int) -> None:
    one = case("Qwen3-30B-A3B", tokens, format=format, favoured=list(range(8)))
    assert error(whole(one, residual=False)) < LIMIT


#: Formats, the tables that they take, and whether activations are quantized.
TILES = [
    ("fp8", "scaled", True), ("fp8", "weights alone", False), ("fp8 blocks", "blocks", True),
    ("int4", "integers", False), ("mxfp4", "mxfp4", False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "config", "quantized"),
    [
        (format, config, quantized)
        for format, name, quantized in TILES
        for _, config in TABLES[name][1]
    ],
)
def test_every_tile(format: str, config: ExpertConfig, quantized: bool) -> None:
    """With few rows and with many."""
    for tokens in (1, 30, 700):
        one = case("Qwen3-30B-A3B", tokens, buckets=True, format=format, quantized=quantized)
        assert error(whole(one, config)) < limit_of(quantized), tokens


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format", ["fp8", "int4", "mxfp4"])
def test_other_types(format: str, dtype: torch.dtype) -> None:
    for tokens in (1, 9, 50):
        assert error(whole(case("unaligned", tokens, dtype=dtype, format=format))) < 2e-3, tokens


def test_all_numbers_of_mxfp4_are_exact() -> None:
    """Every code with many scales: products with unit vectors are the numbers."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 32, 16)
    blocks = codes.expand(16, 32, 16).contiguous()
    scales = torch.arange(65, 129, dtype=torch.uint8).view(2, 32).repeat(8, 1)
    words, kept = (part[None].to(DEVICE) for part in pack_floats(blocks, scales))
    weight = PackedExperts(words, kept, 16, 1024, 32, is_float=True)
    routed = route(
        torch.ones(16, 1024, dtype=BF16, device=DEVICE),
        torch.zeros(1, 1024, dtype=BF16, device=DEVICE), RoutingRule(1, 1),
        torch.zeros(65, dtype=torch.int32, device=DEVICE), buckets=False,
    )  # fmt: skip
    expected = dequantized(weight)[0].to(BF16)
    for begin in range(0, 1024, 16):
        x = torch.zeros(16, 1024, dtype=BF16, device=DEVICE)
        x[torch.arange(16), begin + torch.arange(16)] = 1.0
        found = expert_product(x, weight, routed, gated=False)
        assert torch.equal(found, expected[:, begin : begin + 16].T), begin


@pytest.mark.parametrize("tokens", [1, 12, 64, 256, 2000])
@pytest.mark.parametrize("format", ["fp8", "fp8 blocks", "int4", "mxfp4"])
def test_replayed_graphs(format: str, tokens: int) -> None:
    """Dependent launches in a graph, replayed for other tokens, give what single launches give."""
    one = case("Qwen3-30B-A3B", tokens, format=format, quantized=format.startswith("fp8"))
    given = mixture(one)
    gate_up, down = (
        packed_weight(weight, format, gated=gated)
        for weight, gated in ((given.gate_up, True), (given.down, False))
    )
    x, residual = given.x.clone(), torch.zeros_like(given.x)
    out = torch.empty_like(x)

    def inputs(values: torch.Tensor, pdl: bool) -> Any:
        is_quantized = one.quantized and tokens > 1
        return quantize(values, one.input_format, pdl=pdl) if is_quantized else values

    def launch(pdl: bool) -> None:
        options = {"pdl": pdl, "dtype": BF16}
        routed = route(x, given.router, QWEN, given.counters, buckets=tokens > 16, pdl=pdl)
        gated = expert_product(inputs(x, pdl), gate_up, routed, gated=True, **options)
        pairs = expert_product(inputs(gated, pdl), down, routed, gated=False, **options)
        sum_pairs(pairs, routed, residual=residual, out=out, pdl=pdl)

    launch(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch(True)
    for _ in range(10):
        x.normal_()
        residual.normal_()
        out.fill_(torch.nan)
        graph.replay()
        found = out.clone()
        launch(False)
        assert torch.equal(found, out)


@pytest.mark.parametrize("shape", SHAPES)
def test_variants_of_routing(shape: str) -> None:
    for tokens in (1, 2, 7, 16, 64):
        one = case(shape, tokens, dtype=torch.float32, biased=tokens == 7)
        tile = tile_config(tokens, one.rule.num_experts, 4)
        variants: list[RoutingConfig | FewTokensConfig] = [
            tile, replace(tile, by_keys=False),
            FewTokensConfig(), FewTokensConfig(2), FewTokensConfig(early_weights=False),
        ]  # fmt: skip
        for config in variants:
            assert check_routing(one, config) < 1e-4, (tokens, config)


# ---------------------------------------------------------------- models

MODELS: dict[str, tuple[Format, str]] = {
    "float8 channels": (scaled("fp8"), "scaled"),
    "float8 blocks": (scaled("fp8", 128), "blocks"),
    "gptq": (gptq(Groups(size=32)), "integers"),
    "awq": (awq(), "integers"),
    "packed": (packed(Groups(size=None)), "integers"),
}
FIELDS = {
    "family": "qwen3_moe", "vocab_size": 4096, "hidden_size": 512, "num_experts": 32,
    "num_experts_per_tok": 8, "moe_intermediate_size": 128, "head_dim": 128,
    "max_position_embeddings": 1024, "initializer_range": 0.05, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_compiled_while_serving(name: str, tmp_path: Path) -> None:
    """In bf16, from a quantized checkpoint, with and without graphs."""
    dense = random_model(tmp_path / "dense", **FIELDS)
    format, kernel = MODELS[name]
    folder = quantize_folder(dense, tmp_path / "quantized", format)
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 4096) for _ in range(rng.randint(1, 700))] for _ in range(40)]
    for graphs in (True, False):
        settings = {"model__dtype": "bfloat16", "parallel__cuda_graphs": graphs}
        with inline_llm(folder, **settings) as llm:
            model: Any = worker_of(llm).model
            mixture = model.layers[0].parts[1]
            assert isinstance(mixture, KernelMixtureMLP)
            assert format_name(mixture.stacked.gate_up) == kernel
            for length in (1, 2, SCANNED_TOKENS, SCANNED_TOKENS + 1, 65, 300):
                llm.generate([[5] * length], greedy)
            llm.generate(prompts, greedy)
            check_nothing_was_compiled(llm)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gptq", "awq", "packed"])
def test_a_model_in_four_bits_gives_the_tokens_of_a_cpu(name: str, tmp_path: Path) -> None:
    """In float32, whose activations are not quantized."""
    dense = random_model(tmp_path / "dense", **FIELDS)
    folder = quantize_folder(dense, tmp_path / "quantized", MODELS[name][0])
    prompts = [[5 + i, *range(20, 20 + 30 * i)] for i in range(6)]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = {}
    for device in (DEVICE, "cpu"):
        with inline_llm(folder, parallel__device=device) as llm:
            tokens[device] = tokens_of(llm.generate(prompts, greedy))
    assert tokens[DEVICE] == tokens["cpu"]

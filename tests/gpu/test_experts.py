"""Mixtures of experts, compiled: the kernels at the published models' shapes against float64
references, over random and skewed loads, in CUDA graphs; and models beside those of transformers.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from aioinfer.kernels.expert_configs import (
    CONFIGS,
    SCANNED_CONFIGS,
    ExpertConfig,
    PipelinedConfig,
    VectorConfig,
)
from aioinfer.kernels.expert_product import expert_product, sum_pairs
from aioinfer.kernels.expert_routing import RoutingRule, route
from aioinfer.kernels.expert_sum import CONFIG
from aioinfer.kernels.launch import is_hopper
from cases import error
from engine_settings import (
    NEEDS_TWO,
    TWO_RANKS,
    check_nothing_was_compiled,
    inline_llm,
    tokens_of,
    worker_of,
)
from expert_cases import ExpertCase, check_routing, mixture, one_token, whole
from random_models import random_model
from test_families import NO_END, Case, check_greedy, check_two_ranks, make_case

from aioinfer import SamplingParams
from aioinfer.api.admin.control import expert_load
from aioinfer.ipc.expert_placement import ExpertPlacement, LayerPlacement
from aioinfer.layers.kernel_experts import KernelMixtureMLP

DEVICE, BF16 = "cuda", torch.bfloat16
LIMIT = 1e-2
QWEN = RoutingRule(128, 8)
#: Hidden size, channels of an expert on a rank, routing.
SHAPES = {
    "Qwen3-30B-A3B": (2048, 768, QWEN),
    "Qwen3-30B-A3B / 2": (2048, 384, QWEN),
    "Qwen1.5-MoE": (2048, 1408, RoutingRule(60, 4, is_normalized=False)),
    "Mixtral / 4": (4096, 3584, RoutingRule(8, 2)),
    "GLM-4.5-Air / 2": (4096, 704, RoutingRule(128, 8, True)),
    "DeepSeek-V3 / 8": (7168, 256, RoutingRule(256, 8, True, True, 2.5, 8, 4)),
    "Qwen3.5-35B-A3B": (2048, 512, RoutingRule(256, 8)),
    "unaligned": (328, 24, RoutingRule(6, 3)),
}
TOKENS = (1, 2, 5, 8, 9, 16, 17, 40, 64, 65, 129, 300, 1024, 1025, 3000)


def case(shape: str, tokens: int, **options: Any) -> ExpertCase:
    hidden, channels, rule = SHAPES[shape]
    values = {"dtype": BF16, **options}
    return ExpertCase(tokens, hidden, channels, rule, device=DEVICE, **values)


@pytest.mark.parametrize("shape", SHAPES)
def test_routing(shape: str) -> None:
    """In float32, whose scores do not tie; the selection itself is the same for all types."""
    for tokens in (1, 7, 16, 17, 100, 1024, 1025, 4000):
        assert check_routing(case(shape, tokens, dtype=torch.float32)) < 1e-4, tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_mixtures(shape: str) -> None:
    for tokens in TOKENS:
        added = random.random() < 0.5
        assert error(whole(case(shape, tokens), added=added)) < LIMIT, tokens


@pytest.mark.parametrize("shared", ["gated", "plain"])
@pytest.mark.parametrize("shape", ["Qwen3.5-35B-A3B", "DeepSeek-V3 / 8", "unaligned"])
def test_an_expert_that_all_tokens_take(shape: str, shared: str) -> None:
    """Beside those that are selected, for one token up to the sum, with its norm."""
    for tokens in (1, 7, 16, 17, 100, 1024, 1025, 4000):
        one = case(shape, tokens, dtype=torch.float32, shared=shared)
        assert check_routing(one) < 1e-4, tokens
    for tokens in TOKENS:
        assert error(whole(case(shape, tokens, shared=shared))) < LIMIT, tokens
    assert error(one_token(case(shape, 1, shared=shared))) < LIMIT


@pytest.mark.parametrize("shape", ["Qwen3-30B-A3B", "DeepSeek-V3 / 8", "unaligned"])
def test_ranks_with_some_of_the_experts(shape: str) -> None:
    """The first, the last and the middle of them."""
    count = SHAPES[shape][2].num_experts
    for local in (range(count // 2), range(count // 2, count), range(1, count - 1)):
        for tokens in TOKENS:
            assert error(whole(case(shape, tokens, local=local))) < LIMIT, (local, tokens)


@pytest.mark.parametrize("tokens", [1, 6, 16, 100, 2000])
@pytest.mark.parametrize("favoured", [range(8), range(120, 128)])
def test_experts_that_get_every_token_and_those_that_get_none(tokens: int, favoured: range) -> None:
    one = case("Qwen3-30B-A3B", tokens, favoured=list(favoured))
    assert error(whole(one, residual=False)) < LIMIT


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("config", [config for _, config in CONFIGS])
def test_every_tile(config: ExpertConfig, tma: bool) -> None:
    """With few rows and with many."""
    config = replace(config, tma=tma)
    for shape in ("Qwen3-30B-A3B", "unaligned"):
        for tokens in (1, 30, 700):
            one = case(shape, tokens, buckets=True)
            assert error(whole(one, config)) < LIMIT, (shape, tokens)


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or not is_hopper(torch.device(DEVICE)),
    reason="needs a Hopper GPU",
)


@HOPPER
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "unaligned"])
def test_the_pipelined_kernel(shape: str) -> None:
    """With few rows of an expert and with many, an expert of all tokens, some experts of a rank,
    and experts without rows."""
    rule = SHAPES[shape][2]
    for tokens, options in (
        (17, {"dtype": torch.float16}), (130, {"shared": "gated"}), (3000, {}),
        (700, {"local": range(1, rule.num_experts - 1)}),
        (1025, {"favoured": list(range(rule.top_k))}),
    ):  # fmt: skip
        one = case(shape, tokens, buckets=True, **options)
        assert error(whole(one, PipelinedConfig())) < LIMIT, (tokens, options)


@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize(("bound", "config"), SCANNED_CONFIGS)
def test_every_tile_without_buckets(bound: int, config: ExpertConfig, tma: bool) -> None:
    config = replace(config, tma=tma)
    for shape in ("Qwen3-30B-A3B", "unaligned"):
        for tokens in (1, 3, bound):
            assert error(whole(case(shape, tokens), config)) < LIMIT, (shape, tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    for tokens in (1, 9, 50):
        assert error(whole(case("unaligned", tokens, dtype=dtype))) < 2e-3, tokens


def test_products_of_one_token() -> None:
    for config in (VectorConfig(1, 256, 4), VectorConfig(8, 512, 2)):
        for shape in ("Qwen3-30B-A3B", "unaligned"):
            assert error(whole(case(shape, 1), config)) < LIMIT


@pytest.mark.parametrize("shape", SHAPES)
def test_one_token_in_three_launches(shape: str) -> None:
    """In float32, whose scores do not tie, and with other tiles."""
    for format in ("plain", "fp8"):
        for config in (CONFIG, VectorConfig(1, 256, 1), VectorConfig(8, 512, 2)):
            one = case(shape, 1, dtype=torch.float32, format=format)
            assert error(one_token(one, config)) < 1e-4


@pytest.mark.parametrize("tokens", [1, 12, 64, 256, 2000, 8192])
def test_replayed_graphs_route_anew(tokens: int) -> None:
    """Dependent launches in a graph, which is replayed for other tokens: the result is that of
    launches one by one, bit for bit, whatever places pairs have in their buckets."""
    given = mixture(case("Qwen3-30B-A3B", tokens))
    hopper = torch.cuda.get_device_capability()[0] >= 9
    x, residual = given.x.clone(), torch.zeros_like(given.x)
    out = torch.empty_like(x)

    def launch(pdl: bool) -> None:
        options = {"pdl": pdl}
        routed = route(x, given.router, QWEN, given.counters, buckets=tokens > 16, **options)
        gated = expert_product(x, given.gate_up, routed, gated=True, **options)
        pairs = expert_product(gated, given.down, routed, gated=False, **options)
        sum_pairs(pairs, routed, residual=residual, out=out, **options)

    launch(hopper)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch(hopper)
    for _ in range(20):
        x.normal_()
        residual.normal_()
        out.fill_(torch.nan)
        graph.replay()
        found = out.clone()
        launch(False)
        assert torch.equal(found, out)
        assert not given.counters.any()


# ---------------------------------------------------------------- models

FAMILIES: dict[str, dict[str, Any]] = {
    # GELU, a router with a norm of its own, and a scale of each expert
    "gemma4_text": {
        "head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 5, "sliding_window": 50,
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "enable_moe_block": True, "num_experts": 16, "top_k_experts": 4,
        "moe_intermediate_size": 128,
    },
    "glm4_moe": {"head_dim": 128, "n_routed_experts": 16, "moe_intermediate_size": 128},
    "mixtral": {"head_dim": 128, "num_local_experts": 8},
    "olmoe": {"head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4},
    "qwen2_moe": {"head_dim": 64, "num_experts": 60, "moe_intermediate_size": 96},
    "qwen3_moe": {
        "head_dim": 128, "num_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 96,
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(request.param, tmp_path_factory.mktemp("model"), DEVICE, FAMILIES)


@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_are_those_of_transformers(model: Case, graphs: bool) -> None:
    check_greedy(model, DEVICE, graphs)


@pytest.mark.timeout(300)
@NEEDS_TWO
@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("name", ["glm4_moe", "qwen2_moe", "qwen3_moe"])
def test_two_ranks_give_the_tokens_of_transformers(
    name: str, by_expert: bool, tmp_path: Path
) -> None:
    """With some channels of every expert each, and with whole experts."""
    case = make_case(name, tmp_path, DEVICE, FAMILIES)
    check_two_ranks(case, parallel__expert_parallel=by_expert)


@pytest.mark.timeout(300)
@NEEDS_TWO
def test_copies_of_experts_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    """In graphs and without, and all tokens but the padding of graphs are counted."""
    one = make_case("qwen3_moe", tmp_path, DEVICE, FAMILIES)
    layers, file = json.loads((one.folder / "config.json").read_text()), tmp_path / "placed.json"
    count = layers["num_hidden_layers"]
    by_rank = (*range(20), 31), (*range(20, 32), 0, 1, 2)
    placement = ExpertPlacement(dict.fromkeys(range(count), LayerPlacement(by_rank)))
    file.write_text(json.dumps(placement.to_json()))
    placed = {
        "parallel__expert_parallel": str(file),
        "speculation__method": "none",  # tokens of drafts are counted, too
    }  # fmt: skip
    with inline_llm(one.folder, **TWO_RANKS, **placed) as llm:
        outputs = llm.generate(one.prompts, NO_END)
        time.sleep(1.1)
        llm.generate([[5]], SamplingParams(max_tokens=1))
        load = expert_load(llm.frontend.engines[0])
        counted = load.totals.sum(axis=1).tolist()
    assert tokens_of(outputs) == one.expected
    computed = sum(len(prompt) + 31 for prompt in one.prompts) + 1
    # the last layer computes the sampled tokens alone
    assert counted == [8 * computed] * (count - 1) + [8 * (32 * len(one.prompts) + 1)]
    assert len(set(load.ranks[0].tolist())) == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("load_format", "channels"), [("auto", 96), ("auto", 128), ("dummy", 96)])
def test_nothing_is_compiled_while_serving(load_format: str, channels: int, tmp_path: Path) -> None:
    """For any number of tokens, in bf16, and with experts that the pipelined kernel supports."""
    fields = FAMILIES["qwen3_moe"] | {"moe_intermediate_size": channels}
    random_model(
        tmp_path, family="qwen3_moe", vocab_size=4096, hidden_size=512,
        max_position_embeddings=1024, **fields,
    )  # fmt: skip
    settings = {"model__dtype": "bfloat16", "model__load_format": load_format}
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    rng = random.Random(0)
    with inline_llm(tmp_path, **settings) as llm:
        model: Any = worker_of(llm).model
        assert isinstance(model.layers[0].parts[1], KernelMixtureMLP)
        for length in (1, 2, 8, 9, 16, 17, 64, 65, 300, 900):
            llm.generate([[5] * length], greedy)
        many = [[rng.randrange(3, 4096) for _ in range(rng.randint(1, 900))] for _ in range(50)]
        llm.generate(many, greedy)
        check_nothing_was_compiled(llm)

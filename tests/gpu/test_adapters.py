"""Adapters on a GPU: products of tokens with several adapters, and texts in graphs, which are those
of a model whose weights have the adapter added."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapter_cases import Case, make_case
from aioinfer.kernels.adapters import AdapterOperand, RowOperand, expand, shrink
from aioinfer.kernels.expert_adapters import add_to_pairs, sort_pairs
from aioinfer.kernels.expert_routing import RoutedTokens
from aioinfer.kernels.few_rows_dense import few_rows_dense
from aioinfer.kernels.gated_product import gated_product, interleave
from aioinfer.kernels.split_product import SplitConfig, split_product
from engine_settings import (
    NEEDS_TWO,
    TWO_RANKS,
    TWO_STAGES,
    inline_llm,
    worker_of,
)
from random_models import greedy_outputs, random_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from aioinfer import SamplingParams
from aioinfer.worker.gpu_device import GpuDevice
from tests.adapter_files import write_adapter

GPU = torch.device("cuda")
RANKS = {"first": 8, "second": 16, "third": 3}


@pytest.mark.parametrize("tokens", [1, 8, 65, 256, 3000])
@pytest.mark.parametrize(("width", "out", "modules"), [(4096, 6144, 3), (12288, 4096, 1)])
def test_products_of_half_precision(tokens: int, width: int, out: int, modules: int) -> None:
    case = make_case(tokens, width, out, 16, modules, device=GPU, dtype=torch.bfloat16)
    y = torch.randn(tokens, out, device=GPU).to(torch.bfloat16)
    expected = y.float() + case.added(case.x)
    shrink(case.x, case.adapters, case.tiles, case.workspace, pdl=True)
    expand(y, case.adapters, case.tiles, case.workspace, pdl=True)
    torch.testing.assert_close(y.float(), expected, atol=0.03, rtol=0.02)


Operand = AdapterOperand | RowOperand
Product = Callable[[torch.Tensor, torch.Tensor, Operand], torch.Tensor]


def split_into(parts: int, consumers: int) -> Product:
    """A split product, of which the parts are added up."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, adapters: Operand) -> torch.Tensor:
        assert isinstance(adapters, AdapterOperand)
        config = SplitConfig(consumers, parts)
        return split_product(x, weight, config, pdl=True, operand=adapters).sum(0)

    return multiply


def few_rows(x: torch.Tensor, weight: torch.Tensor, adapters: Operand) -> torch.Tensor:
    return few_rows_dense(x, weight, pdl=True, operand=adapters)


def operand_of(case: Case, launch: int = 0) -> Operand:
    """What products of the case's tokens add in their launch."""
    if len(case.x) == 1:
        return RowOperand.of(case.adapters, case.tiles, launch)
    operand = shrink(case.x, case.adapters, case.tiles, case.workspace, pdl=True)
    assert operand is not None
    return operand


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "product"),
    [
        (1, few_rows), (7, few_rows), (16, few_rows), (17, split_into(1, 1)),
        (64, split_into(2, 1)), (128, split_into(3, 2)), (100, split_into(8, 1)),
    ],
)  # fmt: skip
def test_products_add_adapters_in_their_launch(tokens: int, product: Product, rank: int) -> None:
    case = make_case(tokens, 1024, 768, rank, 3, device=GPU, dtype=torch.bfloat16)
    weight = (torch.randn(768, 1024, device=GPU) / 32).to(torch.bfloat16)
    for launch in range(3):  # one launch empties what the next one waits for
        found = product(case.x, weight, operand_of(case, launch)).float()
    expected = case.x.float() @ weight.float().t() + case.added(case.x)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.02)


@pytest.mark.parametrize("tokens", [1, 12, 40, 128, 256])
def test_gated_products_add_adapters_in_their_launch(tokens: int) -> None:
    case = make_case(tokens, 1024, 3072, 16, 2, device=GPU, dtype=torch.bfloat16)
    weight = (torch.randn(3072, 1024, device=GPU) / 32).to(torch.bfloat16)
    both = case.x.float() @ weight.float().t() + case.added(case.x)
    gate, up = both.chunk(2, 1)
    operand = operand_of(case)
    case.adapters.up.copy_(interleave(case.adapters.up))
    if tokens <= 16:
        found = few_rows_dense(case.x, interleave(weight), gated=True, pdl=True, operand=operand)
    else:
        assert isinstance(operand, AdapterOperand)
        found = gated_product(case.x, interleave(weight), pdl=True, operand=operand)
    torch.testing.assert_close(found.float(), F.silu(gate) * up, atol=0.03, rtol=0.03)


def write_adapters(
    folder: Path, model: Path
) -> dict[str | None, tuple[str, dict[str, torch.Tensor]]]:
    """Saves a random adapter of each rank; returns its folder and the model's weights with it
    added, by name."""
    weights = load_file(model / "model.safetensors")
    modules = {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in weights.items()
        if name.endswith(("proj.weight", "kv_a_proj_with_mqa.weight", "lm_head.weight"))
    }
    modules["model.embed_tokens"] = modules["lm_head"][1], modules["lm_head"][0]
    found: dict[str | None, tuple[str, dict[str, torch.Tensor]]] = {None: ("", weights)}
    for name, rank in RANKS.items():
        added = write_adapter(folder / name, modules, rank=rank)
        merged = {module: weights[f"{module}.weight"] + each for module, each in added.items()}
        merged = {f"{module}.weight": weight for module, weight in merged.items()}
        found[name] = str(folder / name), weights | merged
    return found


LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
    "v_head_dim": 64, "first_k_dense_replace": 2,
}  # fmt: skip


ON_TWO = [NEEDS_TWO, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param({}, id="one GPU"),
        pytest.param(TWO_RANKS, id="two ranks", marks=ON_TWO),
        pytest.param(TWO_STAGES, id="two stages", marks=ON_TWO),
    ],
)
@pytest.mark.parametrize(("family", "fields"), [("qwen3", {}), ("deepseek_v2", LATENT)])
def test_texts_are_those_of_merged_weights(
    family: str, fields: dict[str, Any], way: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts and decodes of all adapters and none in the same steps, in graphs, in float32: of one
    engine with few sizes of graphs, since everything is compiled for it. There are fewer slots than
    adapters, which change all linear layers, the embedding and the head."""
    (tmp_path / "model").mkdir()
    model = random_model(
        tmp_path / "model", family=family, vocab_size=500, head_dim=64, hidden_size=128,
        intermediate_size=256, num_hidden_layers=2, initializer_range=0.05, eos_token_id=None,
        tie_word_embeddings=False, **fields,
    )  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 500) for _ in range(rng.randint(1, 60))] for _ in range(8)]
    adapters = write_adapters(tmp_path, model)
    names = [[*adapters][number % len(adapters)] for number in range(len(prompts))]
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).to(GPU)
    expected = []
    for name, prompt in zip(names, prompts, strict=True):
        reference.load_state_dict(adapters[name][1])
        expected += greedy_outputs(reference, [prompt], 12)
    params = [SamplingParams(temperature=0, max_tokens=12, adapter=name) for name in names]
    with inline_llm(
        model, model__tokenizer="none", model__max_model_len=128, scheduler__max_num_seqs=4,
        scheduler__max_num_batched_tokens=128, cache__num_blocks=40, lora__max_adapters=2,
        lora__targets=["embeddings"],
        lora__adapters={name: path for name, (path, _) in adapters.items() if name}, **way,
    ) as llm:  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        if not way:
            device = worker_of(llm).runner.device
            assert isinstance(device, GpuDevice)
            assert device.graphs.extended.graphs
    found = [list(output.token_ids) for output in outputs]
    # a near tie may show in a request: sums are rounded differently
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= 7


@pytest.mark.parametrize("slots", [2, 64])
def test_nothing_is_compiled_while_serving(slots: int, tmp_path: Path) -> None:
    """Steps of prompts of any number of tokens, the first of which have adapters; 64 slots have
    more columns than steps of many tokens take together."""
    (tmp_path / "model").mkdir()
    model = random_model(
        tmp_path / "model", family="qwen3", vocab_size=500, head_dim=64, hidden_size=128,
        intermediate_size=256, num_hidden_layers=2, tie_word_embeddings=False,
        max_position_embeddings=1024,
    )  # fmt: skip
    adapters = write_adapters(tmp_path, model)
    rng = random.Random(0)
    lengths = [600, 300, 1, 2, 17, 40, 100, 130, 200, 500, 520, 700, 900]
    prompts = [[rng.randrange(3, 500) for _ in range(length)] for length in lengths * 2]
    names = [[*adapters][1 + number % len(RANKS)] for number in range(len(prompts))]
    params = [SamplingParams(temperature=0.8, max_tokens=9, adapter=name) for name in names]
    with inline_llm(
        model, model__tokenizer="none", scheduler__max_num_seqs=40, lora__max_adapters=slots,
        lora__targets=["embeddings"],
        lora__adapters={name: path for name, (path, _) in adapters.items() if name},
    ) as llm:  # fmt: skip
        for prompt, one in zip(prompts[: len(lengths)], params, strict=False):
            llm.generate([{"prompt_token_ids": prompt}], one)
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


SLOTS, EXPERTS, TOP_K, RANK = 4, 128, 8, 16


def route(tokens: int, generator: torch.Generator) -> RoutedTokens:
    """Random experts, with buckets for more than a few tokens."""
    scores = torch.rand(tokens, EXPERTS, generator=generator, device=GPU)
    weights, chosen = scores.topk(TOP_K)
    routed = RoutedTokens(weights.contiguous(), chosen.int().contiguous())
    if tokens <= 16:
        return routed
    flat = chosen.flatten()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=EXPERTS)
    place = torch.arange(len(flat), device=GPU) - (counts.cumsum(0) - counts)[flat[order]]
    rows = torch.zeros(EXPERTS, tokens, dtype=torch.int32, device=GPU)
    rows[flat[order], place] = order.int()
    return RoutedTokens(routed.weights, routed.experts, counts.int(), rows)


@pytest.mark.parametrize("tokens", [1, 16, 256, 3000])
@pytest.mark.parametrize(("is_first", "width", "out"), [(True, 2048, 1536), (False, 768, 2048)])
def test_pairs_in_half_precision(tokens: int, width: int, out: int, *, is_first: bool) -> None:
    generator = torch.Generator(GPU).manual_seed(tokens)

    def random_tensor(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=GPU)
        return (made / shape[-1] ** 0.5).to(torch.bfloat16)

    modules = 1 + is_first
    ranks = torch.tensor([RANK, 5, RANK, 8], dtype=torch.int32, device=GPU)
    first = random_tensor(SLOTS, EXPERTS, modules * RANK, width)
    second = random_tensor(SLOTS, EXPERTS, out, modules * RANK)
    adapters = torch.randint(
        -1, SLOTS, (tokens,), generator=generator, device=GPU, dtype=torch.int32
    )
    routed, pairs = route(tokens, generator), tokens * TOP_K
    x, y = random_tensor(tokens if is_first else pairs, width), random_tensor(pairs, out)
    between = torch.arange(pairs, device=GPU)  # the row of each pair between the products
    if routed.counts is not None:
        between = routed.experts.flatten().argsort(stable=True).argsort()
    keys = adapters.repeat_interleave(TOP_K) * EXPERTS + routed.experts.flatten()
    expected, weights = y.float(), routed.weights.flatten()
    for key in keys[adapters.repeat_interleave(TOP_K) >= 0].unique().tolist():
        slot, expert = divmod(key, EXPERTS)
        used, same = modules * int(ranks[slot]), (keys == key).nonzero()[:, 0]
        given = x[same // TOP_K if is_first else between[same]].float()
        added = given @ first[slot, expert, :used].float().t()
        added = added @ second[slot, expert, :, :used].float().t()
        if is_first:
            expected[between[same]] += added
        else:
            expected[same] += added * weights[same, None]
    tiles = sort_pairs(adapters, routed, EXPERTS, SLOTS)
    add_to_pairs(x, first, second, y, tiles, ranks, modules, is_first=is_first)
    torch.testing.assert_close(y.float(), expected, atol=0.03, rtol=0.02)

"""Process groups over real processes and gloo: collectives stay within the group that they name,
and tensor-parallel ranks together have the logits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aioinfer.ipc.expert_placement import ExpertPlacement, LayerPlacement
from aioinfer.ipc.placement import RankSpec
from aioinfer.layers.parallel import ParallelGroup, ProcessGroups
from tests.paged_model import PagedModel, load_model
from tests.rank_processes import run_ranks

pytestmark = pytest.mark.slow

VOCAB = 211  # no number of ranks divides it
TEXTS = [
    [(11 * i * i + 3 * i + 7 * text) % VOCAB for i in range(length)]
    for text, length in enumerate((29, 14, 1))
]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "a kv head each": ("llama", {"num_key_value_heads": 4}),
    "one kv head": ("mistral", {"num_key_value_heads": 1, "sliding_window": 6}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {"tie_word_embeddings": True}),
    "glm4": ("glm4", {}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss mxfp4": ("gpt_oss", {"num_key_value_heads": 1}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {"sliding_window": 6}),
    "deepseek_v2": ("deepseek_v2", {"q_lora_rank": 40}),
    "deepseek_v3": ("deepseek_v3", {"attention_bias": True}),
    "glm4_moe": ("glm4_moe", {}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    # with whole experts on the ranks
    "deepseek_v3 experts": ("deepseek_v3", {}),
    "gpt_oss mxfp4 experts": ("gpt_oss", {}),
    "qwen2_moe experts": ("qwen2_moe", {}),
    "qwen3_moe experts": ("qwen3_moe", {"num_experts": 7, "moe_intermediate_size": 31}),
    # the same with copies of some of them
    "deepseek_v3 copied experts": ("deepseek_v3", {}),
    "gpt_oss copied experts": ("gpt_oss", {"num_local_experts": 8}),
    "qwen3_moe copied experts": ("qwen3_moe", {}),
}


def copied_experts(size: int) -> ExpertPlacement:
    """Returns a placement of 8 experts with copies of two, one of which is on every rank."""
    by_rank = [list(experts) for experts in LayerPlacement.near_equal(8, size).by_rank]
    by_rank[-1].insert(0, 1)
    for experts in by_rank[:-1]:
        experts.append(7)
    placement = LayerPlacement(tuple(tuple(experts) for experts in by_rank))
    return ExpertPlacement(dict.fromkeys(range(4), placement))


def run_rank(rank: int, size: int, folder: Path) -> None:
    """The body of a process: computes every model's logits and saves them."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    group = ParallelGroup.connect(rank, size, store, torch.device("cpu"))
    logits, shapes = {}, {}
    for name in MODELS:
        by_expert = name.endswith(" experts")
        placement = copied_experts(size) if " copied " in name else None
        model = load_model(
            folder / name, group, expert_parallel=by_expert, expert_placement=placement
        )
        logits[name] = PagedModel(model, 4).run_at_random(TEXTS, longest=9, seed=1)
        shapes[name] = model.kv_specs[0][0].token_shape, model.weights_bytes
    torch.save((logits, shapes), folder / f"rank-{rank}-of-{size}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # these import transformers, which each rank would do anew
    from tests.mxfp4_models import quantize_experts
    from tests.tiny_models import tiny_model

    root = tmp_path_factory.mktemp("models")
    for name, (family, fields) in MODELS.items():
        tiny_model(family, root / name, vocab_size=VOCAB, **fields)
    # of 96 channels: ranks begin and end within blocks
    for name in ("gpt_oss mxfp4", "gpt_oss mxfp4 experts"):
        quantize_experts(root / name, root / name)
    return root


# all families have two ranks in tests/test_models.py
@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.extended), 4])
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[Any]:
    """What each of several ranks saved."""
    return run_ranks(run_rank, request.param, folder)


@pytest.mark.parametrize("name", MODELS)
def test_together_the_ranks_have_the_logits_of_one_process(
    folder: Path, ranks: list[Any], name: str
):
    alone = PagedModel(load_model(folder / name, ParallelGroup.single()), 4).run_at_random(
        TEXTS, longest=9, seed=1
    )
    for text, expected in enumerate(alone):
        whole = torch.cat([logits[name][text] for logits, _ in ranks], dim=-1)
        assert whole.shape == expected.shape
        assert (whole - expected).abs().max() < 2e-4 * expected.std()


def test_ranks_beyond_the_kv_heads_share_them(ranks: list[Any]):
    for _, shapes in ranks:
        assert shapes["llama"][0][1] == max(1, 2 // len(ranks))
        assert shapes["a kv head each"][0][1] == 4 // len(ranks)
        assert shapes["one kv head"][0][1] == 1


def test_each_rank_has_all_of_the_latents(ranks: list[Any]):
    assert all(shapes["deepseek_v3"][0] == (1, 1, 24 + 8) for _, shapes in ranks)


def test_weights_are_divided(folder: Path, ranks: list[Any]):
    whole = load_model(folder / "a kv head each", ParallelGroup.single()).weights_bytes
    for _, shapes in ranks:
        assert shapes["a kv head each"][1] < 1.1 * whole / len(ranks)
    # experts are most of it
    name = "gpt_oss mxfp4 experts"
    sizes = [shapes[name][1] for _, shapes in ranks]
    whole = load_model(folder / name, ParallelGroup.single()).weights_bytes
    assert max(sizes) < 1.3 * whole / len(ranks)


def run_grid_rank(rank: int, size: int, folder: Path) -> None:
    """The body of a process of a world of tp = 2 times dp = 2: saves what each group gives."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "grid-store"), size)
    spec = RankSpec(rank, size, rank, groups=(("dp", 2), ("tp", 2)))
    groups = ProcessGroups.connect(spec, torch.device("cpu"), store)
    found = {
        name: (
            groups[name].rank,
            groups[name].size,
            groups[name].all_reduce(torch.tensor([10.0**rank])).item(),
            groups[name].all_gather_last(torch.tensor([rank])).tolist(),
        )
        for name in ("tp", "dp", "ep")
    }
    torch.save(found, folder / f"rank-{rank}-of-{size}")
    dist.destroy_process_group()


def test_collectives_stay_within_their_group(tmp_path: Path):
    # (rank in the group, size, sum of 10 ** rank, ranks of the group)
    first, second = (2, 11.0, [0, 1]), (2, 1100.0, [2, 3])
    even, odd = (2, 101.0, [0, 2]), (2, 1010.0, [1, 3])
    found = run_ranks(run_grid_rank, 4, tmp_path)
    assert [rank["tp"] for rank in found] == [(0, *first), (1, *first), (0, *second), (1, *second)]
    assert [rank["dp"] for rank in found] == [(0, *even), (0, *odd), (1, *even), (1, *odd)]
    assert [rank["ep"] for rank in found] == [(0, 1, 10.0**rank, [rank]) for rank in range(4)]


def test_groups_of_a_rank_alone():
    groups = ProcessGroups.single()
    assert [groups[name].size for name in ("tp", "dp", "ep", "pp")] == [1, 1, 1, 1]
    assert groups.tp is groups["tp"]
    with pytest.raises(KeyError):
        groups["tensor"]


def test_a_group_of_one_leaves_values_as_they_are():
    group = ParallelGroup.single()
    values = torch.randn(3, 4)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(values) is values
    assert group.all_gather_last(values) is values

"""Copies of experts: where they are placed, and that a model with them is the one without."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.errors import ConfigError
from aioinfer.features.expert_load.planning import place_experts
from aioinfer.ipc.expert_placement import ExpertPlacement, LayerPlacement
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.registry import build_model
from tests.paged_model import CPU
from tests.tiny_models import tiny_model

#: Each expert once, expert 2 on both ranks, 5 on three, and as many experts on no two ranks.
COPIES = ((2, 0, 5), (1, 2, 3, 4, 7), (6, 5), (5,))


def max_load(placement: LayerPlacement, tokens: list[float]) -> float:
    copies = Counter(placement.experts)
    return max(sum(tokens[e] / copies[e] for e in experts) for experts in placement.by_rank)


def test_busy_experts_get_copies_on_other_ranks() -> None:
    tokens = [1000.0, 10.0, 10.0, 500.0, 10.0, 10.0, 10.0, 10.0]
    placement = place_experts(tokens, 4, 4)
    copies = Counter(placement.experts)
    assert copies[0] == 4
    assert copies[3] == 2
    assert set(copies) == set(range(8))
    assert all(len(set(experts)) == len(experts) == 3 for experts in placement.by_rank)
    assert max_load(placement, tokens) < 1.4 * sum(tokens) / 4
    assert max_load(LayerPlacement.near_equal(8, 4), tokens) > 2.5 * sum(tokens) / 4


def test_random_loads_are_placed_whole() -> None:
    """As many places as wanted on ranks that differ by one, never worse than in order."""
    rng = random.Random(3)
    for _ in range(200):
        num_ranks, num_experts = rng.randint(1, 6), rng.randint(6, 20)
        tokens = [rng.choice([0.0, rng.expovariate(1.0)]) for _ in range(num_experts)]
        copies = rng.randint(0, 12)
        placement = place_experts(tokens, num_ranks, copies)
        possible = (num_ranks - 1) * num_experts
        assert set(placement.experts) == set(range(num_experts))
        assert len(placement.experts) == num_experts + min(copies, possible)
        sizes = [len(experts) for experts in placement.by_rank]
        assert max(sizes) - min(sizes) <= 1
        placed = ExpertPlacement({7: placement})
        assert placed.of(7, num_experts, num_ranks) == placement
    with pytest.raises(ValueError, match="3 experts and copies for 4 ranks"):
        place_experts([1.0, 1.0], 4, 1)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file, placement = tmp_path / "p.json", ExpertPlacement({3: LayerPlacement(COPIES)})
    file.write_text(json.dumps(placement.to_json()))
    assert ExpertPlacement.read(file) == placement
    assert placement.of(0, 7, 2).by_rank == ((0, 1, 2), (3, 4, 5, 6))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"0": [[0, 1, 2]]}, "layer 0 is placed on 1 ranks; there are 2"),
        ({"0": [[0, 1, 2], []]}, "layer 0: a rank has no expert"),
        ({"0": [[0, 1], [1]]}, "layer 0: expert 2 is on no rank"),
        ({"0": [[0, 1, 2], [3]]}, "layer 0 has no expert 3: there are 3"),
        ({"0": [[0, 1, 2], [-1]]}, "layer 0 has no expert -1"),
        ({"a": [[0]]}, "'layers' of .* must map"),
        ({"0": [[0, True]]}, "'layers' of .* must map"),
        ({"0": [0, 1]}, "'layers' of .* must map"),
        ([], "'layers' of .* must map"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, layers: Any, message: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps({"version": 1, "layers": layers}))
    with pytest.raises(ConfigError, match=message):
        ExpertPlacement.read(file).of(0, 3, 2)


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 2, "layers": {}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"parallel\.expert_parallel: .*p\.json"):
        ExpertPlacement.read(file)
    with pytest.raises(ConfigError, match="No such file"):
        ExpertPlacement.read(tmp_path / "none.json")


def mixtures(folder: Path, layer: int, placement: LayerPlacement) -> list[Any]:
    """Returns the mixture of a layer as one rank has it, and as each rank of a placement does."""
    found = []
    size = len(placement.by_rank)
    for group in (ParallelGroup.single(), *(ParallelGroup(rank, size) for rank in range(size))):
        backend = Backend(CPU, torch.float32, group, expert_parallel=group.size > 1)
        backend.expert_placement = ExpertPlacement({layer: placement})
        model: Any = build_model(folder, backend)
        model.load(folder, "auto", 0, lambda done, total: None)
        found.append(model.layers[layer].parts[1])
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@torch.inference_mode()
def test_what_ranks_with_copies_add_is_the_mixture(tmp_path: Path, family: str) -> None:
    """Each token once, whichever copy it takes; and the tokens of all copies are counted."""
    experts = {} if family != "gpt_oss" else {"num_local_experts": 8, "num_experts_per_tok": 3}
    heads = {} if family == "deepseek_v3" else {"num_key_value_heads": 4}
    folder = tiny_model(family, tmp_path, **experts, **heads)
    whole, *ranks = mixtures(folder, 1, LayerPlacement(COPIES))
    hidden = whole.router.weight.shape[1]
    for tokens in (1, 23):
        x = torch.randn(tokens, hidden)
        chosen = whole.router(x)[1]
        for mixture in (whole, *ranks):
            mixture.counter.tokens.zero_()
        parts = [mixture._mix(x) for mixture in ranks]
        torch.testing.assert_close(torch.stack(parts).sum(0), whole._mix(x), rtol=1e-4, atol=1e-4)
        expected = chosen.flatten().bincount(minlength=8)
        assert torch.equal(whole.counter.tokens.long(), expected)
        for mixture in ranks:  # each counts the tokens of all
            assert torch.equal(mixture.counter.tokens, ranks[0].counter.tokens)
        counter = ranks[0].counter
        by_expert = torch.zeros(8, dtype=torch.int32)
        by_expert.index_add_(0, torch.tensor(counter.experts), counter.tokens)
        assert torch.equal(by_expert.long(), expected)
        of_five = counter.tokens[torch.tensor(counter.experts) == 5]
        positions = (chosen == 5).any(1).nonzero().flatten()
        assert of_five.tolist() == [int((positions % 3 == copy).sum()) for copy in range(3)]


@torch.inference_mode()
def test_a_skewed_router_gives_its_tokens_to_all_copies(tmp_path: Path) -> None:
    folder = tiny_model("deepseek_v3", tmp_path, n_group=1, topk_group=1)
    whole, *ranks = mixtures(folder, 1, LayerPlacement(((0, 1, 2, 3, 6), (4, 5, 6, 7))))
    for mixture in (whole, *ranks):
        mixture.router.bias.zero_()
        mixture.router.bias[[6, 1, 4]] = 100.0
    x = torch.randn(10, whole.router.weight.shape[1])
    parts = [mixture._mix(x) for mixture in ranks]
    torch.testing.assert_close(sum(parts), whole._mix(x), rtol=1e-4, atol=1e-4)
    assert ranks[0].counter.tokens.tolist() == [0, 10, 0, 0, 5, 10, 0, 5, 0]

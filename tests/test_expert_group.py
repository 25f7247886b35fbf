"""Mixtures of experts of ranks that have tokens of their own: over gloo, each rank gets for its
tokens what one rank with all experts gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from aioinfer.ipc.expert_placement import ExpertPlacement, LayerPlacement
from aioinfer.ipc.placement import RankSpec
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup, ProcessGroups
from aioinfer.layers.residual import ResidualStream
from aioinfer.models.registry import build_model
from tests.rank_processes import run_ranks

CPU = torch.device("cpu")
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
#: Tokens of the ranks in one exchange after the other.
STEPS = ((5, 3), (0, 4), (1, 0), (0, 0), (17, 2))
#: Uneven, with an expert on both ranks.
PLACEMENT = ExpertPlacement({1: LayerPlacement(((0, 1, 2, 5, 7), (3, 4, 5, 6)))})


def mixture(folder: Path, group: ParallelGroup | None) -> Any:
    """Returns the second layer's mixture, with experts divided among the ranks of a group."""
    backend = Backend(CPU, torch.float32, ParallelGroup.single())
    if group is not None:
        backend.expert_parallel, backend.expert_group = True, group
        backend.expert_placement = PLACEMENT
    model: Any = build_model(folder, backend)
    model.load(folder, "auto", 0, lambda done, total: None)
    assert model.layers[1].parts[1].needs_all_ranks == (group is not None)
    return model.layers[1].parts[1]


def tokens(rank: int, step: int, hidden: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(STEPS[step][rank], hidden, generator=generator)


@torch.inference_mode()
def run_rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    spec = RankSpec(rank, size, 0, groups=(("dp", size), ("tp", 1)))
    group = ProcessGroups.connect(spec, CPU, dist.FileStore(str(folder / "store"), size)).dp
    found = {}
    for name in FAMILIES:
        layer = mixture(folder / name, group)
        hidden = layer.router.weight.shape[1]
        outputs = []
        for step in range(len(STEPS)):
            stream = ResidualStream(tokens(rank, step, hidden), layer._backend)
            layer.add_to(stream)
            outputs.append(stream.hidden)
        found[name] = outputs, layer.counter.tokens
    torch.save(found, folder / f"rank-{rank}-of-{size}")
    dist.destroy_process_group()


@torch.inference_mode()
def test_each_rank_gets_what_all_experts_give(tmp_path: Path) -> None:
    """With ranks that have no tokens, and an expert on two ranks."""
    from tests.tiny_models import tiny_model  # imports transformers, which ranks do not need

    for name in FAMILIES:
        tiny_model(name, tmp_path / name)
    ranks = run_ranks(run_rank, 2, tmp_path)
    for name in FAMILIES:
        layer = mixture(tmp_path / name, None)
        hidden, counted = layer.router.weight.shape[1], []
        for rank, found in enumerate(ranks):
            outputs, counts = found[name]
            layer.counter.tokens.zero_()
            for step, output in enumerate(outputs):
                stream = ResidualStream(tokens(rank, step, hidden), layer._backend)
                layer.add_to(stream)
                torch.testing.assert_close(output, stream.hidden, rtol=1e-4, atol=1e-4)
            by_expert = torch.zeros(8, dtype=torch.int32)
            by_expert.index_add_(0, torch.tensor(PLACEMENT.layers[1].experts), counts)
            assert torch.equal(by_expert, layer.counter.tokens)  # each counts its own
            counted.append(int(by_expert.sum()))
        assert counted == [3 * sum(step[rank] for step in STEPS) for rank in range(2)]


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    from aioinfer.errors import ConfigError
    from tests.tiny_models import tiny_model

    folder = tiny_model("mixtral", tmp_path)
    backend = Backend(CPU, torch.float32, ParallelGroup.single(), expert_parallel=True)
    backend.expert_group = ParallelGroup(0, 5)
    with pytest.raises(ConfigError, match="layer 0: a rank has no expert"):
        build_model(folder, backend)

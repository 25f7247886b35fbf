"""Layers with experts on ranks that have tokens of their own, over the kernels and between
processes: each rank gets for its tokens what one rank with all experts gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from aioinfer.kernels.expert_configs import TABLES
from aioinfer.kernels.expert_exchange import ExchangeLayout
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from peer_processes import run_ranks

from aioinfer.errors import ConfigError
from aioinfer.ipc.expert_placement import ExpertPlacement, LayerPlacement
from aioinfer.layers import exchanged_experts
from aioinfer.layers.backend import Backend
from aioinfer.layers.exchanged_experts import ExchangedMixtureMLP
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.models.registry import build_model
from tests.kernels.bound_model import CPU, assert_close
from tests.kernels.test_expert_models import SIZES
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

TOP_K, HIDDEN = 3, SIZES["hidden_size"]
#: Tokens of the ranks in one exchange after the other.
STEPS = ((5, 3), (0, 4), (1, 0), (0, 0), (9, 2))
MAX_TOKENS = 12
#: Uneven, with an expert on both ranks, in the first layer; the second is divided in order.
PLACEMENT = ExpertPlacement({0: LayerPlacement(((0, 1, 2, 5, 7), (3, 4, 5, 6)))})


class Peers(ParallelGroup):
    """A rank of several with symmetric memory that is there already."""

    def __init__(self, peers: SymmetricBuffer):
        super().__init__(peers.rank, peers.size)
        self._peers = peers

    def symmetric_buffer(self, nbytes: int) -> SymmetricBuffer:
        assert nbytes == self._peers.local.nbytes
        return self._peers


def load(
    folder: Path, group: ParallelGroup | None, placement: ExpertPlacement | None = None
) -> Any:
    backend = Backend(CPU, torch.float32, ParallelGroup.single(), has_kernels=group is not None)
    if group is not None:
        backend.expert_parallel, backend.expert_group = True, group
        backend.expert_placement = placement or backend.expert_placement
    model = build_model(folder, backend)
    model.load(folder, "auto", 0, lambda done, total: None)
    return model


def tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(STEPS[step][rank], HIDDEN, generator=generator)


@torch.inference_mode()
def run_rank(peers: SymmetricBuffer, folder: Path) -> list[torch.Tensor]:
    model = load(folder, Peers(peers), PLACEMENT)
    model.connect_experts(MAX_TOKENS)
    outputs = []
    for step in range(len(STEPS)):
        if not STEPS[step][peers.rank]:
            model.take_part()
            continue
        stream = ResidualStream(tokens(peers.rank, step), model.backend)
        for layer in model.layers:
            assert isinstance(layer.parts[1], ExchangedMixtureMLP)
            layer.parts[1].add_to(stream)
        outputs.append(stream.hidden)
    return [*outputs, *(layer.parts[1].counter.tokens for layer in model.layers)]


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
@torch.inference_mode()
def test_each_rank_gets_what_all_experts_give(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an expert of all tokens, and with biases; over two layers."""
    sizes = {**SIZES, "num_hidden_layers": 2}
    tiny_model(family, tmp_path, **sizes)
    monkeypatch.setattr(exchanged_experts, "_MIN_TOKENS", 1)  # the interpreter is slow
    layout = ExchangeLayout.of(2, MAX_TOKENS, TOP_K, HIDDEN, torch.float32)
    ranks = run_ranks(2, layout.nbytes, run_rank, tmp_path)
    model = load(tmp_path, None)
    for rank, found in enumerate(ranks):
        *outputs, first, second = found
        for step in (number for number, counts in enumerate(STEPS) if counts[rank]):
            stream = ResidualStream(tokens(rank, step), model.backend)
            for layer in model.layers:
                layer.parts[1].add_to(stream)
            assert_close(outputs.pop(0), stream.hidden)
        own = TOP_K * sum(step[rank] for step in STEPS)
        assert (len(first), int(first.sum())) == (9, own)
        assert (len(second), int(second.sum())) == (8, own)


@pytest.mark.sample
def test_tiles_go_by_the_tokens_that_may_come() -> None:
    """A rank with few tokens or none has tiles for few rows, and for all that others may send; one
    with a long prompt has tiles for many rows alone."""
    weight = torch.empty(2, 16, 16, dtype=torch.float16)
    table = [config for _, config in TABLES["plain"][1]]
    launches = [
        exchanged_experts._launches(weight, average, torch.float16) for average in (0, 25, 500)
    ]
    assert [one.few for one in launches] == [table[1], table[2], None]
    assert all(one.many == table[-1] for one in launches)


@pytest.mark.sample
def test_what_kernels_do_not_compute_is_refused(tmp_path: Path) -> None:
    tiny_model("mixtral", tmp_path, **SIZES, intermediate_size=20)
    with pytest.raises(ConfigError, match=r"expert_parallel between engines on GPUs needs experts"):
        load(tmp_path, ParallelGroup(0, 2))

"""Vocabulary-parallel ranks on real GPUs sample the tokens that one rank samples: in CUDA graphs,
over many rounds, and out of step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup

ROWS = 300  # more than run at a time
SLOTS = 64
ROUNDS = 300
VOCAB_SIZE = 50_021  # no number of ranks divides it


def sample_together(rank: int, size: int, folder: Path) -> None:
    from aioinfer.kernels.sampling import SamplingState, VocabShard, sample_tokens
    from aioinfer.kernels.symmetric_memory import LLBuffers
    from sampling_cases import make_state

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = ParallelGroup.connect(rank, size, dist.FileStore(str(folder / "store"), size), device)
    vocabulary = Vocabulary(VOCAB_SIZE, group)
    shard = VocabShard(
        vocabulary.start,
        VOCAB_SIZE,
        LLBuffers(group.symmetric_buffer(LLBuffers.nbytes(ROWS, size))),
    )
    state = make_state(SLOTS, "cuda")
    logits = torch.randn(ROWS, VOCAB_SIZE, device="cuda") * 3
    slots, positions = (
        torch.randint(0, SLOTS, (ROWS,), dtype=torch.int32, device="cuda") for _ in range(2)
    )
    for tensor in (
        *(getattr(state, name) for name in SamplingState.__slots__),
        logits,
        slots,
        positions,
    ):
        dist.broadcast(tensor, 0)
    logits[::3] = logits[::3].round()  # equals
    logits[5, VOCAB_SIZE - 1] = logits[7, 0] = float("nan")
    mine = logits[:, vocabulary.start : vocabulary.start + vocabulary.local_size]
    together, alone = (torch.zeros(ROWS, dtype=torch.int32, device="cuda") for _ in range(2))
    sample_tokens(mine, slots, positions, state, shard=shard, out=together)
    sample_tokens(logits, slots, positions, state, out=alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(mine, slots, positions, state, shard=shard, out=together)
    waits = random.Random(rank)
    surely_equal = state.top_p[slots.long()] == 1
    wrong, different = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
    for number in range(ROUNDS):
        positions += 1
        if waits.random() < 0.3:
            torch.cuda._sleep(waits.randrange(200_000))  # cycles: up to 100 microseconds
        if number % 4:
            graph.replay()
        else:  # few rows, one after the other: the same LL buffers
            for begin in range(0, ROWS, 75):
                rows = slice(begin, begin + 75)
                sample_tokens(
                    mine[rows], slots[rows], positions[rows], state, shard=shard, out=together[rows]
                )
        sample_tokens(logits, slots, positions, state, out=alone)
        wrong += ((together != alone) & surely_equal).sum()
        different += (together != alone).sum()
        if number % 50 == 0:
            others = [torch.empty_like(together) for _ in range(size)]
            dist.all_gather(others, together)
            assert all(torch.equal(other, together) for other in others), "the ranks differ"
    assert wrong.item() == 0
    assert different.item() <= ROUNDS * ROWS // 1000, (
        "only the rounding of a sum may move top-p's border"
    )
    assert together[5].item() == together[7].item() == -1
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.timeout(300)
def test_sampled_tokens_are_those_of_one_rank(size: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    torch.multiprocessing.spawn(sample_together, args=(size, tmp_path), nprocs=size)

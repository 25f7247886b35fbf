"""Vocabulary-parallel ranks sample the same tokens as one rank with all of the vocabulary: ranks
are processes, symmetric memory is shared memory."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import pytest
import torch
from aioinfer.kernels import logprobs, penalties, sampling
from aioinfer.kernels.sampling import SamplingState, VocabShard, sample_tokens
from aioinfer.kernels.symmetric_memory import LLBuffers, SymmetricBuffer
from sampling_cases import allowed_tokens, make_state

from aioinfer.layers.backend import Backend
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.formats.dense import MAX_FEW_ROWS
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.loader import load_weights
from aioinfer.models.registry import build_model
from aioinfer.worker.logprobs import merge_logprobs
from tests.kernels.peer_processes import run_ranks
from tests.tiny_models import tiny_model

CHUNK = 64
ROWS = 6
Call = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CHUNK", CHUNK)


class GatheringGroup(ParallelGroup):
    """Rank 0 of a group that gathers results of the other ranks that the test has put into
    `found`."""

    def __init__(self, size: int):
        super().__init__(0, size)
        self.found: dict[int, tuple[torch.Tensor, ...]] = {}

    def all_gather_last(self, values: torch.Tensor) -> torch.Tensor:
        floats = [
            torch.cat([torch.stack(found[:2], 1), found[2]], 1) for found in self.found.values()
        ]
        parts = [
            torch.cat([mine.view(torch.int32), found[3]], 1)
            for mine, found in zip(floats, self.found.values(), strict=True)
        ]
        assert torch.equal(parts[0], values)
        return torch.cat(parts, dim=-1)


def sample_all(
    peers: SymmetricBuffer, calls: list[Call], state: SamplingState, epoch: int = 0
) -> list[list[int]]:
    """Samples from a rank's shard of the logits of each call, with random delays; begins after
    `epoch` all-gathers of each row."""
    sampling.CHUNK = CHUNK
    ll_buffers, rng = LLBuffers(peers), random.Random(peers.rank)
    ll_buffers.epochs.fill_(epoch)
    results = []
    for logits, slots, positions in calls:
        vocab_size = logits.shape[1]
        width = -(-vocab_size // peers.size)
        # padding that must not be read
        padded = torch.nn.functional.pad(
            logits, (0, peers.size * width - vocab_size), value=math.inf
        )
        first = min(peers.rank * width, vocab_size)
        mine = padded[:, peers.rank * width :][:, :width][:, : vocab_size - first]
        time.sleep(rng.choice([0, 0, 0.05]))
        results.append(
            sample_tokens(
                mine, slots, positions, state, shard=VocabShard(first, vocab_size, ll_buffers)
            ).tolist()
        )
    return results


def sample_together(
    size: int, calls: list[Call], state: SamplingState, epoch: int = 0
) -> list[list[int]]:
    """Returns the tokens of each call, which must be the same on all of `size` ranks."""
    ranks = run_ranks(size, LLBuffers.nbytes(ROWS, size), sample_all, calls, state, epoch)
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


def make_call(vocab_size: int, slots: int, *, rounded: bool = False, rows: int = ROWS) -> Call:
    """Returns random logits (with many equal ones if `rounded`), random slots and positions."""
    logits = torch.randn(rows, vocab_size) * 3
    if rounded:
        logits = logits.round()
    return logits, *(
        torch.randint(0, high, (rows,), dtype=torch.int32) for high in (slots, 100_000)
    )


def broken_call(slot: int) -> Call:
    """Returns rows whose logits contain NaN or infinity in different shards, or are all minus
    infinity, one row with a single finite logit, and one valid row."""
    logits, slots, positions = make_call(200, 1)
    logits[0, 198] = logits[1, 3] = math.nan
    logits[2, 100] = math.inf
    logits[3] = -math.inf
    logits[4, :199] = -math.inf
    return logits, slots + slot, positions


def test_sampled_tokens_are_those_of_one_rank() -> None:
    state = make_state(40, "cpu")
    calls = [make_call(400, 40, rounded=number % 2 == 0) for number in range(2)]
    different = 0
    for tokens, call in zip(sample_together(2, calls, state), calls, strict=True):
        alone = sample_tokens(*call, state).tolist()
        different += sum(ours != theirs for ours, theirs in zip(tokens, alone, strict=True))
        for row, token in enumerate(tokens):
            slot = int(call[1][row])
            allowed, exact = allowed_tokens(call[0][row].numpy(), state, slot, int(call[2][row]))
            assert token in allowed
            if float(state.top_p[slot]) == 1:
                assert token == exact
    assert different <= 1, "only the rounding of a sum may move top-p's border"


def test_padded_and_empty_shards_and_rows_without_a_token() -> None:
    """Three ranks: shards with padding, an empty shard, and rows that give -1 on every rank without
    one waiting for another forever."""
    kinds = [
        (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 3, 0.9, 0.0), (1.0, 0, 0.5, 0.1),
        (1.0, 0, 0.0, 0.0),
    ]  # fmt: skip
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*kinds, strict=True))
    state = SamplingState(torch.arange(len(kinds)), temperature, top_k.int(), top_p, min_p)
    broken = [broken_call(slot) for slot in (0, 2, 4)]
    small = [make_call(vocab_size, len(kinds), rows=4) for vocab_size in (4, 1)]
    results = sample_together(3, [*broken, *small], state)
    for tokens in results[: len(broken)]:
        assert tokens[:5] == [-1, -1, -1, -1, 199]
        assert tokens[5] >= 0
    for tokens, call in zip(results, [*broken, *small], strict=True):
        assert tokens == sample_tokens(*call, state).tolist()


def test_ll_buffers_are_reused_when_epochs_wrap_around() -> None:
    state = make_state(20, "cpu")
    calls = [make_call(30, 20, rows=rows) for rows in [1, 2, 1, 3] * 3]
    for tokens, call in zip(sample_together(2, calls, state, 2**31 - 8), calls, strict=True):
        for row, token in enumerate(tokens):
            assert (
                token
                in allowed_tokens(
                    call[0][row].numpy(), state, int(call[1][row]), int(call[2][row])
                )[0]
            )


def test_more_rows_than_ll_buffers_are_rejected() -> None:
    memory = torch.zeros(LLBuffers.nbytes(2, 2), dtype=torch.uint8)
    shard = VocabShard(
        0, 20, LLBuffers(SymmetricBuffer(memory, torch.tensor([memory.data_ptr()] * 2), 0, 2))
    )
    with pytest.raises(ValueError, match="3 rows of logits, but LL buffers for 2"):
        sample_tokens(*make_call(10, 4, rows=3), make_state(4, "cpu"), shard=shard)


def test_merged_log_probabilities_of_shards_are_those_of_the_whole_vocabulary() -> None:
    logits, sampled, requested = (
        torch.randn(4, 101),
        torch.tensor([0, 60, 100, -1]).int(),
        torch.tensor([1, 1, 1, 0]).int(),
    )
    logits[1, :60] = -math.inf
    whole = logprobs.token_logprobs(logits, sampled, requested, 20)
    group = GatheringGroup(2)
    for rank, first in enumerate((0, 51)):
        group.found[rank] = logprobs.shard_logprobs(
            logits[:, first : first + 51], sampled, requested, 20, first
        )
    merged = merge_logprobs(Vocabulary(101, group), group.found[0], 20)
    assert torch.equal(merged[1], whole[1])
    for ours, theirs in zip(merged[::2], whole[::2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_biases_of_other_ranks_tokens_are_skipped() -> None:
    ids, values = torch.tensor([[5, 6, 14]], dtype=torch.int32), torch.tensor([[1.0, -2.0, 3.0]])
    counts = torch.tensor([3], dtype=torch.int32)
    whole, slots = torch.zeros(1, 15), torch.zeros(1, dtype=torch.int32)
    penalties.add_biases(whole, slots, ids, values, counts)
    memory = torch.zeros(1, 3, 5)
    for rank in range(3):
        penalties.add_biases(memory[:, rank], slots, ids, values, counts, first=5 * rank)
    assert torch.equal(memory.flatten(1), whole)


@pytest.mark.parametrize("rows", [2, MAX_FEW_ROWS + 1])
@torch.inference_mode()
def test_each_rank_computes_the_logits_of_its_shard(rows: int, tmp_path: Path) -> None:
    tiny_model(
        "llama", tmp_path, vocab_size=101, head_dim=64, num_attention_heads=4, hidden_size=64
    )
    hidden, parts = torch.randn(rows, 64), []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        group = ParallelGroup(rank, size)
        backend = Backend(torch.device("cpu"), torch.float32, group, has_kernels=True)
        model = build_model(tmp_path, backend)
        load_weights(list(model.weight_shards()), tmp_path, "auto", 0, lambda done, total: None)
        out = torch.full((rows, model.vocabulary.shard_size), math.nan)
        logits = model.logits(hidden, out)
        assert torch.equal(logits, out[:, : logits.shape[1]])
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts[1:], dim=1), parts[0], rtol=1e-4, atol=1e-4)

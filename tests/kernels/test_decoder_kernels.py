"""A model over the kernels gives what it gives in plain torch, in float32, for mixed steps and
decodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout
from aioinfer.kernels.symmetric_memory import SymmetricBuffer

from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.residual import ResidualStream
from aioinfer.layers.step import GroupInputs, Step, StepInputs
from tests.kernels.bound_model import Bound, assert_close, last_tokens, random_ids
from tests.kernels.peer_processes import run_ranks
from tests.tiny_models import tiny_model

HIDDEN = 128  # of the models that ranks share
HEADS = {"head_dim": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", pytest.param("mistral", marks=pytest.mark.extended)]
)
@torch.inference_mode()
def test_a_prefill_and_decodes(family: str, tmp_path: Path) -> None:
    """With biases (Qwen2 has no more than Llama may have), norms of queries and keys, and a
    window."""
    extra = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "qwen3": {},
        "mistral": {"sliding_window": 6},
    }[family]
    tiny_model(family, tmp_path, vocab_size=100, hidden_size=256, **HEADS, **extra)
    over_kernels, plain = (Bound(tmp_path, kernels=use, fill=torch.nan) for use in (True, False))
    for starts, lengths in (
        ([0, 0, 0], [20, 5, 33]),
        ([20, 5, 33], [1, 1, 5]),
        ([21, 6, 38], [1, 1, 1]),
    ):
        ids = random_ids(lengths)
        expected = plain.model.logits(plain.run(plain.step(starts, lengths, ids)))
        hidden = over_kernels.run(over_kernels.step(starts, lengths, ids))
        for rows in (8, 1):
            assert_close(over_kernels.model.logits(hidden[:rows]), expected[:rows])


@pytest.mark.extended
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    ("family", "rows"), [("qwen3", [0, 1, 2]), ("mistral", [2, 0]), ("mistral", [])]
)
@torch.inference_mode()
def test_the_last_layer_for_sampled_rows(
    family: str, rows: list[int], kernels: bool, tmp_path: Path
) -> None:
    """What is left out changes neither the sampled rows' hidden states nor any key or value."""
    extra = {"sliding_window": 6} if family == "mistral" else {}
    tiny_model(family, tmp_path, vocab_size=100, hidden_size=256, **HEADS, **extra)
    some, whole = (Bound(tmp_path, kernels=kernels) for _ in range(2))
    decodes = 2 if {0, 1} <= set(rows) else 1 if 0 in rows else 0
    for starts, lengths, num_decodes in (
        ([0, 0, 0], [20, 5, 33], 0),
        ([20, 5, 33], [1, 1, 5], decodes),
    ):
        ids = random_ids(lengths)
        step = some.step(starts, lengths, ids)
        step.num_decodes, step.sampled = num_decodes, last_tokens(step, rows)
        expected = whole.run(whole.step(starts, lengths, ids))[step.sampled.last]
        assert_close(some.run(step), expected)
        for ours, theirs in zip(some.kv, whole.kv, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("is_interleaved", [False, True])
@torch.inference_mode()
def test_three_rotary_positions_a_token(is_interleaved: bool, tmp_path: Path) -> None:
    """Over the kernels as in plain torch, whatever the tokens' places: in prompts, decodes, and the
    sampled rows of the last layer."""
    sections = {"mrope_section": [16, 8, 8], "mrope_interleaved": is_interleaved}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, **sections}}
    tiny_model("llama", tmp_path, vocab_size=100, hidden_size=128, **HEADS, **rope)
    over_kernels, plain = (Bound(tmp_path, kernels=use) for use in (True, False))
    assert plain.model.has_rotary_sections
    torch.manual_seed(0)
    for starts, lengths in (([0, 0, 0], [9, 5, 18]), ([9, 5, 18], [1, 1, 5])):
        ids = random_ids(lengths)
        steps = [bound.step(starts, lengths, ids) for bound in (over_kernels, plain)]
        rotary = torch.randint(0, 60, (3, len(ids)), dtype=torch.int32)
        unmoved = plain.run(steps[1])
        for step in steps:
            step.inputs = replace(step.inputs, rotary=rotary)
            step.memo.clear()
            if step.num_decodes:
                step.sampled = last_tokens(step, [0, 1, 2])
        ours, expected = over_kernels.run(steps[0]), plain.run(steps[1])
        assert_close(ours, expected)
        last = unmoved if steps[1].sampled is None else unmoved[steps[1].sampled.last]
        assert not torch.allclose(expected, last, atol=1e-2)


@torch.inference_mode()
def test_what_graphs_hold(tmp_path: Path) -> None:
    """All layers but the last for more tokens than there are, with nothing but the plans to show
    which rows decode."""
    tiny_model("qwen3", tmp_path, vocab_size=100, hidden_size=128, **HEADS)
    graph, whole = (Bound(tmp_path, kernels=True) for _ in range(2))
    padding = torch.zeros(5, dtype=torch.int32)
    for starts, lengths, num_decodes in (
        ([0, 0, 0], [12, 5, 20], 0),
        ([12, 5, 20], [1, 1, 5], 2),
        ([13, 6, 25], [1, 1, 1], 3),
    ):
        ids = random_ids(lengths)
        step = graph.step(starts, lengths, ids)
        step.num_decodes, step.sampled = num_decodes, last_tokens(step, [0, 1, 2])
        expected = whole.run(whole.step(starts, lengths, ids))[step.sampled.last]
        inputs, (group,) = step.inputs, step.inputs.groups
        padded = StepInputs(
            torch.cat([inputs.input_ids, padding]),
            torch.cat([inputs.positions, padding]),
            inputs.query_starts,
            inputs.seq_lens,
            (GroupInputs(torch.cat([group.slot_mapping, padding.long() - 1]), group.block_tables),),
        )
        graph.model.plan(step)
        hidden = torch.full((len(padded.input_ids), 128), torch.nan)
        graph.model.begin(Step(padded, None), hidden)
        stream = ResidualStream(hidden[: len(inputs.input_ids)], graph.backend)
        assert_close(graph.model.finish(step, stream), expected)
        assert_close(graph.kv[0], whole.kv[0])


def test_blocks_that_the_kernels_of_states_lack_are_named(tmp_path: Path) -> None:
    tiny_model("bamba", tmp_path, vocab_size=100, head_dim=64, num_attention_heads=2)
    model = Bound(tmp_path, kernels=True).model
    assert model.describe(16) == "Triton kernels"
    assert "they lack head size 64, states with blocks of 24 tokens" in model.describe(24)


def test_head_sizes_that_the_kernels_lack_are_named(tmp_path: Path) -> None:
    """Their attention is computed in plain torch, in the same model."""
    heads = {"head_dim": 48, "num_attention_heads": 4}
    tiny_model("qwen3", tmp_path, vocab_size=100, hidden_size=128, **heads)
    over_kernels, plain = (Bound(tmp_path, kernels=use) for use in (True, False))
    assert "lack head size 48 with blocks of 16 tokens" in over_kernels.model.describe(16)
    assert not over_kernels.model.supports_graphs
    for starts, lengths in (([0, 0, 0], [20, 5, 33]), ([20, 5, 33], [1, 1, 5])):
        ids = random_ids(lengths)
        expected = plain.run(plain.step(starts, lengths, ids))
        assert_close(over_kernels.run(over_kernels.step(starts, lengths, ids)), expected)


@torch.inference_mode()
def rank_states(memory: SymmetricBuffer, folder: Path, pushed_rows: int) -> list[torch.Tensor]:
    """Returns the hidden states of a prefill and two mixed steps on this rank."""
    bound = Bound(folder, kernels=True, group=ParallelGroup(memory.rank, memory.size))
    if memory.size > 1:
        layout = all_reduce_layout(memory.size, pushed_rows)
        bound.backend.all_reduce = AllReduce(memory, layout, HIDDEN, torch.float32)
    states = []
    for starts, lengths in (
        ([0, 0, 0], [9, 5, 18]),
        ([9, 5, 18], [1, 1, 5]),
        ([10, 6, 23], [1, 1, 1]),
    ):
        step = bound.step(starts, lengths, random_ids(lengths))
        step.sampled = last_tokens(step, [0, 1, 2] if step.num_decodes else [2, 1])
        states.append(bound.run(step))
    return states


def all_reduce_layout(size: int, pushed_rows: int) -> AllReduceLayout:
    return AllReduceLayout.of(size, 32, HIDDEN, torch.float32, pushed_rows=pushed_rows)


@pytest.mark.parametrize(
    ("family", "kv_heads", "pushed_rows"), [("llama", 1, 64), ("gemma2", 2, 4)]
)
def test_two_ranks_over_symmetric_memory(
    family: str, kv_heads: int, pushed_rows: int, tmp_path: Path
) -> None:
    """With all-reduces of both kinds; with a KV head that both have; biases are added once; with
    norms of what is added."""
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    heads = {**HEADS, "num_key_value_heads": kv_heads}
    tiny_model(family, tmp_path, vocab_size=101, hidden_size=HIDDEN, **heads, **extra)
    nothing = torch.zeros(0, dtype=torch.uint8)
    alone = SymmetricBuffer(nothing, torch.zeros(1, dtype=torch.int64), 0, 1)
    expected = rank_states(alone, tmp_path, pushed_rows)
    ranks = run_ranks(
        2, all_reduce_layout(2, pushed_rows).nbytes, rank_states, tmp_path, pushed_rows
    )
    for states in ranks:
        for state, of_first, of_one in zip(states, ranks[0], expected, strict=True):
            assert_close(state, of_one)
            assert torch.equal(state, of_first), "the ranks must have the same bits"

"""The transformer over the kernels gives what the plain one gives, in float32, for mixed steps and
decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aioinfer.kernels.all_reduce import AllReduce, AllReduceLayout
from aioinfer.kernels.prepare import StepInputs
from aioinfer.kernels.symmetric_memory import SymmetricBuffer
from aioinfer.models.architecture import Architecture
from aioinfer.models.llama_gpu import GpuLlama, GpuStep, Residual, SampledRows

from aioinfer.layers.attention import AttentionMetadata, KVCache
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.loader import load_weights
from aioinfer.models.registry import build_model
from tests.kernels.peer_processes import run_ranks
from tests.paged_model import make_metadata
from tests.tiny_models import tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
HIDDEN = 128  # of the models that ranks share
TABLES = [[3, 1], [0], [5, 2, 4]]


def step_inputs(
    starts: list[int], lengths: list[int], ids: torch.Tensor
) -> tuple[AttentionMetadata, StepInputs]:
    """Returns a step of three rows with the blocks of `TABLES`, as the plain model and as the
    kernels take it."""
    metadata = make_metadata(TABLES, starts, lengths, BLOCK_SIZE)
    positions = torch.cat(
        [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    ).int()
    rows = metadata.query_starts, metadata.seq_lens, metadata.block_tables
    return metadata, StepInputs(ids, positions, metadata.slot_mapping, *rows)


def two_of(folder: Path) -> tuple[tuple[GpuLlama, torch.Tensor], tuple[GpuLlama, torch.Tensor]]:
    """Returns the model in `folder` twice, each with its KV cache."""
    arch = Architecture.load(folder)
    model = build_model(arch, ParallelGroup.single(), torch.float32, CPU)
    load_weights(model, folder, "auto", 0, lambda done, total: None)
    caches = [torch.zeros(2, arch.num_layers, 6, BLOCK_SIZE, 2, 64) for _ in range(2)]
    one, other = ((GpuLlama(model, kv, dependent_launch=False, programs=3), kv) for kv in caches)
    return one, other


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@torch.inference_mode()
def test_a_prefill_and_decodes(family: str, tmp_path: Path) -> None:
    """With biases (Qwen2 has no more than Llama may have), norms of queries and keys, and a
    window."""
    extra = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "qwen3": {},
        "mistral": {"sliding_window": 6},
    }[family]
    tiny_model(
        family,
        tmp_path,
        vocab_size=100,
        head_dim=64,
        num_attention_heads=4,
        hidden_size=256,
        **extra,
    )
    arch = Architecture.load(tmp_path)
    model, plain = (build_model(arch, ParallelGroup.single(), torch.float32, CPU) for _ in range(2))
    for each in (model, plain):
        load_weights(each, tmp_path, "auto", 0, lambda done, total: None)
    kv = torch.full((2, arch.num_layers, 6, BLOCK_SIZE, 2, 64), torch.nan)
    plain_kv = kv.clone()
    gpu = GpuLlama(model, kv, dependent_launch=False, programs=3)
    caches = [KVCache(keys, values) for keys, values in zip(plain_kv[0], plain_kv[1], strict=True)]
    for starts, lengths in (
        ([0, 0, 0], [20, 5, 33]),
        ([20, 5, 33], [1, 1, 5]),
        ([21, 6, 38], [1, 1, 1]),
    ):
        tokens = torch.randint(0, 100, (sum(lengths),))
        metadata, inputs = step_inputs(starts, lengths, tokens.int())
        expected = plain.logits(plain.forward(tokens, inputs.positions.long(), caches, metadata))
        hidden = gpu.forward(gpu.plan(inputs, metadata.num_decodes))
        for rows in (8, 1):
            torch.testing.assert_close(
                gpu.logits(hidden[:rows]), expected[:rows], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize(
    ("family", "rows"), [("qwen3", [0, 1, 2]), ("mistral", [2, 0]), ("mistral", [])]
)
@torch.inference_mode()
def test_the_last_layer_for_chosen_rows(family: str, rows: list[int], tmp_path: Path) -> None:
    """What is left out changes neither the chosen rows' hidden states nor any key or value."""
    extra = {"sliding_window": 6} if family == "mistral" else {}
    tiny_model(
        family,
        tmp_path,
        vocab_size=100,
        head_dim=64,
        num_attention_heads=4,
        hidden_size=256,
        **extra,
    )
    (gpu, kv), (whole, whole_kv) = two_of(tmp_path)
    decodes = 2 if {0, 1} <= set(rows) else 1 if 0 in rows else 0
    for starts, lengths, num_decodes in (
        ([0, 0, 0], [20, 5, 33], 0),
        ([20, 5, 33], [1, 1, 5], decodes),
    ):
        metadata, inputs = step_inputs(
            starts, lengths, torch.randint(0, 100, (sum(lengths),), dtype=torch.int32)
        )
        last = (metadata.query_starts[1:] - 1)[rows].int()
        chosen = SampledRows.of(inputs, torch.tensor(rows, dtype=torch.int32), last)
        expected = whole.forward(whole.plan(inputs, metadata.num_decodes))[last]
        torch.testing.assert_close(
            gpu.forward(gpu.plan(inputs, num_decodes, chosen)), expected, rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(kv, whole_kv, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_what_graphs_hold(tmp_path: Path) -> None:
    """All layers but the last for more tokens than there are, with nothing but the plans to say
    which rows decode."""
    tiny_model(
        "qwen3", tmp_path, vocab_size=100, head_dim=64, num_attention_heads=4, hidden_size=128
    )
    (gpu, kv), (whole, whole_kv) = two_of(tmp_path)
    prefill, padding = gpu.make_prefill_plan(8, 80), torch.zeros(5, dtype=torch.int32)
    for starts, lengths, num_decodes in (
        ([0, 0, 0], [12, 5, 20], 0),
        ([12, 5, 20], [1, 1, 5], 2),
        ([13, 6, 25], [1, 1, 1], 3),
    ):
        metadata, inputs = step_inputs(
            starts, lengths, torch.randint(0, 100, (sum(lengths),), dtype=torch.int32)
        )
        padded = StepInputs(
            torch.cat([inputs.input_ids, padding]), torch.cat([inputs.positions, padding]),
            torch.cat([inputs.slot_mapping, padding.long() - 1]), inputs.query_starts,
            inputs.seq_lens, inputs.block_tables,
        )  # fmt: skip
        last = (metadata.query_starts[1:] - 1).int()
        expected = whole.forward(whole.plan(inputs, num_decodes))[last]
        step = gpu.plan(
            inputs,
            num_decodes,
            SampledRows.of(inputs, torch.arange(3, dtype=torch.int32), last),
            prefill,
        )
        stream = torch.full((len(padded.input_ids), 128), torch.nan)
        gpu.begin(GpuStep(padded, None, prefill), stream)
        torch.testing.assert_close(
            gpu.finish(step, Residual(stream[: len(inputs.input_ids)])),
            expected,
            rtol=1e-4,
            atol=1e-4,
        )
        torch.testing.assert_close(kv, whole_kv, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def rank_states(peers: SymmetricBuffer, folder: Path, pushed_rows: int) -> list[torch.Tensor]:
    """Returns the hidden states of a prefill and two mixed steps on this rank."""
    arch = Architecture.load(folder)
    model = build_model(arch, ParallelGroup(peers.rank, peers.size), torch.float32, CPU)
    load_weights(model, folder, "auto", 0, lambda done, total: None)
    kv = torch.zeros(2, arch.num_layers, 6, BLOCK_SIZE, model.num_kv_heads, 64)
    exchange = None
    if peers.size > 1:
        exchange = AllReduce(
            peers, all_reduce_layout(peers.size, pushed_rows), HIDDEN, torch.float32
        )
    gpu = GpuLlama(model, kv, dependent_launch=False, exchange=exchange, programs=3)
    states = []
    for starts, lengths in (
        ([0, 0, 0], [9, 5, 18]),
        ([9, 5, 18], [1, 1, 5]),
        ([10, 6, 23], [1, 1, 1]),
    ):
        ids = torch.randint(
            0,
            100,
            (sum(lengths),),
            dtype=torch.int32,
            generator=torch.Generator().manual_seed(lengths[0]),
        )
        metadata, inputs = step_inputs(starts, lengths, ids)
        rows = [0, 1, 2] if metadata.num_decodes else [2, 1]
        last = (metadata.query_starts[1:] - 1)[rows].int()
        chosen = SampledRows.of(inputs, torch.tensor(rows, dtype=torch.int32), last)
        states.append(gpu.forward(gpu.plan(inputs, metadata.num_decodes, chosen)))
    return states


def all_reduce_layout(size: int, pushed_rows: int) -> AllReduceLayout:
    return AllReduceLayout.of(size, 32, HIDDEN, torch.float32, pushed_rows=pushed_rows)


@pytest.mark.parametrize(("family", "kv_heads", "pushed_rows"), [("qwen3", 2, 4), ("llama", 1, 64)])
def test_two_ranks_over_peer_memory(
    family: str, kv_heads: int, pushed_rows: int, tmp_path: Path
) -> None:
    """With exchanges of both kinds; with a KV head that both have; biases are added once."""
    extra = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    heads = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    tiny_model(family, tmp_path, vocab_size=101, hidden_size=HIDDEN, **heads, **extra)
    memory = torch.zeros(0, dtype=torch.uint8)
    expected = rank_states(
        SymmetricBuffer(memory, torch.zeros(1, dtype=torch.int64), 0, 1), tmp_path, pushed_rows
    )
    ranks = run_ranks(
        2, all_reduce_layout(2, pushed_rows).nbytes, rank_states, tmp_path, pushed_rows
    )
    for states in ranks:
        for state, of_first, of_one in zip(states, ranks[0], expected, strict=True):
            torch.testing.assert_close(state, of_one, rtol=1e-4, atol=1e-4)
            assert torch.equal(state, of_first), "the ranks must have the same bits"

"""Drafting over the kernels, in Triton's interpreter: the rows of a drafter's passes, and whole
steps, in graphs and beside prompts, with the drafts of a runner on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aioinfer.kernels.drafts import append_drafts, select_rows
from aioinfer.kernels.prepare import PreparedInputs, prepare_inputs

from aioinfer.config import Config, ModelConfig, SchedulerConfig, SpeculationConfig
from aioinfer.ipc.kv_spec import group_layers
from aioinfer.ipc.lookahead import LookaheadRows
from aioinfer.ipc.plan import StepPlan
from aioinfer.models.drafters.registry import build_drafter
from aioinfer.worker.device import CpuDevice
from aioinfer.worker.features import Rank
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.graph_bodies import GraphBodies
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.slots import Slots
from aioinfer.worker.step_works import StepWorks
from tests.eagle_models import eagle_head
from tests.kernels.bound_model import BLOCK_SIZE, CPU, Bound
from tests.kernels.test_gpu_device import (
    LENGTHS,
    VOCAB,
    Graphs,
    first_plan,
    lookahead_plan,
    with_prompt,
)
from tests.kernels.test_gpu_device import no_cuda as no_cuda
from tests.tiny_models import tiny_model

MOST = 2


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("has_places", [False, True])
def test_rows_of_the_last_tokens_are_selected(has_places: bool) -> None:
    """Two of the rows of slot 3 are kept, all of slot 0, none of slot 2, which is sampled later;
    then comes padding."""
    slots, positions = tensor(3, 3, 3, 0, 0, 2, 1, 0), tensor(7, 8, 9, 4, 5, 6, 3, 0)
    is_real, next_start = tensor(1, 1, 1, 1, 1, 0, 1, 0), tensor(5, 3, 6, 8)
    places = (tensor(0, 1, 2, 3, 4, 5, 7, 8), tensor(0, 1, 2, 3, 4, 5, 20, 21))
    limits = tensor(32, 32, 32, 16, 16, 8, 9, 5, 7)
    memory = torch.full((7, 20), -9, dtype=torch.int32)
    found = select_rows(
        slots, positions, is_real, places if has_places else None, limits, next_start, memory
    )
    last = [7, 20] if has_places else [6, 6]
    limit = 5 if has_places else 9
    assert found.tolist() == [
        [3, 0, 1, 0], [7, 4, 2, 0], [1, 1, 1, 0], [32, 16, limit, 0], [9, 6, 4, 0],
        [1, 4, last[0], 0], [1, 4, last[1], 0],
    ]  # fmt: skip
    assert (memory[:, 4:] == -9).all()


def test_drafts_are_appended_up_to_the_end() -> None:
    tokens = torch.zeros(3, 9, dtype=torch.int32)
    slots, lengths = tensor(2, 0, 1, 0), tensor(1, 1, 1, 0)
    starts, positions = tensor(2, 6, 7, 0), tensor(4, 8, 9, 0)
    append_drafts(tensor(5, -1, 6, 7), slots, starts, lengths, positions, tokens)
    expected = torch.zeros_like(tokens)
    expected[2, 4] = 5
    assert torch.equal(tokens, expected)
    assert starts.tolist() == [3, 7, 7, 1]
    assert positions.tolist() == [5, 9, 10, 1]


def test_tokens_behind_a_limit_are_not_cached() -> None:
    tokens = torch.arange(40, dtype=torch.int32).view(2, 20)
    tables = tensor(3, 5, 2, 4).view(2, 2)
    inputs = PreparedInputs.empty(2, 6, 2, "cpu")
    prepare_inputs(
        tensor(1, 0), tensor(7, 2), tensor(3, 2), tokens[:, 1:], tables, inputs, block_size=8,
        max_length=4, limits=tensor(8, 3),
    )  # fmt: skip
    assert inputs.input_ids.tolist() == [28, 29, 30, 3, 4, 0]
    assert inputs.slot_mapping.tolist() == [23, -1, -1, 26, -1, -1]
    assert inputs.seq_lens.tolist() == [10, 4]
    prepare_inputs(
        tensor(1, 0), tensor(0, 1), tensor(3, 2), tokens[:, 1:], tables, inputs, block_size=8,
        max_length=4, limits=tensor(8, 3), keeps_first=True,
    )  # fmt: skip
    assert inputs.input_ids.tolist() == [20, 22, 23, 2, 3, 0]


def make_runner(folder: Path, speculation: SpeculationConfig, *, kernels: bool) -> Any:
    """A runner of a model and its drafter."""
    bound = Bound(folder, kernels=kernels)
    config = Config(
        model=ModelConfig(path=str(folder)), speculation=speculation,
        scheduler=SchedulerConfig(max_num_seqs=4),
    )  # fmt: skip
    built = build_drafter(config, bound.model, 40)
    assert built is not None
    drafter, own = built
    drafter.load(own, "auto", 0, lambda done, total: None)
    bound.model.tapped_layers = drafter.tapped_layers
    groups = group_layers([*bound.model.kv_specs, *drafter.kv_specs])
    kv = KVTensors(groups, [12] * len(groups), BLOCK_SIZE, torch.float32, CPU)
    slots = Slots(4, 40, BLOCK_SIZE, VOCAB, CPU, len(groups), uses_kernels=kernels)
    most = config.max_lookahead
    programs = {"programs": 3} if kernels else {}
    of_model, of_drafter = kv.divided(len(bound.model.layer_numbers))
    bound.model.bind(*of_model, BLOCK_SIZE, 4 + most, 40, **programs)
    getattr(drafter, "_model", drafter).bind(*of_drafter, BLOCK_SIZE, 4 + most, 40, **programs)
    works = StepWorks.load(Rank(bound.model, slots, None, config, drafter))
    device: Any = CpuDevice(slots, kv, most)
    if kernels:
        device = GpuDevice(bound.model, kv, slots, 40, max_lookahead=most, has_drafter=True)
    if taps := len(drafter.tapped_layers):
        device.taps = torch.zeros(40, taps, bound.model.hidden_size)
    runner = ModelRunner(bound.model, device, works)
    if kernels:
        bodies = GraphBodies(runner, device)
        device.graphs.lookahead = Graphs(bodies.launch_lookahead_decode)
    return runner


def with_own_drafts(folder: Path, head: Path) -> SpeculationConfig:
    return SpeculationConfig(method="draft", model=str(folder), max_draft_tokens=MOST)


def with_head(folder: Path, head: Path) -> SpeculationConfig:
    taps = (0, 1, 2)
    eagle_head(
        head, "midlayer", hidden_size=128, vocab_size=VOCAB, draft_size=40, taps=taps, head_size=64
    )
    return SpeculationConfig(method="eagle3", model=str(head), max_draft_tokens=MOST)


def with_tables_of_drafter(plan: StepPlan) -> StepPlan:
    """Gives the requests that a plan admits the same blocks in a second KV group."""
    rows, indices, blocks = plan.table_rows, plan.table_indices, plan.table_blocks
    return replace(
        plan, table_rows=np.append(rows, rows + 4), table_indices=np.tile(indices, 2),
        table_blocks=np.tile(blocks, 2),
    )  # fmt: skip


def looking_ahead(plan: StepPlan) -> StepPlan:
    """Makes a step draft tokens for the next one, without lookahead rows."""
    none = np.zeros(len(plan.slots), np.int32)
    return replace(plan, sections=[*plan.sections, LookaheadRows(none, none + 1, none + 32)])


@pytest.mark.parametrize("made", [with_own_drafts, with_head])
def test_drafts_are_those_of_a_runner_on_a_cpu(
    made: Callable[[Path, Path], SpeculationConfig], tmp_path: Path
) -> None:
    folder = tiny_model(
        "llama", tmp_path, vocab_size=VOCAB, hidden_size=128, head_dim=64, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=3,
    )  # fmt: skip
    speculation = made(folder, tmp_path / "head")
    runner, cpu = (make_runner(folder, speculation, kernels=kernels) for kernels in (True, False))
    plans, drafts = [looking_ahead(first_plan())], 0
    lows = list(LENGTHS)
    for step, counts in enumerate([(1, 0, 2), (2, 1, 0), (0, 2, 1)], 1):
        groups = [(slot, lows[slot], counts[slot]) for slot in (2, 0, 1)]
        plan = lookahead_plan(step, groups, settled=int(step == 1))
        plans.append(with_prompt(plan) if step == 2 else plan)
        lows = [low + 1 for low in lows]
    # as many rows as slots: the rows of a drafter's passes are no fewer
    plans.append(lookahead_plan(4, [(1, lows[1], 2)], settled=0))
    for plan in plans:
        if len(cpu.slots.tables_by_group) > 1:
            plan = with_tables_of_drafter(plan)
        results = [each.step(plan).wait().tokens.tolist() for each in (runner, cpu)]
        assert results[0] == results[1]
        assert runner.slots.next_start.tolist() == cpu.slots.next_start.tolist()
        known = cpu.slots.next_start.tolist()[:3]
        for slot, last in enumerate(known):
            texts = [each.slots.tokens[slot, : last + 1 + MOST].tolist() for each in (runner, cpu)]
            assert texts[0] == texts[1]
            drafts += sum(texts[0][last + 1 :]) > 0
    assert drafts > 8
    assert len(runner.device.graphs.lookahead.replayed) == 3

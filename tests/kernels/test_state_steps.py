"""Steps that a scheduler plans over models with states, by the kernels and graphs of a GPU: what
plain torch samples. Prompts begin alike, are computed in chunks that end anywhere in a block, and
requests are preempted; KV blocks and states are NaN at first."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.ipc.plan import Admission, Admissions
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import StepFeatures
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.worker.graph_bodies import GraphBodies
from aioinfer.worker.step_works import StepWorks
from tests.kernels.bound_model import BLOCK_SIZE
from tests.kernels.test_family_kernels import FAMILIES, SIZES
from tests.kernels.test_gpu_device import MAX_LOOKAHEAD, Graphs, make_runner, no_cuda, plan_of
from tests.scheduled_worker import KnownDrafts, RandomLookahead
from tests.tiny_models import tiny_model

__all__ = ["no_cuda"]
#: What prompts begin with, and what each goes on with.
SHARED = [(number * number) % 90 for number in range(34)]
OWN = ([1, 2], [3] * 4, [1, 2, 5])


@pytest.mark.parametrize(
    "name",
    [
        "lfm2",
        pytest.param("qwen3_next", marks=pytest.mark.extended),
        # layers that read the cache of others; a side of the stream, also in a graph of layers
        pytest.param("gemma4", marks=pytest.mark.extended),
    ],
)
def test_planned_steps_sample_what_plain_torch_does(name: str, tmp_path: Path) -> None:
    family, fields = FAMILIES[name]
    tiny_model(family, tmp_path, **{**SIZES, "num_key_value_heads": 1, **fields})
    runners: list[Any] = [make_runner(tmp_path, kernels=kernels) for kernels in (True, False)]
    for runner in runners:
        for tensor in runner.device.kv.tensors:
            tensor.fill_(torch.nan)
    if name == "gemma4":
        device, bodies = runners[0].device, GraphBodies(runners[0], runners[0].device)
        bodies.clear_mixed(30)
        device.graphs.mixed = Graphs(lambda _: bodies.launch_mixed(30))
        device.graphs.mixed.fit = lambda tokens: 30  # type: ignore[method-assign]
    groups = runners[0].device.kv.groups
    limits = SchedulerLimits(
        groups=groups, num_blocks=(12,) * len(groups), block_size=BLOCK_SIZE, max_num_seqs=4,
        token_budget=27, prefill_cap=27,
    )  # fmt: skip
    scheduler = Scheduler(limits)
    requests = []
    greedy = SamplingParams(temperature=0)
    for number, own in enumerate(OWN):
        prompt = array("i", [*SHARED, *own])
        # no more than 40 tokens have room in a slot
        requests.append(Request(str(number), prompt, len(prompt), greedy, 40))
        scheduler.add(requests[-1])
    steps = 0
    while (plan := scheduler.schedule()) is not None:
        found, expected = (runner.step(plan).wait() for runner in runners)
        assert found.tokens.tolist() == expected.tokens.tolist()
        scheduler.update(found)
        scheduler.check_integrity()
        steps += 1
        if requests[0].num_output == 2 and not requests[0].num_preemptions:
            scheduler._running.preempt(requests[0])
    assert requests[0].num_preemptions == 1
    assert [request.num_cached for request in requests] == [0, 32, 32]
    assert runners[0].device.graphs.decode.replayed, "decodes are in graphs"
    assert name != "gemma4" or runners[0].device.graphs.mixed.replayed


def run(
    runners: Sequence[Any], ahead: RandomLookahead | None = None, *, new_tokens: int = 9
) -> list[list[int]]:
    """Returns the greedy outputs of two prompts that begin with a part of `SHARED`. All runners
    sample the same in each step."""
    groups = runners[0].device.kv.groups
    for runner in runners:
        runner.slots.reset()
        for tensor in runner.device.kv.tensors:
            tensor.fill_(torch.nan)
    limits = SchedulerLimits(
        groups=groups, num_blocks=(12,) * len(groups), block_size=BLOCK_SIZE, max_num_seqs=4,
        token_budget=9, prefill_cap=9, max_lookahead=0 if ahead is None else MAX_LOOKAHEAD,
    )  # fmt: skip
    scheduler = Scheduler(limits, features=StepFeatures([] if ahead is None else [ahead]))
    requests = []
    for number, own in enumerate(OWN[:2]):
        prompt, params = array("i", [*SHARED[:10], *own]), SamplingParams(temperature=0)
        requests.append(Request(str(number), prompt, len(prompt), params, len(prompt) + new_tokens))
        scheduler.add(requests[-1])
    pending: deque[Any] = deque()
    steps = 0
    while not scheduler.is_idle or pending:
        # sometimes the outcome of the step before is known
        while len(pending) <= steps // 3 % 2 and (plan := scheduler.schedule()) is not None:
            found, *others = (runner.step(plan).wait() for runner in runners)
            for other in others:
                assert found.tokens.tolist() == other.tokens.tolist()
            pending.append(found)
            steps += 1
        scheduler.update(pending.popleft())
        scheduler.check_integrity()
    return [request.tokens.tolist() for request in requests]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_next",
        "bamba",
        "lfm2",
        pytest.param("kimi_linear", marks=pytest.mark.extended),
        pytest.param("falcon_h1", marks=pytest.mark.extended),
    ],
)
def test_lookahead_over_states_samples_what_steps_without_do(name: str, tmp_path: Path) -> None:
    """Drafts that are kept and others, beside prompts in chunks, over the end of a block."""
    family, fields = FAMILIES[name]
    tiny_model(family, tmp_path, **{**SIZES, "num_key_value_heads": 1, **fields})
    kernels, plain = (make_runner(tmp_path, kernels=kernels) for kernels in (True, False))
    texts = run([plain])
    assert len({tuple(text) for text in texts}) == len(texts)
    for runner in (kernels, plain):
        runner.works = StepWorks([KnownDrafts(runner.works.all[0].rank, texts, 90)])
    ahead = RandomLookahead(4, 0.4)
    assert run([kernels, plain], ahead) == texts
    assert ahead.num_rows > ahead.num_kept > 2
    assert kernels.device.graphs.lookahead.replayed


@pytest.mark.parametrize("name", ["bamba", pytest.param("qwen3_next", marks=pytest.mark.extended)])
def test_layers_in_a_graph_change_the_states_of_their_step_alone(name: str, tmp_path: Path) -> None:
    """A graph of layers has as many rows as there are slots. A step of one prompt follows a step of
    more decodes, whose rows it must not find."""
    family, fields = FAMILIES[name]
    tiny_model(family, tmp_path, **{**SIZES, "num_key_value_heads": 1, **fields})
    runner = make_runner(tmp_path, kernels=True)
    device, bodies = runner.device, GraphBodies(runner, runner.device)
    bodies.clear_mixed(8)
    device.graphs.mixed = Graphs(lambda _: bodies.launch_mixed(8))
    device.graphs.mixed.fit = lambda tokens: 8 if tokens <= 8 else 0
    for slot in range(4):
        admission = Admission(slot, np.array([7, 11 + slot], np.int32), 2, SamplingParams(), 0)
        plan = plan_of(0, [slot], [0], [2], Admissions.of([admission]))
        plan.table_rows = 4 * np.arange(len(device.kv.groups), dtype=np.int32) + slot
        plan.table_indices = np.zeros_like(plan.table_rows)
        plan.table_blocks = np.full_like(plan.table_rows, slot)
        if slot < 3:
            runner.step(plan).wait()
    runner.step(plan_of(1, [0, 1, 2], [2] * 3, [1] * 3)).wait()
    before = [tensor.clone() for tensor in device.kv.tensors]
    runner.step(plan).wait()
    assert device.graphs.mixed.replayed[-1] == 8
    for group, tensor, kept in zip(device.kv.groups, device.kv.tensors, before, strict=True):
        changed = (tensor != kept).movedim(1 if group.keeps_states else 2, 0).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == [3]

"""Steps with prompts: replayed from graphs they leave the same keys, values and logits as launched
kernel by kernel."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from random_models import random_model

from aioinfer.config import load_config
from aioinfer.ipc.plan import Admission, Admissions, StepPlan
from aioinfer.layers.parallel import ProcessGroups
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.step_graphs import CudaGraphs
from aioinfer.worker.worker import Worker

VOCAB_SIZE = 1024
SLOTS = 48
LONGEST = 400
NONE = np.empty(0, np.int32)


def start(folder: Path, dtype: str, *, leaves_graphs: bool = False) -> tuple[Worker, GpuDevice]:
    settings = [
        f"model.path={folder}", f"model.dtype={dtype}", f"scheduler.max_num_seqs={SLOTS}",
        "scheduler.max_num_batched_tokens=2048",
        "parallel.device=cuda", "cache.num_blocks=400",
    ]  # fmt: skip
    worker = Worker(load_config(None, settings), folder, ProcessGroups.single())
    report = worker.load(lambda done, total: None)
    worker.allocate(report.num_blocks, LONGEST)
    worker.warm_up(leaves_graphs=leaves_graphs)
    device = worker.runner.device
    assert isinstance(device, GpuDevice)
    return worker, device


def admit(worker: Worker, rng: random.Random) -> None:
    """Gives every slot a prompt and its KV blocks; nothing is computed yet."""
    blocks = -(-LONGEST // worker.block_size)
    slots = np.repeat(np.arange(SLOTS, dtype=np.int32), blocks)
    admissions = [
        Admission(
            slot,
            np.array([rng.randrange(3, VOCAB_SIZE) for _ in range(LONGEST - 1)], np.int32),
            5,
            SamplingParams(temperature=0),
            0,
        )
        for slot in range(SLOTS)
    ]
    indices, each = (
        np.tile(np.arange(blocks, dtype=np.int32), SLOTS),
        np.arange(SLOTS * blocks, dtype=np.int32),
    )
    worker.runner.step(
        StepPlan(
            0, NONE, NONE, NONE, NONE, slots, indices, each, NONE, NONE, [Admissions.of(admissions)]
        )
    ).wait()


def random_plan(step: int, rng: random.Random, computed: list[int]) -> StepPlan:
    """Returns a step of some decodes before some chunks of prompts, of which some sample a
    token."""
    slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
    lengths = [1 if rng.random() < 0.6 else rng.randint(1, 130) for _ in slots]
    lengths = [
        min(length, LONGEST - 2 - computed[slot])
        for slot, length in zip(slots, lengths, strict=True)
    ]
    rows = [
        (slot, computed[slot], length, int(length == 1 or rng.random() < 0.5))
        for slot, length in zip(slots, lengths, strict=True)
    ]
    rows = sorted((row for row in rows if row[2] > 0), key=lambda row: row[2] != 1)
    for slot, _, length, _ in rows:
        computed[slot] += length
    fields = [np.array(column, np.int32) for column in zip(*rows, strict=True)]
    return StepPlan(step, *fields, NONE, NONE, NONE, NONE, NONE)


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("dtype", "head_dim", "bound"),
    [("float32", 64, 1e-5), ("bfloat16", 64, 1e-2), ("bfloat16", 128, 1e-2)],
)
def test_graphs_compute_what_launches_do(
    dtype: str, head_dim: int, bound: float, tmp_path: Path
) -> None:
    random_model(tmp_path, vocab_size=VOCAB_SIZE, head_dim=head_dim, num_hidden_layers=3)
    worker, device = start(tmp_path, dtype)
    graphs, none = device.graphs.mixed, CudaGraphs()
    rng = random.Random(0)
    admit(worker, rng)
    computed, sizes = [0] * SLOTS, set()
    for step in range(1, 40):
        plan = random_plan(step, rng, computed)
        if not len(plan.slots):
            break
        (device_kv,) = device.kv.tensors
        before, tokens = device_kv.clone(), device.slots.tokens.clone()
        sizes.add(graphs.fit(plan.num_tokens))
        found = []
        for used in (none, graphs):
            device_kv.copy_(before)
            device.slots.tokens.copy_(tokens)
            device.graphs.mixed = used
            device.logits.fill_(torch.nan)
            worker.runner.step(plan).wait()
            found.append((device_kv.clone(), device.logits[: int(plan.samples.sum())].clone()))
        (kv, logits), (graph_kv, graph_logits) = found
        assert error(graph_kv, kv) < bound
        assert error(graph_logits, logits) < bound
        written, graph_written = ((cache != before).flatten(4).any(-1) for cache in (kv, graph_kv))
        assert torch.equal(graph_written, written), "padding must not reach the cache"
    assert len(sizes) > 8
    assert 0 not in sizes


def test_graphs_that_are_captured_late_compute_the_same(tmp_path: Path) -> None:
    """While steps are in flight, and at last while there are none."""
    random_model(tmp_path, vocab_size=VOCAB_SIZE, head_dim=64, num_hidden_layers=3)
    found: list[list[torch.Tensor]] = []
    for late in (False, True):
        worker, device = start(tmp_path, "float32", leaves_graphs=late)
        kinds = device.graphs.decode, device.graphs.lookahead, device.graphs.mixed
        missing = sum(len(kind.sizes) - len(kind.graphs) for kind in kinds)
        assert (missing > 10) == late
        rng, computed, logits = random.Random(0), [0] * SLOTS, []
        admit(worker, rng)
        for step in range(1, 24):
            plan = random_plan(step, rng, computed)
            decodes = (plan.lengths == 1) & (plan.samples == 1)
            for part in (plan, select(plan, decodes)):
                if len(part.slots):
                    worker.runner.step(part)
                    logits.append(device.logits[: int(part.samples.sum())].clone())
        missed = sum(len(kind.sizes) - len(kind.graphs) for kind in kinds)
        assert (0 < missed < missing - 5) == late
        assert device.graphs.capture_next() == late
        while worker.continue_warm_up():
            pass
        assert all(sorted(kind.graphs) == list(kind.sizes) for kind in kinds)
        assert worker.compilations is not None
        assert worker.compilations.names == []
        worker.compilations.stop()
        found.append(logits)
    for early, late_ones in zip(*found, strict=True):
        assert error(late_ones, early) < 1e-5


def select(plan: StepPlan, rows: np.ndarray) -> StepPlan:
    """Returns the plan with these rows alone."""
    fields = plan.slots, plan.starts, plan.lengths, plan.samples
    of_rows = (field[rows] for field in fields)
    return StepPlan(plan.step_id, *of_rows, NONE, NONE, NONE, NONE, NONE)

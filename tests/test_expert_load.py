"""The load of experts, from reports to what the page and `/metrics` show."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.api.admin.page import expert_state
from aioinfer.features.expert_load.planning import HALF_LIFE_S, ExpertLoad, Planning, imbalance
from aioinfer.features.expert_load.sections import ExpertTokens
from aioinfer.features.expert_load.worker import Work
from aioinfer.ipc.expert_placement import LayerPlacement
from aioinfer.ipc.plan import StepResult
from aioinfer.layers.backend import Backend
from aioinfer.layers.mixture import ExpertCounter
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.worker.features import Rank

CPU = torch.device("cpu")


def report(tokens: list[list[int]]) -> ExpertTokens:
    """Two layers of three experts; in the second one, expert 1 has copies on both ranks."""
    return ExpertTokens(
        np.array([1, 4], np.int32),
        np.array([[0, 1, 2, -1], [0, 1, 1, 2]], np.int32),
        np.array([[0, 0, 1, -1], [0, 0, 1, 1]], np.int32),
        np.array(tokens, np.int64).astype(np.uint32).view(np.int32),
    )


def test_reports_add_up_by_expert_and_rank() -> None:
    load = ExpertLoad()
    assert load.by_expert(load.totals).shape == (0, 0)
    load.add(report([[1, 2, 3, 0], [4, 5, 6, 7]]), 10.0)
    load.add(report([[10, 0, 0, 0], [0, 0, 0, 3_000_000_000]]), 10.0)
    assert load.layers == [1, 4]
    assert load.by_expert(load.totals).tolist() == [[11, 2, 3], [4, 11, 3_000_000_007]]
    assert load.by_rank(load.totals).tolist() == [[13, 3], [9, 3_000_000_013]]
    assert imbalance(load.by_expert(load.totals))[0] == pytest.approx(11 / (16 / 3))
    load.add(report([[0] * 4] * 2), 10.0 + HALF_LIFE_S)
    assert load.recent[0].tolist() == [5.5, 1.0, 1.5, 0.0]
    assert load.totals[0].tolist() == [11, 2, 3, 0]


def test_layers_without_tokens_are_even() -> None:
    assert imbalance(np.zeros((2, 4))).tolist() == [1.0, 1.0]
    assert imbalance(np.zeros((2, 0))).tolist() == [1.0, 1.0]


def test_the_page_gets_a_report_once() -> None:
    load = ExpertLoad()
    assert expert_state(load, 0) is None
    load.add(report([[0, 0, 6, 0], [0, 2, 2, 2]]), 0.0)
    state = expert_state(load, 0)
    assert state is not None
    assert list(base64.b64decode(state["cells"])) == [0, 0, 192, 0, 128, 64]
    assert (state["layers"], state["experts"], state["layer"]) == (2, 3, 1)
    assert (state["imbalance"], state["rank_imbalance"]) == (3.0, 2.0)
    assert expert_state(load, load.version) is None


def work_of(counters: Sequence[ExpertCounter]) -> Work:
    """The worker half of the first rank of a model with these counters."""
    backend = SimpleNamespace(group=ParallelGroup(0, 2))
    model: Any = SimpleNamespace(backend=backend, expert_counters=counters, layer_numbers=range(5))
    return Work(Rank(model, None))  # type: ignore[arg-type]


def test_a_worker_reports_what_was_counted_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the ring; what was counted while the rank warmed up is forgotten."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    backend = Backend(CPU, torch.float32, ParallelGroup(0, 2), expert_parallel=True)
    placements = LayerPlacement(((0, 1), (2,))), LayerPlacement(((0, 1), (1, 2)))
    counters = [
        ExpertCounter(layer, placement, backend)
        for layer, placement in zip((1, 4), placements, strict=True)
    ]
    work = work_of(counters)
    for _ in range(2):
        counters[0].tokens += 9
        work.read_step(0)
    work.begin_service()
    planning = Planning()
    for seconds, tokens in ((0.0, 1), (0.1, 2), (5.0, 3)):
        now[0] = 100.0 + seconds
        for counter in counters:
            counter.tokens += tokens
        pending = work.read_step(0)
        sections = [] if pending is None else [pending.to_section()]
        result = StepResult(0, np.zeros(0, np.int32), sections=sections)
        message = b"".join(bytes(part) for part in result.encode())
        found = StepResult.decode(message).section(ExpertTokens)
        if found is not None:
            planning.take_report(found)
    load = planning.load
    assert load.version == 2
    assert load.by_expert(load.totals).tolist() == [[6, 6, 6], [6, 12, 6]]
    assert load.by_rank(load.totals).tolist() == [[12, 6], [12, 12]]
    assert work_of([]).read_step(0) is None

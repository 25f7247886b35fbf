"""Step features on workers: which of them a step calls, in what order, and logits processors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.features.logprobs.sections import LogprobRows, Logprobs
from aioinfer.features.logprobs.worker import Work as LogprobWork
from aioinfer.features.masks.worker import Work as MaskWork
from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import I32, StepPlan
from aioinfer.ipc.sections import Section, array
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.features import PendingSection, WorkerFeature
from aioinfer.worker.step_works import StepWorks
from tests.automata import pack
from tests.filled_slots import Shift, ShiftedRows, logits_runner, make_slots, rank_of, rows_plan
from tests.plans import ids

VOCAB = 40


@dataclass(frozen=True, slots=True)
class First(Section):
    """Nothing that a worker reads."""

    values: I32 = array(np.int32)  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Second(Section):
    """The same in another section."""

    values: I32 = array(np.int32)  # noqa: RUF009


class Recorder(WorkerFeature):
    """Notes the calls."""

    def __init__(self, rank: Any, log: list[str]):
        super().__init__(rank)
        self.log = log

    def _note(self, call: str) -> None:
        self.log.append(f"{type(self).__name__} {call}")

    def needs_all_tokens(self, plan: StepPlan, section: Any) -> bool:
        self._note("needs_all_tokens")
        return False

    def read_hidden(
        self, plan: StepPlan, section: Any, hidden: torch.Tensor, *, has_all_tokens: bool
    ) -> PendingSection | None:
        self._note("read_hidden")
        return None

    def read_tokens(
        self, plan: StepPlan, section: Any, logits: torch.Tensor, tokens: torch.Tensor
    ) -> PendingSection | None:
        self._note("read_tokens")
        return PendingSection(type(section), (tokens,))

    def read_step(self, step_id: int) -> PendingSection | None:
        self._note("read_step")
        return None

    def pass_on(self, step_id: int) -> None:
        self._note("pass_on")

    def begin_service(self) -> None:
        self._note("begin_service")


class OfFirst(Recorder):
    section = First
    suits_graphs = False


class OfSecond(Recorder):
    section = Second


class OfAll(Recorder):
    pass


def test_only_the_features_of_a_plan_are_called() -> None:
    log: list[str] = []
    rank = rank_of(make_slots([SamplingParams(temperature=0)], VOCAB))
    works = StepWorks([OfAll(rank, log), OfFirst(rank, log), OfSecond(rank, log)])
    works.begin_service()
    assert log == [f"{name} begin_service" for name in ("OfAll", "OfFirst", "OfSecond")]
    log.clear()
    runner = logits_runner(rank, works, torch.eye(VOCAB)[7:8].clone())
    assert not runner.step(rows_plan([0], [1])).wait().sections
    assert log == ["OfAll read_step"]
    log.clear()
    result = runner.step(rows_plan([0], [2], Second(ids()))).wait()
    calls = ["needs_all_tokens", "read_hidden", "read_tokens"]
    assert log == [*(f"OfSecond {call}" for call in calls), "OfAll read_step"]
    assert [(type(each), each.values.tolist()) for each in result.sections] == [(Second, [7])]
    log.clear()
    works.pass_on(3)
    assert log == ["OfAll pass_on"]


def test_calls_of_a_plan() -> None:
    log: list[str] = []
    rank = rank_of(make_slots([SamplingParams()], VOCAB))
    works = StepWorks([OfFirst(rank, log), OfSecond(rank, log)])
    none, second = works.of(rows_plan([0], [1])), works.of(rows_plan([0], [1], Second(ids())))
    both = works.of(rows_plan([0], [1], Second(ids()), First(ids())))
    assert [bool(calls) for calls in (none, second, both)] == [False, True, True]
    assert [calls.suit_graphs for calls in (none, second, both)] == [True, True, False]
    assert not both.need_all_tokens
    both.read_hidden(torch.zeros(1, 4), has_all_tokens=False)
    assert log == [
        "OfSecond needs_all_tokens", "OfFirst needs_all_tokens", "OfSecond read_hidden",
        "OfFirst read_hidden",
    ]  # fmt: skip
    assert none.late is None
    assert none.adjuster(np.arange(1)) is None


def test_one_feature_of_a_step_has_late_rows() -> None:
    class Late(MaskWork):
        section = First

        def late_rows(self, section: Any) -> I32 | None:
            return section.values

    rank = rank_of(make_slots([SamplingParams()], VOCAB))
    works = StepWorks([MaskWork(rank), Late(rank)])
    masks, late = ConstrainedRows(ids(0)), First(ids(0))
    assert works.of(rows_plan([0], [1], late)).late.tolist() == [0]
    with pytest.raises(ValueError, match="two features"):
        works.of(rows_plan([0], [1], masks, late))


def test_all_features_are_found_by_name() -> None:
    without, works = (StepWorks.load(rank_with_experts(count)) for count in (0, 1))
    found, of_all = (
        {type(work).__module__.split(".")[2] for work in each.all} for each in (without, works)
    )
    always = {"logprobs", "prompt_logprobs", "pooled_states", "token_states", "masks"}
    assert found == {*always, "speculation"}
    assert of_all == {*found, "expert_load"}
    sections = works.dummy_sections(range(3), [200, 100, 5])
    calls = works.of(rows_plan([0], [1], *sections))
    assert calls.late.tolist() == [0, 1, 2]
    assert not calls.suit_graphs
    (scored,) = (each for each in sections if type(each).__name__ == "PromptLogprobRows")
    assert scored.slots.tolist() == [0, 1]  # type: ignore[attr-defined]
    assert scored.counts.tolist() == [200, 56]  # type: ignore[attr-defined]


def rank_with_experts(num_layers: int) -> Any:
    rank = rank_of(make_slots([SamplingParams()] * 3, VOCAB))
    rank.model.backend = SimpleNamespace(group=rank.model.vocabulary.group, extension=None)
    counter = SimpleNamespace(layer=1, experts=(0, 1), ranks=(0, 0), tokens=torch.zeros(2).int())
    rank.model.expert_counters, rank.model.layer_numbers = [counter] * num_layers, range(2)
    return rank


# ---------------------------------------------------------------- logits processors


@pytest.mark.parametrize("seed", range(4))
def test_a_logits_processor_sees_each_row_once(seed: int) -> None:
    """With and without late rows: behind biases and masks, before temperature and filters; the
    log-probabilities are those of the model."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    count, logits = 6, torch.randn(6, VOCAB) * 2
    params = [
        SamplingParams(temperature=0), SamplingParams(temperature=0, logit_bias={3: 50.0}),
        SamplingParams(temperature=0.7, top_k=5), SamplingParams(frequency_penalty=0.5),
        SamplingParams(temperature=0), SamplingParams(top_p=0.8),
    ]  # fmt: skip
    slots = make_slots(params, VOCAB)
    rank = rank_of(slots)
    late = sorted(rng.sample(range(count), (0, 1, 3, count)[seed]))
    allowed = np.random.default_rng(seed).random((len(late), VOCAB)) < 0.5
    shift, offsets = Shift(rank), ids(*(rng.randrange(VOCAB) for _ in range(count)))
    works = StepWorks([shift, MaskWork(rank), LogprobWork(rank)])
    every = np.arange(count, dtype=np.int32)
    sections: list[Section] = [
        ShiftedRows(offsets), LogprobRows(every, every * 0 + 2, every * 0, ids())
    ]  # fmt: skip
    if late:
        sections.append(ConstrainedRows(ids(*late)))
    of_model = logits.clone()
    runner = logits_runner(rank, works, of_model)
    masks = np.stack([*map(pack, allowed)]) if late else None
    result = runner.step(rows_plan(every, every * 0 + 1, *sections), lambda *_: masks).wait()
    assert of_model.equal(logits)
    assert [rows.tolist() for rows, _ in shift.seen] == [
        rows for rows in ([row for row in range(count) if row not in late], late) if rows
    ]
    for rows, seen in shift.seen:
        for row, of_row in zip(rows.tolist(), seen, strict=True):
            expected = logits[row].clone()
            if row in late:
                expected[~torch.from_numpy(allowed[late.index(row)])] = -torch.inf
            if row == 1:
                expected[3] += 50
            torch.testing.assert_close(of_row, expected)
            if row in (0, 1, 4):  # greedy: what the shift makes of it
                assert (expected.argmax() + offsets[row]) % VOCAB == result.tokens[row]
    found = result.section(Logprobs)
    assert found is not None
    own = logits.log_softmax(-1)[every, result.tokens]
    np.testing.assert_allclose(found.sampled, own, atol=1e-5)


def test_a_step_without_the_section_is_not_processed() -> None:
    logits = torch.randn(1, VOCAB)
    rank = rank_of(make_slots([SamplingParams(temperature=0)], VOCAB))
    shift = Shift(rank)
    result = (
        logits_runner(rank, StepWorks([shift]), logits.clone()).step(rows_plan([0], [1])).wait()
    )
    assert result.tokens.tolist() == logits.argmax(1).tolist()
    assert not shift.seen

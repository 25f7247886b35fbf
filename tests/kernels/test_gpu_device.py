"""The model runner on a GPU, in Triton's interpreter: with features and without, launched or
replayed, it samples and returns what the runner on a CPU does. CUDA's streams and events are
replaced by objects without effect, since the interpreter computes at once; graphs launch the
kernels that they would have captured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from aioinfer.kernels import decode_plan, lookahead

from aioinfer.config import Config, ModelConfig, SpeculationConfig
from aioinfer.features.adapters.layers.parts import AdapterWeights
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.sections import AdapterChanges
from aioinfer.features.expert_load.sections import ExpertTokens
from aioinfer.features.logprobs.sections import ALL, LogprobRows, Logprobs
from aioinfer.features.pooled_states.sections import LAST, MEAN, PooledRows, PooledStates
from aioinfer.features.prompt_logprobs.sections import PromptLogprobRows, PromptLogprobs
from aioinfer.features.token_states.sections import TokenStateRows, TokenStates
from aioinfer.ipc.kv_spec import group_layers, groups_of_stage
from aioinfer.ipc.lookahead import SKIPPED, LookaheadRows
from aioinfer.ipc.masks import ConstrainedRows
from aioinfer.ipc.plan import I32, Admission, Admissions, StepPlan, StepResult
from aioinfer.ipc.sections import Section
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.models.registry import build_model
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.device import CpuDevice
from aioinfer.worker.dummy_steps import DummySteps
from aioinfer.worker.features import ProposalRows, Rank, SampledStep, WorkerFeature
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.graph_bodies import GraphBodies
from aioinfer.worker.kv_tensors import KVTensors
from aioinfer.worker.runner import ModelRunner
from aioinfer.worker.slots import Slots
from aioinfer.worker.stage_links import Receive, StageLinks
from aioinfer.worker.step_works import StepWorks
from tests.adapter_files import pack_adapter
from tests.automata import pack
from tests.filled_slots import Shift, ShiftedRows
from tests.kernels.bound_model import BLOCK_SIZE, CPU, Bound
from tests.paged_model import model_options
from tests.tiny_models import tiny_model

VOCAB = 100
NONE = np.empty(0, np.int32)
LENGTHS = [5, 3, 7]
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=9, frequency_penalty=0.7, logit_bias={4: 2.0}),
    SamplingParams(temperature=0.6, presence_penalty=0.5),
]
ALLOWED = np.random.default_rng(0).random((3, VOCAB)) < 0.5
SECTIONS = (
    ExpertTokens, Logprobs, PooledStates, PromptLogprobs, TokenStates,
)  # fmt: skip


def ids(*values: int) -> I32:
    return np.array(values, np.int32)


class Stream:
    """Stands in for a CUDA stream, and for an event."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, end: Stream) -> float:
        return 0.25

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        pass


class Graphs:
    """Stands in for the graphs of decode steps: `launch` is what they have captured."""

    def __init__(self, launch: Any):
        self.launch = launch
        self.replayed: list[int] = []

    def fit(self, rows: int) -> int:
        return rows + 1  # padded, as most steps are

    fit_rows = fit

    def replay(self, rows: int) -> None:
        self.replayed.append(rows)
        self.launch(rows)


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(
        "llama", folder, vocab_size=VOCAB, hidden_size=128, head_dim=64, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=2,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def folder_with_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose stream has a side, and of which the last layer reads the cache of the one
    before it."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(
        "gemma4_text", folder, vocab_size=VOCAB, hidden_size=128, global_head_dim=64,
        num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=3,
        num_kv_shared_layers=1, layer_types=["full_attention"] * 3,
    )  # fmt: skip
    return folder


class Drafts(WorkerFeature):
    """Proposes the tokens of `texts`, int32 [slots, max_len], at the positions of the drafts."""

    proposes = True

    def __init__(self, rank: Rank):
        super().__init__(rank)
        self.texts = torch.zeros_like(rank.slots.tokens)

    def propose(self, rows: ProposalRows) -> None:
        at = rows.slots.long(), (rows.bases + rows.offsets).long()
        tokens, is_draft = self.rank.slots.tokens, rows.offsets > 0
        tokens[at] = torch.where(is_draft, self.texts[at], tokens[at])


class FollowingDrafts(Drafts):
    """Drafts these tokens behind each step, on the last stage, for the next one."""

    proposes = False
    follows = True

    def follow(self, step: SampledStep) -> None:
        tokens, known = self.rank.slots.tokens, self.rank.slots.next_start[:, None]
        tokens.copy_(torch.where(torch.arange(tokens.shape[1]) > known, self.texts, tokens))


#: Lookahead rows that a step may have.
MAX_LOOKAHEAD = 5


def make_runner(folder: Path, *, kernels: bool, num_adapters: int = 0) -> Any:
    """A runner with a graph for each decode step, if it has kernels."""
    bound = Bound(folder, kernels=kernels, num_adapters=num_adapters)
    keeps_states = any(group.keeps_states for group in bound.groups)
    replays = keeps_states and bound.model.looks_ahead(BLOCK_SIZE)
    if replays:
        bound.backend.saved_rows = 4, MAX_LOOKAHEAD
    kv = KVTensors(bound.groups, [12] * len(bound.groups), BLOCK_SIZE, torch.float32, CPU)
    slots = Slots(
        4, 40, BLOCK_SIZE, VOCAB, CPU, len(bound.groups), uses_kernels=kernels,
        has_rotary_offsets=bound.model.has_rotary_sections, has_state_lens=replays,
    )  # fmt: skip
    programs = {"programs": 3} if kernels else {}
    bound.model.bind(bound.groups, kv.tensors, BLOCK_SIZE, 4 + MAX_LOOKAHEAD, 40, **programs)
    rank = Rank(bound.model, slots)
    works = StepWorks.load(rank)
    works = StepWorks([*works.all, Drafts(rank), Shift(rank)])
    if not kernels:
        return ModelRunner(bound.model, CpuDevice(slots, kv, MAX_LOOKAHEAD), works)
    device = GpuDevice(bound.model, kv, slots, 40, max_lookahead=MAX_LOOKAHEAD)
    runner = ModelRunner(bound.model, device, works)
    bodies = GraphBodies(runner, device)
    device.graphs.decode = Graphs(bodies.launch_decode)  # type: ignore[assignment]
    device.graphs.lookahead = Graphs(bodies.launch_lookahead_decode)  # type: ignore[assignment]
    if num_adapters:
        device.graphs.extended = Graphs(bodies.launch_decode)  # type: ignore[assignment]
        device.graphs.mixed_extended = Graphs(bodies.launch_mixed)  # type: ignore[assignment]
        bodies.clear_mixed(40)
    return runner


class QueueChannel:
    """A channel between stages of one process: what is sent is received in its order."""

    def __init__(self) -> None:
        self.waited_ns = 0
        self.sent: deque[torch.Tensor] = deque()

    def send(self, values: torch.Tensor) -> None:
        self.sent.append(values.clone())

    def expect(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        def receive() -> torch.Tensor:
            values = self.sent.popleft()
            assert (values.shape, values.dtype) == (shape, dtype)
            return values

        return receive


def make_stages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, kernels: bool, num_drafts: int = 0
) -> list[Any]:
    """The runners of two pipeline stages, and with a graph for each decode step, if they have
    kernels; `num_drafts`: behind a step, by `FollowingDrafts`, or else both stages have `Drafts`.
    """
    channels = QueueChannel(), QueueChannel()
    monkeypatch.setattr(StageLinks, "_open_channels", lambda *_: channels)
    monkeypatch.setattr(StageLinks, "_connect", lambda _: None)
    runners = []
    for stage in range(2):
        backend = Backend(CPU, torch.float32, ParallelGroup.single(), has_kernels=kernels)
        backend.stage, backend.num_stages = stage, 2
        model: Any = build_model(folder, backend, model_options())
        model.load(folder, "auto", 0, lambda done, total: None)
        of_all = group_layers(model.kv_specs)
        groups = groups_of_stage(of_all, model.layer_numbers)
        kv = KVTensors(groups, [12] * len(groups), BLOCK_SIZE, torch.float32, CPU)
        slots = Slots(4, 40, BLOCK_SIZE, VOCAB, CPU, len(of_all), uses_kernels=kernels)
        programs = {"programs": 3} if kernels else {}
        model.bind(groups, kv.tensors, BLOCK_SIZE, 4 + MAX_LOOKAHEAD, 40, **programs)
        place: Any = SimpleNamespace(pp=SimpleNamespace(rank=stage, size=2))
        links = StageLinks(place, model.stream_size, torch.float32, CPU, 40, num_drafts=num_drafts)
        none = SpeculationConfig(method="none")
        rank = Rank(model, slots, links, Config(model=ModelConfig(path=""), speculation=none))
        works = StepWorks.load(rank)
        if not num_drafts:
            works = StepWorks([*works.all, Drafts(rank)])
        elif links.is_last:
            works = StepWorks([*works.all, FollowingDrafts(rank)])
        if kernels:
            ends = {"is_first": links.is_first, "is_last": links.is_last}
            device = GpuDevice(model, kv, slots, 40, max_lookahead=MAX_LOOKAHEAD, **ends)
            runner = ModelRunner(model, device, works, links)
            bodies = GraphBodies(runner, device)
            device.graphs.decode = Graphs(bodies.launch_decode)  # type: ignore[assignment]
            ahead = Graphs(bodies.launch_lookahead_decode)
            device.graphs.lookahead = ahead  # type: ignore[assignment]
        else:
            runner = ModelRunner(model, CpuDevice(slots, kv, MAX_LOOKAHEAD), works, links)
        runners.append(runner)
    return runners


def plan_of(
    step: int, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int],
    *sections: Section,
) -> StepPlan:  # fmt: skip
    ones, rest = np.ones(len(slots), np.int32), [NONE] * 5
    return StepPlan(step, ids(*slots), ids(*starts), ids(*lengths), ones, *rest, sections)


def first_plan(*sections: Section) -> StepPlan:
    """Admits three requests, each with two KV blocks, and computes their prompts."""
    prompts = [
        ids(*((slot * 31 + i * i * 7) % 90 for i in range(LENGTHS[slot]))) for slot in range(3)
    ]
    admissions = [
        Admission(slot, prompt, len(prompt), params, 7 + slot)
        for slot, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=True))
    ]
    plan = plan_of(0, [0, 1, 2], [0, 0, 0], LENGTHS, Admissions.of(admissions), *sections)
    plan.table_rows = np.repeat(np.arange(3, dtype=np.int32), 2)
    plan.table_indices, plan.table_blocks = np.tile(ids(0, 1), 3), np.arange(6, dtype=np.int32)
    return plan


def features(*late: int) -> list[Section]:
    """Sections of sampled rows: log-probabilities of two rows, a shift, and masks of `late`
    rows."""
    logprobs = LogprobRows(ids(0, 2), ids(3, 1), ids(2, ALL), ids(9, 90))
    sections: list[Section] = [logprobs, ShiftedRows(ids(1, 2, 3))]
    return [*sections, ConstrainedRows(ids(*late))] if late else sections


def prompt_features() -> list[Section]:
    return [
        PromptLogprobRows(ids(0, 2), ids(4, 6), ids(2, 20)),
        PooledRows(ids(1, 2), ids(LAST, MEAN), ids(1, 1)),
        TokenStateRows(ids(1), ids(2)),
    ]


def read_masks(plan: StepPlan, count: int) -> I32:
    return np.stack([*map(pack, ALLOWED[:count])])


def read_equal_masks(plan: StepPlan, count: int) -> I32:
    return np.stack([pack(ALLOWED[0])] * count)


def assert_same(of_gpu: StepResult, of_cpu: StepResult) -> None:
    assert of_gpu.tokens.tolist() == of_cpu.tokens.tolist()
    for kind in SECTIONS:
        on_gpu, on_cpu = of_gpu.section(kind), of_cpu.section(kind)
        assert (on_gpu is None) == (on_cpu is None), kind
        for name in kind.__slots__ if on_gpu is not None else ():
            found, expected = getattr(on_gpu, name), getattr(on_cpu, name)
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.parametrize("late", [(1,), (0, 1, 2)], ids=str)
def test_steps_are_those_of_the_cpu(folder: Path, late: tuple[int, ...]) -> None:
    runner, plain = (make_runner(folder, kernels=kernels) for kernels in (True, False))
    plans = [first_plan(*prompt_features(), *features(*late))]
    starts = list(LENGTHS)
    for step, sections in enumerate(([], features(*late), features()), 1):
        plans.append(
            plan_of(step, [2, 0, 1], [starts[slot] for slot in (2, 0, 1)], [1] * 3, *sections)
        )
        starts = [start + 1 for start in starts]
    for plan in plans:
        plan = StepPlan.decode(b"".join(plan.encode()))
        found, expected = (each.step(plan, read_masks).wait() for each in (runner, plain))
        assert_same(found, expected)
        assert torch.equal(runner.slots.tokens, plain.slots.tokens)
        assert torch.equal(runner.slots.occurrences.rows, plain.slots.occurrences.rows)
        mine, cpus = (each.works.all[-1].seen for each in (runner, plain))
        assert [rows.tolist() for rows, _ in mine] == [rows.tolist() for rows, _ in cpus]
        for (_, logits), (_, of_cpu) in zip(mine, cpus, strict=True):
            torch.testing.assert_close(logits, of_cpu, rtol=1e-3, atol=1e-3)
    assert runner.device.graphs.decode.replayed == [4, 4, 4]


@pytest.mark.parametrize(("model", "kernels"), [("folder_with_side", True), ("folder", False)])
def test_two_stages_sample_what_one_model_does(
    model: str, kernels: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, decodes and late rows; the first stage embeds the tokens that the last sampled."""
    folder = request.getfixturevalue(model)
    whole = make_runner(folder, kernels=False)
    first, last = make_stages(folder, monkeypatch, kernels=kernels)
    logprobs = LogprobRows(ids(0, 2), ids(3, 1), ids(2, ALL), ids(9, 90))
    plans, starts = [first_plan(logprobs, ConstrainedRows(ids(1)))], list(LENGTHS)
    for step, sections in enumerate(([], [logprobs], [ConstrainedRows(ids(0, 2))]), 1):
        plans.append(plan_of(step, [2, 0, 1], [starts[s] for s in (2, 0, 1)], [1] * 3, *sections))
        starts = [start + 1 for start in starts]
    for plan in plans:
        nothing = first.step(plan).wait()
        assert not len(nothing.tokens)
        found, expected = (each.step(plan, read_masks).wait() for each in (last, whole))
        assert_same(found, expected)
        assert torch.equal(last.slots.tokens, whole.slots.tokens)
        if kernels:
            assert found.busy_ns == nothing.busy_ns == 250_000, "the device's time"
    for runner in (first, last) if kernels else ():
        assert runner.device.graphs.decode.replayed == [4, 4, 4]


def lookahead_plan(
    step: int, groups: Sequence[tuple[int, int, int]], *sections: Section, settled: int
) -> StepPlan:
    """A plan of decodes with lookahead: slot, lowest start and lookahead rows of each."""
    rows = [(slot, start + i, i) for slot, start, count in groups for i in range(1 + count)]
    slots, starts, offsets = np.array(rows, np.int32).T.copy()
    known = np.full(len(rows), settled, np.int32)
    lookahead = LookaheadRows(offsets, known, np.full_like(offsets, 64))
    return plan_of(step, slots, starts, [1] * len(rows), lookahead, *sections)


def expected_texts(folder: Path, *sections: Section) -> list[list[int]]:
    """The texts of the three requests of `first_plan`, with 14 tokens after their prompts."""
    plain, starts = make_runner(folder, kernels=False), list(LENGTHS)
    plain.step(first_plan(*sections), read_equal_masks).wait()
    for step in range(1, 14):
        plan = plan_of(step, [0, 1, 2], starts, [1] * 3, *sections)
        plain.step(plan, read_equal_masks).wait()
        starts = [start + 1 for start in starts]
    texts: list[list[int]] = plain.slots.tokens.tolist()
    return texts


def check_lookahead(runner: Any, plan: StepPlan, starts: list[int], texts: Any) -> list[int]:
    """Executes a plan, checks that the kept tokens are those of `texts` and go on without a gap,
    and advances `starts` by them; returns the tokens."""
    result = runner.step(StepPlan.decode(b"".join(plan.encode())), read_equal_masks).wait()
    tokens: list[int] = result.tokens.tolist()
    for slot, token in zip(plan.slots.tolist(), tokens, strict=True):
        if token != SKIPPED and slot < 3:
            starts[slot] += 1
            assert token == texts[slot][starts[slot]]
    for slot in range(3):
        assert (
            runner.slots.tokens[slot, : starts[slot] + 1].tolist()
            == (texts[slot][: starts[slot] + 1])
        )
    return tokens


def check_lookahead_steps(
    runner: Any, cpu: Any, texts: Any, sections_of: Callable[[list[int]], list[Section]]
) -> None:
    """Executes four plans with lookahead on both runners, the third beside a prompt, with the
    sections that `sections_of` returns for the slots of their rows; checks each, and the slots
    behind the last."""
    lows, starts, others = list(LENGTHS), list(LENGTHS), list(LENGTHS)
    for step, counts in enumerate([(1, 0, 2), (2, 1, 1), (0, 2, 3), (2, 2, 1)], 1):
        groups = [(slot, lows[slot], counts[slot]) for slot in (2, 0, 1)]
        slots = [slot for slot, _, count in groups for _ in range(1 + count)]
        if step == 3:
            slots.append(3)  # of the prompt
        plan = lookahead_plan(step, groups, *sections_of(slots), settled=int(step == 1))
        if step == 3:
            plan = with_prompt(plan)
        found = check_lookahead(runner, plan, starts, texts)
        assert found == check_lookahead(cpu, plan, others, texts)
        lows = [low + 1 for low in lows]
    assert sum(starts) > sum(LENGTHS) + 3 * 4, "drafts were kept"
    assert runner.slots.next_start[:3].tolist() == starts
    assert torch.equal(runner.slots.occurrences.rows, cpu.slots.occurrences.rows)


@pytest.mark.parametrize("has_features", [False, True])
def test_lookahead_rows_give_the_tokens_of_a_plain_run(
    folder: Path, has_features: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, and seeded ones with filters and penalties; in graphs, and beside a prompt; with
    drafts that are right, wrong from some position on, and of rows whose position only the device
    knows. With log-probabilities and logits that a feature changes, too: there, attention computes
    the rows of a sequence one by one, else together."""
    if not has_features:
        monkeypatch.setattr(decode_plan, "MIN_JOINED_ROWS", 1)
    shift = [ShiftedRows(ids(0, 1, 2))] if has_features else []
    texts = expected_texts(folder, *shift)
    runner, cpu = (make_runner(folder, kernels=kernels) for kernels in (True, False))
    first = first_plan(*shift)
    for each in (runner, cpu):
        drafts = torch.tensor(texts, dtype=torch.int32)
        drafts[0, LENGTHS[0] + 3] += 1
        drafts[1, LENGTHS[1] + 1 :: 2] += 1
        each.works.all[-2].texts.copy_(drafts)
        each.step(first).wait()

    def features_of(slots: list[int]) -> list[Section]:
        logprobs = LogprobRows(ids(0, len(slots) - 1), ids(3, 1), ids(2, ALL), ids(9, 90))
        return [logprobs, ShiftedRows(ids(*slots))]

    check_lookahead_steps(runner, cpu, texts, features_of if has_features else lambda slots: [])
    assert runner.device.graphs.decode.replayed == []
    assert len(runner.device.graphs.lookahead.replayed) == 3


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("kernels", [True, False])
def test_two_stages_keep_the_drafts_of_one(
    folder: Path, kernels: bool, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that both stages propose, and drafts that the last stage sends to the first, right and
    wrong ones; in graphs, and beside a prompt. Between two steps their result has come."""
    texts = expected_texts(folder)
    first, last = make_stages(folder, monkeypatch, kernels=kernels, num_drafts=num_drafts)
    drafts = torch.tensor(texts, dtype=torch.int32)
    drafts[0, LENGTHS[0] + 3] += 1
    drafts[1, LENGTHS[1] + 1 :: 2] += 1
    for work in (first.works.all[-1], last.works.all[-1]):
        if isinstance(work, Drafts):
            work.texts.copy_(drafts)
    nothing = LookaheadRows(*(ids(value, value, value) for value in (0, 1, 64)))
    first_step, starts, drafted = first_plan(nothing), list(LENGTHS), 0
    for runner in (first, last):
        runner.step(first_step).wait()
    for step, counts in enumerate([(1, 0, 2), (2, 1, 1), (0, 2, 3), (2, 2, 1)], 1):
        drafted += sum(counts)
        groups = [(slot, starts[slot], counts[slot]) for slot in (2, 0, 1)]
        plan = lookahead_plan(step, groups, settled=1)
        if step == 3:
            plan = with_prompt(plan)
        first.step(StepPlan.decode(b"".join(plan.encode()))).wait()
        check_lookahead(last, plan, starts, texts)
    kept = sum(starts) - sum(LENGTHS) - 3 * 4
    assert drafted > kept > drafted // 2
    first.links.drain()
    for slot, start in enumerate(starts):
        # the first stage has all tokens but those of the last step, which it has not needed yet
        assert first.slots.tokens[slot, : start - 2].tolist() == texts[slot][: start - 2]
    if kernels:
        assert [len(each.device.graphs.lookahead.replayed) for each in (first, last)] == [3, 3]


@pytest.mark.parametrize("late", [{1}, {0, 2}], ids=str)
def test_lookahead_rows_may_be_sampled_late(folder: Path, late: set[int]) -> None:
    """Rows of some slots under masks, in graphs and beside a prompt: the tokens are those of a
    plain run under masks, with drafts that are right, and wrong from some position on."""
    constrained = ConstrainedRows(ids(*sorted(late)))
    texts = expected_texts(folder, constrained)
    assert texts != expected_texts(folder)
    runner, cpu = (make_runner(folder, kernels=kernels) for kernels in (True, False))
    for each in (runner, cpu):
        drafts = torch.tensor(texts, dtype=torch.int32)
        drafts[0, LENGTHS[0] + 3] += 1
        drafts[1, LENGTHS[1] + 2 :: 3] += 1
        each.works.all[-2].texts.copy_(drafts)
        each.step(first_plan(constrained), read_equal_masks).wait()

    def late_of(slots: list[int]) -> list[Section]:
        return [ConstrainedRows(ids(*(row for row, slot in enumerate(slots) if slot in late)))]

    check_lookahead_steps(runner, cpu, texts, late_of)
    assert len(runner.device.graphs.lookahead.replayed) == 3


def test_captured_steps_are_timed_and_leave_no_plan(folder: Path) -> None:
    runner = make_runner(folder, kernels=True)
    device, replayed = runner.device, []
    tokens = runner.slots.tokens.clone()

    def captured(*sizes: int) -> Any:
        def replay(size: int) -> None:
            assert device.plan.row_section(2, device.plan.rows).eq(1).all()
            start = int(device.plan.row_section(1, 1))
            assert runner.slots.tokens[:, start].unique().numel() == len(tokens), "other experts"
            replayed.append(size)

        return SimpleNamespace(sizes=sizes, replay=replay)

    device.graphs.decode, device.graphs.lookahead = captured(1, 2, 4), captured(2, 3, 4, 6, 9)
    times = GraphBodies(runner, device).time_decodes()
    assert times == [
        *((rows, 0.00025, False) for rows in (1, 2, 4)),
        *((rows, 0.00025, True) for rows in (2, 3, 4, 6, 9)),
    ]
    assert replayed == [1, 1, 4, 4, 2, 2, 9, 9]
    assert not device.plan.values[: 6 * 9].any()
    assert (device.plan.growth_sections()[0] == -1).all()
    assert torch.equal(runner.slots.tokens, tokens)


def enter_adapter(slots: AdapterSlots, slot: int, rank: int) -> None:
    """Puts a random adapter into a slot."""
    generator = torch.Generator().manual_seed(slot)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(0.0, 0.3, generator=generator)

    weights = {}
    for module, shape in slots.modules.items():
        given = {side: random(*size) for side, size in shape.of_rank(rank).items()}
        weights[module] = AdapterWeights(**given, scale=0.5)
    slots.enter(slot, pack_adapter(slots, weights), rank)


def test_rows_of_several_adapters_share_steps(folder: Path) -> None:
    """Prompts, of which the layers are a graph, decodes, a step without adapters, and lookahead."""
    runner, plain = (
        make_runner(folder, kernels=kernels, num_adapters=2) for kernels in (True, False)
    )
    first = first_plan(AdapterChanges.of((), [(0, 1), (2, 0)]))
    plans = [
        first,
        *(plan_of(step, [2, 0, 1], [LENGTHS[s] + step - 1 for s in (2, 0, 1)], [1] * 3)
          for step in (1, 2, 3)),
        plan_of(4, [1], [LENGTHS[1] + 3], [1]),
    ]  # fmt: skip
    for each in (runner, plain):
        for slot, rank in enumerate((8, 3)):
            enter_adapter(each.model.backend.extension, slot, rank)
        each.works.begin_service()
    for plan in plans:
        found, expected = (each.step(plan).wait() for each in (runner, plain))
        assert found.tokens.tolist() == expected.tokens.tolist()
    graphs = runner.device.graphs
    assert graphs.mixed_extended.replayed == [sum(LENGTHS) + 1]
    assert graphs.extended.replayed == [4, 4, 4]
    assert graphs.decode.replayed == [2]
    drafts = lookahead_plan(5, [(0, LENGTHS[0] + 3, 1), (2, LENGTHS[2] + 3, 0)], settled=1)
    found, expected = (each.step(drafts).wait() for each in (runner, plain))
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert graphs.lookahead.replayed == [4]
    without = make_runner(folder, kernels=False)
    others = [without.step(plan).wait().tokens.tolist() for plan in plans]
    assert others[:4] != [plain.step(plan).wait().tokens.tolist() for plan in plans[:4]]


def with_prompt(plan: StepPlan) -> StepPlan:
    """Adds a request in slot 3, whose prompt a step with lookahead computes."""
    prompt = ids(5, 8, 13)
    lookahead = plan.section(LookaheadRows)
    assert lookahead is not None
    columns = (lookahead.offsets, 0), (lookahead.settled, 1), (lookahead.limits, 64)
    rows = LookaheadRows(*(np.append(of_others, ids(own)) for of_others, own in columns))
    others = [each for each in plan.sections if each is not lookahead]
    admission = Admission(3, prompt, 3, SamplingParams(temperature=0), 1)
    sections = [rows, Admissions.of([admission]), *others]
    columns = (plan.slots, 3), (plan.starts, 0), (plan.lengths, 3), (plan.samples, 1)
    tables = ids(3), ids(0), ids(6)
    return StepPlan(
        plan.step_id, *(np.append(column, ids(last)) for column, last in columns), *tables,
        NONE, NONE, sections,
    )  # fmt: skip


def test_slots_move_the_rotary_positions_of_their_tokens(tmp_path: Path) -> None:
    """Of the tokens behind a prompt, as behind pictures, in mixed steps and replayed graphs."""
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [16, 8, 8]}
    tiny_model(
        "llama", tmp_path, vocab_size=VOCAB, hidden_size=128, head_dim=64, num_attention_heads=2,
        num_key_value_heads=1, num_hidden_layers=2, rope_parameters=rope,
    )  # fmt: skip
    texts = []
    for offset in (0, 9):
        runner, plain = (make_runner(tmp_path, kernels=kernels) for kernels in (True, False))
        plans = [first_plan(PooledRows(ids(0, 1), ids(LAST, LAST), ids(1, 1)))]
        starts = list(LENGTHS)
        for step in range(1, 5):
            plans.append(plan_of(step, [2, 0, 1], [starts[slot] for slot in (2, 0, 1)], [1] * 3))
            starts = [start + 1 for start in starts]
        for plan in plans:
            found, expected = (each.step(plan).wait() for each in (runner, plain))
            assert_same(found, expected)
            for each in (runner, plain):
                each.slots.rotary_offsets[2] = offset
        assert runner.device.graphs.decode.replayed == [4] * 4
        inputs = runner.device.buffers.whole
        assert inputs.rotary[:, 0].tolist() == [starts[2] - 1 + offset] * 3
        assert inputs.rotary[:, 1].tolist() == [starts[0] - 1] * 3
        texts.append(runner.slots.tokens.tolist())
    assert texts[0][:2] == texts[1][:2]


def test_hidden_states_are_read_without_a_graph(folder: Path) -> None:
    runner, plain = (make_runner(folder, kernels=kernels) for kernels in (True, False))
    last = PooledRows(ids(1), ids(LAST), ids(1))
    for plan in (first_plan(last), plan_of(1, [1, 0], [3, 5], [1, 1], last)):
        found, expected = (each.step(plan).wait() for each in (runner, plain))
        assert_same(found, expected)
        assert found.section(PooledStates) is not None
    assert not runner.device.graphs.decode.replayed


def test_dummy_steps_call_every_feature_and_leave_no_trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(folder, kernels=True)
    seen: set[str] = set()
    for work in runner.works.all:
        for name in ("read_hidden", "late_logits", "read_tokens"):
            wrapped = getattr(work, name)
            setattr(work, name, noting(seen, f"{type(work).__module__} {name}", wrapped))
    accept, of_late_rows = lookahead.accept_tokens, set()

    def accept_tokens(*given: Any, **named: Any) -> None:
        of_late_rows.add(named["places"] is not None)
        accept(*given, **named)

    monkeypatch.setattr(lookahead, "accept_tokens", accept_tokens)
    DummySteps(runner, 1, BLOCK_SIZE, VOCAB, 4, 16).run_all()
    assert of_late_rows == {False, True}  # each is a specialization of its kernel
    assert {call.removeprefix("aioinfer.features.") for call in seen} >= {
        "masks.worker late_logits", "logprobs.worker read_tokens",
        "prompt_logprobs.worker read_hidden", "pooled_states.worker read_hidden",
    }  # fmt: skip
    assert not runner.slots.tokens.any()
    assert not runner.device.kv.tensors[0].any()


def noting(seen: set[str], call: str, wrapped: Any) -> Any:
    """A method that notes its calls."""

    def method(*arguments: Any, **named: Any) -> Any:
        seen.add(call)
        return wrapped(*arguments, **named)

    return method

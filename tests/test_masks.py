"""What makes rows wait for masks: the section of a plan, the notice behind it, the memory of the
masks, the worker's wait, and what masks do to logits on a CPU."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing

from aioinfer.features.masks.worker import Work, mask_logits
from aioinfer.ipc.heartbeat import Heartbeat
from aioinfer.ipc.masks import (
    NUM_MASK_BUFFERS,
    ConstrainedRows,
    MaskMemory,
    MaskNotice,
    buffer_of,
    is_notice,
    mask_words,
    num_mask_buffers,
)
from aioinfer.ipc.plan import StepPlan, decode_section, encode_section
from aioinfer.ipc.ring import Ring
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.process import _IDLE_MS, _EndOfPlansError, _Inbox
from aioinfer.worker.step_works import StepCalls, StepWorks
from tests import plans
from tests.automata import pack
from tests.filled_slots import make_slots, rank_of
from tests.plans import ids

VOCAB = 77


def make_plan(step_id: int, *constrained: int) -> StepPlan:
    sections = [ConstrainedRows(ids(*constrained))] if constrained else []
    return plans.make_plan(step_id, [[row] * 4 for row in range(3)], sections=sections)


def calls_of(plan: StepPlan) -> StepCalls:
    slots = make_slots([SamplingParams()] * 3, VOCAB)
    return StepWorks([Work(rank_of(slots))]).of(plan)


def post_section(ring: Ring, number: int) -> None:
    ring.write(encode_section(ConstrainedRows(ids(number))))


def post(ring: Ring, message: StepPlan | MaskNotice) -> None:
    ring.write(message.encode())


def test_a_plan_lists_its_constrained_rows() -> None:
    plan = StepPlan.decode(b"".join(make_plan(3, 0, 2).encode()))
    assert calls_of(plan).late.tolist() == [0, 2]
    assert calls_of(make_plan(3)).late is None
    plan.sections = [ConstrainedRows(ids())]
    assert calls_of(plan).late is None


def test_a_notice_is_no_plan() -> None:
    message = b"".join(MaskNotice(2**40, 2).encode())
    assert is_notice(message)
    assert MaskNotice.decode(message) == MaskNotice(2**40, 2)
    plan = b"".join(make_plan(3).encode())
    assert not is_notice(plan)
    with pytest.raises(ValueError, match="a plan came where masks were due"):
        MaskNotice.decode(plan)
    with pytest.raises(ValueError, match="version -1"):
        StepPlan.decode(message + bytes(64))
    section = b"".join(encode_section(ConstrainedRows(ids(5))))
    assert not is_notice(section)
    found = decode_section(section)
    assert isinstance(found, ConstrainedRows)
    assert found.rows.tolist() == [5]
    assert decode_section(message) is None
    assert decode_section(plan) is None


def _write_masks(memory: MaskMemory) -> None:
    memory.buffers(4, VOCAB)[1, 2] = [5, 6, 7]


@pytest.mark.slow
def test_masks_are_shared_and_untouched_ones_take_no_memory() -> None:
    memory = MaskMemory()
    memory.resize(4, VOCAB)
    masks = memory.buffers(4, VOCAB)
    assert masks.shape == (NUM_MASK_BUFFERS, 4, mask_words(VOCAB)) == (3, 4, 3)
    assert stat.S_IMODE(os.fstat(memory._fd).st_mode) == 0o600
    process = multiprocessing.get_context("spawn").Process(target=_write_masks, args=(memory,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert masks[1, 2].tolist() == [5, 6, 7]
    assert masks.sum() == 18
    large = MaskMemory()
    large.resize(1024, 150_000)
    large.buffers(1024, 150_000)[0, 0] = 1
    assert os.fstat(large._fd).st_blocks * 512 <= 2**17
    for each in (memory, large):
        each.close()
        each.close()


class Inbox:
    """A ring with its reader's inbox, and the other end of its control connection."""

    def __init__(self) -> None:
        self.ring, self.masks = Ring(1, num_slots=8), MaskMemory()
        self.masks.resize(4, VOCAB)
        self.parent, control = multiprocessing.Pipe()
        config = SimpleNamespace(max_sampled_rows=4)
        self.control, self.heartbeat = control, Heartbeat(1)
        spec: Any = SimpleNamespace(
            reader=0, plans=self.ring, masks=self.masks, control=control, config=config, rank=0,
            heartbeat=self.heartbeat,
        )  # fmt: skip
        self.taken: list[list[int]] = []
        works = SimpleNamespace(take=lambda section: self.taken.append(section.rows.tolist()))
        self.worker = SimpleNamespace(
            vocab_size=VOCAB,
            continue_warm_up=self._continue_warm_up,
            runner=SimpleNamespace(works=works),
        )
        self.inbox = _Inbox(spec, self.worker)
        self.to_capture: list[StepPlan] = []

    def _continue_warm_up(self) -> bool:
        """Posts a plan while it captures the last graph."""
        if len(self.to_capture) == 1:
            post(self.ring, self.to_capture[0])
        return bool(self.to_capture and self.to_capture.pop())

    def close(self) -> None:
        for each in (self.ring, self.masks, self.parent, self.control, self.heartbeat):
            each.close()


@pytest.fixture
def box() -> Iterator[Inbox]:
    box = Inbox()
    yield box
    box.close()


def test_masks_come_between_two_plans(box: Inbox) -> None:
    """More of them than the ring has room for: each message is given back in time; also sections
    that come before plans and between a plan and its masks."""
    for step in range(0, 60, 2):
        post_section(box.ring, step)
        post(box.ring, make_plan(step, 1))
        post_section(box.ring, step + 1)
        box.masks.buffers(4, VOCAB)[buffer_of(step), 0] = [1 << step // 2, 0, 0]
        post(box.ring, MaskNotice(step, buffer_of(step)))
        post(box.ring, make_plan(step + 1))
        plan = box.inbox.next_plan()
        calls, logits = calls_of(plan), torch.zeros(3, VOCAB)
        assert (plan.step_id, calls.late.tolist()) == (step, [1])
        places = torch.tensor([1], dtype=torch.int32)
        masked, waited_ns = calls.late_logits(logits, places, box.inbox.wait_for_masks)
        assert masked.isfinite().nonzero().tolist() == [[0, step // 2]]
        assert waited_ns > 0
        assert not logits.any()
        assert plan.slots.tolist() == [0, 1, 2], "the plan holds although it is released"
        box.inbox.release_plan()
        plan = box.inbox.next_plan()
        assert plan.step_id == step + 1
        assert calls_of(plan).late is None
        box.inbox.release_plan()
    assert box.taken == [[number] for number in range(60)]


def test_a_rank_that_does_not_sample_skips_masks(box: Inbox) -> None:
    box.inbox._skips_masks = True
    for step in range(0, 60, 2):
        post(box.ring, make_plan(step, 1))
        post(box.ring, MaskNotice(step, buffer_of(step)))
        post_section(box.ring, step)
        post(box.ring, make_plan(step + 1))
        for step_id in (step, step + 1):
            assert box.inbox.next_plan().step_id == step_id
            box.inbox.release_plan()


def test_an_idle_rank_captures_graphs_one_at_a_time(box: Inbox) -> None:
    box.to_capture = [make_plan(7), make_plan(8), make_plan(9)]
    assert box.inbox.next_plan().step_id == 7
    assert not box.to_capture
    assert box.inbox._may_warm_up


def test_calls_wait_for_the_plans_before_them(box: Inbox) -> None:
    """A rank may be behind the one whose result let the engine call all of them."""
    called: list[str] = []
    box.worker.call = lambda method, arguments: called.append(method)
    post(box.ring, make_plan(1))
    post(box.ring, make_plan(2))
    box.parent.send(("sleep", {"level": 1}))
    for step in (1, 2):
        assert box.inbox.next_plan().step_id == step
        assert not called
        box.inbox.release_plan()
    timer = threading.Timer(0.1, post, (box.ring, make_plan(3)))
    timer.start()
    assert box.inbox.next_plan().step_id == 3
    assert called == ["sleep"]
    assert box.parent.recv() == ("answer", None)
    timer.join()


def test_no_graph_is_captured_while_a_step_is_in_flight(box: Inbox) -> None:
    """A step with a long prompt takes longer than an idle rank waits: the step behind it is posted
    when the step before it has ended."""
    post(box.ring, make_plan(3))
    assert box.inbox.next_plan().step_id == 3
    box.inbox.release_plan()
    box.heartbeat.begin(0, 3)
    box.to_capture = [make_plan(9), make_plan(9)]
    timer = threading.Timer(10 * _IDLE_MS / 1000, post, (box.ring, make_plan(4)))
    timer.start()
    assert box.inbox.next_plan().step_id == 4
    assert len(box.to_capture) == 2
    box.inbox.release_plan()
    box.heartbeat.finish(0, 4)
    assert box.inbox.next_plan().step_id == 9, "posted while the last graph is captured"
    timer.join()


def test_each_further_stage_has_a_buffer_more() -> None:
    masks = MaskMemory(num_mask_buffers(4))
    masks.resize(2, VOCAB)
    assert masks.buffers(2, VOCAB).shape == (6, 2, 3)
    assert [buffer_of(step, masks.num_buffers) for step in range(7)] == [0, 1, 2, 3, 4, 5, 0]
    masks.close()


def test_who_waits_for_masks_notices_the_end(box: Inbox) -> None:
    post(box.ring, make_plan(0, 1))
    plan = box.inbox.next_plan()
    timer = threading.Timer(0.1, box.parent.close)
    timer.start()
    with pytest.raises(_EndOfPlansError):
        box.inbox.wait_for_masks(plan, 1)
    timer.join()


def test_masks_of_another_step_are_an_error(box: Inbox) -> None:
    post(box.ring, make_plan(7, 1))
    post(box.ring, MaskNotice(6, 0))
    with pytest.raises(RuntimeError, match="step 7 was given the masks of 6"):
        box.inbox.wait_for_masks(box.inbox.next_plan(), 1)
    with pytest.raises(ValueError, match="no source of messages"):
        calls_of(make_plan(1, 0)).late_logits(torch.zeros(3, VOCAB), torch.zeros(1).int(), None)


@pytest.mark.parametrize(("first", "size"), [(0, VOCAB), (31, 20), (40, 37), (64, 13), (77, 0)])
def test_logits_of_a_shard_under_masks(first: int, size: int) -> None:
    """Broken logits stay."""
    rng = np.random.default_rng(first)
    allowed = rng.random((2, VOCAB)) < 0.5
    logits = torch.randn(2, VOCAB)
    logits[1, ::9], logits[1, 1::9] = torch.nan, torch.inf
    shard = logits[:, first : first + size].clone()
    mask_logits(shard, np.stack([*map(pack, allowed)]), first)
    there = slice(first, first + size)
    for row, may in enumerate(allowed[:, there]):
        before, after = logits[row, there].numpy(), shard[row].numpy()
        broken = ~(before < np.inf)
        kept = np.where(may | broken, before, -np.inf)
        np.testing.assert_array_equal(after, kept)

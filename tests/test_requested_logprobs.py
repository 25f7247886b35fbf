"""Log-probabilities of more than 20 likeliest tokens, of all tokens, and of those that a request
names: on workers, on one rank and several, and from there to the reader."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from aioinfer.engine.logprobs import ResultLogprobs
from aioinfer.errors import RequestError
from aioinfer.ipc.plan import Logprobs, StepPlan, StepResult
from aioinfer.ipc.prompt_rows import MAX_POOLED_BYTES
from aioinfer.ipc.requested_logprobs import ALL, RequestedLogprobRows, RequestedLogprobs
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.llm import LLM
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.requested_tokens import RequestedTokens
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.worker.requested_logprobs import requested_logprobs
from tests.rank_processes import run_ranks
from tests.tiny_models import tiny_model

VOCAB = 301
#: More rows than are computed at a time, each third with all tokens.
ROWS = RequestedLogprobRows(
    np.arange(1, 20, dtype=np.int32),
    np.array([ALL if row % 3 == 0 else 2 for row in range(1, 20)], np.int32),
    np.array([[row, 300 - row] for row in range(1, 20) if row % 3], np.int32).ravel(),
)


def all_logits() -> torch.Tensor:
    return torch.randn(21, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def expected() -> list[list[float]]:
    logprobs = all_logits().log_softmax(dim=-1)
    return [
        (logprobs[row] if row % 3 == 0 else logprobs[row, [row, 300 - row]]).tolist()
        for row in range(1, 20)
    ]


def check_rank(group: ParallelGroup) -> None:
    """What a rank finds is what one with all logits does."""
    vocabulary = Vocabulary(VOCAB, group)
    shard = all_logits()[:, vocabulary.start : vocabulary.start + vocabulary.local_size]
    section = requested_logprobs(shard, ROWS, vocabulary, torch.from_numpy).to_section()
    assert isinstance(section, RequestedLogprobs)
    found = section.by_row()
    assert list(found) == list(range(1, 20))
    for values, known in zip(found.values(), expected(), strict=True):
        np.testing.assert_allclose(values, known, atol=1e-5)


def run_rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    check_rank(ParallelGroup.connect(rank, size, store, torch.device("cpu")))
    torch.save(rank, folder / f"rank-{rank}-of-{size}")
    dist.destroy_process_group()


def test_one_rank() -> None:
    check_rank(ParallelGroup.single())


def test_several_ranks(tmp_path: Path) -> None:
    assert run_ranks(run_rank, 3, tmp_path) == [0, 1, 2]


def test_a_reader_gets_what_it_asked_for() -> None:
    whole = np.array([-3.0, -1.0, -2.0, -1.0], np.float32)
    result = StepResult(
        0,
        np.array([1, 2, 1], np.int32),
        sections=[
            Logprobs(
                np.array([-1.0, -2.0, -1.0], np.float32),
                np.array([[1], [1], [1]], np.int32),
                np.array([[-1.0], [-1.0], [-1.0]], np.float32),
            ),
            RequestedLogprobs(
                np.array([0, 1], np.int32),
                np.array([4, 2], np.int32),
                np.concatenate([whole, whole[[0, 2]]]),
            ),
        ],
    )
    logprobs = ResultLogprobs(StepResult.decode(b"".join(result.encode())))
    every = logprobs.of(0, 1, SamplingParams(logprobs=-1))
    assert every is not None
    assert (every.logprob, len(every.top)) == (-1.0, 4)
    assert list(every.top) == [(1, -1.0), (3, -1.0), (2, -2.0), (0, -3.0)]
    assert (every.top[0], every.top[1:3]) == ((1, -1.0), [(3, -1.0), (2, -2.0)])
    named = logprobs.of(1, 2, SamplingParams(logprob_token_ids=[0, 2, 0]))
    assert named is not None
    assert named.top == [(0, -3.0), (2, -2.0)]
    plain = logprobs.of(2, 1, SamplingParams(logprobs=1))
    assert plain is not None
    assert plain.top == [(1, -1.0)]
    assert logprobs.of(2, 1, SamplingParams()) is None


def test_running_requests_fit_into_a_result() -> None:
    """Two of three: the third waits, and everybody's rows are named."""
    limits = SchedulerLimits(
        block_size=4, max_num_seqs=8, token_budget=16, prefill_cap=16, num_blocks=(64,)
    )
    scheduler = Scheduler(limits)
    size = MAX_POOLED_BYTES // 4 // 2 - 2
    whole, named = RequestedTokens(None, size), RequestedTokens(np.array([7, 8], np.int32), size)
    for tokens in (whole, named, whole):
        params = SamplingParams(max_tokens=2)
        scheduler.add(Request("r", array("i", [1, 2]), 2, params, 4, requested=tokens))
    scheduler.add(Request("plain", array("i", [1, 2]), 2, SamplingParams(max_tokens=2), 4))
    seen = []
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        assert plan is not None
        plan = StepPlan.decode(b"".join(plan.encode()))
        section = plan.section(RequestedLogprobRows)
        if section is not None:
            seen.append((section.rows.tolist(), section.counts.tolist(), section.tokens.tolist()))
        scheduler.update(StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32)))
    both, last = ([0, 1], [ALL, size], [7, 8]), ([0], [ALL], [])
    assert seen == [both, both, last, last]
    scheduler.check_integrity()


def test_a_model_of_several_widths(tmp_path: Path) -> None:
    """Beside each other, of an output and of a prompt, equal where they overlap. The vocabulary has
    512 tokens: all of them are as many as the server permits."""
    folder = tiny_model("llama", tmp_path / "model", eos_token_id=511)
    settings = {
        "model.skip_tokenizer": True, "model.max_model_len": 64, "cache.num_blocks": 64,
        "scheduler.max_logprobs": 512, "scheduler.max_num_batched_tokens": 64,
    }  # fmt: skip
    greedy = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    fields: list[dict[str, Any]] = [
        {"logprobs": 20}, {"logprobs": 128}, {"logprobs": 200}, {"logprobs": -1},
        {"logprob_token_ids": [5, 500]}, {}, {"prompt_logprobs": -1}, {"prompt_logprobs": 20},
    ]  # fmt: skip
    with LLM(str(folder), settings=settings, progress=False) as llm:
        prompts = [[3, 4, 5, 6]] * len(fields)
        found = llm.generate(prompts, [SamplingParams(**greedy, **each) for each in fields])
        with pytest.raises(RequestError, match="may ask for") as caught:
            llm.generate([[3]], SamplingParams(n=128, logprobs=-1, max_tokens=60))
        assert caught.value.param == "logprobs"
        with pytest.raises(RequestError, match=r"in \[0, 512\], not 513; .* = 513 permits it"):
            llm.generate([[3]], SamplingParams(logprobs=513, max_tokens=1))
        with pytest.raises(RequestError, match="logprob_token_ids"):
            llm.generate([[3]], SamplingParams(logprob_token_ids=[512]))
    assert len({tuple(output.token_ids) for output in found}) == 1
    of_20, of_128, of_200, of_all, of_named, none = (
        output.completions[0].logprobs for output in found[:6]
    )
    assert none is None
    for few, more, many, every, named in zip(of_20, of_128, of_200, of_all, of_named, strict=True):
        assert [len(each.top) for each in (few, more, many, every)] == [20, 128, 200, 512]
        known = dict(every.top)
        assert sum(map(math.exp, known.values())) == pytest.approx(1, abs=1e-4)
        assert [token for token, _ in named.top] == [5, 500]
        for each in (few, more, many, named):
            assert known[each.token_id] == pytest.approx(each.logprob, abs=1e-4)
            assert dict(each.top) == pytest.approx({i: known[i] for i, _ in each.top}, abs=1e-4)
        assert [token for token, _ in many.top] == [token for token, _ in every.top[:200]]
    every_prompt, few_prompt = (output.prompt_scores for output in found[6:])
    assert every_prompt.num_top == 512
    assert every_prompt.top_tokens[:, :20].tolist() == few_prompt.top_tokens.tolist()

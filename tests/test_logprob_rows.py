"""The worker half of log-probabilities: of sampled tokens, of the likeliest, of named tokens and of
all, on one rank and several."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from aioinfer.errors import RequestError
from aioinfer.features.logprobs.sections import ALL, LogprobRows, Logprobs
from aioinfer.features.logprobs.worker import Work
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.llm import LLM
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.step_works import StepWorks
from tests.filled_slots import logits_runner, make_slots, rank_of, rows_plan
from tests.plans import ids
from tests.rank_processes import run_ranks
from tests.tiny_models import tiny_model

VOCAB = 301


#: More rows than named tokens are looked up for at a time; of each three rows one asks for all
#: tokens, one for two of them, and one for none.
COUNTS = [(ALL, 2, 0)[row % 3] for row in range(1, 50)]
ROWS = LogprobRows(
    np.arange(1, 50, dtype=np.int32),
    np.array([row % 9 for row in range(1, 50)], np.int32),
    np.array(COUNTS, np.int32),
    np.array([[row, 300 - row] for row in range(1, 50) if row % 3 == 1], np.int32).ravel(),
)


def all_logits() -> torch.Tensor:
    return torch.randn(51, VOCAB, generator=torch.Generator().manual_seed(5)) * 3


def check_rank(group: ParallelGroup, rows: LogprobRows = ROWS) -> None:
    """What a rank finds is what one with all logits does."""
    vocabulary, logits = Vocabulary(VOCAB, group), all_logits()
    shard = logits[:, vocabulary.start : vocabulary.start + vocabulary.local_size]
    before, slots = shard.clone(), make_slots([SamplingParams()], VOCAB)
    tokens = torch.arange(51, dtype=torch.int32) * 5
    work = Work(rank_of(slots, vocabulary))
    found = work.read_tokens(rows_plan([], []), rows, shard, tokens).to_section()
    assert isinstance(found, Logprobs)
    assert shard.equal(before)
    expected = logits.log_softmax(dim=-1)
    assert found.rows.tolist() == rows.rows.tolist()
    own = expected[rows.rows, 5 * rows.rows]
    np.testing.assert_allclose(found.sampled, own, atol=1e-5)
    best = expected[rows.rows].topk(int(rows.num_top.max()))
    assert found.top_tokens.tolist() == best.indices.tolist()
    np.testing.assert_allclose(found.top_logprobs, best.values, atol=1e-5)
    assert found.counts.tolist() == [VOCAB if count == ALL else count for count in rows.counts]
    named, first = [], 0
    for row, count in zip(rows.rows, rows.counts.tolist(), strict=True):
        tokens_of_row = rows.tokens[first : first + max(count, 0)]
        named.append(expected[row] if count == ALL else expected[row, tokens_of_row])
        first += max(count, 0)
    np.testing.assert_allclose(found.named, torch.cat(named), atol=1e-5)


def run_rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    check_rank(ParallelGroup.connect(rank, size, store, torch.device("cpu")))
    torch.save(rank, folder / f"rank-{rank}-of-{size}")
    dist.destroy_process_group()


def test_one_rank() -> None:
    check_rank(ParallelGroup.single())


@pytest.mark.parametrize("num_top", [0, 3, 128])
def test_all_rows_of_a_step(num_top: int) -> None:
    every = np.arange(51, dtype=np.int32)
    check_rank(
        ParallelGroup.single(), LogprobRows(every, np.full(51, num_top, np.int32), every * 0, ids())
    )


def test_several_ranks(tmp_path: Path) -> None:
    assert run_ranks(run_rank, 3, tmp_path) == [0, 1, 2]


def test_they_are_the_models_own() -> None:
    """Before biases, penalties and filters."""
    torch.manual_seed(7)
    logits = torch.randn(3, 40)
    params = [
        SamplingParams(temperature=0, logit_bias={11: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5, top_k=5, repetition_penalty=1.5),
    ]
    rank = rank_of(make_slots(params, 40))
    rows = LogprobRows(ids(0, 2), ids(3, 0), ids(0, 0), ids())
    runner = logits_runner(rank, StepWorks([Work(rank)]), logits)
    result = runner.step(rows_plan([0, 1, 2], [1, 1, 1], rows)).wait()
    (found,) = result.sections
    assert isinstance(found, Logprobs)
    expected = logits.log_softmax(-1)
    assert result.tokens[0] == 11
    own = expected[[0, 2], result.tokens[[0, 2]]]
    np.testing.assert_allclose(found.sampled, own, atol=1e-5)
    best = expected[0].topk(3)
    assert found.top_tokens[0].tolist() == best.indices.tolist()
    np.testing.assert_allclose(found.top_logprobs[0], best.values, atol=1e-5)


def test_a_broken_row_disturbs_no_other() -> None:
    torch.manual_seed(8)
    logits = torch.randn(2, 40)
    logits[0, 5] = math.nan
    rank = rank_of(make_slots([SamplingParams(temperature=0)] * 2, 40))
    rows = LogprobRows(ids(0, 1), ids(20, 20), ids(0, 0), ids())
    runner = logits_runner(rank, StepWorks([Work(rank)]), logits)
    result = runner.step(rows_plan([0, 1], [1, 1], rows)).wait()
    (found,) = result.sections
    assert isinstance(found, Logprobs)
    assert result.tokens[0] == -1
    assert found.sampled[1] == pytest.approx(float(logits[1].log_softmax(0).max()), abs=1e-5)


def test_more_than_there_are_tokens() -> None:
    logits = torch.randn(1, 5)
    rank = rank_of(make_slots([SamplingParams()], 5))
    rows = LogprobRows(ids(0), ids(20), ids(0), ids())
    found = Work(rank).read_tokens(rows_plan([], []), rows, logits, torch.zeros(1).int())
    expected = logits[0].log_softmax(0).sort(descending=True)
    section = found.to_section()
    assert isinstance(section, Logprobs)
    assert section.top_tokens[0].tolist() == expected.indices.tolist()
    np.testing.assert_allclose(section.top_logprobs[0], expected.values, atol=1e-5)


def test_a_model_of_several_widths(tmp_path: Path) -> None:
    """Beside each other, of an output and of a prompt, equal where they overlap. The vocabulary has
    512 tokens: all of them are as many as the server permits."""
    folder = tiny_model("llama", tmp_path / "model", eos_token_id=511)
    settings = {
        "model.tokenizer": "none", "model.max_model_len": 64, "cache.num_blocks": 64,
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

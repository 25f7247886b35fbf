"""Log-probabilities: in plans and results, in the worker, and in replies."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins

from aioinfer.api.logprobs import chat_logprobs, completion_logprobs
from aioinfer.errors import RequestError
from aioinfer.features.logprobs.planning import (
    Planning,
    ResultLogprobs,
    TokenLogprob,
    TokenLogprobs,
)
from aioinfer.features.logprobs.sections import ALL, LogprobRows, Logprobs
from aioinfer.features.logprobs.worker import Work
from aioinfer.ipc.plan import StepPlan, StepResult
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.llm import LLM
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.features import MAX_RESULT_BYTES, StepFeatures, SubmittedRequest
from aioinfer.scheduler.limits import SchedulerLimits
from aioinfer.scheduler.request import Request
from aioinfer.scheduler.scheduler import Scheduler
from aioinfer.text.tokenizer import Tokenizer
from aioinfer.worker.step_works import StepWorks
from tests.filled_slots import logits_runner, make_slots, rank_of, rows_plan
from tests.plans import ids
from tests.rank_processes import run_ranks
from tests.real_tokenizers import qwen_folder
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def tokenizer(tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(qwen_folder(tokenizer_cache))


def test_a_chat_lists_the_likeliest_with_each_token(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("Hello world")
    logprobs = chat_logprobs(
        tokenizer,
        [TokenLogprob(one, -0.5, [(one, -0.5), (two, -1.5)]), TokenLogprob(two, -0.25, [])],
    )
    hello = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    world = {"token": " world", "logprob": -0.25, "bytes": list(b" world")}
    assert to_builtins(logprobs) == {
        "content": [
            hello | {"top_logprobs": [hello, world | {"logprob": -1.5}]},
            world | {"top_logprobs": []},
        ],
        "refusal": None,
    }


def test_parts_of_a_character_have_exact_bytes(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("𓀀")
    assert len(tokens) > 1
    found = chat_logprobs(tokenizer, [TokenLogprob(token, -1.0, []) for token in tokens])
    assert b"".join(bytes(entry.bytes) for entry in found.content).decode() == "𓀀"


def test_a_completion_has_parallel_lists(tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode("Hello world")
    tokens = [TokenLogprob(one, -0.5, [(one, -0.5)]), TokenLogprob(two, -2.0, [(one, -1.0)])]
    assert to_builtins(completion_logprobs(tokenizer, tokens, 10)) == {
        "text_offset": [10, 15],
        "token_logprobs": [-0.5, -2.0],
        "tokens": ["Hello", " world"],
        "top_logprobs": [{"Hello": -0.5}, {"Hello": -1.0, " world": -2.0}],
    }


def test_what_is_impossible_has_a_number(tokenizer: Tokenizer) -> None:
    tokens = [TokenLogprob(5, -math.inf, [(6, -math.inf)])]
    assert chat_logprobs(tokenizer, tokens).content[0].top_logprobs[0].logprob == -9999.0
    assert completion_logprobs(tokenizer, tokens, 0).token_logprobs == [-9999.0]


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


def make_scheduler(**fields: int) -> Scheduler:
    limits = {"block_size": 4, "max_num_seqs": 8, "token_budget": 16, "prefill_cap": 16}
    features = StepFeatures([Planning(None)])
    return Scheduler(SchedulerLimits(num_blocks=(64,), **limits | fields), features=features)


def make_request(prompt_len: int, max_tokens: int, use: TokenLogprobs | None) -> Request:
    prompt, params = array("i", range(prompt_len)), SamplingParams(max_tokens=max_tokens)
    uses = () if use is None else (use,)
    return Request("r", prompt, prompt_len, params, prompt_len + max_tokens, uses=uses)


def run(scheduler: Scheduler) -> list[tuple[StepPlan, LogprobRows | None]]:
    """Runs all requests; returns the plans as they travel, and their sections."""
    found = []
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        assert plan is not None
        plan = StepPlan.decode(b"".join(plan.encode()))
        found.append((plan, plan.section(LogprobRows)))
        scheduler.update(StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32)))
        scheduler.check_integrity()
    return found


def test_a_reader_gets_what_it_asked_for() -> None:
    """The rows of a result that have log-probabilities are 0, 2, 3 and 5."""
    whole = np.array([-3.0, -1.0, -2.0, -1.0], np.float32)
    found = Logprobs(
        np.array([0, 2, 3, 5], np.int32),
        np.array([-1.0, -2.0, -1.5, -4.0], np.float32),
        np.array([[1, 3], [1, 3], [3, 1], [0, 2]], np.int32),
        np.array([[-1.0, -1.1], [-1.0, -1.1], [-0.5, -1.5], [-0.25, -3.0]], np.float32),
        np.array([4, 2, 0, 0], np.int32),
        np.concatenate([whole, whole[[0, 2]]]),
    )
    result = StepResult(0, np.array([1, 9, 2, 1, 9, 3], np.int32), sections=[found])
    logprobs = ResultLogprobs.of_result(StepResult.decode(b"".join(result.encode())))
    assert logprobs is not None
    every = logprobs.of(0, 1, SamplingParams(logprobs=-1))
    assert every is not None
    assert (every.token_id, every.logprob, len(every.top)) == (1, -1.0, 4)
    assert list(every.top) == [(1, -1.0), (3, -1.0), (2, -2.0), (0, -3.0)]
    assert (every.top[0], every.top[1:3]) == ((1, -1.0), [(3, -1.0), (2, -2.0)])
    named = logprobs.of(2, 2, SamplingParams(logprob_token_ids=[0, 2, 0]))
    assert named is not None
    assert (named.logprob, named.top) == (-2.0, [(0, -3.0), (2, -2.0)])
    plain = logprobs.of(3, 1, SamplingParams(logprobs=1))
    assert plain is not None
    assert (plain.logprob, plain.top) == (-1.5, [(3, -0.5)])
    assert logprobs.of(1, 9, SamplingParams()) is None, "a row without log-probabilities"
    tokens, values = logprobs.likeliest(5)
    assert (tokens.tolist(), values.tolist()) == ([0, 2], [-0.25, -3.0])
    assert ResultLogprobs.of_result(StepResult(0, np.array([1], np.int32))) is None


def test_running_requests_fit_into_a_result() -> None:
    """Two of three: the third waits, and the rows of all requests are named."""
    scheduler = make_scheduler()
    size = MAX_RESULT_BYTES // 4 // 2 - 2
    whole = TokenLogprobs(0, whole=size)
    named = TokenLogprobs(0, np.arange(size, dtype=np.int32))
    for use in (whole, named, whole, None):
        scheduler.add(make_request(2, 2, use))
    seen = [
        (section.rows.tolist(), section.counts.tolist(), len(section.tokens))
        for _, section in run(scheduler)
        if section is not None
    ]
    both, last = ([0, 1], [ALL, size], size), ([0], [ALL], 0)
    assert seen == [both, both, last, last]


def test_plans_without_such_rows_have_no_section() -> None:
    """Of a prompt, the last chunk alone brings log-probabilities."""
    scheduler = make_scheduler(token_budget=8)
    scheduler.add(make_request(20, 3, TokenLogprobs(5)))
    scheduler.add(make_request(3, 9, None))
    seen = [None if s is None else (s.rows.tolist(), s.num_top.tolist()) for _, s in run(scheduler)]
    assert seen[:2] == [None, None]
    assert seen[2:5] == [([0], [5])] * 3
    assert set(seen[5:]) == {None}


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(-1, 9)), max_size=9))
def test_rows_are_ascending_and_of_the_requests_that_ask(asked: list[tuple[int, int, int]]) -> None:
    """`asked`: the length of the prompt and of the output, and how many of the likeliest tokens;
    -1 asks for no log-probabilities."""
    scheduler = make_scheduler(token_budget=7, max_num_seqs=4)
    requests = [
        make_request(length, new, None if top < 0 else TokenLogprobs(top))
        for length, new, top in asked
    ]
    for request in requests:
        scheduler.add(request)
    listed = 0
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        assert plan is not None
        section = plan.section(LogprobRows)
        expected = [
            (row, use.num_top)
            for row, request in enumerate(scheduler._posted.last.sampled)
            if request is not None and (use := request.use(TokenLogprobs)) is not None
        ]
        rows = [] if section is None else zip(section.rows, section.num_top, strict=True)
        assert list(rows) == expected
        listed += len(expected)
        scheduler.update(StepResult(plan.step_id, np.zeros(int(plan.samples.sum()), np.int32)))
    assert listed == sum(new for _, new, top in asked if top >= 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None), ({"logprobs": 5}, (5, 0)), ({"logprobs": 0}, (0, 0)),
        ({"logprobs": -1}, (0, ALL)), ({"logprobs": 200}, (0, ALL)),
        ({"logprob_token_ids": [3, 4]}, (0, 2)),
    ],
)  # fmt: skip
def test_uses_of_a_request(fields: dict[str, object], expected: tuple[int, int] | None) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    for index in range(2):
        use = Planning.use_of(SubmittedRequest(params, array("i", [1]), None, 500, 64, 512), index)
        assert (None if use is None else (use.num_top, use.count)) == expected
        assert use is None or use.result_bytes == {0: 0, 2: 16, ALL: 8 + 4 * 500}[use.count]

"""Ranks that shard the vocabulary sample what one rank with all logits samples: over real
processes, and for the candidates alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from aioinfer.features.logprobs.sections import LogprobRows
from aioinfer.features.logprobs.worker import Work
from aioinfer.ipc.plan import Admission, Admissions
from aioinfer.layers.embedding import Vocabulary
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.host_sampling import filter_tokens
from aioinfer.worker.slots import Slots
from aioinfer.worker.vocab_parallel import Candidates, keep_candidates
from tests.filled_slots import apply, rank_of, rows_plan, sample
from tests.plans import make_plan
from tests.rank_processes import run_ranks

NONE = np.empty(0, np.int32)
VOCAB = 3001
GREEDY = SamplingParams(temperature=0)
BANNED = (5, 2000, 3000)
PROMPT = [1, 2990, 1500, 1500, 7, 1, 999]


class Case(NamedTuple):
    logits: torch.Tensor  # [S, vocabulary]
    params: list[SamplingParams]  # of row i, whose slot is i; which log-probabilities, too
    # how many it takes with 2 and with 3 ranks, where that is to be tested
    all_gathers: tuple[int, int] | None = None


def spread(rows: int, scale: float, seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def broken(rows: int) -> torch.Tensor:
    """Logits of rows that hold NaN, infinity or nothing, in different shards, and of one that is
    sound."""
    logits = spread(rows, 1, 3)
    logits[0, 2999] = logits[1, 4] = math.nan
    logits[2, 1500] = math.inf
    logits[3] = -math.inf
    logits[4, :3000] = -math.inf
    return logits


def few(*values: float) -> torch.Tensor:
    return torch.tensor(values).expand(3, -1).contiguous()


ADJUSTED = SamplingParams(
    repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.4,
    logit_bias={0: 3.0, 1400: 4.0, 2990: 5.0}, min_tokens=20,
    temperature=0.3, logprobs=3,
)  # fmt: skip
CASES: dict[str, Callable[[], Case]] = {
    "greedy": lambda: Case(spread(9, 3, 1), [GREEDY] * 9, (1, 1)),
    "ties": lambda: Case(
        spread(9, 2, 2).round(), [GREEDY, SamplingParams(top_k=3), SamplingParams(top_p=0.2)] * 3
    ),
    "temperatures": lambda: Case(
        spread(20, 2, 3), [SamplingParams(temperature=0.2 + 0.1 * i) for i in range(20)], (1, 1)
    ),
    "few tokens": lambda: Case(
        spread(20, 4, 4), [SamplingParams(top_k=1 + 6 * i, top_p=0.9) for i in range(20)], (1, 1)
    ),
    "min-p": lambda: Case(spread(9, 4, 5), [SamplingParams(min_p=0.1 / 4**i) for i in range(9)]),
    "many tokens": lambda: Case(
        spread(6, 1, 6),
        [SamplingParams(top_k=k, min_p=p) for k in (200, 700, 2999) for p in (0.0, 0.01)],
        (3, 3),
    ),
    "flat": lambda: Case(
        spread(8, 0.1, 7), [SamplingParams(top_p=0.05 + 0.135 * i) for i in range(8)], (3, 3)
    ),
    "all equal": lambda: Case(
        torch.zeros(2, VOCAB), [SamplingParams(top_p=0.5), SamplingParams(top_k=5)], (3, 3)
    ),
    "mixed": lambda: Case(
        spread(4, 3, 8),
        [GREEDY, SamplingParams(top_k=9), SamplingParams(), SamplingParams(top_p=0.8, logprobs=20)],
        (3, 3),
    ),
    "adjusted": lambda: Case(
        spread(6, 1, 9),
        [ADJUSTED, GREEDY, SamplingParams(temperature=0, frequency_penalty=-2.0, logprobs=0)] * 2,
    ),
    "broken": lambda: Case(broken(6), [GREEDY] * 6),
    "broken random": lambda: Case(broken(6), [SamplingParams()] * 6),
    "broken filtered": lambda: Case(broken(6), [SamplingParams(top_k=4, top_p=0.9)] * 6),
    "broken logprobs": lambda: Case(broken(6), [SamplingParams(logprobs=2)] * 6),
    "a rank without tokens": lambda: Case(
        few(0.0, 1.0, 0.5, -2.0),
        [GREEDY, SamplingParams(logprobs=20, logit_bias={2: 9.0}), SamplingParams(top_p=0.7)],
    ),
    "one token": lambda: Case(
        few(2.0),
        [GREEDY, SamplingParams(logprobs=1), SamplingParams(top_k=2, repetition_penalty=1.2)],
    ),
}


def make_slots(params: list[SamplingParams], vocab_size: int) -> Slots:
    slots = Slots(len(params), 64, 16, vocab_size, torch.device("cpu"))
    prompt = np.array(PROMPT if vocab_size == VOCAB else [0], np.int32)
    admissions = (
        Admission(slot, prompt, 3, p, slot, BANNED if p.min_tokens else ())
        for slot, p in enumerate(params)
    )
    apply(slots, make_plan(sections=[Admissions.of(admissions)]))
    return slots


def sample_case(case: Case, vocabulary: Vocabulary | None) -> list[torch.Tensor]:
    """Returns the tokens, the rows with log-probabilities, and the log-probabilities of these as in
    `Logprobs`; on a rank if a vocabulary is given."""
    rows, vocab_size = case.logits.shape
    slots = make_slots(case.params, vocab_size)
    logits = (
        case.logits
        if vocabulary is None
        else case.logits[:, vocabulary.start : vocabulary.start + vocabulary.local_size]
    )
    positions = np.full(rows, len(PROMPT) if vocab_size == VOCAB else 1, np.int32)
    tokens = sample(logits, slots, np.arange(rows, dtype=np.int32), positions, vocabulary)
    asking = [(row, p.logprobs) for row, p in enumerate(case.params) if p.logprobs is not None]
    if not asking:
        return [tokens, tokens[:0], tokens.new_empty(0), tokens[:0, None], tokens[:0, None]]
    places, num_top = np.array(asking, np.int32).T.copy()
    section = LogprobRows(places, num_top, places * 0, NONE)
    found = Work(rank_of(slots, vocabulary)).read_tokens(rows_plan([], []), section, logits, tokens)
    return [tokens, *found.parts[:4]]


class CountingGroup(ParallelGroup):
    """Counts the all-gathers."""

    all_gathers = 0

    def all_gather_last(self, values: torch.Tensor) -> torch.Tensor:
        self.all_gathers += 1
        return super().all_gather_last(values)


def run_rank(rank: int, size: int, folder: Path) -> None:
    """The body of a process: samples in every case and saves what it got, and in how many
    all-gathers."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{size}"), size)
    ParallelGroup.connect(rank, size, store, torch.device("cpu"))
    group = CountingGroup(rank, size)  # of all ranks of the world
    results = {}
    for name, make in CASES.items():
        case, group.all_gathers = make(), 0
        results[name] = (
            sample_case(case, Vocabulary(case.logits.shape[1], group)),
            group.all_gathers,
        )
    torch.save(results, folder / f"rank-{rank}-of-{size}")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 3])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each of several ranks saved."""
    return run_ranks(run_rank, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_samples_what_one_alone_does(ranks: list[dict[str, Any]], name: str) -> None:
    case = CASES[name]()
    expected = sample_case(case, None)
    for results in ranks:
        sampled, all_gathers = results[name]
        for number in (0, 1, 3):
            assert sampled[number].tolist() == expected[number].tolist()
        broken = (expected[0][expected[1].long()] < 0).tolist()
        for ours, theirs in zip((sampled[2], sampled[4]), (expected[2], expected[4]), strict=True):
            sound = [i for i in range(len(theirs)) if not broken[i]]
            torch.testing.assert_close(
                ours[sound], theirs[sound], rtol=1e-5, atol=1e-5, equal_nan=True
            )
        if case.all_gathers is not None:
            assert all_gathers == case.all_gathers[len(ranks) - 2]
    first = ranks[0][name][0]
    assert all(
        torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
        for other in ranks
        for a, b in zip(first, other[name][0], strict=True)
    )


def test_broken_rows_give_no_token(ranks: list[dict[str, Any]]) -> None:
    for kind in ("broken", "broken random", "broken filtered"):
        tokens = ranks[0][kind][0][0].tolist()
        assert tokens[:5] == [-1, -1, -1, -1, 3000]
        assert tokens[5] >= 0


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("count", [1, 7, 60, 400])
def test_candidates_keep_what_the_filters_keep_or_need_more(scale: float, count: int) -> None:
    """With more and more candidates the first answer is right, and with all there is one."""
    ranks, shard, vocab = 3, 134, 400
    logits = spread(1, scale, 11, vocab)[0].numpy()
    if scale == 4.0:
        logits = logits.round()
    complete = np.array([count >= len(logits[rank * shard :][:shard]) for rank in range(ranks)])
    answered = 0
    for top_k in (0, 1, 20, 399, 400):
        for top_p in (1.0, 0.9, 0.5, 1e-6):
            for min_p in (0.0, 0.3, 1e-6):
                found = Candidates.empty(ranks, min(count, shard))
                for rank in range(ranks):
                    found.find(rank, logits[rank * shard :][:shard], rank * shard, top_p)
                kept = keep_candidates(found, complete, vocab, top_k, top_p, min_p)
                if kept is None:
                    assert not complete.all()
                    continue
                answered += 1
                expected = filter_tokens(logits, float(logits.max()), top_k, top_p, min_p).tolist()
                missing = set(kept[1].tolist()) ^ set(expected)
                assert len(missing) <= (1 if top_p < 1 else 0), (
                    "only rounding of a sum may move top-p's border, by a token"
                )
                assert (logits[kept[1]] == kept[0]).all()
    assert answered >= {1: 0, 7: 10, 60: 20, 400: 60}[count]

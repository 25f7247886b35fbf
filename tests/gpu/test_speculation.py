"""Lookahead rows on a GPU: the text of a plain run, in graphs and without, for drafts of n-grams
and for known ones, right and wrong; and that nothing is compiled while serving."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_settings import (
    NEEDS_TWO,
    TWO_STAGES,
    WAYS,
    check_nothing_was_compiled,
    inline_llm,
    worker_of,
)
from random_models import odd_vocabulary_model, random_model

from aioinfer import LLM, SamplingParams
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS, Planning
from aioinfer.llm import Output
from aioinfer.scheduler.request import Request
from aioinfer.worker.features import ProposalRows, WorkerFeature
from aioinfer.worker.gpu_device import GpuDevice
from aioinfer.worker.step_works import StepWorks

VOCAB_SIZE, TOKENS = 4001, 96
RNG = random.Random(0)
#: Prompts that repeat themselves, so that n-grams are found.
PHRASES = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(RNG.randint(3, 30))] for _ in range(12)]
PROMPTS = [phrase * RNG.randint(1, 4) for phrase in PHRASES for _ in range(3)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 0.8, "frequency_penalty": -0.3},
    {"temperature": 0.0, "logit_bias": {7: 3.0, 2001: 4.0}, "min_tokens": 20},
    {"temperature": 0.6, "top_p": 0.9, "presence_penalty": -0.5},
    {"temperature": 0.0, "allowed_token_ids": list(range(40, 3000))},
]
PARAMS = [
    SamplingParams(ignore_eos=True, seed=number, max_tokens=TOKENS, **KINDS[number % len(KINDS)])
    for number in range(len(PROMPTS))
]


class KnownDrafts(WorkerFeature):
    """Proposes the texts of a plain run, by the first tokens of a slot; every fifth position
    something else."""

    proposes = True
    key_len = 3

    def __init__(self, rank: Any, texts: Sequence[Sequence[int]]):
        super().__init__(rank)
        longest = max(map(len, texts))
        padded = [[*text, *[1] * (longest - len(text))] for text in texts]
        self._texts = torch.tensor(padded, dtype=torch.int32, device=rank.device)

    def propose(self, rows: ProposalRows) -> None:
        tokens = self.rank.slots.tokens
        keys = tokens[:, : self.key_len].index_select(0, rows.slots)
        text = (keys[:, None] == self._texts[None, :, : self.key_len]).all(-1).byte().argmax(1)
        at = rows.bases + rows.offsets
        draft = self._texts[text, at.clamp(max=self._texts.shape[1] - 1).long()]
        draft = torch.where(at % 5 == 0, 2, draft)
        where = rows.slots.long(), at.long()
        tokens[where] = torch.where(rows.offsets > 0, draft, tokens[where])


class AlwaysAhead:
    """Replaces the choice of drafts: from 0 to `most` of each request, in turn."""

    def __init__(self, planning: Planning, most: int):
        self._allows, self._most, self._step = planning._allows_lookahead, most, 0

    def __call__(self, decodes: Sequence[Request]) -> dict[Request, int] | None:
        self._step += 1
        if self._step % 7 == 0:
            return None
        count = self._most + 1
        return {
            request: (self._step + i) % count
            for i, request in enumerate(decodes)
            if self._allows(request)
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return odd_vocabulary_model(tmp_path_factory.mktemp("model"), VOCAB_SIZE)


def running(folder: Path, **settings: Any) -> AbstractContextManager[LLM]:
    usual = {"speculation__method": "none", "speculation__max_draft_tokens": 4}
    return inline_llm(folder, **usual | settings)


def look_always_ahead(llm: LLM, most: int = 4) -> Planning:
    planning = llm.frontend.engines[0].features.of(Planning)
    planning.lookahead = AlwaysAhead(planning, most)  # type: ignore[method-assign]
    return planning


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Output]:
    with running(folder) as llm:
        return llm.generate(PROMPTS, PARAMS)


def equal_texts(outputs: Sequence[Output], expected: Sequence[Output]) -> int:
    return sum(
        one.token_ids == other.token_ids for one, other in zip(outputs, expected, strict=True)
    )


def check(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """Float32 sums are rounded differently by the products of other numbers of rows, which a near
    tie may show in a request."""
    assert equal_texts(outputs, expected) >= len(expected) - 1
    for one, other in zip(outputs, expected, strict=True):
        assert len(one.token_ids) == TOKENS
        mine, theirs = one.completions[0].logprobs, other.completions[0].logprobs
        if one.token_ids == other.token_ids and mine is not None and theirs is not None:
            for entry, wanted in zip(mine, theirs, strict=True):
                assert entry.token_id == wanted.token_id
                assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        *WAYS,
        pytest.param({"scheduler__max_num_batched_tokens": 64}, id="chunks beside drafts"),
        *(
            pytest.param(
                TWO_STAGES | more, id=f"two stages {more}",
                marks=[NEEDS_TWO, pytest.mark.timeout(300)],
            )
            for more in (
                {},
                {"parallel__cuda_graphs": False},
                {"scheduler__max_num_batched_tokens": 64},
                {"cache__num_blocks": 12},
            )
        ),
    ],
)  # fmt: skip
def test_text_is_that_of_a_plain_run(
    folder: Path, expected: list[Output], settings: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With drafts of n-grams, of which random rows follow."""
    with running(folder, speculation__method="ngram", **settings) as llm:
        look_always_ahead(llm)
        check(llm.generate(PROMPTS, PARAMS), expected)
        counts = llm.frontend.engines[0].metrics.counts
        assert counts[DRAFT_TOKENS] > counts[ACCEPTED] > 0
        if "parallel__executor" not in settings:
            device = worker_of(llm).runner.device
            assert isinstance(device, GpuDevice)
            graphs = settings.get("parallel__cuda_graphs", True)
            assert bool(device.graphs.lookahead.graphs) == graphs
    if "parallel__pipeline_parallel_size" in settings:
        assert "was compiled while serving" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma3_text", {"head_dim": 64, "sliding_window": 24}),
        ("deepseek_v2", {}),
        ("qwen3_moe", {"head_dim": 64}),
    ],
    ids=["windows", "latents", "experts"],
)
def test_text_of_other_layers(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Sliding windows, whose blocks are freed only when the rows are settled, latent attention, and
    experts."""
    random_model(
        tmp_path, family=family, vocab_size=VOCAB_SIZE, initializer_range=0.05, eos_token_id=None,
        max_position_embeddings=1024, **fields,
    )  # fmt: skip
    with running(tmp_path) as llm:
        expected = llm.generate(PROMPTS, PARAMS)
    with running(tmp_path, speculation__method="ngram") as llm:
        look_always_ahead(llm)
        outputs = llm.generate(PROMPTS, PARAMS)
    assert equal_texts(outputs, expected) >= len(expected) - 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_known_drafts_are_kept(
    folder: Path, expected: list[Output], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most are: a step gives more than a token. In bfloat16 most texts are the same as well."""
    settings = {"model__dtype": dtype}
    if dtype == "bfloat16":
        with running(folder, **settings) as llm:
            expected = llm.generate(PROMPTS, PARAMS)
    propose_known_drafts(expected, monkeypatch)
    with running(folder, speculation__method="ngram", **settings) as llm:
        kept = count_kept_drafts(look_always_ahead(llm))
        outputs = llm.generate(PROMPTS, PARAMS)
    assert equal_texts(outputs, expected) >= len(expected) - (1 if dtype == "float32" else 18)
    # three prompts of a phrase begin alike, and every fifth draft is wrong
    assert kept[1] > 0.1 * kept[0] > 100, kept


def propose_known_drafts(expected: Sequence[Output], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives engines that start from now on `KnownDrafts` of the expected texts."""
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, expected, strict=True)]
    load = StepWorks.load

    def with_known_drafts(rank: Any, names: Any = ()) -> Any:
        return StepWorks([*load(rank, names).all, KnownDrafts(rank, texts)])

    monkeypatch.setattr(StepWorks, "load", with_known_drafts)


def count_kept_drafts(planning: Planning) -> list[int]:
    """Returns the numbers of lookahead rows and of those that are kept, which grow as steps end."""
    kept = [0, 0]
    planning._finds_drafts = False  # of constrained requests: they are no n-grams
    take = planning.take_lookahead

    def count(request: Request, rows: int, number: int) -> None:
        kept[0] += rows
        kept[1] += number
        take(request, rows, number)

    planning.take_lookahead = count  # type: ignore[method-assign]
    return kept


def test_predicted_texts_are_kept(folder: Path, expected: list[Output]) -> None:
    """Texts that were predicted rightly, and wrongly; the second time in slots that others had."""
    with running(folder, speculation__method="ngram", scheduler__max_num_seqs=20) as llm:
        look_always_ahead(llm)
        counts, shares = llm.frontend.engines[0].metrics.counts, list[float]()
        for wrong in (False, True):
            params = [
                replace(each, predicted_tokens=tuple([5] * TOKENS if wrong else output.token_ids))
                for each, output in zip(PARAMS, expected, strict=True)
            ]
            kept, drafts = counts[ACCEPTED], counts[DRAFT_TOKENS]
            check(llm.generate(PROMPTS, params), expected)
            kept, drafts = counts[ACCEPTED] - kept, counts[DRAFT_TOKENS] - drafts
            shares.append(kept / drafts)
    assert shares[0] > max(0.6, shares[1]), shares


def test_what_another_request_had_for_an_answer_is_kept(
    folder: Path, expected: list[Output]
) -> None:
    """The same requests once more: their texts reach the workers while they run."""
    settings = {"speculation__method": "ngram", "cache__enable_prefix_caching": True}
    with running(folder, **settings) as llm:
        planning = look_always_ahead(llm)
        always_ahead = planning.lookahead

        def look(decodes: Sequence[Request]) -> Mapping[Request, int] | None:
            planning._look(decodes)
            return always_ahead(decodes)

        planning.lookahead = look  # type: ignore[method-assign]
        counts, shares = llm.frontend.engines[0].metrics.counts, list[float]()
        for _ in range(2):
            kept, drafts = counts[ACCEPTED], counts[DRAFT_TOKENS]
            check(llm.generate(PROMPTS, PARAMS), expected)
            kept, drafts = counts[ACCEPTED] - kept, counts[DRAFT_TOKENS] - drafts
            shares.append(kept / drafts)
        check_nothing_was_compiled(llm)
    assert shares[1] > max(0.5, shares[0]), shares


def test_replayed_steps_are_graphs_with_lookahead(folder: Path) -> None:
    with running(folder, speculation__method="ngram") as llm:
        look_always_ahead(llm)
        device = worker_of(llm).runner.device
        assert isinstance(device, GpuDevice)
        replayed: list[int] = []
        replay = device.graphs.lookahead.replay

        def note(size: int) -> None:
            replayed.append(size)
            replay(size)

        device.graphs.lookahead.replay = note  # type: ignore[method-assign]
        llm.generate(PROMPTS[:6], PARAMS[:1] * 6)
        assert len(replayed) > TOKENS // 5
        report = llm.frontend.engines[0].report
        sizes = {ahead: [n for n, _, of in report.step_times if of == ahead] for ahead in (0, 1)}
        assert sizes[True] == list(device.graphs.lookahead.sizes)
        assert sizes[False] == list(device.graphs.decode.sizes)
        assert all(0.0 < seconds < 0.1 for _, seconds, _ in report.step_times)


def test_nothing_is_compiled_while_serving(folder: Path) -> None:
    with running(folder, speculation__method="ngram", model__dtype="bfloat16") as llm:
        look_always_ahead(llm)
        llm.generate(PROMPTS, PARAMS)
        llm.generate(PROMPTS[:1], PARAMS[:1])
        check_nothing_was_compiled(llm)

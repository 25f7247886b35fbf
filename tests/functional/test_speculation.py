"""Speculation changes no text: with drafts of n-grams, wherever a row costs nothing, each request
gets what it gets without, under every way of sampling, preemption, chunks, aborts, lost workers,
and with two ranks or stages."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.engine import recovery
from aioinfer.errors import EngineDeadError
from aioinfer.features.speculation.costs import RowTimes
from aioinfer.features.speculation.planning import ACCEPTED, DRAFT_TOKENS
from aioinfer.llm import CompletionOutput
from aioinfer.sampling_params import BeamSearch, GrammarSpec
from tests.executor_runs import planning_ahead
from tests.functional.test_equality import check_at_rest, serving
from tests.gpu.random_models import random_model, random_prompts

pytestmark = pytest.mark.extended

VOCAB_SIZE, END, TOKENS = 128, 2, 48
SETTINGS: dict[str, Any] = {
    "parallel.executor": "inline", "parallel.cpu_threads": 1, "parallel.restart_workers": 1000,
    "model.dtype": "float32", "model.max_model_len": 256, "cache.block_size": 8,
    "cache.num_blocks": 400, "scheduler.max_num_seqs": 8, "scheduler.max_num_batched_tokens": 64,
}  # fmt: skip
#: What requests ask for, beside the number of tokens.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": {"temperature": 0.3},
    "filters": {"temperature": 0.6, "top_k": 6, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.05},
    "penalties": {"temperature": 0.4, "frequency_penalty": 0.05, "presence_penalty": 0.1},
    "bias": {"temperature": 0.0, "logit_bias": {20: 5.0, 30: -20.0}},
    "bias and a seed": {"temperature": 0.4, "logit_bias": {20: 3.0, 30: -20.0}},
    "repetition and a seed": {"temperature": 0.5, "repetition_penalty": 1.1, "n": 2},
    "allowed tokens": {"temperature": 0.4, "allowed_token_ids": tuple(range(5, 90))},
    "bad words": {"temperature": 0.0, "bad_words": ("\u0114", "\u0120")},
    "siblings": {"temperature": 0.4, "n": 3},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "named tokens": {"temperature": 0.4, "logprob_token_ids": (5, 77)},
    "few tokens": {"temperature": 0.0, "max_tokens": 5},
    "an end token": {"temperature": 0.9, "ignore_eos": False, "logit_bias": {END: 6.0}},
    "min_tokens": {
        "temperature": 0.0, "ignore_eos": False, "logit_bias": {END: 50.0}, "min_tokens": 17,
    },
    "a grammar": {"temperature": 1.0, "grammar": GrammarSpec("regex", r"([\x01-\x08]){20}")},
    "beam search": {"temperature": 0.0, "beam_search": BeamSearch(2), "n": 2},
}  # fmt: skip
#: Prompts that repeat themselves, so that the text is likely to.
PROMPTS = [motif * 4 for motif in random_prompts([3 + 2 * i for i in range(7)], VOCAB_SIZE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, family="llama", eos_token_id=END,
        initializer_range=0.12,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of so small a model say nothing; so every request has all drafts, always."""
    monkeypatch.setattr(RowTimes, "seconds", lambda self, rows: 0.001)


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[LLM]:
    ahead = planning_ahead(settings)
    given = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    with ahead, LLM(str(folder), settings=given, progress=False) as llm:
        yield llm
        check_at_rest(llm)


@contextmanager
def speculating(folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine that has drafts, and keeps many but not all of them."""
    with running(folder, speculation__method="ngram", **settings) as llm:
        yield llm
        counts = llm.frontend.engines[0].metrics.counts
        assert counts[DRAFT_TOKENS] > counts[ACCEPTED] > 60


def params_of(case: str, stop: str = "") -> SamplingParams:
    fields = {"seed": 11, "max_tokens": 32, "ignore_eos": True} | CASES[case]
    if "beam_search" in fields:
        del fields["seed"]
    return SamplingParams(**fields, stop=[stop] if stop else [])


def requests(stop: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """Each case, and two with a stop string, with several prompts."""
    params = [params_of(case) for case in CASES]
    params += [params_of(case, stop) for case in ("greedy", "seed")]
    pairs = [
        (PROMPTS[(i + j) % len(PROMPTS)], each) for i in range(2) for j, each in enumerate(params)
    ]
    return [prompt for prompt, _ in pairs], [each for _, each in pairs]


def check(found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish_reason, one.stop_reason) == (
            other.text, other.finish_reason, other.stop_reason,
        )  # fmt: skip
        assert (one.logprobs is None) == (other.logprobs is None)
        for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert (a.token_id, a.text) == (b.token_id, b.text)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def check_twice(llm: LLM, stop: str, expected: list[list[CompletionOutput]]) -> None:
    """Checks all requests, and then each case once more from the prefix cache; with workers apart,
    whose steps take long, each case with one prompt both times."""
    prompts, params = requests(stop)
    half = slice(len(params) // 2)
    is_inline = llm.frontend.config.parallel.executor == "inline"
    for some in (slice(None) if is_inline else half, half):
        outputs = llm.generate(prompts[some], params[some])
        for found, wanted in zip(outputs, expected[some], strict=True):
            check(found.completions, wanted)
    assert any(output.num_cached_tokens for output in outputs)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with running(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def stop(plain: LLM) -> str:
    """A string within the greedy text of the first prompts."""
    return plain.generate([PROMPTS[0]], params_of("greedy"))[0].text[21:23]


@pytest.fixture(scope="module")
def expected(plain: LLM, stop: str) -> list[list[CompletionOutput]]:
    found = [output.completions for output in plain.generate(*requests(stop))]
    reasons = {each.finish_reason for completions in found for each in completions}
    assert reasons == {"length", "stop"}
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculation__max_draft_tokens": 1, "scheduler__max_num_seqs": 3},
        {"speculation__max_draft_tokens": 15, "cache__block_size": 1, "cache__num_blocks": 3000},
        {"scheduler__plan_ahead": False, "scheduler__max_num_batched_tokens": 9},
        {"parallel__executor": "multiprocess", "parallel__tensor_parallel_size": 2},
        {"parallel__executor": "multiprocess", "parallel__pipeline_parallel_size": 2},
    ],
    ids=str,
)
def test_the_text_is_the_plain_one(
    folder: Path, settings: Mapping[str, Any], expected: list[list[CompletionOutput]], stop: str
) -> None:
    with speculating(folder, **settings) as llm:
        check_twice(llm, stop, expected)


def test_preempted_requests(
    folder: Path, expected: list[list[CompletionOutput]], stop: str
) -> None:
    with speculating(folder, cache__num_blocks=40) as llm:
        for found, wanted in zip(llm.generate(*requests(stop)), expected, strict=True):
            check(found.completions, wanted)
        assert llm.frontend.stats()["preemptions"] > 5


def test_one_request_takes_fewer_steps(folder: Path, plain: LLM) -> None:
    """The text of this prompt repeats itself."""
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    wanted = plain.generate([PROMPTS[2]], params)[0].completions
    with running(folder, speculation__method="ngram") as llm:
        check(llm.generate([PROMPTS[2]], params)[0].completions, wanted)
        assert llm.frontend.stats()["steps"] < 75


def six_params() -> list[SamplingParams]:
    """Of texts that do not repeat themselves, every second one under a grammar."""
    fields: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.2}
    grammar = {"grammar": GrammarSpec("regex", r"[\x01-\x38]{48}")}
    return [
        SamplingParams(seed=seed, **fields, **(grammar if seed % 2 else {})) for seed in range(6)
    ]


def test_a_predicted_output_is_taken_in_few_steps(folder: Path, plain: LLM) -> None:
    """A text that does not repeat itself, predicted rightly, or with a wrong part; in slots that
    other requests have had, after preemptions, and under a grammar."""
    prompts = random_prompts([5, 6, 7, 8, 9, 10], VOCAB_SIZE)
    params = six_params()
    wanted = [output.completions for output in plain.generate(prompts, params)]
    counts: list[tuple[int, int]] = []
    for settings in ({}, {"cache__num_blocks": 32}, {"scheduler__max_num_seqs": 2}):
        with running(folder, **settings) as llm:
            for wrong in (None, 20, 0):
                predicted = []
                for each, (completion,) in zip(params, wanted, strict=True):
                    tokens = completion.token_ids.copy()
                    if wrong is not None:
                        tokens[wrong : wrong + 3] = [VOCAB_SIZE - 1] * 3
                    predicted.append(replace(each, predicted_tokens=tuple(tokens)))
                metrics = llm.frontend.engines[0].metrics.counts
                before = metrics.copy()
                for found, expected in zip(llm.generate(prompts, predicted), wanted, strict=True):
                    check(found.completions, expected)
                delta = metrics - before
                counts.append((delta[ACCEPTED], delta[DRAFT_TOKENS]))
            if settings == {"cache__num_blocks": 32}:
                assert llm.frontend.stats()["preemptions"] > 1
    for accepted, drafts in counts:
        assert 0.5 * drafts < accepted
        assert accepted > 6 * 0.6 * TOKENS


TWO_STAGES = {"parallel__executor": "multiprocess", "parallel__pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    "settings",
    [{}, {"cache__num_blocks": 32}, {"scheduler__max_num_seqs": 2}, TWO_STAGES],
    ids=str,
)
def test_what_another_request_had_for_an_answer_is_taken_in_few_steps(
    folder: Path, settings: Any, plain: LLM
) -> None:
    """Texts that do not repeat themselves, some under a grammar; then once more."""
    prompts = random_prompts([15, 16, 17, 18, 19, 20], VOCAB_SIZE)
    params = six_params()
    wanted = [output.completions for output in plain.generate(prompts, params)]
    kept: list[int] = []
    with running(folder, speculation__method="ngram", **settings) as llm:
        for _ in range(2):
            before = llm.frontend.engines[0].metrics.counts[ACCEPTED]
            for found, expected in zip(llm.generate(prompts, params), wanted, strict=True):
                check(found.completions, expected)
            kept.append(llm.frontend.engines[0].metrics.counts[ACCEPTED] - before)
        if "cache__num_blocks" in settings:
            assert llm.frontend.stats()["preemptions"] > 1
    assert kept[0] < 0.15 * 6 * TOKENS
    assert kept[1] > 0.5 * 6 * TOKENS


async def kept_of(llm: LLM, salt: str) -> int:
    """How many drafts are kept of a request under a salt."""
    before = llm.frontend.engines[0].metrics.counts[ACCEPTED]
    (prompt,) = random_prompts([20], VOCAB_SIZE)
    params = SamplingParams(temperature=1.2, seed=4, max_tokens=TOKENS, ignore_eos=True)
    output = await llm.frontend.submit(prompt, params, cache_salt=salt)
    await output.collect()
    return llm.frontend.engines[0].metrics.counts[ACCEPTED] - before


def test_tenants_do_not_get_drafts_from_each_other(folder: Path) -> None:
    """The same request under a salt and another, and after the prefix cache was emptied."""
    with running(folder, speculation__method="ngram") as llm:
        kept = [llm.run(kept_of(llm, salt)) for salt in ("a", "b", "", "a", "b", "")]
        llm.frontend.reset_prefix_cache()
        kept.append(llm.run(kept_of(llm, "a")))
    assert max(kept[:3] + kept[6:]) < 0.15 * TOKENS
    assert min(kept[3:6]) > 0.5 * TOKENS
    with running(folder, speculation__method="ngram", cache__enable_prefix_caching=False) as llm:
        assert max(llm.run(kept_of(llm, "")) for _ in range(2)) < 0.15 * TOKENS


async def abort_some(llm: LLM, stop: str) -> dict[int, str]:
    """The texts of every other request; the others are aborted once they have some tokens."""
    prompts, params = requests(stop)
    texts: dict[int, str] = {}

    async def read(index: int) -> None:
        output = await llm.frontend.submit(prompts[index], params[index])
        try:
            parts = []
            async for delta in output:
                parts.append(delta)
                if index % 2 and sum(len(part.token_ids) for part in parts) > 7:
                    return
            texts[index] = "".join(part.text for part in parts if part.index == 0)
        finally:
            output.abort()

    await asyncio.gather(*(read(index) for index in range(len(prompts))))
    return texts


def test_aborts(folder: Path, expected: list[list[CompletionOutput]], stop: str) -> None:
    with speculating(folder) as llm:
        texts = llm.run(abort_some(llm, stop))
        assert len(texts) >= len(expected) // 2
        for index, text in texts.items():
            assert text == expected[index][0].text
        (output,) = llm.generate([PROMPTS[0]], params_of("greedy"))
        check(output.completions, expected[0])


async def run_with_loss(
    llm: LLM, stop: str, given: tuple[list[list[int]], list[SamplingParams]] | None = None
) -> list[list[int]]:
    """The tokens of the first sequences of `given` requests, or of all cases; the workers are lost
    on the way."""
    engine = llm.frontend.engines[0]

    async def read(prompt: list[int], params: SamplingParams) -> list[int]:
        output = await llm.frontend.submit(prompt, params)
        return [
            token
            for delta in await output.collect()
            if delta.index == 0
            for token in delta.token_ids
        ]

    running = [
        asyncio.create_task(read(*each)) for each in zip(*(given or requests(stop)), strict=True)
    ]
    while engine.scheduler.stats.steps < 40:  # noqa: ASYNC110 (each turn may post a step)
        await asyncio.sleep(0)
    engine.handle_loss(EngineDeadError("worker 0 was killed by SIGKILL"))
    return list(await asyncio.gather(*running))


def test_lost_workers(
    folder: Path,
    expected: list[list[CompletionOutput]],
    stop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    with speculating(folder) as llm:
        found = llm.run(run_with_loss(llm, stop))
        assert found == [completions[0].token_ids for completions in expected]
        assert llm.frontend.engines[0].metrics.restarts == 1


def test_aborts_and_lost_workers_with_texts_of_other_requests(
    folder: Path,
    expected: list[list[CompletionOutput]],
    stop: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    with speculating(folder) as llm:
        llm.generate(*requests(stop))
        for index, text in llm.run(abort_some(llm, stop)).items():
            assert text == expected[index][0].text
        found = llm.run(run_with_loss(llm, stop))
        assert found == [completions[0].token_ids for completions in expected]
        assert llm.frontend.engines[0].metrics.restarts == 1


def test_metrics(folder: Path) -> None:
    with speculating(folder, server__port=0) as llm, serving(llm) as url:
        llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        page = urllib.request.urlopen(f"{url}/metrics").read().decode()
        values = {
            line.split("{")[0].removeprefix("vllm:spec_decode_num_"): float(line.split()[-1])
            for line in page.splitlines()
            if line.startswith("vllm:spec_decode_num_") and 'position="' not in line
        }
        counts = llm.frontend.engines[0].metrics.counts
    assert values["draft_tokens_total"] == counts[DRAFT_TOKENS]
    assert values["accepted_tokens_total"] == counts[ACCEPTED]

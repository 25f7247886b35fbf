"""Constrained requests in a running engine: their tokens are allowed and the same however they are
planned, plain requests beside them are undisturbed, and what goes wrong with one ends it alone."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.engine.output import OutputSequence
from aioinfer.errors import GenerationError
from aioinfer.executor import worker_executor
from aioinfer.features.masks.planning import Planning as Masks
from aioinfer.llm import Output
from aioinfer.text.constraints import Constraint
from tests.automata import Residues, Runs, accepts, constrain
from tests.disturbance import worker_pids
from tests.executor_runs import planning_ahead
from tests.gpu.random_models import random_model

pytestmark = pytest.mark.extended

VOCAB_SIZE = 500  # no multiple of 32, and two ranks have shards that do not begin at a word
TOKENS = 24


def params_of(number: int, **more: Any) -> SamplingParams:
    """Returns parameters that differ from request to request; those of odd numbers, which are their
    seeds, are for constrained requests."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.875, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 2},
        {"temperature": 1.25, "min_p": 0.02, "logit_bias": {7: 2.0, 8: -50.0}},
        {"temperature": 0.0, "presence_penalty": 0.5, "logprobs": 3},
    ]
    fields = kinds[number // 2 % len(kinds)] | {"seed": number, "max_tokens": TOKENS} | more
    return SamplingParams(ignore_eos=True, n=2 if number % 8 == 3 else 1, **fields)


def is_constrained(params: SamplingParams) -> bool:
    return params.seed is not None and params.seed % 2 == 1


def residues(sequence: OutputSequence) -> Constraint | None:
    return Residues(VOCAB_SIZE) if is_constrained(sequence.output.params) else None


PARAMS = [params_of(number) for number in range(14)]
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(RNG.randint(1, 40))] for _ in PARAMS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, eos_token_id=None,
        num_attention_heads=6, num_key_value_heads=2,
    )  # fmt: skip


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[LLM]:
    usual = {
        "parallel.executor": "inline", "parallel.device": "cpu", "parallel.cpu_threads": 1,
        "model.dtype": "float32", "model.max_model_len": 128, "cache.block_size": 8,
        "cache.num_blocks": 200,
    }  # fmt: skip
    ahead = planning_ahead(settings)
    merged = usual | {key.replace("__", "."): value for key, value in settings.items()}
    with ahead, LLM(str(folder), settings=merged, progress=False) as llm:
        yield llm
        for engine in llm.frontend.engines:
            engine.scheduler.check_integrity()


def tokens_of(outputs: list[Output]) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.completions] for output in outputs]


def generate(llm: LLM, choose: Any = residues) -> list[list[list[int]]]:
    undo = constrain(llm.frontend, choose)
    try:
        return tokens_of(llm.generate(PROMPTS, PARAMS))
    finally:
        undo()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    """The tokens of all requests, with constrained ones planned when their tokens are known; those
    of the plain ones are what they are without any constrained request."""
    with running(folder, scheduler__plan_ahead=False) as llm:
        plain = [number for number, params in enumerate(PARAMS) if not is_constrained(params)]
        alone = tokens_of(
            llm.generate([PROMPTS[number] for number in plain], [PARAMS[n] for n in plain])
        )
        together = generate(llm)
    assert [together[number] for number in plain] == alone
    for params, completions in zip(PARAMS, together, strict=True):
        for tokens in completions:
            assert len(tokens) == TOKENS
            assert accepts(tokens, VOCAB_SIZE) == is_constrained(params)
    return together


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plenty"),
        pytest.param({"cache__num_blocks": 26}, marks=pytest.mark.sample, id="preempted"),
        pytest.param({"scheduler__max_num_batched_tokens": 9, "scheduler__max_num_seqs": 7},
                     marks=pytest.mark.sample, id="chunks, and a budget for some"),
        pytest.param({"scheduler__max_num_seqs": 1}, id="one at a time"),
    ],
)  # fmt: skip
def test_tokens_are_the_same_however_they_are_planned(
    folder: Path, expected: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    with running(folder, **settings) as llm:
        assert generate(llm) == expected
        assert generate(llm) == expected, "with the prefix cache"
        stats = llm.frontend.stats()
        assert (stats["preemptions"] > 0) == ("cache__num_blocks" in settings)
        metrics = llm.frontend.engines[0].metrics
        assert metrics.counts["constrained_rows"] >= 2 * 8 * TOKENS
        assert metrics.observed["mask_fill_seconds"].count >= 2 * TOKENS


def test_a_complete_output_ends_the_request_with_its_last_token(folder: Path) -> None:
    params = [replace(PARAMS[1], n=1, min_tokens=20, logprobs=None), PARAMS[0]]
    with running(folder) as llm:
        constrain(
            llm.frontend,
            lambda s: Residues(VOCAB_SIZE, length=5) if s.output.params is params[0] else None,
        )
        ended, other = llm.generate(PROMPTS[:2], params)
        (completion,) = ended.completions
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert len(completion.token_ids) == len(completion.text) == 5
        assert len(other.token_ids) == TOKENS
        finished = llm.frontend.engines[0].metrics.finished
        assert (finished["stop"], finished["length"]) == (1, 1)


def runs(tells: bool, **more: Any) -> Any:
    return lambda s: (
        Runs(VOCAB_SIZE, tells=tells, **more) if is_constrained(s.output.params) else None
    )


@pytest.fixture(scope="module")
def expected_of_runs(folder: Path) -> list[list[list[int]]]:
    """What comes without jumps."""
    with running(folder) as llm:
        return generate(llm, runs(False))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scheduler__plan_ahead": False},
        {"cache__num_blocks": 26},
        {"scheduler__max_num_batched_tokens": 9, "scheduler__max_num_seqs": 7},
    ],
    ids=["plenty", "not ahead", "preempted", "chunks"],
)
def test_forced_tokens_are_taken_without_sampling(
    folder: Path, expected_of_runs: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    """The tokens are those of sampling one by one, also behind penalties that count them. Without
    drafts, whose rows are constrained, too."""
    with running(folder, speculation__method="none", **settings) as llm:
        engine = llm.frontend.engines[0]
        engine.features.of(Masks).max_jumpers = 100
        assert generate(llm, runs(True)) == expected_of_runs
        of_constrained = [
            tokens
            for params, each in zip(PARAMS, expected_of_runs, strict=True)
            for tokens in each
            if is_constrained(params)
        ]
        num_tokens = sum(map(len, of_constrained))
        assert engine.metrics.counts["constrained_rows"] < 0.8 * num_tokens
        assert engine.metrics.generation_tokens == sum(
            len(tokens) for each in expected_of_runs for tokens in each
        )


def test_requests_may_end_within_forced_tokens(folder: Path) -> None:
    """By their length, a stop token, a stop string, or since the output is complete."""
    (constrained,) = params = [replace(PARAMS[1], n=1, temperature=1.0, top_k=0, top_p=1.0)]
    with running(folder) as llm:
        whole = {}
        for tells in (False, True):
            undo = constrain(llm.frontend, runs(tells))
            (whole[tells],) = llm.generate(PROMPTS[:1], params)
            undo()
        tokens, text = whole[True].token_ids, whole[True].text
        assert (tokens, text) == (whole[False].token_ids, whole[False].text)
        start = next(i for i, token in enumerate(tokens) if token % 5 == 0 and i < TOKENS - 7)
        inside = next(i for i in range(start + 2, start + 6) if tokens[i] not in tokens[:i])
        cases: list[tuple[Any, Any, str, int, int]] = [
            ({"max_tokens": inside + 1}, {}, "length", inside + 1, inside + 1),
            ({"stop_token_ids": (tokens[inside],)}, {}, "stop", inside + 1, inside),
            ({"stop": (text[inside],)}, {}, "stop", inside + 1, inside),
            ({}, {"length": start + 7}, "stop", start + 7, start + 7),
        ]
        for fields, more, reason, num_tokens, num_characters in cases:
            undo = constrain(llm.frontend, runs(True, **more))
            (output,) = llm.generate(PROMPTS[:1], [replace(constrained, **fields)])
            undo()
            (completion,) = output.completions
            assert completion.finish_reason == reason, fields
            assert completion.token_ids == tokens[:num_tokens], fields
            assert completion.text == text[:num_characters], fields


class Wrong(Residues):
    """Does not take the fourth token."""

    def accept(self, tokens: Any) -> None:
        super().accept(tokens)
        if len(self.tokens) == 4:
            raise ValueError("out of order")


class Nothing(Residues):
    """Allows nothing."""

    def fill(self, mask: Any) -> None:
        mask[:] = 0


@pytest.mark.parametrize("num_others", [0, 6])
def test_a_constraint_that_fails_ends_its_request_alone(folder: Path, num_others: int) -> None:
    """Whether masks are filled on the event loop or in a thread."""
    broken = {
        0: (Residues(VOCAB_SIZE, fails_at=3), "the automaton fails"),
        1: (Wrong(VOCAB_SIZE), "could not be applied: ValueError"),
        2: (Nothing(VOCAB_SIZE), "no token may come next"),
    }
    for number, (constraint, message) in broken.items():
        params = [replace(PARAMS[1], n=1, seed=2 * i + 1) for i in range(num_others + 1)]
        with running(folder) as llm:
            constrain(
                llm.frontend,
                lambda s, c=constraint, p=params: (
                    c if s.output.params is p[0] else Residues(VOCAB_SIZE)
                ),
            )

            async def submit_all(llm: LLM = llm, params: Any = params) -> list[Any]:
                outputs = [
                    await llm.frontend.submit(prompt, each)
                    for prompt, each in zip(PROMPTS, params, strict=False)
                ]
                results: list[Any] = []
                for output in outputs:
                    tokens: list[int] = []
                    try:
                        async for delta in output:
                            tokens += delta.token_ids
                        results.append(tokens)
                    except GenerationError as error:
                        results.append(str(error))
                return results

            first, *others = llm.run(submit_all())
            assert message in first, number
            for tokens in others:
                assert len(tokens) == TOKENS
                assert accepts(tokens, VOCAB_SIZE)


class Hanging(Residues):
    """Hangs at its fifth mask."""

    over = threading.Event()

    def fill(self, mask: Any) -> None:
        if len(self.tokens) == 4:
            self.over.wait(60)
        super().fill(mask)


def test_two_ranks_and_lost_workers(
    folder: Path,
    expected: list[list[list[int]]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks sample what one does; after the loss of one requests go on in their constraints;
    and masks that never come are not a rank's fault."""
    monkeypatch.setattr(worker_executor, "STEP_TIMEOUT_S", 4.0)
    others = worker_pids()
    with running(
        folder, parallel__executor="multiprocess", parallel__tensor_parallel_size=2
    ) as llm:
        assert generate(llm) == expected
        victim = worker_pids(others)[1]
        killed = threading.Event()

        class Killing(Residues):
            def accept(self, tokens: Any) -> None:
                super().accept(tokens)
                if len(self.tokens) == TOKENS // 2 and not killed.is_set():
                    killed.set()
                    os.kill(victim, signal.SIGKILL)

        assert expected == generate(
            llm, lambda s: Killing(VOCAB_SIZE) if is_constrained(s.output.params) else None
        )
        metrics = llm.frontend.engines[0].metrics
        assert (metrics.restarts, metrics.interrupted > 0) == (1, True)

        hanging = {1, 5, 7}
        undo = constrain(
            llm.frontend,
            lambda s: Hanging(VOCAB_SIZE) if s.output.params.seed in hanging else residues(s),
        )
        with pytest.raises(GenerationError, match="the masks of the request took too long"):
            llm.generate(PROMPTS, PARAMS)
        undo()
        Hanging.over.set()
        assert metrics.restarts == 2
        assert "were not filled within 4 s" in caplog.text
        caplog.clear()
        assert generate(llm) == expected

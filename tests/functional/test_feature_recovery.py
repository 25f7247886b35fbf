"""Workers that are lost while requests use step features: the output is that of an undisturbed run,
with every feature of the package and of another one (tests/feature_package)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.engine import recovery
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.errors import EngineDeadError
from aioinfer.features import FEATURES
from aioinfer.features.expert_load import worker as expert_load
from aioinfer.features.expert_load.planning import Planning as ExpertLoad
from aioinfer.sampling_params import BeamSearch, GrammarSpec
from tests.adapter_files import write_adapter
from tests.disturbance import worker_pids
from tests.gpu.random_models import random_model, random_prompts

VOCAB_SIZE = 128
#: A prompt takes five steps, and the output as many as it has tokens.
PROMPT_LEN, TOKENS, BUDGET = 100, 20, 24
PROMPT, OTHER = random_prompts([PROMPT_LEN] * 2, VOCAB_SIZE)
BASE = {
    "parallel.executor": "inline", "parallel.cpu_threads": 1, "parallel.restart_workers": 1000,
    "model.dtype": "float32", "model.max_model_len": 256,
    "model.features": ["only_even", "watch_token"],
    "cache.block_size": 16, "cache.num_blocks": 200, "scheduler.max_num_seqs": 32,
    "scheduler.max_num_batched_tokens": BUDGET, "scheduler.max_logprobs": -1,
}  # fmt: skip
#: Tokens 0 to 32 stand for bytes; one of 8 and one of 16 in turn.
REGEX = GrammarSpec("regex", r"([\x01-\x08][\x10-\x1f]){20}")
#: By the feature, and what a request asks of it.
CASES: dict[str, dict[str, Any]] = {
    "nothing": {"temperature": 1.0}, "masks, a grammar": {"temperature": 1.0, "grammar": REGEX},
    "masks, allowed tokens": {"temperature": 0.9, "allowed_token_ids": range(9, 70), "n": 2},
    "logprobs, the likeliest": {"temperature": 1.0, "logprobs": 3, "frequency_penalty": 1.0},
    "logprobs, named tokens": {"temperature": 1.0, "logprob_token_ids": (5, 77)},
    "logprobs, all tokens": {"temperature": 1.0, "logprobs": -1},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 4, "n": 2},
    "pooled_states, last": {"pooling": "last"}, "pooled_states, mean": {"pooling": "mean"},
    "pooled_states, cls": {"pooling": "cls"}, "token_states": {"pooling": "all"},
    "prompt_progress": {"temperature": 0.0, "reports_progress": True},
    "expert_load": {"temperature": 0.0}, "adapters": {"temperature": 1.0, "adapter": "one"},
    "only_even": {"temperature": 1.0, "extra_args": {"only_even": True}},
    "watch_token": {"temperature": 1.0, "extra_args": {"watch_token": 17}},
    "together": {"temperature": 1.0, "logprobs": 2, "prompt_logprobs": 1, "grammar": REGEX,
                 "repetition_penalty": 1.3, "extra_args": {"watch_token": 17, "only_even": False},
                 "n": 2},
    "beam search": {"temperature": 0.0, "beam_search": BeamSearch(3), "n": 2, "logprobs": 2},
}  # fmt: skip
#: Beams are of a beam search; functional/test_speculation.py has losses under speculation.
#: functional/test_kv_store.py has losses under the store of KV. Pictures and soft prompts need
#: models of their own; what their halves keep, the prefix cache and embeddings, is lost as here.
#: So do sources, speech and alignment, whose worker halves keep nothing of a request.
NO_CASE = {
    "beams", "beam_search", "speculation", "kv_store", "pictures", "adapters.soft_prompts",
    "sources", "speech", "alignment",
}  # fmt: skip
#: The steps that were posted when the workers are lost: in the prompt, and in the output if any.
LOSSES = (3, 12)


@dataclass
class Found:
    """All that a request has brought. `progress` has the tokens computed at each delta."""

    deltas: list[Delta]
    features: list[dict[str, Any]]
    scores: Any = None
    pooled: Any = None
    progress: list[int] = field(default_factory=list)


def params_of(case: str) -> SamplingParams:
    fields = {"seed": 5, "max_tokens": TOKENS, "ignore_eos": True} | CASES[case]
    if "beam_search" in fields:
        del fields["seed"]
    return SamplingParams(**fields)


async def read(output: RequestOutput) -> Found:
    deltas, progress = [], []
    try:
        if output.params.reports_progress:
            async for delta in output:
                deltas.append(delta)
                progress.append(output.prompt_progress.num_computed)  # type: ignore[union-attr]
        else:
            deltas = await output.collect()
    finally:
        output.abort()
    features = [output.features(index) for index in range(len(output.sequences))]
    return Found(deltas, features, output.prompt_scores, output.pooled, progress)


async def run(llm: LLM, cases: Sequence[str]) -> list[Found]:
    outputs = [await llm.frontend.submit(PROMPT, params_of(case)) for case in cases]
    return await asyncio.gather(*map(read, outputs))


async def run_with_loss(llm: LLM, case: str, num_steps: int) -> Found:
    """Loses the workers when so many steps have been posted."""
    engine = llm.frontend.engines[0]
    last = engine.scheduler.stats.steps + num_steps
    running = asyncio.create_task(run(llm, [case]))
    while engine.scheduler.stats.steps < last:  # noqa: ASYNC110 (each turn may post a step)
        await asyncio.sleep(0)
    assert engine.requests.sequences
    engine.handle_loss(EngineDeadError("worker 0 was killed by SIGKILL"))
    (found,) = await running
    return found


def check(found: Found, expected: Found) -> None:
    if expected.progress:
        assert found.progress == sorted(found.progress)
        assert found.progress[-1] == PROMPT_LEN
        found.deltas, expected.deltas = [merged(found.deltas)], [merged(expected.deltas)]
    for delta, wanted in zip(found.deltas, expected.deltas, strict=True):
        assert (delta.index, delta.token_ids) == (wanted.index, wanted.token_ids)
        assert (delta.finish_reason, delta.text) == (wanted.finish_reason, wanted.text)
        assert delta.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=1e-4)
        assert (delta.logprobs is None) == (wanted.logprobs is None)
        for one, other in zip(delta.logprobs or (), wanted.logprobs or (), strict=True):
            assert (one.token_id, one.text) == (other.token_id, other.text)
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert np.allclose([x for _, x in one.top], [x for _, x in other.top], atol=1e-4)
            # tokens whose log-probabilities are nearly equal may change places
            values = dict(other.top)
            assert dict(one.top).keys() == values.keys()
            assert all(value == pytest.approx(values[token], abs=1e-4) for token, value in one.top)
    for one, other in zip(found.features, expected.features, strict=True):
        assert one.keys() == other.keys()
        for name, values in other.items():
            assert np.allclose(one[name], values, atol=1e-4)
    if expected.scores is not None:
        for name in ("logprobs", "ranks", "top_tokens", "top_logprobs"):
            values = getattr(expected.scores, name)
            assert np.allclose(getattr(found.scores, name), values, atol=1e-4)
    assert (found.pooled is None) == (expected.pooled is None)
    if expected.pooled is not None:
        assert found.pooled.shape == expected.pooled.shape
        assert np.allclose(found.pooled, expected.pooled, atol=1e-4)


def merged(deltas: list[Delta]) -> Delta:
    first, *others = deltas
    for delta in others:
        first.merge(delta)
    return first.join()


def settings_of(folder: Path) -> dict[str, Any]:
    """Returns the configuration of an engine of the model, with an adapter."""
    return BASE | {"lora.adapters": {"one": str(folder / "adapter")}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB_SIZE, family="qwen3_moe",
        initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    write_adapter(model / "adapter", {"model.layers.0.self_attn.q_proj": (128, 64)}, rank=4)
    return model


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
        patch.setattr(expert_load, "INTERVAL_S", 0.0)
        with LLM(str(folder), settings=settings_of(folder), progress=False) as llm:
            yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[str, Found]:
    """What each request brings where it runs alone and no workers are lost."""
    return {case: llm.run(run(llm, [case]))[0] for case in CASES}


def test_every_feature_has_a_case(llm: LLM) -> None:
    features = {feature.name for feature in llm.frontend.engines[0].features}
    assert {*FEATURES, "only_even", "watch_token"} < features
    assert {case.partition(",")[0] for case in CASES} >= features - NO_CASE


@pytest.mark.parametrize("num_steps", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_a_loss_changes_nothing(
    llm: LLM, expected: dict[str, Found], case: str, num_steps: int
) -> None:
    if num_steps > PROMPT_LEN // BUDGET and params_of(case).prompt_only:
        num_steps = 4
    engine = llm.frontend.engines[0]
    llm.run(run_other(llm))  # the cache holds none of the prompt
    load = engine.features.of(ExpertLoad).load
    restarts, reports, tokens = engine.metrics.restarts, load.version, load.totals[0].sum()
    found = llm.run(run_with_loss(llm, case, num_steps))
    assert engine.metrics.restarts == restarts + 1
    engine.scheduler.check_integrity()
    check(found, expected[case])
    assert load.version > reports
    assert load.totals[0].sum() - tokens >= 3 * PROMPT_LEN  # each token has three experts


async def run_other(llm: LLM) -> None:
    llm.frontend.reset_prefix_cache()


async def run_with_death(llm: LLM) -> list[Found]:
    """Loses the first engine for good when it has generated some tokens of all cases."""
    engine = llm.frontend.engines[0]
    running = asyncio.create_task(run(llm, [*CASES]))
    while engine.metrics.generation_tokens < 40:  # noqa: ASYNC110 (each turn may bring tokens)
        await asyncio.sleep(0)
    engine.handle_loss(EngineDeadError("worker 0 was killed by SIGKILL"))
    return await running


def test_requests_go_on_with_another_engine(folder: Path, expected: dict[str, Found]) -> None:
    settings: dict[str, Any] = {
        "parallel.executor": "multiprocess",
        "parallel.data_parallel_size": 2,
        "parallel.restart_workers": 0,
    }
    with LLM(str(folder), settings=settings_of(folder) | settings, progress=False) as llm:
        results = llm.run(run_with_death(llm))
        first, second = llm.frontend.engines
        assert first.dead_reason is not None
        assert first.metrics.moved > 3
        second.scheduler.check_integrity()
    for found, wanted in zip(results, expected.values(), strict=True):
        check(found, wanted)


def test_all_at_once_and_a_worker_that_is_killed(folder: Path, expected: dict[str, Found]) -> None:
    """Two ranks, some requests in their prompts and some behind them."""
    settings: dict[str, Any] = {
        "parallel.executor": "multiprocess",
        "parallel.tensor_parallel_size": 2,
    }
    others = worker_pids()
    with (
        LLM(str(folder), settings=settings_of(folder) | settings, progress=False) as llm,
        ThreadPoolExecutor(1) as pool,
    ):
        engine = llm.frontend.engines[0]
        running = pool.submit(llm.run, run(llm, [*CASES]))
        deadline = time.monotonic() + 30
        while engine.metrics.generation_tokens < 20:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(worker_pids(others)[0], signal.SIGKILL)
        results = running.result()
        assert engine.metrics.restarts == 1
        assert engine.metrics.interrupted > 3
    for found, wanted in zip(results, expected.values(), strict=True):
        check(found, wanted)

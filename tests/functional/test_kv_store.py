"""The store of KV, end to end: conversations whose blocks have left the device go on with the text
that they would have had, greedy and sampled, whatever the layers keep and however ranks divide
them."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.errors import ConfigError
from aioinfer.scheduler.request import RequestStatus
from tests.disturbance import worker_pids
from tests.tiny_models import tiny_model
from tests.waiting import until

extended = pytest.mark.extended
NEW_TOKENS, TURNS = 12, 3
RNG = random.Random(5)
#: Each is longer than a third of the blocks of the device.
PROMPTS = [[RNG.randrange(3, 200) for _ in range(RNG.randint(40, 60))] for _ in range(5)]
SETTINGS: dict[str, Any] = {
    "model.dtype": "float32", "model.tokenizer": "none", "model.max_model_len": 160,
    "parallel.executor": "inline", "parallel.device": "cpu", "parallel.cpu_threads": 1,
    "cache.block_size": 4, "cache.num_blocks": 48, "scheduler.max_num_seqs": 4,
    "scheduler.max_num_batched_tokens": 64,
}  # fmt: skip
#: Half of what the prompts of all turns but the first have at least.
MOST = sum(len(prompt) for prompt in PROMPTS) * TURNS // 2
STORE = {"cache.host_bytes": 2**24}
WINDOWS = {
    "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "all tokens": ("qwen3", {}),
    "windows": ("qwen2", WINDOWS),
    "latents": ("deepseek_v3", {}),
    "states": ("qwen3_next", {}),
    "states alone": ("lfm2", {"layer_types": ["conv", "conv"], "full_attn_idxs": []}),
}


def converse(folder: Path, params: SamplingParams, **settings: Any) -> tuple[list[Any], LLM]:
    """Returns the answers of several conversations, which take their turns one after the other, and
    all at once at last; and the closed model."""
    answers: list[Any] = []
    with LLM(str(folder), settings=SETTINGS | settings, progress=False) as llm:
        prompts = [list(prompt) for prompt in PROMPTS]
        for _ in range(TURNS):
            for prompt in prompts:
                (output,) = llm.generate([prompt], params)
                answers.append(list(output.outputs[0].token_ids))
                prompt += [*answers[-1], 7, 11]
        answers += [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
        for engine in llm.frontend.engines:
            engine.scheduler.check_integrity()
    return answers, llm


def check(folder: Path, params: SamplingParams, least: int = MOST, **settings: Any) -> None:
    """Texts with and without the store are equal, and it brings `least` tokens at least."""
    expected, _ = converse(folder, params, **settings)
    answers, llm = converse(folder, params, **settings | STORE)
    assert answers == expected
    assert len(set(map(tuple, answers))) >= len(answers) - TURNS
    stats = llm.frontend.engines[0].scheduler.stats
    assert stats.loaded_tokens >= least


def params_of(temperature: float) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=NEW_TOKENS, ignore_eos=True, seed=3
    )  # fmt: skip


def model_of(kind: str, folder: Path) -> Path:
    family, fields = MODELS[kind]
    return tiny_model(family, folder / "model", vocab_size=200, **fields)


@pytest.mark.parametrize(
    "kind",
    ["windows", *(pytest.param(name, marks=extended) for name in MODELS if name != "windows")],
)
def test_texts_are_the_same_with_the_store(kind: str, tmp_path: Path) -> None:
    folder = model_of(kind, tmp_path)
    least, settings = MOST, {}
    if kind == "states alone":  # with more requests the device has room for most of its snapshots
        least, settings = 1, {"scheduler.max_num_seqs": 2}
    for temperature in (0.0, 1.0):
        check(folder, params_of(temperature), least, **settings)


@extended
def test_a_cache_in_float8(tmp_path: Path) -> None:
    check(model_of("windows", tmp_path), params_of(0.0), **{"cache.dtype": "fp8"})


@extended
@pytest.mark.parametrize("kind", ["windows", "states"])
@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_each_rank_has_its_own_part(kind: str, way: str, tmp_path: Path) -> None:
    settings = {"parallel.executor": "multiprocess", f"parallel.{way}_parallel_size": 2}
    check(model_of(kind, tmp_path), params_of(0.0), **settings)


@extended
def test_drafted_tokens(tmp_path: Path) -> None:
    settings = {"speculation.method": "ngram", "speculation.max_draft_tokens": 3}
    check(model_of("all tokens", tmp_path), params_of(0.0), **settings)


@extended
@pytest.mark.parametrize("kind", ["all tokens", "states"])
def test_preempted_requests_are_swapped_in(kind: str, tmp_path: Path) -> None:
    folder, found = model_of(kind, tmp_path), []
    for store in ({}, STORE):
        settings = SETTINGS | store | {"cache.num_blocks": 40}
        with LLM(str(folder), settings=settings, progress=False) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
            outputs = llm.generate(PROMPTS, params)
            stats = llm.frontend.engines[0].scheduler.stats
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        assert stats.preemptions > 0
    assert found[0] == found[1]
    assert stats.loads > 0


@extended
def test_workers_that_are_lost_take_the_store_with_them(tmp_path: Path) -> None:
    folder = model_of("all tokens", tmp_path)
    settings = SETTINGS | STORE | {
        "parallel.executor": "multiprocess", "parallel.restart_workers": 3
    }  # fmt: skip
    with LLM(str(folder), settings=settings, progress=False) as llm:
        first = llm.generate(PROMPTS, params_of(0.0))
        for pid in worker_pids():
            os.kill(pid, signal.SIGKILL)
        again = llm.generate(PROMPTS, params_of(0.0))
        engine = llm.frontend.engines[0]
        assert engine.metrics.restarts == 1
        engine.scheduler.check_integrity()
    texts = [[list(o.outputs[0].token_ids) for o in outputs] for outputs in (first, again)]
    assert texts[0] == texts[1]


@extended
@pytest.mark.parametrize(
    ("place", "ranks"), [("host", 1), ("host", 2), ("disk", 1), ("disk", 2)], ids=str
)
def test_workers_that_are_killed_while_they_load(place: str, ranks: int, tmp_path: Path) -> None:
    """They are stopped, so that requests of which the store has the beginnings stay LOADING, and
    then killed: the requests go on with new workers, and nothing of them is left."""
    folder, disk = model_of("states", tmp_path), tmp_path / "kv"
    settings = SETTINGS | STORE | {
        "parallel.executor": "multiprocess", "parallel.restart_workers": 3,
        "parallel.tensor_parallel_size": ranks,
    }  # fmt: skip
    if place == "disk":
        settings["cache.disk_path"] = str(disk)
        with LLM(str(folder), settings=settings, progress=False) as llm:
            expected = texts_of(llm)
            until_written(disk)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        if place == "host":
            expected = texts_of(llm)
        scheduler = llm.frontend.engines[0].scheduler

        async def lose() -> list[list[int]]:
            for pid in worker_pids():
                os.kill(pid, signal.SIGSTOP)
            outputs = [await llm.frontend.submit(each, params_of(0.0)) for each in PROMPTS]
            running = [asyncio.create_task(output.collect()) for output in outputs]
            await until(lambda: any(
                each.status is RequestStatus.LOADING for each in scheduler.requests()
            ))  # fmt: skip
            for pid in worker_pids():
                os.kill(pid, signal.SIGKILL)
            return [[t for delta in await each for t in delta.token_ids] for each in running]

        assert llm.run(lose()) == expected
        assert texts_of(llm) == expected
        engine = llm.frontend.engines[0]
        assert engine.metrics.restarts == 1
        engine.scheduler.check_integrity()
        assert engine.scheduler.kv_cache.num_free == sum(engine.report.num_blocks)


def texts_of(llm: LLM) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params_of(0.0))]


@pytest.mark.parametrize("kind", ["windows", pytest.param("states", marks=extended)])
def test_memory_of_the_host_that_is_exhausted_changes_no_text(kind: str, tmp_path: Path) -> None:
    """It has room for less than one conversation has at its end."""
    folder = model_of(kind, tmp_path)
    expected, _ = converse(folder, params_of(1.0))
    answers, llm = converse(folder, params_of(1.0), **{"cache.host_bytes": 2**16})
    assert answers == expected
    store = llm.frontend.engines[0].scheduler.kv_cache.store
    assert store is not None
    for group in store.groups:
        assert len(group) == group.num_places < 20


def test_a_disk_that_gets_full_changes_no_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was written before is read, and nothing more is written. Half of the host's memory has
    room for the blocks of a prompt: on a busy machine those that were read may have to leave before
    their request takes them, so prompts come several times."""
    folder, disk = model_of("windows", tmp_path), tmp_path / "kv"
    settings = SETTINGS | {"cache.host_bytes": 2**17, "cache.disk_path": str(disk)}
    others = [[*prompt[20:], 9, 5] for prompt in PROMPTS]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LLM(str(folder), settings=settings, progress=False) as llm:
        scheduler = llm.frontend.engines[0].scheduler
        expected = texts_of(llm)
        until_written(disk)
        before = scheduler.stats.loaded_tokens
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))  # bytes of a file: less than a block
        try:
            llm.generate(others, params_of(0.0))
            llm.run(until(lambda: "no further KV blocks are written" in caplog.text))
            kept = files_of(disk)
            for _ in range(5):
                assert texts_of(llm) == expected
                if scheduler.stats.loaded_tokens > before:
                    break
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert scheduler.stats.loaded_tokens > before
        scheduler.check_integrity()
    assert kept
    assert set(files_of(disk)) <= set(kept)
    assert not list(disk.glob("**/*.tmp"))


def test_memory_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lower cache\.host_bytes"):
        LLM(
            str(model_of("all tokens", tmp_path)), progress=False,
            settings=SETTINGS | {"cache.host_bytes": 2**62},
        )  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("engine-0/rank-*/*.kv"))


def until_written(folder: Path) -> None:
    """Waits until no file has been added for a second: beside other processes it takes a while."""
    before, calm = 0, 0
    while calm < 5:
        time.sleep(0.2)
        now = len(files_of(folder))
        calm = calm + 1 if now == before and now else 0
        before = now


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("windows", None),
        *(pytest.param(kind, None, marks=extended) for kind in ("all tokens", "states")),
        *(pytest.param("windows", way, marks=extended) for way in ("tensor", "pipeline")),
        pytest.param("states", "tensor", marks=extended),
    ],
)
def test_files_outlive_the_server_and_broken_ones_are_misses(
    kind: str, way: str | None, tmp_path: Path
) -> None:
    folder, disk = model_of(kind, tmp_path), tmp_path / "kv"
    settings = SETTINGS | STORE | {"cache.disk_path": str(disk), "cache.num_blocks": 120}
    if way is not None:
        settings |= {"parallel.executor": "multiprocess", f"parallel.{way}_parallel_size": 2}
    for phase in ("write", "read", "broken", "other dtype"):
        if phase == "broken":
            for number, file in enumerate(files_of(disk)):
                content = bytearray(file.read_bytes())
                content[-1 - number % 50] ^= 4
                file.write_bytes(content if number % 3 else content[: 100 * (number % 2)])
        if phase == "other dtype":
            settings["cache.dtype"] = "fp8"
        with LLM(str(folder), settings=settings, progress=False) as llm:
            outputs = llm.generate(PROMPTS, params_of(0.0))
            stats = llm.frontend.engines[0].scheduler.stats
            until_written(disk)
            llm.frontend.engines[0].scheduler.check_integrity()
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        if phase == "write":
            expected = texts
        if phase != "other dtype":
            assert texts == expected, phase
        assert (stats.loaded_tokens > 0) == (phase == "read"), phase

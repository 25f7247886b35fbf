"""A model pauses, sleeps and wakes up: requests that run and requests that come meanwhile have the
text that they would have had, on one worker and on two tensor-parallel ones."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.engine import recovery
from aioinfer.engine.engine import Engine
from aioinfer.engine.frontend import Frontend
from aioinfer.engine.model_control import Mode
from aioinfer.engine.output import Delta, RequestOutput
from aioinfer.engine.recovery import EngineState
from aioinfer.errors import (
    ConfigError,
    EngineDeadError,
    NotReadyError,
    RequestError,
    WorkerCallError,
)
from aioinfer.executor.base import Executor, WorkerReport
from aioinfer.sampling_params import SamplingParams
from aioinfer.worker.worker import Worker
from tests.executor_runs import tiny_config, tiny_llama
from tests.scaled_models import layouts, write
from tests.trainer_group import broadcast_file
from tests.waiting import until
from tests.worker_extension import identity_of, rank_of

extended = pytest.mark.extended
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
PROMPTS = [[5, 9, 13, 2, 7], [11, 4, 8], [3] * 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@asynccontextmanager
async def launched(
    folder: Path, executor: str = "inline", **settings: Any
) -> AsyncIterator[Frontend]:
    frontend = await Frontend.launch(
        tiny_config(folder, executor=executor, **{"model.tokenizer": "none"} | settings)
    )
    yield frontend
    await frontend.close()


async def submit_all(frontend: Frontend) -> list[RequestOutput]:
    return [
        await frontend.submit(prompt, params)
        for prompt, params in zip(PROMPTS, (GREEDY, SEEDED, GREEDY), strict=True)
    ]


async def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    collected = [(await output.collect())[0] for output in outputs]
    return [list(delta.token_ids) for delta in collected]


async def texts_of(frontend: Frontend) -> list[list[int]]:
    return await tokens_of(await submit_all(frontend))


async def until_running(frontend: Frontend, tokens: int = 5) -> None:
    scheduler = frontend.engines[0].scheduler
    await until(lambda: sum(request.num_output for request in scheduler.running) > tokens)


async def begin(frontend: Frontend, tokens: int = 5) -> tuple[list[list[int]], list[RequestOutput]]:
    """Returns the texts of all requests, and the same requests again, which run."""
    expected, outputs = await texts_of(frontend), await submit_all(frontend)
    await until_running(frontend, tokens)
    return expected, outputs


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_requests_go_on_after_sleep_with_the_text_that_they_would_have_had(
    folder: Path, mode: Mode
) -> None:
    async with launched(folder) as frontend:
        control, scheduler = frontend.control, frontend.engines[0].scheduler
        expected, outputs = await begin(frontend)
        await control.sleep(mode=mode)
        assert control.sleep_level == 1
        assert not scheduler.running
        assert scheduler.num_waiting == (3 if mode == "keep" else 0)
        late = await submit_all(frontend)
        await asyncio.sleep(0.05)
        assert scheduler.num_in_flight == 0
        await control.sleep()  # does nothing
        with pytest.raises(RequestError, match="wake it up first"):
            control.resume()
        await control.wake_up(["weights"])
        assert (control.sleep_level, control.asleep) == (1, {"kv_cache"})
        await control.wake_up()
        await control.wake_up()  # does nothing
        assert await tokens_of(outputs) == expected
        assert await tokens_of(late) == expected
        scheduler.check_integrity()


@pytest.mark.parametrize("lost", ["before", "meanwhile"])
async def test_requests_whose_workers_are_lost_are_finished_before_sleep(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    async with launched(folder) as frontend:
        (engine,) = frontend.engines
        expected, outputs = await begin(frontend)
        if lost == "before":
            engine.handle_loss(EngineDeadError("lost"))
        sleeping = asyncio.ensure_future(frontend.control.sleep(mode="wait"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if lost == "meanwhile":
            assert engine.scheduler.running
            engine.handle_loss(EngineDeadError("lost"))
        assert await tokens_of(outputs) == expected
        await sleeping
        assert (engine.state, frontend.control.sleep_level) == (EngineState.SERVING, 1)


async def test_after_abort_new_requests_are_rejected_until_the_model_is_awake(folder: Path) -> None:
    async with launched(folder) as frontend:
        outputs = await submit_all(frontend)
        await until_running(frontend)
        await frontend.control.sleep(mode="abort")
        deltas: list[Delta] = [(await output.collect())[0] for output in outputs]
        assert {delta.finish_reason for delta in deltas} == {"abort"}
        with pytest.raises(NotReadyError, match="sleeps"):
            await frontend.submit(PROMPTS[0], GREEDY)
        await frontend.control.wake_up()
        assert await texts_of(frontend)


async def test_a_client_that_goes_away_ends_no_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither leaves it workers that sleep unknown to the engine, nor does `resume` meanwhile have
    steps planned for them."""
    put_to_sleep, has_begun = Worker.sleep, threading.Event()

    def sleep_slowly(worker: Worker, level: int) -> None:
        has_begun.set()
        time.sleep(0.3)
        put_to_sleep(worker, level)

    monkeypatch.setattr(Worker, "sleep", sleep_slowly)
    async with launched(folder) as frontend:
        control = frontend.control
        expected, outputs = await begin(frontend)
        call = asyncio.ensure_future(control.sleep())
        await until(has_begun.is_set)
        call.cancel()
        control.resume()
        assert control.is_paused
        await until(lambda: control.sleep_level == 1)
        assert frontend.engines[0].scheduler.num_in_flight == 0
        await control.wake_up()
        assert await tokens_of(outputs) == expected


async def test_a_pause_outlasts_sleep(folder: Path) -> None:
    async with launched(folder) as frontend:
        control = frontend.control
        await control.pause()
        (output,) = (await submit_all(frontend))[:1]
        await control.sleep()
        await control.wake_up()
        assert control.is_paused
        await asyncio.sleep(0.05)
        assert frontend.engines[0].scheduler.num_waiting == 3
        control.resume()
        assert len((await output.collect())[0].token_ids) == 40


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_modes_of_a_pause(folder: Path, mode: Mode) -> None:
    async with launched(folder) as frontend:
        expected = await texts_of(frontend)
        outputs = await submit_all(frontend)
        scheduler = frontend.engines[0].scheduler
        await until_running(frontend)
        waiting = [await frontend.submit(prompt, GREEDY) for prompt in PROMPTS]
        await frontend.control.pause(mode, clear_cache=True)
        assert scheduler.num_in_flight == 0
        assert not scheduler.running
        frontend.control.resume()
        reasons = [(await output.collect())[0] for output in outputs]
        if mode == "abort":
            assert [delta.finish_reason for delta in reasons] == ["abort"] * 3
        else:
            assert [list(delta.token_ids) for delta in reasons] == expected
        await tokens_of(waiting)
        scheduler.check_integrity()


async def test_workers_that_cannot_sleep_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Worker, level: int) -> None:
        raise WorkerCallError("there is no room")

    monkeypatch.setattr(Worker, "sleep", refuse)
    async with launched(folder) as frontend:
        expected, outputs = await begin(frontend)
        with pytest.raises(WorkerCallError, match="there is no room"):
            await frontend.control.sleep()
        assert frontend.control.sleep_level == 0
        assert await tokens_of(outputs) == expected


async def test_with_a_store_of_kv_blocks_come_back(folder: Path) -> None:
    async with launched(folder, **{"cache.host_bytes": 2**20}) as frontend:
        scheduler = frontend.engines[0].scheduler
        expected, outputs = await begin(frontend, 40)
        await frontend.control.sleep()
        await frontend.control.wake_up()
        assert await tokens_of(outputs) == expected
        assert scheduler.stats.loaded_tokens > 0
        scheduler.check_integrity()


@pytest.mark.extended
async def test_two_ranks_sleep_and_new_ones_sleep_again(folder: Path, other: Path) -> None:
    async with launched(other) as frontend:
        new = await texts_of(frontend)
    settings = {"parallel.tensor_parallel_size": 2, "parallel.restart_workers": 3}
    async with launched(folder, "auto", **settings) as frontend:
        (engine,), control = frontend.engines, frontend.control
        expected, outputs = await begin(frontend)
        await control.sleep()
        engine.executor.hosts[0]._processes[1].kill()  # type: ignore[attr-defined]
        await until(lambda: engine.state is EngineState.RESTARTING)
        await until(lambda: engine.state is EngineState.SERVING, 60)
        assert control.sleep_level == 1
        await control.wake_up()
        assert await tokens_of(outputs) == expected
        await control.update_from_disk(other)
        assert await texts_of(frontend) == new
        engine.executor.hosts[0]._processes[0].kill()  # type: ignore[attr-defined]
        await until(lambda: engine.state is EngineState.RESTARTING)
        await until(lambda: engine.state is EngineState.SERVING, 60)
        assert await texts_of(frontend) == new
        assert control.weight_version == "1"
        await control.sleep(2)
        await control.wake_up()
        assert await texts_of(frontend) == new


# ---------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same model with other weights."""
    return tiny_llama(tmp_path_factory.mktemp("other"), seed=1)


async def texts_with(folder: Path, **settings: Any) -> list[list[int]]:
    async with launched(folder, **settings) as frontend:
        return await texts_of(frontend)


async def test_new_requests_have_the_text_of_the_new_weights(folder: Path, other: Path) -> None:
    new = await texts_with(other)
    async with launched(folder) as frontend:
        control = frontend.control
        old = await texts_of(frontend)
        assert old != new
        assert control.weight_version == "0"
        await control.update_from_disk(other, version="step-7")
        assert control.weight_version == "step-7"
        outputs = await submit_all(frontend)
        assert await tokens_of(outputs) == new, "the prefix cache is of the old weights"
        assert outputs[0].weight_versions == ["step-7"]
        await control.update_from_disk(folder)
        assert control.weight_version == "2"
        assert await texts_of(frontend) == old


@pytest.mark.parametrize("is_paused", [False, True])
async def test_streams_stay_open_while_weights_are_updated(
    folder: Path, other: Path, is_paused: bool
) -> None:
    async with launched(folder) as frontend:
        expected, outputs = await begin(frontend, 20)
        if is_paused:
            await frontend.control.pause()
        known = [len(output.generated()[0]) for output in outputs]
        await frontend.control.update_from_disk(other)
        assert frontend.control.is_paused is is_paused
        frontend.control.resume()
        texts = await tokens_of(outputs)
        assert [len(text) for text in texts] == [40] * 3
        assert texts != expected
        for text, before, count in zip(texts, expected, known, strict=True):
            assert text[:count] == before[:count]
        assert outputs[0].weight_versions == ["0", "1"]


async def test_answers_name_the_weights_that_have_computed_them(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits during an update has the new ones alone; one whose workers are lost has
    those of the checkpoint again."""
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    async with launched(folder, **{"parallel.restart_workers": 1}) as frontend:
        control = frontend.control
        await control.pause()
        waiting = await submit_all(frontend)
        await control.update_from_disk(other)
        control.resume()
        await tokens_of(waiting)
        assert [output.weight_versions for output in waiting] == [["1"]] * 3
        await control.begin_update()
        await control.end_update("tensors")
        running = await submit_all(frontend)
        await until_running(frontend)
        frontend.engines[0].handle_loss(EngineDeadError("lost"))
        await tokens_of(running)
        assert [output.weight_versions for output in running] == [["tensors", "1"]] * 3


async def test_equal_weights_change_no_text(folder: Path) -> None:
    async with launched(folder) as frontend:
        expected, outputs = await begin(frontend, 20)
        await frontend.control.update_from_disk(folder)
        assert await tokens_of(outputs) == expected


async def test_a_checkpoint_of_another_model_changes_nothing(folder: Path, tmp_path: Path) -> None:
    wrong = tiny_llama(tmp_path, inner=128)
    async with launched(folder) as frontend:
        expected, outputs = await begin(frontend)
        with pytest.raises(WorkerCallError, match="has the shape"):
            await frontend.control.update_from_disk(wrong)
        with pytest.raises(WorkerCallError, match="holds no safetensors"):
            await frontend.control.update_from_disk(tmp_path / "nowhere")
        assert await tokens_of(outputs) == expected
        assert await texts_of(frontend) == expected
        assert frontend.control.weight_version == "0"


async def test_a_checkpoint_that_lacks_a_tensor_changes_no_stage(tmp_path: Path) -> None:
    """The first stage finds all of its own."""
    folder = tiny_llama(tmp_path / "old", num_layers=2)
    other = tiny_llama(tmp_path / "new", num_layers=2, seed=1)
    whole = load_file(other / "model.safetensors")
    lacking = {name: each for name, each in whole.items() if name != "model.norm.weight"}
    save_file(lacking, other / "model.safetensors")
    stages = {"parallel.pipeline_parallel_size": 2}
    async with launched(folder, "multiprocess", **stages) as frontend:
        expected = await texts_of(frontend)
        with pytest.raises(WorkerCallError, match=r"model\.norm\.weight"):
            await frontend.control.update_from_disk(other)
        assert await texts_of(frontend) == expected
        save_file(whole, other / "model.safetensors")
        await frontend.control.update_from_disk(other)
        assert await texts_of(frontend) != expected


def hold_start(engine: Engine, *, begun: asyncio.Event, gate: asyncio.Event) -> None:
    """Has the next new workers of an engine wait for `gate` once they have been made."""
    new_executor = engine.recovery.new_executor
    assert new_executor is not None

    def make() -> Executor:
        executor = new_executor()
        start = executor.start

        async def start_late(*args: Any) -> WorkerReport:
            begun.set()
            await gate.wait()
            return await start(*args)

        executor.start = start_late  # type: ignore[method-assign]
        return executor

    engine.recovery.new_executor = make


TWO_ENGINES = {"parallel.data_parallel_size": 2, "parallel.restart_workers": 1}


async def check_both(frontend: Frontend, expected: list[list[int]]) -> None:
    """Asserts that both engines give the same texts."""
    await until(lambda: all(e.state is EngineState.SERVING for e in frontend.engines), 60)
    before = [engine.metrics.generation_tokens for engine in frontend.engines]
    outputs = [output for _ in range(2) for output in await submit_all(frontend)]
    assert await tokens_of(outputs) == expected * 2
    for engine, tokens in zip(frontend.engines, before, strict=True):
        assert engine.metrics.generation_tokens > tokens


@pytest.mark.parametrize("are_ready", [False, True])
async def test_workers_that_start_during_an_update_have_its_weights(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch, *, are_ready: bool
) -> None:
    """Where they are ready before its end, or only behind it."""
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    new = await texts_with(other)
    async with launched(folder, "multiprocess", **TWO_ENGINES) as frontend:
        begun, gate = asyncio.Event(), asyncio.Event()
        first, engine = frontend.engines
        call = first.executor.call

        async def call_slowly(method: str, *args: Any) -> Sequence[Any]:
            if method == "update_from_disk" and are_ready:
                gate.set()
                await until(lambda: engine.state is EngineState.SERVING, 60)
            return await call(method, *args)

        monkeypatch.setattr(first.executor, "call", call_slowly)
        hold_start(engine, begun=begun, gate=gate)
        engine.handle_loss(EngineDeadError("lost"))
        await begun.wait()
        await frontend.control.update_from_disk(other, version="new")
        gate.set()
        await check_both(frontend, new)
        assert [each.weight_version for each in frontend.engines] == ["new"] * 2


async def test_an_engine_that_is_lost_in_an_update_comes_back_with_the_weights_of_the_others(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    new = await texts_with(other)
    async with launched(folder, "multiprocess", **TWO_ENGINES) as frontend:
        await texts_of(frontend)
        engine, control = frontend.engines[1], frontend.control
        call = engine.executor.call

        async def lose(method: str, *args: Any) -> Sequence[Any]:
            if method == "update_from_disk":
                engine.executor.fail(EngineDeadError("lost"))  # type: ignore[attr-defined]
            return await call(method, *args)

        monkeypatch.setattr(engine.executor, "call", lose)
        await control.update_from_disk(other, version="new")
        await check_both(frontend, new)
        assert [each.weight_version for each in frontend.engines] == ["new"] * 2


async def test_weights_that_sleep_cannot_be_updated(folder: Path, other: Path) -> None:
    new = await texts_with(other)
    async with launched(folder) as frontend:
        control = frontend.control
        await control.sleep()
        with pytest.raises(RequestError, match="wake them up first"):
            await control.update_from_disk(other)
        await control.wake_up(["weights"])
        await control.update_from_disk(other)
        assert control.sleep_level == 1
        await control.wake_up()
        assert await texts_of(frontend) == new


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints."""
    folders = [tiny_llama(tmp_path_factory.mktemp("quantized"), seed=seed) for seed in (0, 1)]
    for each in folders:
        write(each, layouts((16, 16))["int channel"])
    return folders


async def test_new_workers_load_weights_of_a_quantized_checkpoint(quantized: list[Path]) -> None:
    folder, other = quantized
    new = await texts_with(other)
    async with launched(folder) as frontend:
        old, outputs = await begin(frontend)
        await frontend.control.update_from_disk(other)
        assert await texts_of(frontend) == new
        for text, before in zip(await tokens_of(outputs), old, strict=True):
            assert text[:3] == before[:3]
            assert len(text) == 40
        with pytest.raises(WorkerCallError, match="nowhere"):
            await frontend.control.update_from_disk(folder / "nowhere")
        await until(lambda: frontend.engines[0].state is EngineState.SERVING)
        assert await texts_of(frontend) == new


@pytest.mark.parametrize("quantization", ["auto", "int8"])
async def test_weights_that_were_dropped_are_loaded_again(
    folder: Path, other: Path, quantization: str
) -> None:
    settings = {"model.quantization": quantization}
    new = await texts_with(other, **settings)
    async with launched(folder, **settings) as frontend:
        control = frontend.control
        expected, outputs = await begin(frontend)
        await control.sleep(2)
        await control.wake_up()
        assert await tokens_of(outputs) == expected
        await control.sleep(2)
        waiting = await submit_all(frontend)
        await control.wake_up(["weights"])
        await control.wake_up(["kv_cache"])
        assert (control.sleep_level, control.asleep) == (2, set()), "the weights are missing"
        await asyncio.sleep(0.05)
        assert frontend.engines[0].scheduler.num_waiting == 3
        await control.update_from_disk(other)
        assert control.sleep_level == 0
        assert await tokens_of(waiting) == new


async def test_weights_that_cannot_be_loaded_again_are_not_dropped(quantized: list[Path]) -> None:
    async with launched(quantized[0]) as frontend:
        expected = await texts_of(frontend)
        with pytest.raises(WorkerCallError, match="quantized"):
            await frontend.control.sleep(2)
        assert await texts_of(frontend) == expected


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
async def test_tensors_replace_weights(folder: Path, other: Path, quantization: str) -> None:
    settings = {"model.quantization": quantization}
    new = await texts_with(other, **settings)
    async with launched(folder, **settings) as frontend:
        control = frontend.control
        old, outputs = await begin(frontend)
        tensors = list(load_file(other / "model.safetensors").items())
        with pytest.raises(RequestError, match="comes first"):
            await control.update("load_weights", tensors=tensors)
        await control.begin_update()
        with pytest.raises(RequestError, match="finish_weight_update"):
            control.resume()
        for number in range(0, len(tensors), 4):
            await control.update("load_weights", tensors=tensors[number : number + 4])
        with pytest.raises(WorkerCallError, match="has no tensor nothing"):
            await control.update("load_weights", tensors=[("nothing", torch.ones(1))])
        await control.end_update("tensors")
        assert await texts_of(frontend) == new
        texts = await tokens_of(outputs)
        assert [len(text) for text in texts] == [40] * 3
        assert [text[:2] for text in texts] == [text[:2] for text in old]
        await control.begin_update()
        await control.update("load_weights", tensors=[t for t in tensors if "gate_proj" in t[0]])
        with pytest.raises(WorkerCallError, match="lacks 1 tensors"):
            await control.end_update()
        assert control.is_paused
        control.resume()
        assert await texts_of(frontend) == new


async def answers_of(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    async with launched(folder, **settings) as frontend:
        return await tokens_of([await frontend.submit(each, GREEDY) for each in prompts])


@pytest.mark.parametrize(
    "way",
    ["disk", "extension", *(pytest.param(way, marks=extended) for way in ("tensors", "wake-up"))],
)
async def test_no_block_of_old_weights_is_used_with_new_ones(tmp_path: Path, way: str) -> None:
    """Requests that run keep their blocks over an update; those behind them, which the new weights
    compute of the old keys, are no others' prefix, on the device, in files, and after a restart."""
    folder, other = (tiny_llama(tmp_path / str(seed), seed=seed, num_layers=2) for seed in range(2))
    settings: dict[str, Any] = {
        "cache.host_bytes": 2**20, "cache.disk_path": str(tmp_path / "kv"),
        "parallel.worker_extension": "tests.worker_extension.Extension",
    }  # fmt: skip
    tensors = list(load_file(other / "model.safetensors").items())
    async with launched(folder, **settings) as frontend:
        control = frontend.control
        identities = await control.call_extension(identity_of)
        outputs = await submit_all(frontend)
        await until_running(frontend)
        if way == "tensors":
            await control.begin_update()
            await control.update("load_weights", tensors=tensors)
            await control.end_update()
        elif way == "extension":
            await control.call_extension("copy_weights", [str(other / "model.safetensors")])
        elif way == "wake-up":
            await control.sleep(2)
            await control.wake_up(["weights"])
            await control.update_from_disk(other)
            await control.wake_up()
        else:
            await control.update_from_disk(other)
        identities += await control.call_extension(identity_of)
        texts = await tokens_of(outputs)
        await texts_of(frontend)
        longer = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
        found = await tokens_of([await frontend.submit(each, GREEDY) for each in longer])
        await control.call_extension("scale_norm", [1.5])
        identities += await control.call_extension(identity_of)
        assert len(set(identities)) == 3
    assert found == await answers_of(other, longer)
    assert await answers_of(folder, longer, **settings) == await answers_of(folder, longer)


async def test_weights_are_known_by_what_was_loaded(folder: Path, other: Path) -> None:
    async with launched(folder, **{"cache.host_bytes": 2**20}) as frontend:
        control = frontend.control
        before = await control.call_extension(identity_of)
        file = folder / "model.safetensors"
        content = file.read_bytes()
        try:
            file.write_bytes((other / "model.safetensors").read_bytes())
            assert await control.call_extension(identity_of) == before
        finally:
            file.write_bytes(content)


async def identities(folder: Path, executor: str = "inline", **settings: Any) -> list[str]:
    """Returns by what the KV blocks of each rank are known."""
    store = {"cache.host_bytes": 2**20}
    async with launched(folder, executor, **store | settings) as frontend:
        found: list[str] = await frontend.control.call_extension(identity_of)
        return found


async def test_blocks_are_known_by_what_their_keys_depend_on(folder: Path) -> None:
    """The length that is served changes the keys of "longrope" alone, and the order in which the
    configuration has its keys none."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 48, **factors}
    turned = dict(reversed(rope.items()))
    found = [
        await identities(folder, **{"model.hf_overrides": overrides, "model.max_model_len": length})
        for overrides in ({}, {"rope_parameters": rope}, {"rope_parameters": turned})
        for length in (48, 49)
    ]
    assert found[0] == found[1]
    assert found[2:4] == found[4:]
    assert len({*map(tuple, found)}) == 3


@pytest.mark.extended
async def test_of_another_number_of_ranks_a_rank_has_other_heads(folder: Path) -> None:
    """Two of four ranks share a head: the second has the first head then, and else the second."""
    two, four = [
        await identities(folder, "auto", **{"parallel.tensor_parallel_size": n}) for n in (2, 4)
    ]
    assert not set(two) & set(four)


@pytest.mark.slow
async def test_a_trainer_broadcasts_to_two_ranks(folder: Path, other: Path) -> None:
    new = await texts_with(other)
    tensors = load_file(other / "model.safetensors")
    info = {
        "names": [*tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {
        "parallel.tensor_parallel_size": 2,
        "parallel.worker_extension": "tests.worker_extension.Extension",
    }
    async with launched(folder, "auto", **settings) as frontend:
        control = frontend.control
        outputs = await submit_all(frontend)
        await until_running(frontend)
        group = {"master_address": "127.0.0.1", "master_port": port, "world_size": 3}
        trainer = asyncio.create_task(
            asyncio.to_thread(broadcast_file, port, 3, other / "model.safetensors")
        )
        await control.join_group(group | {"timeout_s": 5.0})
        await control.begin_update()
        await control.update("receive_weights", **info)
        await control.end_update()
        await trainer
        assert await texts_of(frontend) == new
        assert [len(text) for text in await tokens_of(outputs)] == [40] * 3
        # the trainer is gone
        await control.begin_update()
        with pytest.raises(WorkerCallError, match=r"did not come from rank 0"):
            await control.update("receive_weights", **info)
        await control.end_update()
        assert await texts_of(frontend) == new
        # methods of the extension
        (first, pid), (second, other_pid) = await control.call_extension("place", [5])
        assert (first, second) == (5, 6)
        assert pid != other_pid
        assert await control.call_extension(rank_of, [7]) == [7, 8]


async def test_methods_of_an_extension(folder: Path) -> None:
    settings = {"parallel.worker_extension": "tests.worker_extension.Extension"}
    async with launched(folder, **settings) as frontend:
        control = frontend.control
        old, outputs = await begin(frontend)
        assert (await control.call_extension("place", [3], {"factor": 2}))[0][0] == 3
        assert await control.call_extension("opaque") == ["tensor([1.])"]
        for name in ("fail", "_hidden", "sleep", "load_weights"):
            message = "ValueError: on purpose" if name == "fail" else "no method"
            with pytest.raises(WorkerCallError, match=message):
                await control.call_extension(name)
        assert await tokens_of(outputs) == old
        await control.call_extension("scale_norm", [-1.0])
        assert await texts_of(frontend) != old


@pytest.mark.parametrize(
    "name",
    ["tests.worker_extension.Replacing", "tests.nothing.There", "x", "tests.worker_extension"],
)
async def test_an_extension_that_cannot_be_used(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="worker_extension"):
        async with launched(folder, **{"parallel.worker_extension": name}):
            pass


# ---------------------------------------------------------------- the end


@pytest.mark.parametrize("is_started", [False, True])
async def test_an_update_with_new_workers_outlives_no_engine(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch, *, is_started: bool
) -> None:
    """An engine is closed while its former workers end, or while new ones start."""
    monkeypatch.setattr(Worker, "check_folder", lambda worker, folder: False)
    monkeypatch.setattr(recovery, "_FIRST_DELAY_S", 0.0)
    async with launched(folder, **{"parallel.restart_workers": 3}) as frontend:
        (engine,) = frontend.engines
        begun, gate, ending = asyncio.Event(), asyncio.Event(), asyncio.Event()
        hold_start(engine, begun=begun, gate=gate)
        former, end = engine.executor, engine.executor.shutdown

        async def shut_down() -> None:
            await end()
            ending.set()
            await asyncio.sleep(0.05)

        monkeypatch.setattr(former, "shutdown", shut_down)
        update = asyncio.ensure_future(frontend.control.update_from_disk(other))
        await (begun if is_started else ending).wait()
        await frontend.close()
        gate.set()
        with pytest.raises((WorkerCallError, EngineDeadError)):
            await update
        await asyncio.sleep(0.1)
        assert engine.state is EngineState.DEAD
        assert (engine.executor is former) is not is_started
        assert frontend.control.weights_folder == folder

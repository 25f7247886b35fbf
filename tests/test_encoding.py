"""Encoding prompts: hopeless texts are rejected at once, long ones do not delay short ones, and all
get the tokens that the tokenizer gives them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aioinfer.engine.encoding import SHORT_TEXT, EncodingThreads, PromptEncoder
from aioinfer.errors import RequestError
from aioinfer.text.pieces import PIECE_CHARS
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import mistral_folder, qwen_folder
from tests.waiting import until

pytestmark = pytest.mark.slow

PROSE = "The quick brown fox jumps over the lazy dog, isn't it? Zwölf Boxkämpfer, 世界.\n"


@pytest.fixture(scope="module", params=["qwen", "mistral"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_cache: Path) -> Tokenizer:
    make_folder = qwen_folder if request.param == "qwen" else mistral_folder
    return Tokenizer.load(make_folder(tokenizer_cache))


@pytest.fixture
async def threads() -> AsyncIterator[EncodingThreads]:
    threads = EncodingThreads()
    yield threads
    threads.shutdown()


def make_encoder(
    tokenizer: Tokenizer, threads: EncodingThreads, max_model_len: int = 32_768
) -> PromptEncoder:
    return PromptEncoder(
        tokenizer, threads, max_model_len=max_model_len, vocab_size=tokenizer.vocab_size,
        hash_block_size=16,
    )  # fmt: skip


@contextmanager
def too_long(param: str = "prompt") -> Iterator[None]:
    """Checks that the block rejects a text for its length."""
    with pytest.raises(RequestError) as caught:
        yield
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    "text", ["0123456789" * 1_600_000, PROSE * 200_000, "世界人类" * 1_300_000]
)
async def test_a_text_that_cannot_fit_is_rejected_at_once(
    tokenizer: Tokenizer, threads: EncodingThreads, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder(tokenizer, threads)
    monkeypatch.setattr(tokenizer, "encode", None)  # it is not encoded, not even a part
    await threads.run(lambda: None)  # the threads are there
    times = []
    for _ in range(3):
        began = time.perf_counter()
        with too_long():
            await encoder.encode(text)
        times.append(time.perf_counter() - began)
    assert min(times) < 0.05


async def test_short_prompts_do_not_wait_for_long_ones(
    tokenizer: Tokenizer, threads: EncodingThreads
) -> None:
    encoder = make_encoder(tokenizer, threads, max_model_len=10**7)
    long = [asyncio.ensure_future(encoder.encode(PROSE * 60_000)) for _ in range(2)]
    await asyncio.sleep(0.1)
    times = []
    while not any(one.done() for one in long) and len(times) < 20:
        began = time.perf_counter()
        await encoder.encode("A short prompt.")
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.01)
    assert len(times) == 20, "the long ones were encoded too fast for this test"
    assert sorted(times)[10] < 0.1
    for one in long:
        one.cancel()
    await asyncio.gather(*long, return_exceptions=True)


async def test_a_long_prompt_does_not_wait_for_a_longer_one_before_it(
    tokenizer: Tokenizer, threads: EncodingThreads
) -> None:
    """The shorter of two long ones is done long before the other, which came first."""
    encoder = make_encoder(tokenizer, threads, max_model_len=10**7)
    longer = asyncio.ensure_future(encoder.encode(PROSE * 60_000))
    await asyncio.sleep(0)
    assert len(await encoder.encode(PROSE * 1000)) > 20_000
    assert not longer.done()
    longer.cancel()
    await asyncio.gather(longer, return_exceptions=True)


async def test_what_is_cancelled_before_it_begins_is_dropped(threads: EncodingThreads) -> None:
    may_end, done = threading.Event(), []
    for is_long, running in ((False, 2), (True, 1)):
        busy = [
            asyncio.ensure_future(threads.run(may_end.wait, is_long=is_long))
            for _ in range(running)
        ]
        late = asyncio.ensure_future(threads.run(lambda: done.append(1), is_long=is_long))
        await asyncio.sleep(0.05)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        may_end.set()
        await asyncio.gather(*busy)
        await threads.run(lambda: None, is_long=is_long)
        may_end.clear()
    assert not done


async def test_a_cancelled_long_prompt_stops_after_a_piece(
    tokenizer: Tokenizer, threads: EncodingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder(tokenizer, threads, max_model_len=10**7)
    pieces, encode = [], tokenizer.encode

    def count(text: str, *args: object, **options: object) -> list[int]:
        pieces.append(len(text))
        return encode(text, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tokenizer, "encode", count)
    task = asyncio.ensure_future(encoder.encode(PROSE * 60_000))
    await until(lambda: len(pieces) >= 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await threads.run(lambda: None, is_long=True)
    assert 2 <= len(pieces) <= 4
    assert max(pieces) < PIECE_CHARS + 100


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("repetitions", [1, 300, 2000])
async def test_the_tokens_are_those_of_the_tokenizer(
    tokenizer: Tokenizer, threads: EncodingThreads, repetitions: int, add_special_tokens: bool
) -> None:
    encoder, text = make_encoder(tokenizer, threads, 10**7), PROSE * repetitions
    expected = tokenizer.encode(text, add_special_tokens)
    assert await encoder.encode(text, add_special_tokens) == expected


async def test_the_longest_text_that_fits_is_not_rejected(
    tokenizer: Tokenizer, threads: EncodingThreads
) -> None:
    """Text of long tokens, in which the bound comes closest to the real number."""
    text = (" " * 128 + "x") * 2000
    num_tokens = len(tokenizer.encode(text))
    assert len(text) > SHORT_TEXT
    exactly = make_encoder(tokenizer, threads, num_tokens)
    assert len(await exactly.encode(text)) == num_tokens
    with too_long():
        await make_encoder(tokenizer, threads, num_tokens - 1).encode(text)


async def test_a_conversation_is_encoded_as_a_whole(
    tokenizer: Tokenizer, threads: EncodingThreads
) -> None:
    for repetitions in (1, 2000):
        messages = [{"role": "user", "content": PROSE * repetitions}]
        encoder = make_encoder(tokenizer, threads, 10**7)
        assert await encoder.encode_chat(messages) == tokenizer.encode_chat(messages)
    with too_long("messages"):
        await make_encoder(tokenizer, threads, 1000).encode_chat(messages)


async def test_special_tokens_in_a_long_conversation_are_text(
    tokenizer: Tokenizer, threads: EncodingThreads
) -> None:
    special = tokenizer.decode([tokenizer.eos_token_id or 0], skip_special_tokens=False)
    for repetitions in (1, 2000):
        messages = [{"role": "user", "content": f"{PROSE}{special}" * repetitions}]
        encoder = make_encoder(tokenizer, threads, 10**7)
        ids = await encoder.encode_chat(messages)
        assert ids == tokenizer.encode_chat(messages)
        parsed = await encoder.encode_chat(messages, parse_special=True)
        extra = parsed.count(tokenizer.eos_token_id) - ids.count(tokenizer.eos_token_id)
        assert extra == repetitions


async def test_a_surrogate_is_reported_in_long_texts_too(
    tokenizer: Tokenizer, threads: EncodingThreads
) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        await make_encoder(tokenizer, threads, 10**7).encode(PROSE * 2000 + "\ud800")


async def test_token_ids_that_are_too_many_are_not_hashed(
    tokenizer: Tokenizer, threads: EncodingThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioinfer.engine.encoding.extend_hashes", None)
    with pytest.raises(
        RequestError, match=r"context length is 32768 tokens\. However, .* has 40000 tokens"
    ):
        await make_encoder(tokenizer, threads).prepare([5] * 40_000)

"""Text that comes token by token: it must add up to the text of the whole, and never show half a
character."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from aioinfer.errors import ConfigError
from aioinfer.text.detokenizer import DecodeRules
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import (
    TEXTS,
    mistral_folder,
    qwen_folder,
    sentencepiece_model,
    smollm2_folder,
)

pytestmark = pytest.mark.slow

FOLDERS = {"qwen": qwen_folder, "smollm2": smollm2_folder, "mistral": mistral_folder}


@pytest.fixture(scope="session")
def all_tokenizers(tokenizer_cache: Path) -> dict[str, Tokenizer]:
    return {name: Tokenizer.load(folder(tokenizer_cache)) for name, folder in FOLDERS.items()}


@pytest.fixture(params=FOLDERS, scope="session")
def tokenizer(request: pytest.FixtureRequest, all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers[request.param]


@pytest.fixture(scope="session")
def library(
    all_tokenizers: dict[str, Tokenizer], tokenizer_cache: Path
) -> dict[str, tokenizers.Tokenizer]:
    """The byte-level vocabularies as the library `tokenizers` has them."""
    return {
        name: tokenizers.Tokenizer.from_file(str(FOLDERS[name](tokenizer_cache) / "tokenizer.json"))
        for name in ("qwen", "smollm2")
    }


@pytest.fixture(scope="session")
def native() -> SentencePieceProcessor:
    """Mistral's vocabulary as the sentencepiece library has it."""
    return SentencePieceProcessor(model_file=str(sentencepiece_model()))


def stream(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    prompt: Sequence[int] = (),
    skip: bool = True,
    cuts: Sequence[int] = (),
) -> list[str]:
    """Returns the pieces of a stream that is fed token by token, or cut at these places; the last
    one is the flush."""
    detokenizer = tokenizer.detokenizer(prompt, skip)
    borders = (
        sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
        if cuts
        else range(len(ids) + 1)
    )
    pieces = [detokenizer.step(ids[a:b]) for a, b in itertools.pairwise(borders)]
    return [*pieces, detokenizer.flush()]


def some_ids(tokenizer: Tokenizer, source: random.Random, count: int) -> list[int]:
    """Returns random ids, rich in special tokens, single bytes and ids beyond the vocabulary."""
    size = tokenizer.vocab_size
    pools = [range(size), range(300), range(size - 3, size + 290), sorted(tokenizer.special_ids)]
    return [source.choice(source.choice(pools)) for _ in range(count)]


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_add_up_to_the_text(tokenizer: Tokenizer, skip: bool):
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = stream(tokenizer, ids, skip=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip)
        assert "\ufffd" not in "".join(pieces)  # so no piece ended within a character
    assert tokenizer.decode(tokenizer.encode(TEXTS[1])) == TEXTS[1]


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 60),
    skip=st.booleans(),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
@pytest.mark.parametrize("name", FOLDERS)
def test_any_tokens_in_any_pieces_add_up(
    all_tokenizers, library, name: str, seed: int, count: int, skip: bool, cuts: list[int]
):
    tokenizer = all_tokenizers[name]
    ids = some_ids(tokenizer, random.Random(seed), count)
    text = "".join(stream(tokenizer, ids, skip=skip, cuts=cuts))
    assert text == tokenizer.decode(ids, skip)
    if name in library:
        assert text == library[name].decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 60))
def test_byte_pieces_decode_as_in_sentencepiece(
    all_tokenizers, native: SentencePieceProcessor, seed: int, count: int
):
    tokenizer, source = all_tokenizers["mistral"], random.Random(seed)
    pools = [range(3, 259), range(3 + 0x80, 259), range(259, 32000)]
    ids = [source.choice(source.choice(pools)) for _ in range(count)]
    # a space at the start goes, however spelled, as in transformers; in sentencepiece not as a byte
    if ids[:1] == [3 + ord(" ")]:
        ids = ids[1:]
    assert "".join(stream(tokenizer, ids)) == native.decode(ids)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), text=st.text(max_size=20))
@pytest.mark.parametrize("name", FOLDERS)
def test_output_is_what_the_whole_has_beyond_the_prompt(
    all_tokenizers, name: str, seed: int, text: str
):
    tokenizer = all_tokenizers[name]
    prompt = tokenizer.encode("A prompt:")
    output = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(prompt + output)
    assert "".join(stream(tokenizer, output, prompt)) == whole.removeprefix(
        tokenizer.decode(prompt)
    )


def test_the_space_before_the_first_word(all_tokenizers):
    mistral = all_tokenizers["mistral"]
    hello = mistral.encode("Hello world", add_special_tokens=False)
    assert stream(mistral, hello) == ["Hello", " world", ""]
    assert stream(mistral, hello, prompt=mistral.encode("Say:")) == [" Hello", " world", ""]
    assert stream(mistral, hello, prompt=[1]) == ["Hello", " world", ""]  # skipped, BOS is no text
    # shown, it is
    assert stream(mistral, hello, prompt=[1], skip=False) == [" Hello", " world", ""]
    # a piece that is a space alone
    assert stream(mistral, [28705, *hello]) == ["", " Hello", " world", ""]


def test_a_character_that_the_prompt_began(tokenizer: Tokenizer):
    ids = tokenizer.encode("a🦜", add_special_tokens=False)
    cut = len(ids) - 1
    letter = tokenizer.encode("1x", add_special_tokens=False)[-1]
    assert "".join(stream(tokenizer, ids[cut:], prompt=ids[:cut])) == "🦜"
    # the half character stays the prompt's
    assert "".join(stream(tokenizer, [letter], prompt=ids[:cut])) == "x"
    assert "".join(stream(tokenizer, [], prompt=ids[:cut])) == ""


def test_a_character_that_never_ends(tokenizer: Tokenizer):
    ids = tokenizer.encode("a🦜", add_special_tokens=False)[:-1]
    letter = tokenizer.encode("1x", add_special_tokens=False)[-1]
    *pieces, rest = stream(tokenizer, ids)
    assert "".join(pieces) == "a"
    assert rest
    assert set(rest) == {"\ufffd"}
    *pieces, last, rest = stream(tokenizer, [*ids, letter])
    assert "".join(pieces) == "a"
    assert set(last) == {"\ufffd", "x"}
    assert rest == ""


def test_endless_bytes_that_are_no_text_are_shown_at_once(tokenizer: Tokenizer):
    single = {
        data: token for token in range(600) if len(data := tokenizer.token_text(token)[1]) == 1
    }
    detokenizer = tokenizer.detokenizer()
    for count in range(1, 5001):
        text = detokenizer.step((single[b"\x80"],))
        assert text == "\ufffd", count
    for _ in range(5000):  # a first byte, which waits for the next one, again and again
        assert len(detokenizer.step((single[b"\xf0"],))) <= 1
    assert detokenizer.flush() == "\ufffd"


def test_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer):
    ids = some_ids(tokenizer, random.Random(3), 20_000)
    begin = time.perf_counter()
    stream(tokenizer, ids)
    # it takes 40 ms; at 20 000 tokens a quadratic way takes minutes
    assert time.perf_counter() - begin < 4


def test_the_vocabulary_is_looked_up_only_where_it_is_used(all_tokenizers):
    table = all_tokenizers["smollm2"].token_bytes(False)
    before = len(table)
    assert table[49151] is table[49151]
    assert all(table[token] == b"" for token in range(10**6, 10**6 + 100))
    assert len(table) <= before + 1


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        tokenizers.decoders.CTC(),
        tokenizers.decoders.Sequence(
            [tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip(" ", left=1)]
        ),
        tokenizers.decoders.Strip("x", left=1),
    ],
    ids=["none", "CTC", "ByteLevel and more", "Strip of x"],
)
def test_decoders_of_other_kinds_are_refused(decoder):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ConfigError, match="not supported"):
        DecodeRules.of(backend)


def test_word_pieces_and_unigrams():
    """Of encoders; punctuation keeps the space before it, since tokens are converted one by one."""
    pieces = {"[CLS]": 0, "run": 1, "##ning": 2, ".": 3}
    word_pieces = tokenizers.Tokenizer(tokenizers.models.WordPiece(pieces, unk_token="[CLS]"))
    word_pieces.decoder = tokenizers.decoders.WordPiece()
    assert Tokenizer(word_pieces, {}, None).decode([1, 2, 1, 3]) == "running run ."
    unigrams = [("<s>", 0.0), ("\u2581run", -1.0), ("ning", -1.0)]
    unigram = tokenizers.Tokenizer(tokenizers.models.Unigram(unigrams, unk_id=0))
    unigram.decoder = tokenizers.decoders.Metaspace()
    assert Tokenizer(unigram, {}, None).decode([1, 2, 1]) == "running run"

"""The lower bound of a text's tokens: never above the real number, close to it where it matters,
and absent for tokenizers that can lose text."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aioinfer.text import token_bound
from aioinfer.text.token_bound import TokenBound
from aioinfer.text.tokenizer import Tokenizer as ModelTokenizer
from tests.real_tokenizers import mistral_folder, qwen_folder, smollm2_folder

pytestmark = pytest.mark.slow

FOLDERS = {"qwen": qwen_folder, "smollm2": smollm2_folder, "mistral": mistral_folder}
PARTS = [
    "a", "Hello", " the", "  ", " " * 100, "\n", "\t", "1", "2026", "-" * 70, "=" * 90, "é",
    "e\u0301", "\u1fbe\u0308\u0301", "\u212a", "世界", "😀", "\u1100\u1161\u11a8", "▁", "▁▁the",
    "<|im_end|>", "</s>", "<0x0A>", "\u0301" * 3, "\u3000", "\x00", "\ufffd", "ﬁ", "\U0001d400",
]  # fmt: skip


@pytest.fixture(scope="module", params=FOLDERS)
def tokenizer(request: pytest.FixtureRequest, tokenizer_cache: Path) -> ModelTokenizer:
    return ModelTokenizer.load(FOLDERS[request.param](tokenizer_cache))


def bound_of(tokenizer: ModelTokenizer) -> TokenBound:
    assert tokenizer.bound is not None
    return tokenizer.bound


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PARTS), max_size=40).map("".join)))
def test_it_is_never_above_the_number_of_tokens(tokenizer: ModelTokenizer, text: str) -> None:
    assert bound_of(tokenizer).min_tokens(text) <= len(tokenizer.encode(text, False))


def test_a_text_of_the_longest_tokens_is_not_counted_too_high(tokenizer: ModelTokenizer) -> None:
    """The bound meets the real number there: any more would reject texts that fit."""
    longest = max(
        (tokenizer.decode([token]) for token in range(tokenizer.vocab_size)),
        key=lambda text: len(text.encode()) / max(1, len(tokenizer.encode(text, False))),
    )
    text = longest * 50
    real = len(tokenizer.encode(text, False))
    assert 0.2 * real <= bound_of(tokenizer).min_tokens(text) <= real


def test_digits_count_in_full_where_each_is_a_token(tokenizer_cache: Path) -> None:
    tokenizer = ModelTokenizer.load(qwen_folder(tokenizer_cache))
    assert bound_of(tokenizer).min_tokens("0123456789" * 1000) == 10_000


def test_composed_characters_at_the_ends_of_slices_do_not_count_too_high(
    tokenizer_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ModelTokenizer.load(qwen_folder(tokenizer_cache))
    for text in (unicodedata.normalize("NFD", "Việt Ώ각 " * 8), "\u1100\u1161\u11a8" * 20):
        count = len(tokenizer.encode(text, False))
        for slice_chars in (1, 2, 3, 7):
            monkeypatch.setattr(token_bound, "_SLICE", slice_chars)
            assert bound_of(tokenizer).min_tokens(text) <= count, slice_chars


def test_counting_stops_once_it_is_enough(tokenizer: ModelTokenizer) -> None:
    text = "0 " * 2**20
    assert 1000 <= bound_of(tokenizer).min_tokens(text, 1000) < 2**18


def test_a_surrogate_is_left_to_the_encoder(tokenizer: ModelTokenizer) -> None:
    assert bound_of(tokenizer).min_tokens("a\ud800b") >= 0


def byte_level(missing: str = "", *added: AddedToken) -> Tokenizer:
    """Returns a byte-level tokenizer without merges that lacks some bytes."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(missing))
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    return tokenizer


def test_a_byte_that_the_vocabulary_lacks_counts_nothing() -> None:
    bound = TokenBound.of(byte_level("z"))
    assert bound is not None
    assert (bound.min_tokens("xyz"), bound.min_tokens("zzz")) == (2, 0)


def test_white_space_counts_nothing_beside_a_token_that_takes_it_along() -> None:
    tokenizer = byte_level("", AddedToken("<end>", rstrip=True))
    bound = TokenBound.of(tokenizer)
    text = "<end>" + " \n\u3000" * 50 + "x"
    assert bound is not None
    assert bound.min_tokens(text) <= len(tokenizer.encode(text).ids) == 2


def make_lossy() -> dict[str, Tokenizer]:
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    no_fallback = Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    stripped, removed, replaced = byte_level(), byte_level(), byte_level()
    stripped.normalizer = normalizers.Strip()
    removed.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    replaced.normalizer = normalizers.Replace("aaaa", "")
    return locals()


@pytest.mark.parametrize("kind", make_lossy())
def test_tokenizers_that_can_lose_text_have_none(kind: str) -> None:
    assert TokenBound.of(make_lossy()[kind]) is None

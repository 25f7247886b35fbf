"""Pieces of a long text: their tokens are those of the whole, and tokenizers for which that is not
sure are not cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from aioinfer.text import pieces as pieces_module
from aioinfer.text.pieces import TextPieces
from aioinfer.text.tokenizer import Tokenizer as ModelTokenizer
from tests.real_tokenizers import mistral_folder, qwen_folder, smollm2_folder

pytestmark = pytest.mark.slow

FOLDERS = {"qwen": qwen_folder, "smollm2": smollm2_folder, "mistral": mistral_folder}
PARTS = [
    "a", "B.", " ", "  ", "\n", " \n", "\r\n", "\t", "1", "23", "'s", "I'll", "é", "e\u0301", "世",
    "😀", "▁", "<s>", "</s>", "<|im_end|>", "\u3000", "\u200b", "\u180e", "-", "'", "(x)", "_",
    "\u0301", " the", "don't ",
]  # fmt: skip


@pytest.fixture(scope="module", params=FOLDERS)
def tokenizer(request: pytest.FixtureRequest, tokenizer_cache: Path) -> ModelTokenizer:
    return ModelTokenizer.load(FOLDERS[request.param](tokenizer_cache))


@pytest.mark.parametrize("is_escaped", [False, True])
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=60).map("".join), st.integers(1, 20))
def test_the_tokens_of_the_pieces_are_those_of_the_text(
    is_escaped: bool, tokenizer: ModelTokenizer, text: str, size: int
) -> None:
    cutter = tokenizer.escaped_pieces if is_escaped else tokenizer.pieces
    assert cutter is not None
    cut = list(cutter.cut(text, size))
    assert "".join(cut) == text
    encoded = [t for piece in cut for t in tokenizer.encode(piece, False, is_escaped=is_escaped)]
    whole = tokenizer.encode(text, not is_escaped, is_escaped=is_escaped)
    assert cutter.prefix + encoded + cutter.suffix == whole


def test_a_text_without_spaces_is_cut_between_letters_and_marks() -> None:
    tokenizer = byte_level()
    cutter = TextPieces.of(tokenizer)
    assert cutter is not None
    assert list(cutter.cut("ab.c,d'e_f1-g(h", 1)) == ["ab", ".c", ",d'e_f1-g", "(h"]
    tokenizer.add_tokens([AddedToken("<end,>", special=True)])
    cutter = TextPieces.of(tokenizer)
    assert cutter is not None
    assert list(cutter.cut("a,b<c<end,>d>e", 1)) == ["a,b", "<c", "<end,>d", ">e"]


def test_pieces_are_of_about_the_size(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.pieces is not None
    text = "Of course, this is only an example. " * 100
    cut = list(tokenizer.pieces.cut(text, 100))
    assert len(cut) > 30
    assert all(100 <= len(piece) < 120 for piece in cut[:-1])


def test_the_search_for_a_cut_goes_on_beyond_its_window(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "_SEARCHED", 4)
    assert tokenizer.pieces is not None
    assert list(tokenizer.pieces.cut("x" * 50 + " y", 3)) == ["x" * 50, " y"]
    assert list(tokenizer.pieces.cut("x" * 50, 3)) == ["x" * 50]


def byte_level(pattern: str | None = None) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


def make_uncut() -> dict[str, Tokenizer]:
    stripping, phrase, prepending = byte_level(), byte_level(), byte_level()
    stripping.add_tokens([AddedToken("<end>", rstrip=True)])
    phrase.add_tokens(["of course"])
    prepending.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    unknown_pattern = byte_level(r"\w+ \w+|\s+|.")
    normalized = byte_level()
    normalized.normalizer = normalizers.Prepend("▁")
    words_joined = Tokenizer(models.BPE({"a": 0, "▁": 1, "a▁": 2}, [("a", "▁")]))
    words_joined.pre_tokenizer = pre_tokenizers.Metaspace("▁", split=False)
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    return locals()


@pytest.mark.parametrize("kind", make_uncut())
def test_where_a_cut_could_change_tokens_there_is_none(kind: str) -> None:
    assert TextPieces.of(make_uncut()[kind]) is None


def test_special_tokens_go_around_the_whole() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ids
    )
    cutter = TextPieces.of(tokenizer)
    assert cutter is not None
    assert (cutter.prefix, cutter.suffix) == ([ids[0][1]], [ids[1][1]])

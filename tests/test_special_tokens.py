"""Special tokens around texts: what is cut and joined is what the tokenizers library makes."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, processors

from aioinfer.text.special_tokens import Pair, SpecialTokens
from tests.encoder_models import word_pieces

FIRST, SECOND = "the river ran by", "an old town the river"


def of_kind(kind: str) -> Tokenizer:
    """Returns a tokenizer that joins pairs as BERT's, RoBERTa's, or in no way of its own."""
    tokenizer = word_pieces()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if kind == "roberta":
        tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    if kind == "plain":
        tokenizer.post_processor = None
    return tokenizer


def bare(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", ["bert", "roberta", "plain"])
@pytest.mark.parametrize("kept", [None, 4, 8, 17, 18, 24, 100])
def test_pairs(kind: str, kept: int | None) -> None:
    tokenizer = of_kind(kind)
    special = SpecialTokens.of(tokenizer)
    texts = bare(tokenizer, FIRST), bare(tokenizer, SECOND)
    for first, second, names in ((*texts, (FIRST, SECOND)), (*texts[::-1], (SECOND, FIRST))):
        if kept is not None:
            tokenizer.enable_truncation(kept)
        expected = tokenizer.encode(*names)
        tokenizer.no_truncation()
        start = expected.type_ids.index(1) if 1 in expected.type_ids else 0
        assert (start > 0) == (kind != "roberta")
        assert special.join(first, second, kept) == Pair(expected.ids, start)


@pytest.mark.parametrize("kind", ["bert", "roberta", "plain"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_cuts(kind: str, side: str) -> None:
    tokenizer = of_kind(kind)
    special, whole = SpecialTokens.of(tokenizer), tokenizer.encode(FIRST).ids
    for kept in (3, 5, len(whole) - 1, len(whole), 100):
        tokenizer.enable_truncation(kept, direction=side)
        expected = tokenizer.encode(FIRST).ids
        assert special.cut(whole, kept, side) == expected  # type: ignore[arg-type]
    # token ids without the special tokens are cut as they are
    text = bare(tokenizer, FIRST)
    assert special.cut(text, 3, "right") == text[:3]
    assert special.cut(whole, 1, "right") == whole[:1]


def test_a_tokenizer_that_knows_no_letter() -> None:
    assert SpecialTokens.of(Tokenizer(models.BPE())) == SpecialTokens()
    assert SpecialTokens.of(Tokenizer(models.WordLevel({"b": 0}))) == SpecialTokens()

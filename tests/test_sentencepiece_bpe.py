"""The conversion of sentencepiece models, against the sentencepiece library."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from aioinfer.errors import ConfigError
from aioinfer.text.sentencepiece_bpe import PieceType, add_bos_eos, build, read_model
from tests.real_tokenizers import TEXTS, sentencepiece_model

pytestmark = pytest.mark.slow


def random_texts(source: random.Random, count: int) -> list[str]:
    """Returns texts of few characters, so that runs of them merge in every way."""
    alphabets = ["ab ", "a  \n=-", " \t\n", "*#- ", "éü中世🦜 "]
    return [
        "".join(source.choice(alphabet) for _ in range(source.randrange(1, 60)))
        for alphabet in alphabets
        for _ in range(count)
    ]


@pytest.mark.parametrize("version", [1, 3])
def test_ids_are_those_of_sentencepiece(version: int):
    file = sentencepiece_model(version)
    native = SentencePieceProcessor(model_file=str(file))
    pieces, _ = read_model(file)
    as_legacy, as_first = build(pieces, "always"), build(pieces, "first")
    control = [
        text
        for text, kind in zip(pieces.texts, pieces.types, strict=True)
        if kind != PieceType.NORMAL
    ]
    texts = (
        TEXTS
        + random_texts(random.Random(5), 200)
        + [character * count for character in " -=a0é" for count in range(1, 70)]
    )
    for text in texts:
        if any(token in text for token in control):  # sentencepiece takes these for plain text
            continue
        ids = native.encode(text)
        assert as_legacy.encode(text).ids == ids, text
        if not text.startswith(" "):
            assert as_first.encode(text).ids == ids, text


def test_where_a_space_is_put_before_the_text():
    pieces, _ = read_model(sentencepiece_model())
    tokens = {
        scheme: build(pieces, scheme).encode("Hello</s>world").tokens
        for scheme in ("never", "first", "always")
    }
    assert tokens["never"] == ["Hello", "</s>", "world"]
    assert tokens["first"] == ["▁Hello", "</s>", "world"]
    assert tokens["always"] == ["▁Hello", "</s>", "▁world"]


def test_special_pieces_and_named_tokens():
    pieces, named = read_model(sentencepiece_model(3))
    assert named == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = build(pieces, "first")
    added = {
        token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()
    }
    assert added["[INST]"]
    assert not added["[REFERENCE_DOC_0]"]  # user-defined: found whole, but text
    found = tokenizer.encode("[INST][REFERENCE_DOC_0]").ids
    assert found == [3, pieces.texts.index("[REFERENCE_DOC_0]")]


@pytest.mark.parametrize(
    ("bos", "eos"), [("<s>", None), (None, "</s>"), ("<s>", "</s>"), (None, None)]
)
def test_tokens_around_the_text(bos: str | None, eos: str | None):
    pieces, _ = read_model(sentencepiece_model())
    tokenizer = build(pieces, "first")
    add_bos_eos(tokenizer, bos, eos)
    assert tokenizer.encode("Hello").tokens == [token for token in (bos, "▁Hello", eos) if token]
    assert tokenizer.encode("Hello", add_special_tokens=False).tokens == ["▁Hello"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"model_type": "unigram"}, "an algorithm other than BPE"),
        ({"normalization_rule_name": "nmt_nfkc"}, "text normalization"),
        ({"remove_extra_whitespaces": True}, "text normalization"),
        ({"treat_whitespace_as_suffix": True}, "whitespace as a suffix"),
        ({"add_dummy_prefix": False}, "no space before the text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_of_other_kinds_are_refused(tmp_path: Path, option: dict[str, object], message: str):
    settings = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 3,
    }
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 20),
        model_prefix=str(tmp_path / "tiny"),
        vocab_size=31,
        **(settings | option),
    )
    with pytest.raises(ConfigError, match=message):
        read_model(tmp_path / "tiny.model")

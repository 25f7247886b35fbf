"""Encoding, decoding and loading, against transformers on real vocabularies."""

from __future__ import annotations

import json
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from transformers import AutoTokenizer

from aioinfer.errors import ConfigError, RequestError
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import TEXTS, mistral_folder, qwen_folder, smollm2_folder

pytestmark = pytest.mark.slow

FOLDERS = {
    "qwen": qwen_folder,
    "smollm2": smollm2_folder,
    "mistral": mistral_folder,
    "mistral-v3": lambda cache: mistral_folder(cache, 3),
}


@pytest.fixture(scope="session", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tokenizer_cache: Path) -> Path:
    return FOLDERS[request.param](tokenizer_cache)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def reference(folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(folder)


def copy_with_config(folder: Path, target: Path, **changes: object) -> Path:
    """Copies a tokenizer folder with other entries in its `tokenizer_config.json`."""
    shutil.copytree(folder, target)
    config = json.loads((target / "tokenizer_config.json").read_text("utf-8"))
    (target / "tokenizer_config.json").write_text(json.dumps(config | changes), "utf-8")
    return target


def test_ids_are_those_of_transformers(tokenizer, reference):
    for text in TEXTS:
        # Transformers orders the merges of a bare sentencepiece model in a way that takes runs of
        # spaces apart differently from sentencepiece itself (test_sentencepiece_bpe.py compares
        # with that).
        if tokenizer.decode_rules.byte_level or "   " not in text:
            assert tokenizer.encode(text) == reference(text).input_ids, text
            assert (
                tokenizer.encode(text, add_special_tokens=False)
                == reference(text, add_special_tokens=False).input_ids
            ), text


def test_properties_are_those_of_transformers(tokenizer, reference):
    assert tokenizer.bos_token_id == reference.bos_token_id
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert tokenizer.special_ids == {
        index for index, token in reference.added_tokens_decoder.items() if token.special
    }
    assert tokenizer.vocab_size == len(reference)


def test_decoding_is_that_of_transformers(tokenizer, reference):
    source = random.Random(7)
    sequences = [tokenizer.encode(text) for text in TEXTS]
    sequences += [[source.randrange(tokenizer.vocab_size) for _ in range(30)] for _ in range(100)]
    for ids in sequences:
        for skip in (True, False):
            # Transformers gives up a whole run of byte pieces for one bad byte; sentencepiece
            # itself does not.
            if not tokenizer.decode_rules.byte_fallback or "\ufffd" not in tokenizer.decode(ids):
                assert tokenizer.decode(ids, skip) == reference.decode(
                    ids, skip_special_tokens=skip
                )


def test_bos_follows_the_config(tokenizer_cache: Path, tmp_path: Path):
    folder = mistral_folder(tokenizer_cache)
    assert Tokenizer.load(folder).encode("Hello") == [1, 22557]
    without = copy_with_config(folder, tmp_path / "without", add_bos_token=False)
    assert (
        Tokenizer.load(without).encode("Hello")
        == AutoTokenizer.from_pretrained(without)("Hello").input_ids
        == [22557]
    )
    both = copy_with_config(folder, tmp_path / "both", add_eos_token=True)
    assert (
        Tokenizer.load(both).encode("Hello")
        == AutoTokenizer.from_pretrained(both)("Hello").input_ids
        == [1, 22557, 2]
    )


def test_ids_outside_of_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer):
    hello = tokenizer.encode("Hello", add_special_tokens=False)
    outside = [tokenizer.vocab_size, tokenizer.vocab_size + 289, -1, 2**31, 2**32, 2**70]
    assert tokenizer.decode(outside) == ""
    assert tokenizer.decode([*outside, *hello, *outside]) == tokenizer.decode(hello)
    assert tokenizer.token_text(outside[0]) == ("", b"")


def test_text_and_bytes_of_single_tokens(tokenizer: Tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = [tokenizer.token_text(token) for token in ids]
        assert b"".join(data for _, data in pieces).decode().lstrip(" ") == tokenizer.decode(
            ids, False
        ).lstrip(" ")
        assert all(text == data.decode() for text, data in pieces if "\ufffd" not in text)


def test_single_tokens_of_each_kind(tokenizer_cache: Path):
    qwen, mistral = (
        Tokenizer.load(qwen_folder(tokenizer_cache)),
        Tokenizer.load(mistral_folder(tokenizer_cache)),
    )
    assert qwen.token_text(1879) == (" world", b" world")
    assert qwen.token_text(qwen.encode("😀🦜")[-1])[1] == "🦜".encode()[-1:]
    assert qwen.token_text(151645) == ("<|im_end|>", b"<|im_end|>")
    assert mistral.token_text(1526) == (" world", b" world")
    assert mistral.token_text(3 + 0xE4) == ("\ufffd", b"\xe4")
    assert mistral.token_text(2) == ("</s>", b"</s>")


def test_text_that_is_no_text_is_refused(tokenizer: Tokenizer):
    for text in ("\ud800", "cut off \ud83d", "\udc00 first"):
        with pytest.raises(RequestError, match="surrogate") as caught:
            tokenizer.encode(text)
        assert caught.value.param == "prompt"
    assert tokenizer.decode(tokenizer.encode("a\x00b")) == "a\x00b"


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer_cache: Path):
    tokenizer = Tokenizer.load(qwen_folder(tokenizer_cache))
    text = " ".join(TEXTS) * 1500
    ready, done = threading.Event(), threading.Event()

    def encode() -> None:
        ready.set()
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    ready.wait()
    iterations = 0
    while not done.wait(0.001):
        iterations += 1
    thread.join()
    # a call that kept the interpreter's lock would leave room for two or three
    assert iterations > 20


def test_threads_do_not_disturb_each_other(tokenizer: Tokenizer):
    texts = [f"{n} {text}" for n in range(20) for text in TEXTS]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(tokenizer.decode, expected)) == [
            tokenizer.decode(ids) for ids in expected
        ]


def test_truncation_and_padding_of_the_file_do_not_count(tokenizer_cache: Path, tmp_path: Path):
    folder = shutil.copytree(smollm2_folder(tokenizer_cache), tmp_path / "smollm2")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).encode("one two three four five six") == Tokenizer.load(
        smollm2_folder(tokenizer_cache)
    ).encode("one two three four five six")


def test_tokens_that_only_the_config_adds(tokenizer_cache: Path, tmp_path: Path):
    think = {
        "content": "<think>", "lstrip": False, "normalized": False, "rstrip": False,
        "single_word": False, "special": False,
    }  # fmt: skip
    folder = copy_with_config(
        smollm2_folder(tokenizer_cache), tmp_path / "smollm2", added_tokens_decoder={"49152": think}
    )
    tokenizer = Tokenizer.load(folder)
    assert (
        tokenizer.encode("a<think>b")
        == AutoTokenizer.from_pretrained(folder)("a<think>b").input_ids
        == [81, 49152, 82]
    )
    assert tokenizer.decode([81, 49152, 82]) == "a<think>b"
    assert tokenizer.vocab_size == 49153


def test_special_tokens_may_be_dicts_or_lie_in_a_file_of_their_own(
    tokenizer_cache: Path, tmp_path: Path
):
    as_dict = copy_with_config(
        smollm2_folder(tokenizer_cache),
        tmp_path / "dict",
        eos_token={"__type": "AddedToken", "content": "<|im_start|>"},
    )
    assert Tokenizer.load(as_dict).eos_token_id == 1
    apart = shutil.copytree(smollm2_folder(tokenizer_cache), tmp_path / "apart")
    (apart / "tokenizer_config.json").unlink()
    assert Tokenizer.load(apart).eos_token_id is None
    (apart / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert Tokenizer.load(apart).eos_token_id == 2


def test_spaces_are_not_cleaned_up(tokenizer_cache: Path, tmp_path: Path):
    folder = copy_with_config(
        smollm2_folder(tokenizer_cache), tmp_path / "smollm2", clean_up_tokenization_spaces=True
    )
    text = "Hello , world . It 's ?"
    ids = Tokenizer.load(folder).encode(text)
    assert (
        Tokenizer.load(folder).decode(ids)
        == AutoTokenizer.from_pretrained(folder).decode(ids)
        == text
    )


def test_a_folder_without_a_usable_tokenizer(tokenizer_cache: Path, tmp_path: Path):
    with pytest.raises(
        ConfigError,
        match=r"no tokenizer\.json, tokenizer\.model or tekken\.json, nor vocab\.json with "
        r"merges\.txt or vocab\.txt: let model\.tokenizer",
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(ConfigError, match="is not a sentencepiece model"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_of_an_unknown_kind_is_refused(tmp_path: Path):
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0, "##b": 1}))
    words.decoder = tokenizers.decoders.CTC()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="decoder 'CTC' is not supported"):
        Tokenizer.load(tmp_path)


def test_chat_is_encoded_without_a_second_bos(tokenizer_cache: Path):
    tokenizer = Tokenizer.load(mistral_folder(tokenizer_cache))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert ids.count(1) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>[INST] Hello [/INST]"


def test_chat_without_a_template(tokenizer_cache: Path, tmp_path: Path):
    folder = shutil.copytree(smollm2_folder(tokenizer_cache), tmp_path / "smollm2")
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match=r"no chat template.*set model\.chat_template") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert caught.value.param == "messages"


def test_chat_that_is_no_text_is_refused(tokenizer_cache: Path):
    tokenizer = Tokenizer.load(smollm2_folder(tokenizer_cache))
    with pytest.raises(RequestError, match="surrogate") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "\ud800"}])
    assert caught.value.param == "messages"

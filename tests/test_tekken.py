"""Mistral's tekken.json, against tiktoken, which Mistral's own package runs on the same file."""

from __future__ import annotations

import base64
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from aioinfer.errors import ConfigError
from aioinfer.text.tokenizer import Tokenizer
from tests.real_tokenizers import TEXTS, packaged_file

pytestmark = pytest.mark.slow

NUM_SPECIAL, VOCAB_SIZE = 1000, 131_072


@pytest.fixture(scope="session")
def published() -> dict[str, Any]:
    file = packaged_file("mistral-common", "mistral_common/data/tekken_240911.json")
    return json.loads(file.read_bytes())


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tekken")
    file = packaged_file("mistral-common", "mistral_common/data/tekken_240911.json")
    shutil.copyfile(file, folder / "tekken.json")
    return Tokenizer.load(folder)


def small(published: dict[str, Any], folder: Path, **changes: Any) -> Path:
    """Writes a tekken.json with the first 2000 tokens of the published one."""
    config = published["config"] | {"default_vocab_size": 2100, "default_num_special_tokens": 100}
    content = {"config": config, "vocab": published["vocab"][:2500]} | changes
    (folder / "tekken.json").write_text(json.dumps(content), "utf-8")
    return folder


def test_ids_and_texts_are_those_of_tiktoken(tokenizer: Tokenizer, published: dict[str, Any]):
    tokens = [base64.b64decode(token["token_bytes"]) for token in published["vocab"]]
    tokens = tokens[: VOCAB_SIZE - NUM_SPECIAL]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pattern = published["config"]["pattern"]
    reference = tiktoken.Encoding(
        "tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )
    source = random.Random(5)
    texts = [text for text in TEXTS if "<s>" not in text] + [
        "".join(source.choice("aaabbB1é世 \n\t.,/-'sS\r²٣ǅ😀=\u0301") for _ in range(40))
        for _ in range(1000)
    ]
    for text in texts:
        ids = [1, *(NUM_SPECIAL + rank for rank in reference.encode(text))]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
    assert [tokenizer.token_text(NUM_SPECIAL + rank)[1] for rank in range(len(tokens))] == tokens


def test_special_tokens_come_first(tokenizer: Tokenizer):
    assert tokenizer.special_ids == frozenset(range(NUM_SPECIAL))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.vocab_size == VOCAB_SIZE
    known = {"<s>": 1, "[INST]": 3, "[TOOL_CALLS]": 9, "[IMG]": 10, "<SPECIAL_999>": 999}
    assert {text: tokenizer.marker_ids[text] for text in known} == known
    assert tokenizer.encode("".join(known), False) == list(known.values())
    found = (tokenizer.decode(known.values()), tokenizer.decode(known.values(), False))
    assert found == ("", "".join(known))


def test_streams_with_bytes_that_are_no_text(tokenizer: Tokenizer):
    source = random.Random(6)
    for _ in range(200):
        ids = [
            source.choice([NUM_SPECIAL + source.randrange(256), source.randrange(VOCAB_SIZE)])
            for _ in range(20)
        ]
        stream = tokenizer.detokenizer()
        text = "".join([stream.next(token) for token in ids]) + stream.flush()
        assert text == tokenizer.decode(ids)


def test_files_that_name_their_special_tokens(published: dict[str, Any], tmp_path: Path):
    texts = ["<unk>", "<s>", "</s>", "[INST]", "[ARGS]"]
    special = [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(texts)]
    tokenizer = Tokenizer.load(small(published, tmp_path, special_tokens=special))
    assert tokenizer.encode("[ARGS]<SPECIAL_5>a") == [1, 4, 5, 100 + ord("a")]
    assert tokenizer.vocab_size == 2100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": [{"token_bytes": "!"}]}, "not a tokenizer of Mistral's"),
        ({"config": {}}, "default_num_special_tokens"),
        ({"vocab": [{"token_bytes": "QQ=="}] * 2}, "twice"),
        ({"special_tokens": [{"rank": 100, "token_str": "x"}]}, "more special tokens"),
    ],
)
def test_files_that_are_wrong(
    published: dict[str, Any], tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(small(published, tmp_path, **changes))

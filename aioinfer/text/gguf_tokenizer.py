"""Writes the tokenizer that a GGUF file describes as a folder in Hugging Face's layout.

`aioinfer.checkpoint.gguf` calls it when it converts a GGUF file; afterwards the folder is like any
other. A GGUF file holds the vocabulary, the merges and a name for the pre-tokenizer. The pattern
behind each name is defined in llama.cpp's `llama-vocab.cpp`; `_PRE_TOKENIZERS` has the patterns of
the supported model families.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from aioinfer.errors import ConfigError
from aioinfer.text import byte_level_bpe
from aioinfer.text.sentencepiece_bpe import Pieces, add_bos_eos, add_special_pieces
from aioinfer.text.sentencepiece_bpe import build as build_sentencepiece


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """The pre-tokenizer that a name in `tokenizer.ggml.pre` stands for.

    Attributes:
        split: the pattern whose matches are encoded one by one; None is GPT-2's, which `tokenizers`
            knows.
        digits_apart: each digit is encoded by itself, before the pattern is looked for.
        ignore_merges: a match that is a token as a whole is that token, regardless of merges.
        adds_bos: whether encoding puts BOS first, where the file has no field for it.
        nfc: text is brought to Unicode's composed form first.
    """

    split: str | None = None
    digits_apart: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


def _qwen2_pattern(digits: str) -> str:
    """Returns the pattern of Qwen 2, Llama 3 and GPT-4, which differ in how many digits stay
    together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _PreTokenizer(_qwen2_pattern(r"\p{N}{1,3}"), ignore_merges=True, adds_bos=True)
_GPT4 = _PreTokenizer(_qwen2_pattern(r"\p{N}{1,3}"))
_SMOLLM = _PreTokenizer(digits_apart=True)
_QWEN2 = _PreTokenizer(_qwen2_pattern(r"\p{N}"), nfc=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _SMOLLM,
    "refact": _SMOLLM,  # Granite 3
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _GPT4,  # Phi-4, OLMo 2
    "chatglm-bpe": _GPT4,
    "glm4": _GPT4,
    "tekken": _PreTokenizer(_TEKKEN_PATTERN, ignore_merges=True, adds_bos=True),
}
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and the chat templates into `folder`, which
    must exist.

    Args:
        metadata: the key-value pairs of the GGUF file.
        folder: where to write.

    Raises:
        ConfigError: the file has no tokenizer, or one of a kind that is not known here; the message
            names it, and states that `model.tokenizer` can name a folder to use in its place.
        OSError: the folder cannot be written.
    """
    fields = _Fields(metadata)
    model = fields.get("ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level(fields)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece(fields), True
    else:
        raise fields.error(f"its tokenizer is of the kind {model!r}; known are 'gpt2' and 'llama'")
    named = _named_tokens(fields)
    adds_bos = fields.get("ggml.add_bos_token", adds_bos) and "bos_token" in named
    adds_eos = fields.get("ggml.add_eos_token", False) and "eos_token" in named
    add_bos_eos(
        tokenizer,
        named["bos_token"] if adds_bos else None,
        named["eos_token"] if adds_eos else None,
    )
    # the library's own `save` raises a bare Exception where the disk is full
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": adds_bos,
        "add_eos_token": adds_eos,
    } | named
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False), "utf-8"
    )
    _write_chat_templates(fields, folder)


class _Fields:
    """The metadata of a GGUF file under `tokenizer.`."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of `tokenizer.NAME`: a str, a number, a bool, or a list of these."""
        return self._metadata.get(f"tokenizer.{name}", default)

    def need(self, name: str) -> Any:
        """Returns the value of `tokenizer.NAME`, or raises `ConfigError`."""
        value = self.get(name)
        if value is None:
            raise self.error(f"its tokenizer lacks {name!r}")
        return value

    def error(self, problem: str) -> ConfigError:
        """Returns an error that recommends to name another tokenizer in `model.tokenizer`."""
        return ConfigError(
            f"the GGUF file's tokenizer cannot be read: {problem}. Let model.tokenizer name the "
            f"original model's folder or id"
        )


def _byte_level(fields: _Fields) -> tuple[Tokenizer, bool]:
    """Returns the tokenizer of a byte-level BPE vocabulary, and whether its kind adds BOS."""
    name = fields.get("ggml.pre", "default")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        raise fields.error(
            f"its pre-tokenizer {name!r} is not known; known are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    texts = fields.need("ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("ggml.merges")]
    vocab = {text: index for index, text in enumerate(texts)}
    try:
        tokenizer = byte_level_bpe.build(
            vocab,
            merges,
            pre.split,
            digits_apart=pre.digits_apart,
            ignore_merges=pre.ignore_merges,
        )
    except ValueError as error:
        raise fields.error(str(error)) from error
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    add_special_pieces(tokenizer, texts, fields.get("ggml.token_type", [1] * len(texts)))
    return tokenizer, pre.adds_bos


def _sentencepiece(fields: _Fields) -> Tokenizer:
    """Returns the tokenizer of a sentencepiece vocabulary."""
    texts = fields.need("ggml.tokens")
    pieces = Pieces(
        texts, fields.need("ggml.scores"), fields.get("ggml.token_type", [1] * len(texts))
    )
    return build_sentencepiece(
        pieces, "first" if fields.get("ggml.add_space_prefix", True) else "never"
    )


def _named_tokens(fields: _Fields) -> dict[str, str]:
    """Returns the special tokens that have a role, such as `{"eos_token": "</s>"}`."""
    texts = fields.need("ggml.tokens")
    ids = {name: fields.get(f"ggml.{key}") for name, key in _NAMED_TOKENS.items()}
    return {
        name: texts[index]
        for name, index in ids.items()
        if index is not None and index < len(texts)
    }


def _write_chat_templates(fields: _Fields, folder: Path) -> None:
    if (template := fields.get("chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    for name in fields.get("chat_templates", []):
        template = fields.get(f"chat_template.{name}")
        if template is not None and re.fullmatch(r"[\w-]+", name):  # the name becomes a file's
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(template, "utf-8")

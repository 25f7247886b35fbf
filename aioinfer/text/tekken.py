"""Tekken, the tokenizer of Mistral's models since Nemo, out of the `tekken.json` that Mistral
publishes: byte-level BPE, with special tokens before the vocabulary.

The file has the vocabulary as byte sequences in base64, in the order of their ranks; the pattern
that splits text; and the special tokens, whose ids come first (the format follows Mistral's
package `mistral-common`, Apache-2.0). `Tokenizer.load` calls it for folders without a
`tokenizer.json`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer

from aioinfer.errors import ConfigError
from aioinfer.text import byte_level_bpe
from aioinfer.text.byte_level_bpe import merges_of_ranks, spell
from aioinfer.text.sentencepiece_bpe import add_bos_eos

#: The special tokens of files that name none: those of the first releases.
_FIRST_SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
_NAMED_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}


@dataclass(frozen=True, slots=True)
class Tekken:
    """What a `tekken.json` holds.

    Attributes:
        version: of the chat format, as `"v3"`.
        pattern: the regular expression whose matches are encoded one by one.
        special_tokens: the texts of special tokens, in the order of their ids.
        tokens: the vocabulary in the order of its ranks, spelled in GPT-2's alphabet; its ids
            follow those of the special tokens.
    """

    version: str
    pattern: str
    special_tokens: Sequence[str]
    tokens: Sequence[str]

    @classmethod
    def read(cls, file: Path) -> Tekken:
        """Reads a `tekken.json`. Raises `ConfigError` if it cannot be read or is no such file."""
        try:
            content = orjson.loads(file.read_bytes())
            config = content["config"]
            num_special = config["default_num_special_tokens"]
            # Files have more tokens than the models were trained with.
            used = content["vocab"][: config["default_vocab_size"] - num_special]
            tokens = [
                spell(base64.b64decode(token["token_bytes"], validate=True)) for token in used
            ]
            given = content.get("special_tokens")
            named: dict[int, str] = (
                dict(enumerate(_FIRST_SPECIAL_TOKENS))
                if given is None
                else {token["rank"]: token["token_str"] for token in given}
            )
            special = [named.get(index, f"<SPECIAL_{index}>") for index in range(num_special)]
            version, pattern = config["version"], config["pattern"]
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is not a tokenizer of Mistral's: {error!r}") from error
        if len({*special, *tokens}) != len(special) + len(tokens):
            raise ConfigError(f"{file} has the same token twice")
        if any(index >= num_special for index in named):
            raise ConfigError(f"{file} has more special tokens than it says")
        return cls(version, pattern, special, tokens)

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens that have a role, such as `{"eos_token": "</s>"}`."""
        return {
            name: token for name, token in _NAMED_TOKENS.items() if token in self.special_tokens
        }

    def build(self, config: Mapping[str, Any]) -> Tokenizer:
        """Makes the tokenizer; ids equal those of `mistral-common`. Encoding adds BOS, and what
        `add_bos_token` and `add_eos_token` of a `tokenizer_config.json` say. Raises
        `ConfigError`."""
        vocab = {text: index for index, text in enumerate([*self.special_tokens, *self.tokens])}
        merges = merges_of_ranks({token: rank for rank, token in enumerate(self.tokens)})
        try:
            tokenizer = byte_level_bpe.build(vocab, merges, self.pattern, ignore_merges=True)
        except ValueError as error:
            raise ConfigError(f"tekken.json cannot be used: {error}") from error
        tokenizer.add_special_tokens(
            [AddedToken(text, normalized=False, special=True) for text in self.special_tokens]
        )
        named = self.named_tokens
        add_bos_eos(
            tokenizer,
            named.get("bos_token") if config.get("add_bos_token", True) else None,
            named.get("eos_token") if config.get("add_eos_token", False) else None,
        )
        return tokenizer

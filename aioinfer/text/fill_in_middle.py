"""Prompts of fill-in-the-middle: the text before a gap and the text behind it, between which the
model writes.

Models that are trained for it have tokens that mark the parts (Bavarian et al. 2022, "Efficient
Training of Language Models to Fill in the Middle"); the families differ in their names and order.
llama.cpp looks for the same names. `Tokenizer` finds the ones of its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers

#: The tokens before the prefix, the suffix and the middle of the families, prefix first.
_PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StableCode, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
#: The same of families that have the suffix first; Codestral's middle follows its prefix directly.
_SUFFIX_FIRST = (
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)
#: Tokens that stand behind a middle: its end, or the next file.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<file_sep>",
    "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """The tokens of a vocabulary that mark the parts.

    Attributes:
        prefix, suffix: before the text of that name.
        middle: before the text that the model writes; empty if there is no such token.
        suffix_first: whether the suffix stands before the prefix.
        begin: tokens that the tokenizer puts before every text, such as BOS.
        ends: tokens that end the middle, besides the model's own end tokens.
        suffix_is_joined: whether the suffix is to be encoded as `encode_suffix` does.
    """

    prefix: int
    suffix: int
    middle: tuple[int, ...]
    suffix_first: bool
    begin: tuple[int, ...]
    ends: tuple[int, ...]
    suffix_is_joined: bool

    @classmethod
    def of(
        cls, backend: tokenizers.Tokenizer, eos_token_id: int | None = None
    ) -> FillInMiddle | None:
        """Returns the tokens of a vocabulary, or None if it has none."""
        formats = [(names, False) for names in _PREFIX_FIRST]
        formats += [(names, True) for names in _SUFFIX_FIRST]
        for names, suffix_first in formats:
            wanted = [name for name in names if name]
            found = [t for name in wanted if (t := backend.token_to_id(name)) is not None]
            if len(found) < len(wanted):
                continue
            prefix, suffix, *middle = found
            around = backend.encode("", add_special_tokens=True).ids
            return cls(
                prefix,
                suffix,
                tuple(middle),
                suffix_first,
                tuple(token for token in around if token != eos_token_id),
                tuple(t for name in _ENDS if (t := backend.token_to_id(name)) is not None),
                names[0].startswith("▁"),
            )
        return None

    def arrange(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Returns the prompt of two texts, which were encoded without special tokens."""
        prefix, suffix = [self.prefix, *before], [self.suffix, *after]
        parts = [*suffix, *prefix] if self.suffix_first else [*prefix, *suffix]
        return [*self.begin, *parts, *self.middle]

"""Splits long texts into pieces whose encodings add up to the encoding of the whole text.

A tokenizer works on the whole text, so cutting it anywhere changes tokens. But most never join a
letter, digit or punctuation mark with a space behind it: their pre-tokenizer ends a word there, or
no token of the vocabulary holds the two side by side. Such a tokenizer gives the same tokens for
the pieces of a text that is cut in front of such spaces; one that splits words also for a text that
is cut between a letter and a mark. `TextPieces.of` returns None for all others, whose long texts
are encoded in one go.

`PromptEncoder` encodes long prompts piece by piece: other prompts are encoded in between, a prompt
that is too long is rejected early, and only one piece takes memory at a time.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

import tokenizers

#: Characters of a piece: some 20 ms of encoding.
PIECE_CHARS = 64 * 1024

# The regular expressions of pre-tokenizers that begin a new word at a space that stands behind
# something else. In all of them only an alternative that begins with white space matches a space
# in another place than the first, and the only look-ahead is for white space.
_WORD_PATTERNS = frozenset(
    (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # GPT-4 (cl100k), Llama 3, GLM-4, OLMo 2
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        # Mistral's Tekken
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_SPACE_BEHIND_SOMETHING = re.compile(r"[^\s▁][ ▁]")
_CUT_AT_SPACE = re.compile(r"(?<=[\w.,;:!?)\]}\"']) ")
_MARK_BEHIND_LETTER = re.compile(r"(?<=[A-Za-z])[!-/:-@\[-`{-~]")
#: Characters that are searched at a time: other threads may run in between.
_SEARCHED = 64 * 1024


class TextPieces:
    """Cuts texts for one tokenizer.

    Attributes:
        prefix, suffix: the special tokens that encoding puts around a whole text.
    """

    def __init__(
        self,
        prefix: Sequence[int] = (),
        suffix: Sequence[int] = (),
        cut: re.Pattern[str] = _CUT_AT_SPACE,
    ):
        """`cut` is found where a text can be cut in front of."""
        self.prefix = list(prefix)
        self.suffix = list(suffix)
        self._cut = cut

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TextPieces | None:
        """Returns the `TextPieces` of a tokenizer, or None where cutting could change tokens."""
        if not isinstance(backend.model, tokenizers.models.BPE):
            return None
        for token in backend.get_added_tokens_decoder().values():
            if token.lstrip or token.rstrip or _SPACE_BEHIND_SOMETHING.search(token.content):
                return None
        if not _normalizes_in_place(backend.normalizer):
            return None
        if _splits_words(backend.pre_tokenizer):
            return cls._probe(backend, _word_cuts(backend))
        return cls._probe(backend) if _has_no_inner_space(backend) else None

    @classmethod
    def _probe(
        cls, backend: tokenizers.Tokenizer, cut: re.Pattern[str] = _CUT_AT_SPACE
    ) -> TextPieces | None:
        """Finds the special tokens around a text by encoding one."""
        bare, whole = (backend.encode("a", add_special_tokens=flag).ids for flag in (False, True))
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return cls(whole[:start], whole[start + len(bare) :], cut)
        return None

    def cut(self, text: str, size: int = PIECE_CHARS) -> Iterator[str]:
        """Yields the pieces of a text in order: each the shortest of at least `size` characters
        that ends where the text can be cut, or the rest."""
        start = 0
        while start < len(text):
            end = self._find_cut(text, start + size)
            yield text[start:end]
            start = end

    def _find_cut(self, text: str, start: int) -> int:
        """Returns the first place from `start` on where a text can be cut, or its length."""
        for begin in range(start, len(text), _SEARCHED):
            if found := self._cut.search(text, begin, begin + _SEARCHED):
                return found.start()
        return len(text)


def _word_cuts(backend: tokenizers.Tokenizer) -> re.Pattern[str]:
    """Returns where texts can be cut if they are split into words: at spaces, and also between a
    letter and a mark of ASCII, unless an added token holds the same mark behind a letter.

    In all of `_WORD_PATTERNS` a run of letters ends a match, and what matches behind it does not
    depend on it. Texts without spaces have such places: a list of identifiers, or a million times
    the text of a special token where that is plain text.
    """
    marks = set(string.punctuation) - {"'", "_"}  # the latter is a part of words to some
    for token in backend.get_added_tokens_decoder().values():
        marks -= set(_MARK_BEHIND_LETTER.findall(token.content))
    if not marks:
        return _CUT_AT_SPACE
    listed = re.escape("".join(sorted(marks)))
    return re.compile(rf"{_CUT_AT_SPACE.pattern}|(?<=[A-Za-z])[{listed}]")


def _states(component: Any) -> list[dict[str, Any]]:
    """Returns the steps of a tokenizer's component as `tokenizer.json` describes them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    steps: list[dict[str, Any]] = state.get("normalizers") or state.get("pretokenizers") or []
    return steps


def _normalizes_in_place(normalizer: Any) -> bool:
    """Whether the normal form of a text equals the normal forms of its pieces, joined."""
    for step in _states(normalizer):
        match step:
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:  # "Prepend" would put a space before each piece
                return False
    return True


def _splits_words(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer ends a word in front of every space that follows something else, and
    does so whatever comes before and after."""
    splits = False
    for step in _states(pre_tokenizer):
        match step:
            case {"type": "Digits"}:
                pass
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                splits |= use_regex  # GPT-2's
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"} if (
                pattern in _WORD_PATTERNS and not step.get("invert")
            ):
                splits = True
            case _:
                return False
    return splits


def _has_no_inner_space(backend: tokenizers.Tokenizer) -> bool:
    """Whether words are found by BPE alone and no token holds a space behind something else: merges
    then never reach over such a place."""
    for step in _states(backend.pre_tokenizer):
        match step:
            case {"type": "Metaspace", "split": False, "replacement": "▁"}:
                pass  # puts a space in front only of a text that does not begin with one
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                # Gemma's, which finds no space: the normalizer has replaced them
                if not _states(backend.normalizer):
                    return False
            case _:
                return False
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return not any(map(_SPACE_BEHIND_SOMETHING.search, vocabulary))

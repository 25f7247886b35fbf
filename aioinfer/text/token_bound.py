"""A lower bound of the number of tokens of a text, computed without encoding it.

Encoding a megabyte takes up to a second and some hundred megabytes of memory, and most texts of
that size can never fit the model. The bound is found from the vocabulary: a token stands for a run
of bytes, so a byte that occurs in no token longer than L bytes costs at least 1/L of a token. Let
w(b) be 1 over the length of the longest token in which the byte b occurs. The bytes of one token
then weigh at most 1 together, and the weight of a text is at most the number of its tokens. This
counts a digit in most vocabularies as a whole token, and a space as a hundredth.

That holds where every byte of a text ends up in some token, which is true of byte-level BPE and of
BPE with byte fallback, under the normalizers and pre-tokenizers that are listed here. For any other
tokenizer there is no bound (`TokenBound.of` returns None).

`Tokenizer` makes one when it is loaded. Imports no torch.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from aioinfer.text.detokenizer import BYTE_OF_CHARACTER

#: Characters that are counted at a time. Between two slices other threads may run.
_SLICE = 64 * 1024
#: The UTF-8 bytes of characters that Unicode counts as white space, as a set of bytes.
_WHITESPACE_BYTES = frozenset(
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005"
    "\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000".encode()
)
#: Normal forms of Unicode. They leave ASCII as it is, and an ASCII character never joins the one
#: before it.
_NORMAL_FORMS: tuple[Any, ...] = ("NFC", "NFD", "NFKC", "NFKD")
#: Tokens that a text could lose where two of its slices meet in the middle of a composed character:
#: a character composes with a few others at most.
_LOST_AT_A_CUT = 32
#: Converts a token that is spelled in GPT-2's alphabet into Latin-1, a character a byte.
_TO_LATIN = {ord(character): byte for character, byte in BYTE_OF_CHARACTER.items()}


class TokenBound:
    """A lower bound of the number of tokens, for one tokenizer. Safe to use from several threads.

    Attributes:
        weights: float64 [256], what each byte adds to the bound, in tokens.
    """

    def __init__(
        self,
        weights: npt.NDArray[np.float64],
        forms: Sequence[Any] = (),
        normalize: Callable[[str], str] = str,
    ):
        """Takes the weights; the Unicode normal forms that a text is brought into before it is
        encoded, if any; and the normalizer that applies them."""
        self.weights = weights
        self._forms = forms
        self._normalize = normalize

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> TokenBound | None:
        """Returns the bound for a tokenizer, or None where the vocabulary gives none.

        Takes 0.3 s for 150 000 tokens.
        """
        byte_level = _is_byte_level(backend)
        normalizer = _normalizer_kind(backend)
        if normalizer is None or not _keeps_all_text(backend.pre_tokenizer):
            return None
        if not byte_level and not _falls_back_to_bytes(backend):
            return None
        if byte_level and normalizer == "spaces":
            return None
        longest = _longest_tokens(_spellings(backend, byte_level))
        if byte_level:
            for character, byte in BYTE_OF_CHARACTER.items():
                if backend.model.token_to_id(character) is None:
                    longest[byte] = 0  # BPE drops a byte that is no token by itself
        added = backend.get_added_tokens_decoder().values()
        weights = np.divide(1.0, longest, out=np.zeros(256), where=longest > 0)
        if any(token.lstrip or token.rstrip for token in added):
            # such a token takes any amount of white space beside it along
            weights[list(_WHITESPACE_BYTES)] = 0.0
        if normalizer != "unicode":
            return cls(weights)
        forms = [step["type"] for step in _steps(_state(backend.normalizer))]
        return cls(weights, forms, backend.normalizer.normalize_str)

    def min_tokens(self, text: str, enough: int | None = None) -> int:
        """Returns a number of tokens that `text` has at least.

        Args:
            text: any text; special tokens that encoding puts around it do not count.
            enough: stop counting there. The time is then only spent on the part of the text that
                weighs so much: about 2 ms a megabyte, and 0.1 s where a normalizer has work to do.
        """
        total = 0.0
        for piece, has_clean_start in self._slices(text):
            # half a surrogate pair is an error that encoding reports
            data = piece.encode("utf-8", "replace")
            # Python's tables show ten times faster than the tokenizer's whether text changes
            if not all(unicodedata.is_normalized(form, piece) for form in self._forms):
                data = self._normalize(data.decode()).encode()
                if not has_clean_start:
                    total -= _LOST_AT_A_CUT
            counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
            total += float(counts @ self.weights)
            if enough is not None and total >= enough:
                break
        # sums of fractions are not exact
        return max(0, math.ceil(total - 1e-6 * (1.0 + total)))

    def _slices(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yields the text in slices, and whether each begins where nothing can compose."""
        start, has_clean_start = 0, True
        while start < len(text):
            end = start + _SLICE
            # a little further on there may be an ASCII character, where a cut changes nothing
            for clean in range(end, min(end + 64, len(text))):
                if text[clean] < "\x80":
                    end = clean
                    break
            yield text[start:end], has_clean_start
            start, has_clean_start = end, end < len(text) and text[end] < "\x80"


def _longest_tokens(spellings: Iterable[str | bytes]) -> npt.NDArray[np.float64]:
    """Returns the length of the longest token in which each byte occurs, 0 for bytes in none."""
    longest = np.zeros(256)
    missing = set(range(256))
    by_length = sorted((s if isinstance(s, bytes) else s.encode() for s in spellings), key=len)
    for data in reversed(by_length):
        if not missing.isdisjoint(data):
            found = missing.intersection(data)
            longest[list(found)] = len(data)
            missing -= found
            if not missing:
                break
    return longest


def _spellings(backend: tokenizers.Tokenizer, byte_level: bool) -> Iterator[str | bytes]:
    """Yields the texts that each token of a vocabulary may stand for in a prompt."""
    added = backend.get_added_tokens_decoder().values()
    for token in added:  # found as they are spelled, before or after normalization
        yield token.content.encode("utf-8", "replace")
        if backend.normalizer is not None:
            yield backend.normalizer.normalize_str(token.content).encode("utf-8", "replace")
    for piece in backend.get_vocab(with_added_tokens=False):
        if byte_level:
            try:
                yield piece.translate(_TO_LATIN).encode("latin-1")
            except UnicodeEncodeError:  # not in the alphabet, hence never made from text
                continue
        else:
            # "▁" stands for a space or for itself, in any mixture: both kinds of bytes get the
            # length of the longer spelling
            spelled = piece.encode("utf-8", "replace")
            yield spelled
            if "▁" in piece:
                yield spelled.replace("▁".encode(), b" ").ljust(len(spelled), b" ")
            elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                yield bytes([int(piece[3:5], 16)])


def _state(component: Any) -> dict[str, Any]:
    """Returns the description of a tokenizer's component as `tokenizer.json` has it."""
    return {"type": None} if component is None else json.loads(component.__getstate__())


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the steps of a component, which may be a sequence of sequences."""
    if state["type"] is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    parts = state.get("normalizers") or state.get("pretokenizers") or []
    return [step for part in parts for step in _steps(part)]


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether text is spelled in GPT-2's alphabet of bytes before BPE sees it."""
    return isinstance(backend.model, tokenizers.models.BPE) and any(
        step["type"] == "ByteLevel" for step in _steps(_state(backend.pre_tokenizer))
    )


def _falls_back_to_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether a character that is in no token becomes a token for each of its bytes."""
    model = backend.model
    return (
        isinstance(model, tokenizers.models.BPE)
        and model.byte_fallback
        and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    )


def _normalizer_kind(backend: tokenizers.Tokenizer) -> str | None:
    """Returns "none", "unicode" (normal forms only) or "spaces" (spaces become `▁`, which may also
    be put in front); None for a normalizer that could shorten a text in other ways."""
    steps = _steps(_state(backend.normalizer))
    if all(step["type"] in _NORMAL_FORMS for step in steps):
        return "unicode" if steps else "none"
    for step in steps:
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case _:
                return None
    return "spaces"


def _keeps_all_text(pre_tokenizer: Any) -> bool:
    """Whether a pre-tokenizer only cuts a text and drops none of it."""
    for step in _steps(_state(pre_tokenizer)):
        match step:
            case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
                pass
            case {"type": "Split" | "Punctuation", "behavior": behavior} if behavior != "Removed":
                pass
            case _:
                return False
    return True

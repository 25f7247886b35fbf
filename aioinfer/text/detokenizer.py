"""From token ids back to text: the bytes of every token, and the text of a stream as its tokens
come.

A token stands for bytes, not for characters, so a vocabulary is a table of bytes and a stream an
incremental UTF-8 decoder over it: one look-up and one decode a token, nothing looked at twice, and
no more than three bytes held back. `Tokenizer.decode` and the step loop's `Detokenizer` share both,
so that the pieces of a stream add up to what decoding the whole gives.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from aioinfer.errors import ConfigError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
#: Tokens at the end of a prompt that may hold the beginning of a character: at most three bytes do.
_PROMPT_TAIL = 8


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: one U+FFFD a byte, as sentencepiece and ByteFallback decode byte
    pieces."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte for each character of GPT-2's alphabet (`bytes_to_unicode` in its encoder,
    Radford et al. 2019).

    Printable characters of Latin-1 stand for themselves, those from U+0100 on for the other 68
    bytes in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


#: The byte that each character of GPT-2's alphabet stands for.
BYTE_OF_CHARACTER = _byte_alphabet()
codecs.register_error("aioinfer.replace_each_byte", _replace_each_byte)


@dataclass(frozen=True, slots=True)
class DecodeRules:
    """Rules that convert the tokens of a vocabulary to bytes, and the bytes to text.

    Attributes:
        byte_level: tokens are spelled in GPT-2's alphabet, a character a byte; else pieces are
            UTF-8 text.
        replacements: (old, new) in the text of a piece, in order; sentencepiece spells a space `▁`.
        byte_fallback: `<0x0A>` is the byte 10.
        continuation: stands before pieces that go on with a word (WordPiece); there is a space
            before all others. Empty for other vocabularies.
        strip_left: as many spaces are taken from the start of the text (the one that encoding put
            there).
        errors: the error handler for bytes that are not UTF-8.
    """

    byte_level: bool
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip_left: int = 0
    errors: str = "replace"
    continuation: str = ""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> DecodeRules:
        """Reads the rules off a tokenizer's decoder.

        Raises `ConfigError` for a kind that is not known here.
        """
        state: dict[str, Any] = (
            json.loads(backend.decoder.__getstate__())
            if backend.decoder is not None
            else {"type": "none"}
        )
        steps = state["decoders"] if state["type"] == "Sequence" else [state]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(byte_level=True)
        match steps:
            case [{"type": "WordPiece", "prefix": str(prefix)}]:
                return cls(False, strip_left=1, continuation=prefix)
        replacements: list[tuple[str, str]] = []
        byte_fallback, strip_left = False, 0
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    replacements.append((old, new))
                case {"type": "Metaspace", "replacement": old}:
                    replacements.append((old, " "))
                    strip_left = 1
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                    strip_left = start
                case _:
                    raise ConfigError(
                        f"the tokenizer's decoder {step['type']!r} is not supported: only "
                        f"byte-level, sentencepiece and WordPiece vocabularies are"
                    )
        return cls(
            False,
            tuple(replacements),
            byte_fallback,
            strip_left,
            "aioinfer.replace_each_byte" if byte_fallback else "replace",
        )

    def piece_bytes(self, piece: str) -> bytes:
        """Returns the bytes that a token's spelling stands for."""
        if self.byte_level:
            try:
                return bytes([BYTE_OF_CHARACTER[character] for character in piece])
            except KeyError:  # an added token, spelled as plain text
                return piece.encode("utf-8", "replace")
        if self.continuation:
            goes_on = piece.startswith(self.continuation)
            piece = piece.removeprefix(self.continuation) if goes_on else f" {piece}"
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.encode("utf-8", "replace")

    def text(self, data: bytes) -> str:
        """Returns the text of a whole sequence's bytes."""
        text, _ = codecs.utf_8_decode(data, self.errors, True)
        return self.strip(text, self.strip_left)[0]

    def strip(self, text: str, spaces: int) -> tuple[str, int]:
        """Takes up to `spaces` spaces from the start of `text`; returns the rest and how many may
        still go."""
        kept = text.lstrip(" ")
        taken = min(len(text) - len(kept), spaces)
        return text[taken:], 0 if kept else spaces - taken


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, computed at first use: a table of 150 000 would slow
    the start.

    An id outside of the vocabulary has no bytes (embeddings often have more rows than the tokenizer
    has tokens), and is not kept. Safe to use from several threads.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        rules: DecodeRules,
        skipped: frozenset[int] = frozenset(),
    ):
        super().__init__(dict.fromkeys(skipped, b""))
        self.texts = TokenTexts(self)
        self._backend = backend
        self._rules = rules

    def __missing__(self, token: int) -> bytes:
        try:
            piece = self._backend.id_to_token(token)
        except OverflowError:  # negative, or beyond 32 bits
            piece = None
        if piece is None:
            return b""
        data = self[token] = self._rules.piece_bytes(piece)
        return data


class TokenTexts(dict[int, str | None]):
    """The text of each token id whose bytes are whole characters, which is most of them; None for
    others."""

    def __init__(self, table: TokenBytes):
        super().__init__()
        self._table = table

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._table[token].decode()
        except UnicodeDecodeError:
            text = None
        if token in self._table:  # and so in the vocabulary
            self[token] = text
        return text


class Detokenizer:
    """The text of one sequence, as its tokens come.

    The pieces that `step` and `flush` return add up to `decode(prompt + output)` without the
    prompt's text. Where the prompt ends within a character that the output completes, the whole
    character belongs to the output; a half character that the output does not complete is the
    prompt's. A character is held back until its bytes are complete, or until they can no longer
    become one and count as U+FFFD.
    """

    __slots__ = ("_bytes", "_pending", "_prompt_tail", "_rules", "_strip_left", "_texts")

    def __init__(self, rules: DecodeRules, table: TokenBytes, prompt_ids: Sequence[int] = ()):
        """Begins behind a prompt; `table` determines whether special tokens have a text."""
        self._rules = rules
        self._bytes = table
        self._texts = self._bytes.texts
        # The space that encoding puts before a text is gone only where the text begins with the
        # output.
        strip = self._rules.strip_left
        self._strip_left = (
            strip if strip and not any(self._bytes[token] for token in prompt_ids) else 0
        )
        tail = b"".join([self._bytes[token] for token in prompt_ids[-_PROMPT_TAIL:]])
        self._pending = _incomplete_end(tail)
        self._prompt_tail = bool(self._pending)

    def next(self, token: int) -> str:
        """Returns the text that one further token completes, as `step` does."""
        if not self._pending and not self._strip_left:
            text = self._texts[token]
            if text is not None:
                return text
        return self.step((token,))

    def step(self, ids: Sequence[int]) -> str:
        """Returns the text that these further token ids complete; it may be empty."""
        table = self._bytes
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[token] for token in ids])
        if self._pending:
            data = self._join(data)
        text, used = codecs.utf_8_decode(data, self._rules.errors, False)
        self._pending = data[used:]
        if self._strip_left and text:
            text, self._strip_left = self._rules.strip(text, self._strip_left)
        return text

    def flush(self) -> str:
        """Returns the text that was held back, once no more tokens come: U+FFFD for an incomplete
        character."""
        if self._prompt_tail:
            return ""
        text, _ = codecs.utf_8_decode(self._pending, self._rules.errors, True)
        self._pending = b""
        return text

    def _join(self, data: bytes) -> bytes:
        """Returns the bytes held back, followed by the new ones. Half a character at the end of the
        prompt is dropped if the new bytes do not continue it."""
        if not self._prompt_tail or not data:
            return self._pending + data
        self._prompt_tail = False
        try:
            codecs.utf_8_decode(self._pending + data[:1], "strict", False)
        except UnicodeDecodeError:
            return data
        return self._pending + data


def _incomplete_end(data: bytes) -> bytes:
    """Returns the bytes at the end of `data` that begin a character and could still become one (0
    to 3 bytes)."""
    _, used = codecs.utf_8_decode(data, "replace", False)
    return data[used:]

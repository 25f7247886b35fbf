"""A generated message as a sequence of blocks: thoughts, texts and calls, one after the other, made
of the deltas of its parser, each text with the log-probabilities of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from aioinfer.text.message_parser import MessageDelta

BlockKind = Literal["reasoning", "text", "call"]
#: A change of a block: it begins, gets text, or ends.
BlockChange = tuple[Literal["start", "delta", "stop"], "Block", str]


class TokenBytes(Protocol):
    """The log-probability of a token, as an API has it."""

    @property
    def bytes(self) -> Sequence[int]:
        """The bytes that the token stands for."""
        ...


@dataclass(slots=True)
class Block:
    """A part of a message.

    Attributes:
        index: its place in the message.
        kind: its type.
        id: made when it begins.
        name: of a call, the function.
        parts: its text in pieces; of a call, the arguments.
        logprobs: of a text, the log-probabilities of its tokens, if they are wanted.
        num_sent: how many of them `new_logprobs` has returned.
    """

    index: int
    kind: BlockKind
    id: str
    name: str = ""
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenBytes] = field(default_factory=list)
    num_sent: int = 0

    def new_logprobs(self) -> list[TokenBytes]:
        """Returns the log-probabilities that have come since the last call."""
        first, self.num_sent = self.num_sent, len(self.logprobs)
        return self.logprobs[first:]

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.parts)


@dataclass(slots=True)
class _PendingToken:
    """A token that has come, and the bytes of it that are in no block's text yet. `is_noted`: its
    log-probability is in a block, whose text ended within it."""

    logprob: TokenBytes
    rest: bytes
    is_noted: bool = False


class _TokensOfText:
    """The tokens that have come and are in no block's text yet: text is held back while it may
    become a marker, and markers are no text."""

    def __init__(self) -> None:
        self._tokens: list[_PendingToken] = []

    def add(self, logprob: TokenBytes) -> None:
        """Adds the next token, whose `bytes` are its part of a text."""
        self._tokens.append(_PendingToken(logprob, bytes(logprob.bytes)))

    def take(self, text: str, *, notes: bool) -> list[TokenBytes]:
        """Returns the log-probabilities of the tokens that the next text of a block consists of,
        and forgets all tokens up to its end. `notes`: the block holds them."""
        if not self._tokens:
            return []
        start, end = self._place(text.encode("utf-8", "replace"))
        found: list[TokenBytes] = []
        place = 0
        for count, token in enumerate(self._tokens):
            if place >= end:
                del self._tokens[:count]
                return found
            length = len(token.rest)
            if place + length > start and not token.is_noted:
                found.append(token.logprob)
                token.is_noted = notes
            if place + length > end:
                token.rest = token.rest[end - place :]
                del self._tokens[:count]
                return found
            place += length
        self._tokens.clear()
        return found

    def _place(self, text: bytes) -> tuple[int, int]:
        """Returns where a text begins and ends in the bytes that have come. Before it may stand a
        marker, behind it bytes that are still held back; where its bytes were replaced, since they
        are no characters, all bytes are the text's."""
        whole = b"".join(token.rest for token in self._tokens)
        start = 0 if whole.startswith(text) else whole.rfind(text)
        return (0, len(whole)) if start < 0 else (start, start + len(text))


class Blocks:
    """The blocks of one message as its deltas come.

    Attributes:
        all: the blocks so far.
    """

    def __init__(self, new_id: Callable[[BlockKind], str]):
        """`new_id` makes the id of a block."""
        self.all: list[Block] = []
        self._new_id = new_id
        self._open: Block | None = None
        self._tokens = _TokensOfText()

    def take(self, delta: MessageDelta, logprob: TokenBytes | None = None) -> Iterator[BlockChange]:
        """Yields the changes that a delta makes. `logprob` is the log-probability of the token that
        brought it, as OpenAI has it, for the text that the token becomes part of."""
        if logprob is not None:
            self._tokens.add(logprob)
        if delta.reasoning:
            yield from self._append("reasoning", delta.reasoning)
        if delta.content:
            yield from self._append("text", delta.content)
        for call in delta.calls:
            if call.name is not None:
                yield from self._begin("call", call.name)
            if call.arguments and self._open is not None:
                self._open.parts.append(call.arguments)
                self._tokens.take(call.arguments, notes=False)
                yield "delta", self._open, call.arguments

    def end(self) -> Iterator[BlockChange]:
        """Ends the block that is open, if one is."""
        if self._open is not None:
            yield "stop", self._open, ""
            self._open = None

    def _append(self, kind: BlockKind, text: str) -> Iterator[BlockChange]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.parts.append(text)
        is_text = kind == "text"
        tokens = self._tokens.take(text, notes=is_text)
        if is_text:
            self._open.logprobs += tokens
        yield "delta", self._open, text

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[BlockChange]:
        yield from self.end()
        self._open = Block(len(self.all), kind, self._new_id(kind), name)
        self.all.append(self._open)
        yield "start", self._open, ""

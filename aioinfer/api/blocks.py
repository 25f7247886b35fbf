"""A generated message as a sequence of blocks: thoughts, texts and calls, one after the other, as
Anthropic's API and OpenAI's Responses deliver them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from aioinfer.text.message_parser import MessageDelta

BlockKind = Literal["reasoning", "text", "call"]
#: What happens to a block: it begins, gets text, or ends.
BlockChange = tuple[Literal["start", "delta", "stop"], "Block", str]


@dataclass(slots=True)
class Block:
    """A part of a message.

    Attributes:
        index: its place in the message.
        kind: of what it is.
        id: made when it begins.
        name: of a call, the function.
        parts: its text in pieces; of a call, the arguments.
    """

    index: int
    kind: BlockKind
    id: str
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.parts)


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

    def take(self, delta: MessageDelta) -> Iterator[BlockChange]:
        """Yields what a delta changes."""
        if delta.reasoning:
            yield from self._append("reasoning", delta.reasoning)
        if delta.content:
            yield from self._append("text", delta.content)
        for call in delta.calls:
            if call.name is not None:
                yield from self._begin("call", call.name)
            if call.arguments and self._open is not None:
                self._open.parts.append(call.arguments)
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
        yield "delta", self._open, text

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[BlockChange]:
        yield from self.end()
        self._open = Block(len(self.all), kind, self._new_id(kind), name)
        self.all.append(self._open)
        yield "start", self._open, ""

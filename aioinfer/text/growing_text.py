"""A text that grows piece by piece and is joined when it is read: appending to a string copies all
of it each time."""

from __future__ import annotations


class GrowingText:
    """The pieces of a text."""

    __slots__ = ("_pieces",)

    def __init__(self, text: str = ""):
        self._pieces = [text]

    def append(self, piece: str) -> None:
        """Adds a piece at the end."""
        if piece:
            self._pieces.append(piece)

    def __str__(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

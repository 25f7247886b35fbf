"""The pictures of a step, as the layers see them: vectors that take the place of tokens'
embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class PictureBlock(NamedTuple):
    """Tokens of one picture in a step.

    Attributes:
        row: the row of the step.
        first, length: the places of the tokens among those of `StepPictures.places`.
        position: of the first one.
        start, end: the position of the picture's first token, and the one behind its last.
    """

    row: int
    first: int
    length: int
    position: int
    start: int
    end: int


class StepPictures(NamedTuple):
    """The embeddings of pictures that take the place of tokens' in a step of T tokens.

    Attributes:
        rows: int64 [T], the row of `embeddings` for each token; -1 for text.
        embeddings: [rows, width], whose first channels are those of the stream; further vectors of
            as many channels are added to the stream behind the first layers, one behind each.
        places: int64 [n], the tokens of pictures, as indices of the step's, where there are
            `blocks`.
        blocks: where tokens of a picture attend to each other both ways; else none.
        keeps_windows: whether they do so in layers with a window alone, and within it.
    """

    rows: torch.Tensor
    embeddings: torch.Tensor
    places: torch.Tensor | None = None
    blocks: Sequence[PictureBlock] = ()
    keeps_windows: bool = False

    def is_bidirectional(self, window: int | None) -> bool:
        """Whether tokens of a picture attend to each other both ways in a layer with a window, or
        without one."""
        return bool(self.blocks) and (window is not None or not self.keeps_windows)

    def enter(self, hidden: torch.Tensor) -> None:
        """Puts the embeddings into the stream [T, hidden_size]."""
        hidden.copy_(torch.where(self._are_pictures, self._vectors(0, hidden.shape[1]), hidden))

    def deepen(self, hidden: torch.Tensor, number: int) -> None:
        """Adds what belongs behind layer `number` to the stream [T, hidden_size]; nothing behind
        most layers."""
        size = hidden.shape[1]
        if (number + 1) * size < self.embeddings.shape[1]:
            hidden.add_(self._vectors(number + 1, size).masked_fill_(~self._are_pictures, 0.0))

    @property
    def _are_pictures(self) -> torch.Tensor:
        """bool [T, 1]."""
        return (self.rows >= 0).unsqueeze(1)

    def _vectors(self, number: int, size: int) -> torch.Tensor:
        """Returns a vector [size] of each token's embedding, any one for text."""
        part = self.embeddings[:, number * size : (number + 1) * size]
        return part.index_select(0, self.rows.clamp(min=0))

"""The pictures of a prompt: which of its tokens they take the place of, and where RoPE places the
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aioinfer.ipc.sections import I32
from aioinfer.models.vision.format import PictureFormat, ProcessedPicture
from aioinfer.scheduler.block_pool import KeyedSpan


class PlacedPicture(NamedTuple):
    """A picture in a prompt.

    Attributes:
        picture: its pixels.
        start, end: the first placeholder token, and the token behind the last.
        sources: int32 [end - start], which embedding takes the place of each token; -1 for tokens
            between that are text.
    """

    picture: ProcessedPicture
    start: int
    end: int
    sources: I32


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """The pictures of a prompt of L tokens.

    Attributes:
        placed: in their order.
        positions: int32 [3, L], where RoPE places each token in time, height and width (M-RoPE);
            None where that is its position.
        rotary_offset: what is added to the positions of all tokens behind the prompt.
        is_bidirectional: whether the tokens of a picture attend to each other both ways.
    """

    placed: tuple[PlacedPicture, ...]
    positions: I32 | None = None
    rotary_offset: int = 0
    is_bidirectional: bool = False

    @property
    def end(self) -> int:
        """The token behind the last placeholder; 0 without pictures."""
        return self.placed[-1].end if self.placed else 0

    @property
    def spans(self) -> list[KeyedSpan]:
        """The tokens that are not known by their ids alone."""
        return [KeyedSpan(each.start, each.end, each.picture.key) for each in self.placed]

    def touched(self, start: int, end: int) -> list[PlacedPicture]:
        """Returns the pictures with tokens from `start` to `end`."""
        return [each for each in self.placed if each.start < end and start < each.end]


def place_pictures(
    ids: Sequence[int], pictures: Sequence[ProcessedPicture], format: PictureFormat
) -> tuple[list[int], PromptPictures]:
    """Returns the token ids of a prompt, and the pictures in it.

    Args:
        ids: with one placeholder token for each run of each picture, in their order.

    Raises:
        ValueError: there are more or fewer placeholder tokens.
    """
    runs = [run for picture in pictures for run in picture.runs]
    places = [place for place, token in enumerate(ids) if token == format.placeholder_id]
    if len(places) != len(runs):
        raise ValueError(f"{len(places)} placeholder tokens stand for {len(runs)}")
    expanded: list[int] = []
    starts, before = [], 0
    for place, run in zip(places, runs, strict=True):
        expanded += ids[before:place]
        starts.append(len(expanded))
        expanded += [format.placeholder_id] * run
        before = place + 1
    expanded += ids[before:]
    placed, number = [], 0
    for picture in pictures:
        own = range(number, number + len(picture.runs))
        placed.append(_place(picture, [starts[each] for each in own]))
        number = own.stop
    if not format.has_sections:
        both_ways = format.is_bidirectional
        return expanded, PromptPictures(tuple(placed), is_bidirectional=both_ways)
    positions = rotary_positions(placed, len(expanded))
    offset = int(positions.max()) + 1 - len(expanded)
    return expanded, PromptPictures(tuple(placed), positions, offset)


def _place(picture: ProcessedPicture, starts: Sequence[int]) -> PlacedPicture:
    first, end = starts[0], starts[-1] + picture.runs[-1]
    sources = np.full(end - first, -1, np.int32)
    number = 0
    for start, run in zip(starts, picture.runs, strict=True):
        sources[start - first : start - first + run] = np.arange(number, number + run)
        number += run
    return PlacedPicture(picture, first, end, sources)


def rotary_positions(placed: Sequence[PlacedPicture], length: int) -> I32:
    """Returns the three positions of each token of a prompt (M-RoPE, Wang et al. 2024): int32 [3,
    length]. A picture's tokens have one time, and count rows and columns from there; text goes on
    behind the largest position so far."""
    positions = np.empty((3, length), np.int32)
    token = following = 0
    for each in placed:
        text = each.start - token
        positions[:, token : each.start] = following + np.arange(text)
        base = following + text
        rows, columns = each.picture.grid
        positions[0, each.start : each.end] = base
        positions[1, each.start : each.end] = base + np.repeat(np.arange(rows), columns)
        positions[2, each.start : each.end] = base + np.tile(np.arange(columns), rows)
        token, following = each.end, base + max(rows, columns)
    positions[:, token:] = following + np.arange(length - token)
    return positions

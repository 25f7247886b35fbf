"""The workload of a load: prompts and lengths, and the request bodies made of them. Conversations
have a module of their own.

A workload gives its request number i by `item(i)`, which depends on i and the seed alone: several
client processes can each make their own share of one load, and no matter how many there are,
together they send the same requests.
"""

from __future__ import annotations

import itertools
import json
from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

#: A prompt: text, token ids, or the messages of a conversation.
Prompt = str | list[int] | list[dict[str, Any]]

#: Common words, most of them one token with their leading space in the usual vocabularies.
_WORD_LIST = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case "
    "week company system program question work government number night point home water room "
    "mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car "
    "city community name president team minute idea body information back parent face others "
    "level office door health person art war"
)
WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class IntRange:
    """Whole numbers drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> IntRange:
        """Reads "128" or "100-1024". Raises `ArgumentTypeError`."""
        low, _, high = text.partition("-")
        try:
            numbers = cls(int(low), int(high or low))
        except ValueError:
            numbers = cls(0, 0)
        if not 1 <= numbers.low <= numbers.high:
            raise ArgumentTypeError(
                f"{text!r} is no range of positive numbers: write 128 or 100-1024"
            )
        return numbers

    def __str__(self) -> str:
        return f"{self.low}-{self.high}" if self.low < self.high else f"{self.low}"

    def draw(self, random: np.random.Generator) -> int:
        """Returns one of them."""
        return int(random.integers(self.low, self.high + 1))


@dataclass(frozen=True, slots=True)
class Call:
    """One request to send."""

    body: bytes
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The settings that all requests of a load share.

    `ignore_eos` is sent only where it is set: not every server knows it.
    """

    model: str
    chat: bool = False
    stream: bool = True
    temperature: float = 0.0
    ignore_eos: bool = False

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(
        self, prompt: Prompt, max_tokens: int, more: Mapping[str, Any] = MappingProxyType({})
    ) -> bytes:
        """Returns the JSON body of a request; `more` are further fields of it."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": self.stream,
        }
        if self.chat:
            body["messages"] = (
                [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            )
        else:
            body["prompt"] = prompt
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps({**body, **more}).encode()

    def call(self, prompt: Prompt, max_tokens: int) -> Call:
        """Returns a request."""
        return Call(self.body(prompt, max_tokens), max_tokens)


class Workload(Protocol):
    """Requests by number, from 0 without end. Client processes get it pickled."""

    def item(self, index: int) -> Any:
        """Returns the `Call` or `Conversation` with a number, the same each time."""


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes random prompts: token ids drawn from `token_ids`, or common words where that is
    None."""

    token_ids: IntRange | None

    def make(self, length: int, random: np.random.Generator) -> str | list[int]:
        """Returns a prompt of `length` tokens, or words."""
        if self.token_ids is None:
            return " ".join(
                WORDS[number] for number in random.integers(0, len(WORDS), length).tolist()
            )
        return random.integers(self.token_ids.low, self.token_ids.high + 1, length).tolist()


@dataclass(frozen=True, slots=True)
class RandomPrompts:
    """Prompts that share nothing.

    `input_len` counts tokens, or words where the maker makes words.
    """

    shape: RequestShape
    maker: PromptMaker
    input_len: IntRange
    output_len: IntRange
    seed: int

    def item(self, index: int) -> Call:
        """See `Workload.item`."""
        random = np.random.default_rng([self.seed, index])
        prompt = self.maker.make(self.input_len.draw(random), random)
        max_tokens = self.output_len.draw(random)
        return self.shape.call(prompt, max_tokens)


@dataclass(frozen=True, slots=True)
class SharedPrefixPrompts:
    """Prompts that begin with one of `num_prefixes` prefixes, drawn evenly; the rest of each is its
    own.

    In a chat the prefix is the system's message and the suffix the user's. Lengths count as in
    `RandomPrompts`.
    """

    shape: RequestShape
    maker: PromptMaker
    num_prefixes: int
    prefix_len: int
    suffix_len: IntRange
    output_len: IntRange
    seed: int

    def item(self, index: int) -> Call:
        """See `Workload.item`."""
        random = np.random.default_rng([self.seed, 0, index])
        number = int(random.integers(self.num_prefixes))
        prefix = self.maker.make(self.prefix_len, np.random.default_rng([self.seed, 1, number]))
        suffix = self.maker.make(self.suffix_len.draw(random), random)
        max_tokens = self.output_len.draw(random)
        return self.shape.call(self._join(prefix, suffix), max_tokens)

    def _join(self, prefix: str | list[int], suffix: str | list[int]) -> Prompt:
        if self.shape.chat:
            return [{"role": "system", "content": prefix}, {"role": "user", "content": suffix}]
        if isinstance(prefix, str):
            return f"{prefix} {suffix}"
        return [*prefix, *suffix]


@dataclass(frozen=True, slots=True)
class FilePrompts:
    """The requests that `read_entries` found, in order, from the beginning again after the end.

    `output_len` is for those without a `max_tokens` of their own.
    """

    shape: RequestShape
    entries: Sequence[dict[str, Any]]
    output_len: IntRange
    seed: int

    def item(self, index: int) -> Call:
        """See `Workload.item`."""
        entry = self.entries[index % len(self.entries)]
        max_tokens = entry.get("max_tokens") or self.output_len.draw(
            np.random.default_rng([self.seed, index])
        )
        return self.shape.call(entry.get("messages") or entry["prompt"], max_tokens)


@dataclass(frozen=True, slots=True)
class Calls:
    """Requests that are made already."""

    calls: Sequence[Call]

    def item(self, index: int) -> Call:
        """Returns one of them."""
        return self.calls[index]


def random_token_calls(
    shape: RequestShape, input_len: IntRange, output_len: IntRange, token_ids: IntRange, seed: int
) -> Iterator[Call]:
    """Yields requests without end whose prompts are token ids drawn from `token_ids`; the same seed
    gives the same ones."""
    return map(
        RandomPrompts(shape, PromptMaker(token_ids), input_len, output_len, seed).item,
        itertools.count(),
    )


def read_entries(file: Path, chat: bool) -> list[dict[str, Any]]:
    """Returns the lines of a JSONL file of prompts; blank ones do not count.

    A line holds `prompt` (text or token ids) or `messages`, and may hold `max_tokens`. Only the
    chat endpoint takes `messages`; there a text `prompt` becomes a user's message.

    Raises:
        ValueError: a line, named by its number, is not that, or there is none.
        OSError: the file cannot be read.
    """
    entries = []
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
        if not isinstance(entry, dict) or not (entry.get("prompt") or entry.get("messages")):
            raise ValueError(
                f"{file}, line {number}: an object with `prompt` or `messages` is needed"
            )
        if "messages" in entry and not chat:
            raise ValueError(f"{file}, line {number}: `messages` need --endpoint chat")
        if chat and "messages" not in entry and not isinstance(entry["prompt"], str):
            raise ValueError(f"{file}, line {number}: the chat endpoint takes no token ids")
        entries.append(entry)
    if not entries:
        raise ValueError(f"{file} holds no prompt")
    return entries

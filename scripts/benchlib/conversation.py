"""Conversations of several turns: each user sends the next turn when the former one is answered,
with all that was said before.

The history holds the answers that the model really gave, as a chat's does, so a server with a
prefix cache finds in it the blocks computed for the turn before. Conversations are made from a
seed, or their users' turns are taken from a file (ShareGPT's format). Called by `load`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchlib.client import Client, Record
from benchlib.workload import IntRange, PromptMaker, RequestShape

#: Names of the roles, ShareGPT's and OpenAI's.
_SYSTEM = ("system",)
_USERS = ("human", "user")


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's text, how many tokens are requested, and the seconds that the user thinks before
    it."""

    text: str
    max_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's side of a conversation. An empty `system` is none."""

    turns: tuple[Turn, ...]
    system: str = ""


@dataclass(frozen=True, slots=True)
class Transcript:
    """A conversation of a file: the system's text and the users' texts."""

    system: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversations:
    """A workload of conversations, from a file in order and from its beginning again, or of random
    words where there is none.

    Attributes:
        turns: how many a conversation has; one of a file ends sooner if it has fewer.
        input_len: words of a random turn.
        output_len: tokens requested in each turn.
        think_s: the mean of the exponentially distributed pauses before all turns but the first.
    """

    transcripts: Sequence[Transcript]
    turns: IntRange
    input_len: IntRange
    output_len: IntRange
    think_s: float
    seed: int

    def item(self, index: int) -> Conversation:
        """See `Workload.item`."""
        random = np.random.default_rng([self.seed, index])
        count = self.turns.draw(random)
        system = ""
        if self.transcripts:
            transcript = self.transcripts[index % len(self.transcripts)]
            system, texts = transcript.system, transcript.texts[:count]
        else:
            maker = PromptMaker(None)
            texts = tuple(
                str(maker.make(self.input_len.draw(random), random)) for _ in range(count)
            )
        pauses = [0.0, *(random.exponential(self.think_s) for _ in texts[1:])]
        turns = (
            Turn(text, self.output_len.draw(random), pause)
            for text, pause in zip(texts, pauses, strict=True)
        )
        return Conversation(tuple(turns), system)


async def converse(
    client: Client, shape: RequestShape, conversation: Conversation
) -> AsyncIterator[Record]:
    """Sends the turns one after another and yields their records. A turn that fails ends the
    conversation.

    The chat endpoint gets messages; the completions endpoint a text of all that was said, a
    paragraph each.
    """
    messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for number, turn in enumerate(conversation.turns, 1):
        if turn.think_s:
            await asyncio.sleep(turn.think_s)
        messages.append({"role": "user", "content": turn.text})
        prompt = (
            messages if shape.chat else "".join(f"{message['content']}\n\n" for message in messages)
        )
        record = await client.send(shape, shape.call(prompt, turn.max_tokens), keep_text=True)
        record.turn = number
        messages.append({"role": "assistant", "content": record.text})
        record.text = ""
        yield record
        if record.error is not None:
            return


def read_transcripts(file: Path) -> list[Transcript]:
    """Returns the conversations of a JSON list or a JSONL file in ShareGPT's format, without the
    conversations in which no user speaks.

    A conversation is an object with `conversations`, a list of `from` ("human" or "user", "gpt",
    "system") and `value`, or with `messages`, a list of OpenAI's `role` and `content`. Recorded
    answers are left out.

    Raises:
        ValueError: an entry, named by its number, is not that, or no user speaks in any.
        OSError: the file cannot be read.
    """
    text = file.read_text("utf-8")
    try:
        entries = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except ValueError as error:
        raise ValueError(f"{file}: neither a JSON list nor JSON lines: {error}") from error
    transcripts = []
    for number, entry in enumerate(entries, 1):
        try:
            transcript = _transcript(entry)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}, conversation {number}: an object with `conversations` or "
                f"`messages` is needed"
            ) from error
        if transcript.texts:
            transcripts.append(transcript)
    if not transcripts:
        raise ValueError(f"{file} holds no conversation in which a user speaks")
    return transcripts


def _transcript(entry: dict[str, Any]) -> Transcript:
    if "conversations" in entry:
        said = [(message["from"], message["value"]) for message in entry["conversations"]]
    else:
        said = [(message["role"], message["content"]) for message in entry["messages"]]
    if not all(isinstance(text, str) for _, text in said):
        raise TypeError("a message without text")
    systems = [text for speaker, text in said if speaker in _SYSTEM]
    return Transcript(
        "\n\n".join(systems), tuple(text for speaker, text in said if speaker in _USERS and text)
    )

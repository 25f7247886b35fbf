"""Server-sent events of a stream, as bytes. Dialects make them, and `delivery` sends them.

All chunks of a choice are the same but for their text. `ChunkTemplate` makes the constant bytes
around it once, so that a token costs the JSON escape of its text and one join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from msgspec import UNSET, Struct, UnsetType

#: Makes JSON of anything that a reply holds. `orjson` does so for texts, which it escapes faster.
encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
#: Headers of every reply that is a stream of events.
STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect events otherwise
}


class PromptTokensDetails(Struct, kw_only=True):
    """The number of the prompt's tokens that were in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(Struct, kw_only=True):
    """The number of generated tokens that are reasoning, with its markers."""

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of a request. Each prompt counts once, whatever n is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all chunks of a reply have in common; `created` is in Unix seconds, and
    `fingerprint` is the reply's `system_fingerprint`.

    With `include_usage`, chunks carry `"usage": null`, and `usage_event` is to follow the last one;
    with `continuous_usage` as well, they are to carry the usage so far instead (`with_usage`).
    """

    id: str
    object: str
    created: int
    model: str
    include_usage: bool = False
    continuous_usage: bool = False
    fingerprint: str | None = None

    def fields(self) -> dict[str, Any]:
        """Returns these fields."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def head(self) -> bytes:
        """Returns the beginning of an event, up to where the choices go."""
        return b"data: " + orjson.dumps(self.fields())[:-1] + b',"choices":['

    def tail(self) -> bytes:
        """Returns the end of an event, from behind the choices."""
        return b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"

    def usage_event(self, usage: Usage, timings: Mapping[str, float] | None = None) -> bytes:
        """Returns the event with empty choices that reports the usage, and llama.cpp's `timings`
        where they are given."""
        more = b"" if timings is None else b',"timings":' + orjson.dumps(timings)
        return self.head() + b'],"usage":' + encode(usage) + more + b"}\n\n"

    def progress_event(self, index: int, progress: Mapping[str, float]) -> bytes:
        """Returns the event of choice `index` that has llama.cpp's `prompt_progress` alone."""
        text: dict[str, Any] = {"delta": {}} if "chat" in self.object else {"text": ""}
        choice = {"index": index, **text, "logprobs": None, "finish_reason": None}
        more = b'],"prompt_progress":' + orjson.dumps(progress)
        return self.head() + orjson.dumps(choice) + more + self.tail()[1:]


class ChunkTemplate:
    """The events of one choice. Made by `for_completion` or `for_chat`."""

    __slots__ = (
        "_after_logprobs",
        "_after_text",
        "_before_text",
        "_fixed_len",
        "_head",
        "_no_logprobs",
        "_tail",
        "_without_text",
    )

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        before_text: bytes,
        after_text: bytes,
        without_text: bytes,
    ):
        """Takes the JSON around a choice's text, and the whole of it in a chunk that has no
        text."""
        self._head = head = envelope.head() + b'{"index":%d,' % index
        self._before_text = head + before_text
        self._after_text = after_text + b',"logprobs":'
        self._tail = b"}" + envelope.tail()
        self._after_logprobs = b',"finish_reason":null' + self._tail
        self._no_logprobs = self._after_text + b"null" + self._after_logprobs
        self._without_text = head + without_text + b',"logprobs":null,"finish_reason":'
        self._fixed_len = len(self._before_text) + len(self._no_logprobs)

    @classmethod
    def for_completion(cls, envelope: Envelope, index: int) -> ChunkTemplate:
        """Returns the template of a choice of `/v1/completions`."""
        return cls(envelope, index, b'"text":', b"", b'"text":""')

    @classmethod
    def for_chat(cls, envelope: Envelope, index: int) -> ChunkTemplate:
        """Returns the template of a choice of `/v1/chat/completions`."""
        return cls(envelope, index, b'"delta":{"content":', b"}", b'"delta":{}')

    def chunk(self, text: str) -> bytes:
        """Returns the event that appends `text`."""
        return b"".join((self._before_text, orjson.dumps(text), self._no_logprobs))

    def framed_chunk(self, text: str) -> bytes:
        """Returns that event in a frame of HTTP's chunked coding (RFC 9112, 7.1)."""
        escaped = orjson.dumps(text)
        return b"%x\r\n%b%b%b\r\n" % (
            self._fixed_len + len(escaped),
            self._before_text,
            escaped,
            self._no_logprobs,
        )

    def chunk_with_logprobs(self, text: str, logprobs: Mapping[str, Any]) -> bytes:
        """Returns the event that appends `text`, with the log-probabilities of its tokens."""
        return b"".join(
            (
                self._before_text,
                orjson.dumps(text),
                self._after_text,
                encode(logprobs),
                self._after_logprobs,
            )
        )

    def chunk_with_token_ids(
        self,
        text: str,
        logprobs: Mapping[str, Any] | None,
        token_ids: Sequence[int],
        prompt_token_ids: Sequence[int] | None,
    ) -> bytes:
        """Returns the event that appends `text`, with the ids of its tokens, and with the ids of
        the prompt's tokens where they are given (vLLM's fields)."""
        ids: dict[str, Any] = {"token_ids": token_ids}
        if prompt_token_ids is not None:
            ids["prompt_token_ids"] = prompt_token_ids
        return b"".join(
            (
                self._before_text,
                orjson.dumps(text),
                self._after_text,
                encode(logprobs),
                b",",
                orjson.dumps(ids)[1:-1],
                self._after_logprobs,
            )
        )

    def chunk_with_delta(self, delta: Mapping[str, Any], fields: Mapping[str, Any]) -> bytes:
        """Returns the event of a chat that appends `delta` to the message. `fields` are further
        ones of the choice, such as the log-probabilities of the tokens."""
        return b"".join(
            (
                self._head,
                b'"delta":',
                encode(delta),
                b",",
                encode({"logprobs": None, **fields})[1:-1],
                self._after_logprobs,
            )
        )

    def finish(self, reason: str, stop_reason: int | str | None) -> bytes:
        """Returns the choice's last event.

        `stop_reason` (vLLM's field) is the token id or string that ended the text.
        """
        return b"".join(
            (
                self._without_text,
                orjson.dumps(reason),
                b',"stop_reason":',
                orjson.dumps(stop_reason),
                self._tail,
            )
        )


def with_usage(events: bytes, usage: Usage) -> bytes:
    """Returns events of an envelope with `include_usage`, with this usage in place of null."""
    # no text can hold the end of an event: JSON escapes line ends
    return events.replace(b'],"usage":null}\n\n', b'],"usage":' + encode(usage) + b"}\n\n")


def role_event(
    envelope: Envelope, index: int, prompt_token_ids: Sequence[int] | None = None
) -> bytes:
    """Returns the event that opens a choice of a chat: it names the role, with empty content, and
    the ids of the prompt where they are given (vLLM's field)."""
    choice = (
        b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        % index
    )
    if prompt_token_ids is None:
        return envelope.head() + choice + envelope.tail()
    ids = b'],"prompt_token_ids":' + orjson.dumps(prompt_token_ids)
    return envelope.head() + choice + ids + envelope.tail()[1:]


def error_event(body: Mapping[str, Any] | Struct) -> bytes:
    """Returns the event that reports that something failed; `DONE` follows it."""
    return b"data: " + encode(body) + b"\n\n"


def named_event(fields: Mapping[str, Any]) -> bytes:
    """Returns an event whose name is its `type`."""
    return b"event: %b\ndata: %b\n\n" % (str(fields["type"]).encode(), encode(fields))

"""Messages as gpt-oss writes them, in OpenAI's harmony format: `<|channel|>NAME<|message|>TEXT` up
to `<|end|>`, `<|call|>` or `<|return|>`. The channel `analysis` is the thought, `final` the answer,
and `commentary to=functions.NAME` a call, whose text is its arguments.

The description is OpenAI's "harmony response format" in its cookbook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.lark import Lark, Tool
from aioinfer.text.formats.reader import Markers, Reader, Steps

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_END, _CALL, _RETURN, _CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


class HarmonyCalls:
    """Tool calls and reasoning in OpenAI's harmony format; see the module."""

    name = "harmony"
    markers: tuple[str, ...] = (_START, _CHANNEL, _MESSAGE, _END, _CALL, _RETURN, _CONSTRAIN)
    #: A call ends the model's turn as an answer does; checkpoints may name the latter alone.
    ends: tuple[str, ...] = (_RETURN, _CALL)
    trigger = ""
    bare = ""
    _header_end = Markers(_MESSAGE)
    _body_end = Markers(_END, _CALL, _RETURN, _START)

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """See `CallFormat.read`."""
        while (yield from reader.peek()):
            header = yield from reader.short_until(self._header_end)
            if header is None:  # no message of this format
                found = yield from reader.until(self._body_end, draft.content)
            elif recipient := _RECIPIENT.search(header[0]):
                draft.begin_call(recipient[1])
                found = yield from reader.until(self._body_end, draft.arguments)
                if found:
                    draft.end_call()
            elif "analysis" in header[0]:
                draft.cut()
                found = yield from reader.until(self._body_end, draft.reasoning)
            else:
                draft.cut()
                found = yield from reader.until(self._body_end, draft.content)
            if found in (_END, _CALL):
                draft.cut()

    @staticmethod
    def num_thought_tokens(
        tokens: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        special_ids: Mapping[str, int],
    ) -> int:
        """Returns the number of reasoning tokens of an output: the tokens of the messages in the
        channel `analysis`, with the token that ends each."""
        message, *ends = (special_ids.get(text) for text in (_MESSAGE, _END, _CALL, _RETURN))
        count, begin, is_thought = 0, 0, False
        for place, token in enumerate(tokens):
            if token == message:
                is_thought = "analysis" in decode(tokens[begin:place])
            elif token in ends:
                count += is_thought
                begin, is_thought = place + 1, False
            else:
                count += is_thought
        return count

    def answer(self, lark: Lark, body: str) -> str:
        """Returns the term for a thought, if the model wants one, and the answer `body`."""
        final = lark.marker(_CHANNEL) + lark.text("final") + lark.marker(_MESSAGE) + body
        return self._thoughts(lark) + final

    def _thoughts(self, lark: Lark) -> str:
        """Returns the term for messages before the answer or the calls."""
        channel, message = lark.marker(_CHANNEL), lark.marker(_MESSAGE)
        kinds = '("analysis" | "commentary") '
        text, end, start = lark.free(), lark.marker(_END), lark.marker(_START)
        return f'({channel}{kinds}{message}{text}{end}{start}"assistant")* '

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.bare_calls`."""
        raise NotImplementedError

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """See `CallFormat.calls`. One call for a message: the model ends with it."""
        each = lark.any_of(
            lark.marker(_CHANNEL) + lark.text(f"commentary to=functions.{name} ")
            + lark.marker(_CONSTRAIN) + lark.text("json") + lark.marker(_MESSAGE)
            + lark.schema(tool)
            for name, tool in tools.items()
        )  # fmt: skip
        return self._thoughts(lark) + each

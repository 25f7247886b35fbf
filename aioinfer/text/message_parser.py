"""Parsing a model's text into a message: the interface between the formats of model families
(reasoning, tool calls) and the HTTP handlers.

Models write thoughts and tool calls as text between markers of their own. A `MessageFormat` knows
the markers of a family. For each choice of a chat it makes a `MessageParser`, which takes the text
as it is generated and divides it into content, reasoning and calls, without looking at any
character twice; text that may become a marker is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from aioinfer.sampling_params import GrammarSpec


@dataclass(slots=True)
class CallDelta:
    """The delta of one tool call.

    Attributes:
        index: the number of the call in the message.
        name: the function, in the first delta of a call; else None.
        arguments: further text of the arguments, JSON of an object when all of it has come.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """The delta of a message: text of the answer, reasoning text, and tool calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class MessageParser(Protocol):
    """Divides the text of one choice into content, reasoning and tool calls."""

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun; with one or more, the finish reason is "tool_calls"."""
        ...

    @property
    def repeats_call(self) -> bool:
        """Whether a call has come that equals an earlier one, which completes the message: the call
        is left out, and so is all that follows."""
        ...

    def feed(self, text: str) -> MessageDelta:
        """Parses the next piece of text and returns the delta of the message that is certain by
        now."""
        ...

    def flush(self) -> MessageDelta:
        """Returns the delta of the text that was held back, at the end of the text."""
        ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and how they may be called.

    Attributes:
        tools: the functions as in OpenAI's `tools[i].function`: name, description, parameters
            (JSON Schema), strict.
        choice: whether a call is forbidden, possible or required; "named" requires one of `name`.
        name: the function that is required under "named".
        parallel: whether several calls may be made in one message.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    name: str | None = None
    parallel: bool = True


class MessageFormat(Protocol):
    """The format in which a family of models writes reasoning and tool calls.

    Attributes:
        name: the name of its way of writing calls.
        markers: the special tokens that its parsers have to see: what follows from them is hidden
            from clients, and so are all other special tokens.
        end_ids: tokens that end a text, whether or not the model's files name them.
        knows_tools: whether the chat template shows tools to the model.
    """

    name: str
    markers: frozenset[str]
    end_ids: tuple[int, ...]
    knows_tools: bool

    def parses(self, use: ToolUse) -> bool:
        """Whether the text of a choice has to be parsed; else all of it is content."""
        ...

    def opens_thought(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has opened a thought."""
        ...

    def template_messages(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Returns messages as the chat template of the family needs them."""
        ...

    def parser(self, use: ToolUse, *, in_thought: bool) -> MessageParser:
        """Returns the parser of one choice.

        Args:
            use: the tools of the request; without any, text that looks like a call is content.
            in_thought: whether the prompt's end has opened a thought, as the templates of some
                models do.
        """
        ...

    @property
    def has_thoughts(self) -> bool:
        """Whether the model may write thoughts."""
        ...

    @property
    def bounds_thoughts(self) -> bool:
        """Whether a grammar can end thoughts at a budget of tokens."""
        ...

    def num_thought_tokens(
        self,
        tokens: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        *,
        in_thought: bool,
    ) -> int:
        """Returns how many tokens of an output are thoughts, with their markers.

        Args:
            tokens: of the output, an end token included.
            decode: returns the text of tokens, special ones included.
            in_thought: as for `parser`.
        """
        ...

    def grammar(
        self,
        use: ToolUse,
        *,
        in_thought: bool,
        answer: GrammarSpec | None,
        thought_budget: int | None = None,
    ) -> GrammarSpec | None:
        """Returns the grammar that holds the output to the tools' schemas, or None where nothing
        restricts it.

        "required" and "named" enforce a call; under "auto" text is free until the model opens a
        call, and then the call's schema holds. A thought is free in all cases.

        Args:
            answer: the grammar of the content, if the request has one (`response_format`).
            thought_budget: the maximum length of a thought in tokens, its markers not counted.
        """
        ...

"""Message format of a model family: how it writes reasoning, and how it writes tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from aioinfer.errors import RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.formats.draft import Draft
from aioinfer.text.formats.harmony import HarmonyCalls
from aioinfer.text.formats.hermes import HermesCalls
from aioinfer.text.formats.kimi import KimiCalls, number_calls
from aioinfer.text.formats.lark import Lark, Tool, quote
from aioinfer.text.formats.reader import Reader, Steps, TextParser
from aioinfer.text.formats.thought import ThoughtMarkers
from aioinfer.text.message_parser import MessageParser, ToolUse

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class CallFormat(Protocol):
    """The tool-call format of a family of models.

    Attributes:
        name: of the format, in the configuration.
        markers: texts that are special tokens in its tokenizers, and part of the message.
        ends: texts that end the model's turn where they are tokens; checkpoints may not name them.
        trigger: the text behind which the grammar of calls takes over.
        bare: the text behind which, at the beginning of a message, the grammar of a call without
            markers takes over; "" where there is none.
    """

    name: str
    markers: tuple[str, ...]
    ends: tuple[str, ...]
    trigger: str
    bare: str

    def read(self, reader: Reader, draft: Draft, tools: Mapping[str, Tool]) -> Steps[None]:
        """Reads content and calls up to the end of the text, in which `tools` may be called."""
        ...

    def calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """Returns the term for one call of these tools, or more if `parallel`, behind the first
        trigger."""
        ...

    def bare_calls(self, lark: Lark, tools: Mapping[str, Tool], *, parallel: bool) -> str:
        """Returns the same behind `bare`."""
        ...


class FamilyFormat:
    """The message format of a model family; implements `MessageFormat`."""

    def __init__(
        self,
        calls: CallFormat | None,
        thought: ThoughtMarkers | None,
        special_ids: Mapping[str, int],
        knows_tools: bool = True,
    ):
        """Takes the formats of tool calls and of reasoning, None where they are not looked for, and
        the ids of the tokenizer's special tokens by their texts. `knows_tools`: whether the chat
        template shows tools to the model."""
        self.name = calls.name if calls is not None else "none"
        self.knows_tools = knows_tools
        self._calls = calls
        self._thought = thought
        self._special_ids = special_ids
        self.markers = frozenset(self.all_markers()) & special_ids.keys()
        ends = calls.ends if calls is not None else ()
        self.end_ids = tuple(special_ids[text] for text in ends if text in special_ids)

    def all_markers(self) -> tuple[str, ...]:
        """Returns the texts that are special tokens in some tokenizers of the family."""
        given = self._calls.markers if self._calls is not None else ()
        if self._thought is not None:
            given = (*given, self._thought.open, self._thought.close)
        return given

    def parses(self, use: ToolUse) -> bool:
        """See `MessageFormat.parses`."""
        return self._thought is not None or self._reads_calls(use)

    def _reads_calls(self, use: ToolUse) -> bool:
        if isinstance(self._calls, HarmonyCalls):
            return True  # without its parser, not even the answer is found
        return self._calls is not None and bool(use.tools) and use.choice != "none"

    def opens_thought(self, prompt_end: str) -> bool:
        """See `MessageFormat.opens_thought`."""
        if self._thought is None:
            return False
        opened = self._thought.open + self._thought.label
        return prompt_end.rstrip().endswith((self._thought.open, opened.rstrip()))

    def template_messages(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """See `MessageFormat.template_messages`."""
        return number_calls(messages) if isinstance(self._calls, KimiCalls) else messages

    def parser(self, use: ToolUse, *, in_thought: bool) -> MessageParser:
        """See `MessageFormat.parser`."""
        tools = _tools(use)

        def read(reader: Reader, draft: Draft) -> Steps[None]:
            if self._thought is not None:
                yield from self._thought.read(reader, draft, in_thought=in_thought)
            if self._calls is not None and self._reads_calls(use):
                yield from self._calls.read(reader, draft, tools)
            else:
                yield from reader.rest(draft.content)

        return TextParser(read, parallel=use.parallel)

    @property
    def has_thoughts(self) -> bool:
        """See `MessageFormat.has_thoughts`."""
        return self._thought is not None or isinstance(self._calls, HarmonyCalls)

    @property
    def bounds_thoughts(self) -> bool:
        """See `MessageFormat.bounds_thoughts`."""
        return self._thought is not None and self._thought.close in self._special_ids

    def num_thought_tokens(
        self,
        tokens: Sequence[int],
        decode: Callable[[Sequence[int]], str],
        *,
        in_thought: bool,
    ) -> int:
        """See `MessageFormat.num_thought_tokens`."""
        if isinstance(self._calls, HarmonyCalls):
            return self._calls.num_thought_tokens(tokens, decode, self._special_ids)
        if self._thought is None:
            return 0
        close_id = self._special_ids.get(self._thought.close)
        return self._thought.num_tokens(tokens, decode, close_id, in_thought=in_thought)

    def grammar(
        self,
        use: ToolUse,
        *,
        in_thought: bool,
        answer: GrammarSpec | None,
        thought_budget: int | None = None,
    ) -> GrammarSpec | None:
        """See `MessageFormat.grammar`."""
        with_calls = bool(use.tools) and use.choice != "none"
        if with_calls and self._calls is None:
            if use.choice == "auto":
                return answer
            raise RequestError(
                "this model's way of writing tool calls is not known: chat.tool_format names those "
                "that are",
                param="tool_choice",
            )
        if thought_budget is not None and isinstance(self._calls, HarmonyCalls):
            raise RequestError(
                "thinking_token_budget is not supported for this model, but reasoning_effort is",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        has_budget = thought_budget is not None and self._thought is not None
        if not with_calls and not has_budget and (answer is None or not self.parses(use)):
            return answer
        lark = Lark(self._special_ids)
        shown = use if with_calls else None
        source = lark.grammar(self._start(lark, shown, in_thought, answer, thought_budget))
        param = "thinking_token_budget" if answer is None else answer.param
        param = "tools" if with_calls else param
        return GrammarSpec("message", source, param=param)

    def _start(
        self,
        lark: Lark,
        use: ToolUse | None,
        in_thought: bool,
        answer: GrammarSpec | None,
        thought_budget: int | None,
    ) -> str:
        """Returns the term for the whole output: calls if there is a `use` of tools."""
        if isinstance(self._calls, HarmonyCalls):
            return self._harmony(lark, self._calls, use, answer)
        thought, unlike = "", ""
        if self._thought is not None:
            thought = self._thought.term(lark, in_thought=in_thought, budget=thought_budget)
            unlike = "" if in_thought else self._thought.begins_text(lark)
        space = "/\\s*/ " if thought else ""
        body = "" if answer is None else _answer(lark, answer)
        if use is None or self._calls is None:
            return thought + (space + body if body else lark.free(but=unlike))
        # one that is named is called once
        parallel = use.parallel and use.choice != "named"
        calls = self._calls.calls(lark, _tools(use), parallel=parallel)
        trigger = lark.marker(self._calls.trigger)
        call = lark.rule(f"{trigger}{calls}")
        if use.choice in ("required", "named"):
            return thought + space + call
        if body:
            return f"{thought}{space}({lark.rule(body)}| {call})"
        ways, hidden = [], [self._calls.trigger]
        if self._calls.bare:
            begins = f"/\\s*/ {lark.text(self._calls.bare)}"
            unlike = f"({unlike} | {begins})" if unlike else begins
            bare = self._calls.bare_calls(lark, _tools(use), parallel=parallel)
            ways.append(f"{lark.terminal(begins)}{bare}")
        if isinstance(self._calls, HermesCalls):
            begins, fenced = self._calls.fenced_calls(lark, _tools(use), parallel=parallel)
            unlike = f"({unlike} | {begins})"
            ways.append(fenced)
        if self._calls.bare == self._calls.trigger:  # no call comes later in the message
            hidden = []
        else:
            ways.append(lark.free_until(self._calls.trigger, but=unlike) + calls)
        return f"{thought}({lark.free(*hidden, but=unlike)}| {' | '.join(ways)})"

    def _harmony(
        self, lark: Lark, calls: HarmonyCalls, use: ToolUse | None, answer: GrammarSpec | None
    ) -> str:
        text = lark.free() if answer is None else _answer(lark, answer)
        final = lark.rule(calls.answer(lark, text))
        if use is None:
            return final
        call = lark.rule(calls.calls(lark, _tools(use), parallel=use.parallel))
        return call if use.choice in ("required", "named") else f"{final}| {call}"


def _tools(use: ToolUse) -> dict[str, Tool]:
    """Returns the tools that may be called, by name."""
    tools = (Tool(str(tool["name"]), tool.get("parameters") or _ANY_OBJECT) for tool in use.tools)
    return {tool.name: tool for tool in tools if use.choice != "named" or tool.name == use.name}


def _answer(lark: Lark, answer: GrammarSpec) -> str:
    """Returns the term for an answer that follows a grammar."""
    match answer.kind:
        case "json_object":
            return lark.json_value(_ANY_OBJECT)
        case "json_schema":
            return lark.json_value(json.loads(answer.source))
        case "choice":
            return lark.any_of(quote(text) for text in json.loads(answer.source))
        case "lark" if "::=" not in answer.source:
            return f"%lark {{\n{answer.source}\n}} "
    raise RequestError(
        f"a grammar of the kind {answer.kind} cannot be combined with tools or thoughts",
        param=answer.param,
    )

"""Calls as Kimi's models (K2, Linear) write them: a section of calls, each
`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`, where
INDEX counts the calls of the conversation.

The markers and the ids are those of Kimi K2's chat template and of its guide to tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aioinfer.text.formats.deepseek import DeepSeekCalls
from aioinfer.text.formats.lark import Lark
from aioinfer.text.formats.reader import Markers

_BEGIN, _END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")


class KimiCalls(DeepSeekCalls):
    """Tool calls in Kimi's format: DeepSeek's with other markers, and with ids for names."""

    name = "kimi"
    markers: tuple[str, ...] = (_BEGIN, _END, _CALL, _CALL_END, _ARGUMENTS)
    trigger = _BEGIN
    begin, end, call, call_end, separator = _BEGIN, _END, _CALL, _CALL_END, _ARGUMENTS
    _open = Markers(_BEGIN, _CALL)
    _separator = Markers(_ARGUMENTS, _CALL_END, _CALL)
    _close = Markers(_CALL_END, _CALL, _END)

    def __init__(self) -> None:
        super().__init__(fenced=False)

    def function(self, text: str) -> str:
        """See `DeepSeekCalls.function`."""
        found = _ID.fullmatch(text)
        return found[1] if found else ""

    def named(self, lark: Lark, name: str) -> str:
        """See `DeepSeekCalls.named`."""
        return f"{lark.text(f'functions.{name}:')}/[0-9]{{1,4}}/ "


def number_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in which the ids of calls are Kimi's, since the template shows them to the
    model: `functions.NAME:INDEX`. The results of the calls name the same ids."""
    renamed: dict[Any, str] = {}
    number, result = 0, []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            numbered = []
            for call in calls:
                name = (call.get("function") or {}).get("name", "")
                renamed[call.get("id")] = new_id = f"functions.{name}:{number}"
                numbered.append({**call, "id": new_id})
                number += 1
            message["tool_calls"] = numbered
        if message.get("role") == "tool" and message.get("tool_call_id") in renamed:
            message["tool_call_id"] = renamed[message["tool_call_id"]]
        result.append(message)
    return result

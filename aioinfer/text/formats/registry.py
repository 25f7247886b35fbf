"""Selects the message format of a model: from its chat template, or by its name in the
configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal, get_args

from aioinfer.text.formats.deepseek import DeepSeekCalls
from aioinfer.text.formats.family import CallFormat, FamilyFormat
from aioinfer.text.formats.gemma import FUNCTION_GEMMA, GEMMA_4, GemmaCalls
from aioinfer.text.formats.harmony import HarmonyCalls
from aioinfer.text.formats.hermes import HermesCalls
from aioinfer.text.formats.kimi import KimiCalls
from aioinfer.text.formats.lfm2 import Lfm2Calls
from aioinfer.text.formats.llama import LlamaCalls
from aioinfer.text.formats.mistral import MistralCalls
from aioinfer.text.formats.qwen_coder import QwenCoderCalls
from aioinfer.text.formats.thought import BRACKETS, CHANNEL, THINK, ThoughtMarkers

ToolFormatName = Literal[
    "auto",
    "none",
    "hermes",
    "nemotron",
    "qwen_coder",
    "llama",
    "mistral",
    "deepseek",
    "kimi",
    "harmony",
    "lfm2",
    "gemma",
]
ThoughtFormatName = Literal["auto", "none", "think", "brackets", "channel"]

#: Texts of templates that show tool calls, and the format of each, in the order of the search.
_SIGNS = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("[TOOL_CALLS]", "mistral"),
    ("<TOOLCALL>", "nemotron"),
    ("<function=", "qwen_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters": ', "llama"),
)
#: Special tokens that tell the format where the template shows neither tools nor calls.
_SIGNS_OF_TOKENS = (("<|tool_call_start|>", "lfm2"), ("<start_function_call>", "gemma"))
#: A template that shows a list of calls between Hermes's markers, as Falcon-H1's does.
_LIST = re.compile(r"<tool_call>\s*(\\n)*\s*\[")
_THOUGHTS: Mapping[str, ThoughtMarkers] = {
    "think": THINK,
    "brackets": BRACKETS,
    "channel": CHANNEL,
}


def message_format(
    template: str,
    special_ids: Mapping[str, int],
    tools: ToolFormatName = "auto",
    thoughts: ThoughtFormatName = "auto",
) -> FamilyFormat:
    """Returns the format of a model.

    A template that shows no calls is taken for one of Hermes's: of all formats, models that were
    trained on any have seen this one most often.

    Args:
        template: the text of its chat template.
        special_ids: the ids of its tokenizer's special tokens, by their texts.
        tools, thoughts: names from the configuration.
    """
    name: str = tools
    if tools == "auto":
        shown = (format for sign, format in _SIGNS if sign in template)
        known = (format for sign, format in _SIGNS_OF_TOKENS if sign in special_ids)
        name = next(shown, None) or next(known, "hermes")
    function_gemma = "<start_function_call>" in template or "<start_function_call>" in special_ids
    makers: dict[str, Callable[[], CallFormat]] = {
        "hermes": lambda: HermesCalls(listed=bool(_LIST.search(template))),
        "nemotron": lambda: HermesCalls("nemotron", "TOOLCALL", listed=True),
        "qwen_coder": QwenCoderCalls,
        "llama": LlamaCalls,
        "mistral": lambda: MistralCalls(by_name="[ARGS]" in template),
        "deepseek": lambda: DeepSeekCalls(fenced="```json" in template),
        "kimi": KimiCalls,
        "harmony": HarmonyCalls,
        "lfm2": Lfm2Calls,
        "gemma": lambda: GemmaCalls(FUNCTION_GEMMA if function_gemma else GEMMA_4),
    }
    assert set(makers) | {"auto", "none"} == set(get_args(ToolFormatName))
    thought = _THOUGHTS.get(thoughts)
    if thoughts == "auto" and name != "harmony":
        thought = next((each for each in _THOUGHTS.values() if each.close in template), None)
    return FamilyFormat(
        makers[name]() if name in makers else None,
        thought,
        special_ids,
        knows_tools="tools" in template,
    )

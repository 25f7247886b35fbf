"""Selects the message format of a model: from its chat template, or by its name in the
configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, get_args

from aioinfer.text.formats.deepseek import DeepSeekCalls
from aioinfer.text.formats.family import CallFormat, FamilyFormat
from aioinfer.text.formats.harmony import HarmonyCalls
from aioinfer.text.formats.hermes import HermesCalls
from aioinfer.text.formats.llama import LlamaCalls
from aioinfer.text.formats.mistral import MistralCalls
from aioinfer.text.formats.qwen_coder import QwenCoderCalls
from aioinfer.text.formats.thought import BRACKETS, THINK, ThoughtMarkers

ToolFormatName = Literal[
    "auto", "none", "hermes", "qwen_coder", "llama", "mistral", "deepseek", "harmony"
]
ThoughtFormatName = Literal["auto", "none", "think", "brackets"]

#: Texts of templates that show tool calls, and the format of each, in the order of the search.
_SIGNS = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
    ('"parameters": ', "llama"),
)
_THOUGHTS: Mapping[str, ThoughtMarkers] = {"think": THINK, "brackets": BRACKETS}


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
        name = next((format for sign, format in _SIGNS if sign in template), "hermes")
    makers: dict[str, Callable[[], CallFormat]] = {
        "hermes": HermesCalls,
        "qwen_coder": QwenCoderCalls,
        "llama": LlamaCalls,
        "mistral": lambda: MistralCalls(by_name="[ARGS]" in template),
        "deepseek": lambda: DeepSeekCalls(fenced="```json" in template),
        "harmony": HarmonyCalls,
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

"""Chat templates of folders with a tekken.json alone. The texts are those of `mistral-common`
1.13.1 for the same conversation (`encode_chat_completion`, decoded with its special tokens)."""

from __future__ import annotations

from typing import Any

import pytest

from aioinfer.text.chat_template import ChatTemplate
from aioinfer.text.formats.registry import message_format
from aioinfer.text.tekken_template import chat_template

TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALLS = [
    {"id": f"abcdef12{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
    for i, arguments in enumerate([{"city": "Paris"}, {"city": "Zürich"}])
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "abcdef120", "content": '{"celsius": 21}'},
    {"role": "tool", "tool_call_id": "abcdef121", "content": "rain"},
    {"role": "assistant", "content": "21, rain. "},
    {"role": "user", "content": "And"},
    {"role": "user", "content": "now?"},
]
TOOLS = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f", "description": "", '
    '"parameters": {"type": "object", "properties": {}}}}][/AVAILABLE_TOOLS]'
)
SYSTEM = "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
LIST = (
    '[TOOL_CALLS][{"name": "f", "arguments": {"city": "Paris"}, "id": "abcdef120"}, '
    '{"name": "f", "arguments": {"city": "Zürich"}, "id": "abcdef121"}]</s>'
)
RESULTS = (
    '[TOOL_RESULTS]abcdef120[TOOL_CONTENT]{"celsius": 21}[/TOOL_RESULTS]'
    "[TOOL_RESULTS]abcdef121[TOOL_CONTENT]rain[/TOOL_RESULTS]"
)
TEXTS = {
    "v3": f'<s>[INST]Weather?[/INST]{LIST}[TOOL_RESULTS]{{"content": {{"celsius": 21}}, "call_id": '
    '"abcdef120"}[/TOOL_RESULTS][TOOL_RESULTS]{"content": "rain", "call_id": "abcdef121"}'
    f"[/TOOL_RESULTS]21, rain.</s>{TOOLS}[INST]Be brief.\n\nAnd\n\nnow?[/INST]",
    "v7": f"<s>{SYSTEM}[INST]Weather?[/INST]{LIST}{RESULTS}21, rain.</s>{TOOLS}"
    "[INST]And\n\nnow?[/INST]",
    "v11": f'<s>{SYSTEM}[INST]Weather?[/INST][TOOL_CALLS]f[CALL_ID]abcdef120[ARGS]{{"city": '
    '"Paris"}[TOOL_CALLS]f[CALL_ID]abcdef121[ARGS]{"city": "Zürich"}</s>'
    f"{RESULTS}21, rain.</s>{TOOLS}[INST]And\n\nnow?[/INST]",
    "v13": f'<s>{SYSTEM}{TOOLS}[INST]Weather?[/INST][TOOL_CALLS]f[ARGS]{{"city": "Paris"}}'
    '[TOOL_CALLS]f[ARGS]{"city": "Zürich"}</s>[TOOL_RESULTS]{"celsius": 21}[/TOOL_RESULTS]'
    "[TOOL_RESULTS]rain[/TOOL_RESULTS]21, rain.</s>[INST]And\n\nnow?[/INST]",
}


def render(version: str, messages: list[dict[str, Any]], **options: Any) -> str:
    text = chat_template(version, thinks=True)
    assert text is not None
    assert message_format(text, {}).name == "mistral"
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


@pytest.mark.parametrize("version", TEXTS)
def test_texts_are_those_of_mistral_common(version: str):
    tools = [{"type": "function", "function": TOOL}]
    assert render(version, CONVERSATION, tools=tools) == TEXTS[version]


def test_thoughts_pictures_and_sound():
    turns = [{"type": "text", "text": "a"}, {"type": "image"}], [{"type": "audio", "audio": ""}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": turns[0]},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "user", "content": turns[1]},
    ]
    behind = "b</s>[INST][BEGIN_AUDIO][AUDIO][/INST]"
    assert render("v13", messages) == f"<s>[INST][IMG]a[/INST][THINK]c[/THINK]{behind}"
    assert render("v7", messages) == f"<s>[INST][IMG]a[/INST]{behind}"
    assert chat_template("v15", thinks=True) is None

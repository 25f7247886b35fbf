"""Conversations with tool calls and results: what a chat template shows of a call is read as the
call, and the template gets the ids that it shows to the model."""

from __future__ import annotations

from typing import Any

import pytest

from aioinfer.engine.chat_turn import call_input
from aioinfer.text.chat_template import ChatTemplate
from aioinfer.text.formats.registry import message_format
from aioinfer.text.message_parser import ToolUse

#: Templates that write calls as the families' own do.
TEMPLATES = {
    "lfm2": """\
{%- macro value(v) -%}
  {%- if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}{% else %}{{ v }}{% endif -%}
{%- endmacro -%}
{%- for message in messages -%}
<|im_start|>{{ message.role + "\\n" }}
  {%- if message.tool_calls -%}
    <|tool_call_start|>[
    {%- for call in message.tool_calls -%}
      {{ ", " if not loop.first }}{{ call.function.name }}(
      {%- for key, v in call.function.arguments.items() -%}
        {{ ", " if not loop.first }}{{ key }}={{ value(v) }}
      {%- endfor -%}
      )
    {%- endfor -%}
    ]<|tool_call_end|>
  {%- endif -%}
  {{ message.content }}<|im_end|>{{ "\\n" }}
{%- endfor -%}
""",
    "gemma": """\
{%- macro value(v) -%}
  {%- if v is string -%}<|"|>{{ v }}<|"|>
  {%- elif v is boolean -%}{{ "true" if v else "false" }}
  {%- elif v is none -%}null
  {%- elif v is mapping -%}{ {{- members(v) -}} }
  {%- elif v is iterable -%}[{% for i in v %}{{ "," if not loop.first }}{{ value(i) }}{% endfor %}]
  {%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
{%- macro members(m) -%}
  {%- for key, v in m | dictsort -%}
    {{ "," if not loop.first }}{{ key }}:{{ value(v) }}
  {%- endfor -%}
{%- endmacro -%}
{%- for message in messages -%}
<|turn>{{ message.role + "\\n" }}
  {%- for call in message.tool_calls or [] -%}
    {%- set function = call.function -%}
    <|tool_call>call:{{ function.name }}{ {{- members(function.arguments) -}} }<tool_call|>
  {%- endfor -%}
  {{ message.content }}<turn|>{{ "\\n" }}
{%- endfor -%}
""",
    "kimi": """\
{%- for message in messages -%}
<|im_{{ message.role }}|>
  {%- if message.role == "tool" %}## Return of {{ message.tool_call_id + "\\n" }}{% endif -%}
  {{ message.content }}
  {%- if message.tool_calls -%}
    <|tool_calls_section_begin|>
    {%- for call in message.tool_calls -%}
      <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
      {{- call.function.arguments | tojson }}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
""",
    "nemotron": """\
{%- for message in messages -%}
<SPECIAL_11>{{ message.role + "\\n" + message.content }}
  {%- if message.tool_calls -%}
    <TOOLCALL>[
    {%- for call in message.tool_calls -%}
      {{ ", " if not loop.first }}{"name": "{{ call.function.name }}", "arguments": {# #}
      {{- call.function.arguments | tojson }}}
    {%- endfor -%}
    ]</TOOLCALL>
  {%- endif -%}
  {{ "\\n" }}<SPECIAL_12>
{%- endfor -%}
""",
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("weather", {"city": 'São "Paulo"', "days": 3}),
    ("weather", {"city": "it's, here", "flags": [True, False], "limits": {"low": -1.5}}),
    ("now", {}),
]
ENDS = ("<|im_end|>", "<turn|>", "\n<SPECIAL_12>")


def conversation() -> list[dict[str, Any]]:
    """Returns two turns: two calls and their results, and one more call."""
    calls = [
        {"type": "function", "id": f"call_{n}", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(CALLS)
    ]
    return [
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "", "tool_calls": calls[:2]},
        {"role": "tool", "content": "12", "tool_call_id": "call_0"},
        {"role": "tool", "content": "13", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "tool", "content": "noon", "tool_call_id": "call_2"},
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_calls_are_read_again(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], {})
    format = message_format(template.text, {})
    assert format.name == name
    text = template.render(format.template_messages(conversation()), add_generation_prompt=False)
    use = ToolUse([{"name": "weather"}, {"name": "now"}], "auto")
    found = []
    for part in text.split("assistant")[1:]:
        end = min(part.index(end) for end in ENDS if end in part)
        parser = format.parser(use, in_thought=False)
        names: list[str] = []
        arguments: dict[int, str] = {}
        for delta in (*map(parser.feed, part[:end].removeprefix("|>")), parser.flush()):
            for call in delta.calls:
                names += [call.name] if call.name else []
                arguments[call.index] = arguments.get(call.index, "") + call.arguments
            assert not delta.content.strip()
        found += [(name, call_input(arguments[n])) for n, name in enumerate(names)]
    assert found == CALLS


def test_kimi_sees_ids_that_count_the_calls() -> None:
    format = message_format(TEMPLATES["kimi"], {})
    given = conversation()
    messages = format.template_messages(given)
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert ids == ["functions.weather:0", "functions.weather:1", "functions.now:2"]
    assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ids
    assert given == conversation()  # the client's messages stay as they are
    assert message_format("", {}).template_messages(given) is given

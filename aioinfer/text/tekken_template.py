"""Chat templates of Mistral's models whose folders have a `tekken.json` and no template: one for
each version of the chat format, as that file names it.

The formats are those of Mistral's package `mistral-common` (Apache-2.0), whose token ids they give.
In short: version 3 puts the system prompt into the last user's turn; from 7 on it has a turn of its
own; 3 and 7 write calls as a JSON list; 11 and 13 write each call by its name, 11 with its id;
13 puts the tools before the first user's turn, the others before the last one's. Differences that
remain: results of tools keep the order and, in version 3, the JSON text that they were given.
"""

from __future__ import annotations

#: Between `@` in these: the parts that `chat_template` fills in.
_BEGIN = """\
{%- macro content_of(content) -%}
  {%- if content is string %}{{ content }}{% else -%}
    {%- set places = content | rejectattr('type', 'equalto', 'text') | list -%}
    {%- set is_last = content and content[-1].type == 'image' and places | length == 1 -%}
    {%- if is_last %}[IMG]{% endif -%}
    {%- for part in content -%}
      {%- if part.type == 'text' -%}
        {{- '\\n\\n' if loop.previtem and loop.previtem.type == 'text' }}{{ part.text -}}
      {%- elif part.type == 'audio' %}[BEGIN_AUDIO][AUDIO]
      {%- elif not is_last %}[IMG]{% endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- macro tools_before_turn() -%}
  {%- set ns = namespace(listed=[]) -%}
  {%- for tool in tools -%}
    {%- set f = tool.function -%}
    {%- set ns.listed = ns.listed + [{'type': 'function', 'function': {'name': f.name,
        'description': f.description or '', 'parameters': f.parameters or {}}}] -%}
  {%- endfor -%}
  [AVAILABLE_TOOLS]{{ ns.listed | tojson }}[/AVAILABLE_TOOLS]
{%- endmacro -%}
{%- macro arguments_of(call) -%}
  {%- set given = call.function.arguments -%}
  {{- given if given is string else given | tojson -}}
{%- endmacro -%}
"""
_CALL_LIST = """\
{%- macro calls_of(calls) -%}
  [TOOL_CALLS][
  {%- for call in calls -%}
    {"name": {{ call.function.name | tojson }}, "arguments": {{ arguments_of(call) }}
    {%- if call.id %}, "id": {{ call.id | tojson }}{% endif -%}
    }{{ ', ' if not loop.last }}
  {%- endfor -%}
  ]
{%- endmacro -%}
"""
_CALLS_BY_NAME = """\
{%- macro calls_of(calls) -%}
  {%- for call in calls -%}
    [TOOL_CALLS]{{ call.function.name }}@CALL_ID@[ARGS]{{ arguments_of(call) }}
  {%- endfor -%}
{%- endmacro -%}
"""
_RESULT_AS_JSON = """\
    {%- set text = content_of(message.content) -%}
    {"content": {{ text if text[:1] in ('{', '[') else text | tojson }}, "call_id": \
{{ message.tool_call_id | tojson }}}"""
_MESSAGES = """\
{%- set ns = namespace(first=none, last=none, system='') -%}
{%- for message in messages -%}
  {%- if message.role == 'user' and (loop.first or loop.previtem.role != 'user') -%}
    {%- set ns.first = loop.index0 if ns.first is none else ns.first -%}
    {%- set ns.last = loop.index0 -%}
  {%- elif message.role == 'system' and message.content -%}
    {%- set ns.system = ns.system + content_of(message.content) + '\\n\\n' -%}
  {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
  {%- set goes_on = loop.previtem is defined and loop.previtem.role == message.role -%}
  {%- set is_followed = loop.nextitem is defined and loop.nextitem.role == message.role -%}
  {%- if message.role == 'system' -%}
    @SYSTEM@
  {%- elif message.role == 'user' -%}
    {%- if goes_on %}{{ '\\n\\n' }}{% else -%}
      {%- if tools and loop.index0 == ns.@TOOLS_AT@ %}{{ tools_before_turn() }}{% endif -%}
      [INST]@IN_LAST_TURN@
    {%- endif -%}
    {{- content_of(message.content) }}{{ '[/INST]' if not is_followed }}
  {%- elif message.role == 'assistant' -%}
    {%- set text = content_of(message.content or '') -%}
    {{- '\\n\\n' if goes_on and text and not message.tool_calls -}}
    @TEXT@
    {%- if message.tool_calls %}{{ calls_of(message.tool_calls) }}{% endif -%}
    {{- eos_token if not is_followed -}}
  {%- elif message.role == 'tool' -%}
    [TOOL_RESULTS]
    @RESULT@
    {#--#}[/TOOL_RESULTS]
  {%- else -%}
    {{- raise_exception('a role must be system, user, assistant or tool') -}}
  {%- endif -%}
{%- endfor -%}
"""


def chat_template(version: str, *, thinks: bool) -> str | None:
    """Returns the Jinja text for a version of the format such as `"v3"`; None for one that is not
    known here. `thinks`: whether the vocabulary has the tokens around thoughts."""
    if version not in ("v3", "v7", "v11", "v13"):
        return None
    number = int(version[1:])
    content = "{{- content_of(message.content) -}}"
    text = "{{- text.rstrip(' ') -}}"
    if thinks and number >= 13:
        thought = "'[THINK]' + message.reasoning_content + '[/THINK]' + text"
        text = f"{{{{- {thought} if message.reasoning_content else text.rstrip(' ') -}}}}"
    results = {3: _RESULT_AS_JSON, 13: content}
    parts = {
        "SYSTEM": "" if number == 3 else f"[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]",
        "TOOLS_AT": "first" if number >= 13 else "last",
        "IN_LAST_TURN": "{{ ns.system if loop.index0 == ns.last }}" if number == 3 else "",
        "TEXT": text,
        "RESULT": results.get(number, "{{- message.tool_call_id }}[TOOL_CONTENT]" + content),
        "CALL_ID": "[CALL_ID]{{ call.id }}" if number == 11 else "",
    }
    template = _BEGIN + (_CALLS_BY_NAME if number >= 11 else _CALL_LIST) + _MESSAGES
    for name, part in parts.items():
        template = template.replace(f"@{name}@", part)
    return template

"""The tools of a request: checked, and made into the `ToolUse` that formats of messages take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from aioinfer.errors import FieldError, RequestError
from aioinfer.sampling_params import GrammarSpec, SamplingParams
from aioinfer.text.message_parser import ToolUse

if TYPE_CHECKING:
    from aioinfer.engine.frontend import Frontend

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_ARGUMENTS = {"type": "object", "properties": {}}
_ANY_OBJECT = {"type": "object"}

NO_TOOLS = ToolUse()
Choice = Literal["none", "auto", "required", "named"]


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    *,
    parallel: bool | None,
    is_flat: bool = False,
) -> ToolUse:
    """Returns the tools of a chat completion, or with `is_flat` those of a response, which have the
    fields of a function themselves.

    Raises `RequestError` naming the place, such as `tools[0].function.name`.
    """
    functions = []
    for index, tool in enumerate(tools or ()):
        place = f"tools[{index}]"
        if (kind := tool.get("type", "function")) != "function":
            raise FieldError(
                f"{place}.type", f"{str(kind)[:40]!r} is not supported, only 'function'"
            )
        function: Any = tool
        if not is_flat:
            place, function = f"{place}.function", tool.get("function")
        if not isinstance(function, Mapping):
            raise FieldError(place, "is missing")
        functions.append({**function, "place": f"{place}.parameters"})
    choice, name = read_choice(tool_choice, bool(functions))
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        functions = _allowed(functions, tool_choice)
    return make_use(functions, choice, name, parallel=parallel)


def make_use(
    functions: Sequence[Mapping[str, Any]],
    choice: Choice,
    name: str | None,
    *,
    parallel: bool | None,
) -> ToolUse:
    """Checks functions with the fields of OpenAI's, and `place`, where the body has its schema.

    Raises `RequestError` naming the place, or `tool_choice`.
    """
    if len(functions) > MAX_TOOLS:
        raise RequestError(
            f"tools may hold at most {MAX_TOOLS} functions, not {len(functions)}", param="tools"
        )
    names: set[str] = set()
    for function in functions:
        place, _, member = function["place"].rpartition(".")
        given = function.get("name")
        if not isinstance(given, str) or not _NAME.fullmatch(given):
            raise RequestError(
                f"{place}.name must have 1 to 128 letters, digits or characters of _.:/-",
                param=f"{place}.name",
            )
        if given in names:
            raise RequestError(f"{place}.name {given!r} is given twice", param=f"{place}.name")
        names.add(given)
        if not isinstance(function.get("parameters"), dict | None):
            raise RequestError(f"{place}.{member} must be an object", param=f"{place}.{member}")
        kind = (function.get("parameters") or {}).get("type") or "object"
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            text = f"must be the schema of an object: its type is {kind!r:.80}"
            raise RequestError(f"{place}.{member} {text}", param=f"{place}.{member}")
        if not isinstance(function.get("description"), str | None):
            raise RequestError(f"{place}.description must be a text", param=f"{place}.description")
    if choice in ("required", "named") and not functions:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    if choice == "named" and name not in names:
        raise RequestError(
            f"tool_choice names {name!r}, which is not in tools", param="tool_choice"
        )
    return ToolUse(tuple(functions), choice if functions else "none", name, parallel is not False)


def read_choice(choice: Any, has_tools: bool) -> tuple[Choice, str | None]:
    """Returns OpenAI's `tool_choice` as a `ToolUse` has it. Raises `RequestError`."""
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if choice in ("none", "auto", "required"):
        return choice, None
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        if choice.get("type") == "function" and isinstance(function, Mapping):
            name = function.get("name")
            if isinstance(name, str):
                return "named", name
        if choice.get("type") == "allowed_tools":
            mode = choice.get("allowed_tools", choice)
            mode = mode.get("mode", "auto") if isinstance(mode, Mapping) else None
            if mode in ("auto", "required"):
                return mode, None
    raise RequestError(
        "tool_choice must be 'none', 'auto', 'required', or name a function as in "
        '{"type": "function", "function": {"name": "f"}}',
        param="tool_choice",
    )


def _allowed(
    functions: Sequence[dict[str, Any]], choice: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the functions that a choice of type `allowed_tools` lists."""
    listed = choice.get("allowed_tools", choice)
    names = set()
    for item in (listed.get("tools") if isinstance(listed, Mapping) else None) or ():
        if isinstance(item, Mapping):
            function = item.get("function", item)
            names.add(function.get("name") if isinstance(function, Mapping) else None)
    return [function for function in functions if function.get("name") in names]


async def settle_schemas(frontend: Frontend, use: ToolUse) -> ToolUse:
    """Returns the tools with the schemas that their calls will follow.

    A schema that cannot be enforced is an error where a call is required or the function is strict;
    else its calls may have any arguments, as with `"strict": false`.

    Raises `RequestError` naming the place of the schema.
    """
    if not use.tools or use.choice == "none":
        return use
    settled = []
    for tool in use.tools:
        schema: Mapping[str, Any] = {"type": "object"} | (tool.get("parameters") or _NO_ARGUMENTS)
        if use.choice == "auto" and tool.get("strict") is False:
            schema = _ANY_OBJECT
        elif use.choice != "named" or tool["name"] == use.name:
            try:
                await _check(frontend, schema, tool["place"])
            except RequestError as error:
                if use.choice != "auto" or tool.get("strict"):
                    message = f"{tool['place']}: {error.message}"
                    raise RequestError(message, param=tool["place"]) from error
                schema = _ANY_OBJECT
        settled.append({**tool, "parameters": schema})
    return ToolUse(tuple(settled), use.choice, use.name, use.parallel)


async def _check(frontend: Frontend, schema: Mapping[str, Any], place: str) -> None:
    """Raises `RequestError` naming `place` for a schema that cannot be enforced."""
    try:
        source = json.dumps(schema)
    except RecursionError as error:
        raise RequestError(f"{place} is nested too deeply", param=place) from error
    await frontend.compile(SamplingParams(grammar=GrammarSpec("json_schema", source, param=place)))


def show_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a conversation in which a system message lists the tools, in the words of Hermes's
    template: for models whose own templates do not show them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = (
        "You may call one or more functions to assist with the user query.\n\nYou are provided "
        "with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{listed}\n</tools>\n\nFor each function call, return a json object with function name "
        "and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]

"""Formats of thoughts and tool calls: scripted texts, in one piece and cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioinfer.text.formats.family import FamilyFormat
from aioinfer.text.formats.registry import message_format
from aioinfer.text.message_parser import ToolUse

TOOLS = [
    {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}},
    {"name": "flags", "parameters": {"properties": {"on": {"type": "boolean"}}}},
    {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
        },
    },
]  # fmt: skip
AUTO = ToolUse(TOOLS, "auto")
FORMATS = (
    "hermes", "nemotron", "qwen_coder", "llama", "mistral", "deepseek", "kimi", "harmony", "lfm2",
    "gemma",
)  # fmt: skip
Message = tuple[str, str, list[tuple[str, str]]]


@pytest.fixture(autouse=True)
def no_parser_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A parser that fails logs it, and the rest of the text is content."""
    yield
    assert not caplog.records


def make(tools: Any, thoughts: Any = "none") -> FamilyFormat:
    return message_format("", {}, tools, thoughts)


def read(
    format: FamilyFormat, pieces: Sequence[str], use: ToolUse = AUTO, *, in_thought: bool = False
) -> Message:
    """Returns content, thought and calls of a text that comes in pieces."""
    parser = format.parser(use, in_thought=in_thought)
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    for delta in (*map(parser.feed, pieces), parser.flush()):
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append((call.name, ""))
            name, arguments = calls[call.index]
            calls[call.index] = name, arguments + call.arguments
    assert parser.num_calls == len(calls)
    return content, reasoning, calls


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
OBJECT = '{"name": "add", "arguments": {"a": 1}}'
OTHER, OBJECT_2 = HERMES.replace("1", "12"), OBJECT.replace("1", "12")
BEGIN, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END, ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
KIMI, KIMI_ENDS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI_END = "<|tool_call_end|>"
LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
GEM, GEM_END, D = "<|tool_call>", "<tool_call|>", '<|"|>'
ADD, ADD_2 = ("add", '{"a": 1}'), ("add", '{"a": 12}')
CASES: list[tuple[str, str, Message]] = [
    ("hermes", f"Let me see.\n\n{HERMES}\n", ("Let me see.", "", [ADD])),
    ("hermes", f"{HERMES}\n{OTHER}", ("", "", [ADD, ADD_2])),
    (
        "hermes",
        '<tool_call>{"arguments": {"city": "a\\"}{<"}, "name": "weather"}</tool_call>',
        ("", "", [("weather", '{"city": "a\\"}{<"}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", "", [ADD]),
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', ("", "", [("add", "{}")])),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', ("", "", [("add", '{"a": 1')])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": </tool_call> so',
        ("so", "", [("add", '{"a": ')]),
    ),
    ("hermes", "<tool_call> is a tag <b>", ("<tool_call> is a tag <b>", "", [])),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', ('<tool_call>{"x": 1}</tool_call>', "", [])),
    ("hermes", "a < b <tool ", ("a < b <tool ", "", [])),
    ("hermes", ' {"name": "add", "arguments": {"a": 1}}\n', ("", "", [ADD])),
    ("hermes", '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', "", [])),
    ("hermes", 'So: {"name": "add"}', ('So: {"name": "add"}', "", [])),
    ("hermes", f"```json\n{OBJECT}\n```", ("", "", [ADD])),
    ("hermes", f"```\n{OBJECT}```\n\n```json\n{OBJECT_2}\n```\n", ("", "", [ADD, ADD_2])),
    ("hermes", f"```json\n{OBJECT}\n```\nThat is all.", ("That is all.", "", [ADD])),
    ("hermes", f"```json\n{OBJECT}\n```\n{OTHER}", ("", "", [ADD, ADD_2])),
    ("hermes", f"```json\n{OBJECT}\n```\n```py\nf()\n```", ("```py\nf()\n```", "", [ADD])),
    ("hermes", "```json\n[1]\n```", ("```json\n[1]\n```", "", [])),
    ("hermes", "``` ", ("``` ", "", [])),
    ("hermes", '```json\n{"name": "Ann"}\n```', ('```json\n{"name": "Ann"}\n```', "", [])),
    ("hermes", f"Use\n```json\n{OBJECT}\n```", (f"Use\n```json\n{OBJECT}\n```", "", [])),
    (
        "qwen_coder",
        "Now:\n<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n<parameter=note>\n1\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        ("Now:", "", [("add", '{"a": 12, "note": "1\\n2"}')]),
    ),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', ("", "", [ADD])),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}; '
        '{"name": "weather", "parameters": {}}',
        ("", "", [ADD, ("weather", "{}")]),
    ),
    ("llama", '{"name": "Ann", "age": 3}', ('{"name": "Ann", "age": 3}', "", [])),
    ("llama", 'It is {"name": "add"}', ('It is {"name": "add"}', "", [])),
    (
        "mistral",
        'Yes.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, '
        '{"name": "weather", "arguments": {"city": "]"}, "id": "123456789"}]',
        ("Yes.", "", [ADD, ("weather", '{"city": "]"}')]),
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]weather[CALL_ID]x[ARGS]{"city": ""}',
        ("", "", [ADD, ("weather", '{"city": ""}')]),
    ),
    ("mistral", '[TOOL_CALLS]add{"a": 1}', ("", "", [ADD])),
    ("mistral", "[TOOL_CALLS] none", ("[TOOL_CALLS] none", "", [])),
    (
        "deepseek",
        f'Hm{BEGIN}{CALL}function{SEP}add\n```json\n{{"a": 1}}\n```{END}\n'
        f'{CALL}function{SEP}weather\n```json\n{{"city": "<"}}\n```{END}{ENDS}',
        ("Hm", "", [ADD, ("weather", '{"city": "<"}')]),
    ),
    (
        "deepseek",
        f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{END}{CALL}weather{SEP}{{}}{END}{ENDS}',
        ("", "", [ADD, ("weather", "{}")]),
    ),
    ("hermes", f"<tool_call>\n[{OBJECT}, {OBJECT_2}]\n</tool_call> So", ("So", "", [ADD, ADD_2])),
    ("nemotron", f"Hm.\n<TOOLCALL>[{OBJECT}, {OBJECT_2}]</TOOLCALL>\n", ("Hm.", "", [ADD, ADD_2])),
    ("nemotron", f"<TOOLCALL>{OBJECT}</TOOLCALL>", ("", "", [ADD])),
    ("nemotron", "<TOOLCALL>[]</TOOLCALL>", ("<TOOLCALL>[]</TOOLCALL>", "", [])),
    (
        "qwen_coder",
        "<tool_call>\n<function=flags>\n<parameter=on>\nTrue\n</parameter>\n<parameter=x>\nTrue\n"
        "</parameter>\n</function>\n</tool_call>",
        ("", "", [("flags", '{"on": true, "x": "True"}')]),
    ),
    (
        "kimi",
        f'See.{KIMI}{KIMI_CALL}functions.add:0{KIMI_ARGS}{{"a": 1}}{KIMI_END}'
        f'{KIMI_CALL}functions.weather:1 {KIMI_ARGS} {{"city": "<"}} {KIMI_END}{KIMI_ENDS}',
        ("See.", "", [ADD, ("weather", '{"city": "<"}')]),
    ),
    ("kimi", f'{KIMI_CALL}add{KIMI_ARGS}{{"a": 1}}', ("", "", [ADD])),
    ("kimi", f"{KIMI} none", (f"{KIMI} none", "", [])),
    ("lfm2", f"{LFM}[add(a=1)]{LFM_END}It is 1.", ("It is 1.", "", [ADD])),
    ("lfm2", f"{LFM} [add(a=1), add(a=12)]{LFM_END}", ("", "", [ADD, ADD_2])),
    ("lfm2", f"{LFM}[{OBJECT}, {OBJECT_2}]{LFM_END}", ("", "", [ADD, ADD_2])),
    ("lfm2", f"{LFM}[x.now()]{LFM_END}", ("", "", [("x.now", "{}")])),
    (
        "lfm2",
        f"{LFM}[f(a='it\\'s', b=None, c=[True, (1.5, 'x'), ], d={{'k': {{}}, \"l\": -07}}, e=x y)]"
        f"{LFM_END}",
        ("", "", [("f", '{"a": "it\'s", "b": null, "c": [true, [1.5, "x"]], '
                        '"d": {"k": {}, "l": -7}, "e": "x y"}')]),
    ),
    (
        "lfm2",
        f"{LFM}[sh(c='sed -n '1,2p' f', d=\"a\nb\\n\\u00e9\\x41\\/\\d\")]{LFM_END}",
        ("", "", [("sh", '{"c": "sed -n \'1,2p\' f", "d": "a\\nb\\n\\u00e9\\u0041/\\\\d"}')]),
    ),
    ("lfm2", f"{LFM}[print('x')]{LFM_END}", (f"{LFM}[print('x')]{LFM_END}", "", [])),
    ("lfm2", f"{LFM}[]{LFM_END}", (f"{LFM}[]{LFM_END}", "", [])),
    ("lfm2", f"{LFM}[add(a=1", ("", "", [("add", '{"a": 1')])),
    ("lfm2", f"{LFM}[add(note='no end", ("", "", [("add", '{"note": "no end')])),
    (
        "gemma",
        f"Now.{GEM}call:weather{{city:{D}a}}\"b\nc{D}}}{GEM_END}{GEM}call:add{{a:1}}{GEM_END}",
        ("Now.", "", [("weather", '{"city": "a}\\"b\\nc"}'), ADD]),
    ),
    (
        "gemma",
        f"{GEM}call:f{{a:[{D}x{D},-1.5,true],b:{{c:null,{D}d e{D}:{{}}}},g:any word}}{GEM_END}",
        ("", "", [("f", '{"a": ["x", -1.5, true], "b": {"c": null, "d e": {}}, "g": "any word"}')]),
    ),
    ("gemma", f"{GEM}call:now{{}}{GEM_END}", ("", "", [("now", "{}")])),
    ("gemma", f"{GEM}call:add{{a:1", ("", "", [("add", '{"a": 1')])),
    ("gemma", f"{GEM}call:add{{a}}{GEM_END}So", ("So", "", [("add", "{")])),
    ("gemma", f"{GEM}add{{a:1}}{GEM_END}", (f"{GEM}add{{a:1}}{GEM_END}", "", [])),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        ("Hi", "Hm.", []),
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        ("", "Hm.", [ADD]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_a_text_in_one_piece_and_by_characters(name: str, text: str, expected: Message) -> None:
    assert read(make(name), [text]) == expected
    assert read(make(name), list(text)) == expected


def test_function_gemma_has_markers_of_its_own() -> None:
    format = message_format("<start_function_call>", {"<start_function_response>": 7})
    call = "<start_function_call>call:weather{city:<escape>Rome<escape>}<end_function_call>"
    expected = ("", "", [("weather", '{"city": "Rome"}')])
    assert read(format, [call]) == read(format, list(call)) == expected
    assert format.end_ids == (7,)


def test_the_tokens_tell_the_format_where_the_template_shows_no_tools() -> None:
    assert message_format("{{ messages }}", {LFM: 10}).name == "lfm2"
    assert message_format("<tool_call>", {LFM: 10}).name == "hermes"


CHANNEL, THINK = ("gemma", "channel"), ("hermes", "think")


@pytest.mark.parametrize(
    ("formats", "text", "in_thought", "expected"),
    [
        (CHANNEL, "<|channel>thought\nHm.<channel|>Yes", False, ("Yes", "Hm.", [])),
        (CHANNEL, "Hm.\n<channel|>Yes", True, ("Yes", "Hm.", [])),
        (CHANNEL, "<|channel>thought\n<channel|>Yes", False, ("Yes", "", [])),
        (CHANNEL, f"<|channel>thought\nHm.<channel|>{GEM}call:add{{a:1}}{GEM_END}", False,
         ("", "Hm.", [ADD])),
        (THINK, "<think>\nHm.\n</think>\n\nYes \n", False, ("Yes \n", "Hm.", [])),
        (THINK, "Hm.\n</think>\n\nYes", True, ("Yes", "Hm.", [])),
        (THINK, "Hm. ", True, ("", "Hm.", [])),
        (THINK, "  Yes <think>", False, ("  Yes <think>", "", [])),
        (THINK, f"<think>{HERMES}</think>{HERMES}", False, ("", HERMES, [ADD])),
    ],
)  # fmt: skip
def test_thoughts(formats: tuple[str, str], text: str, in_thought: bool, expected: Message) -> None:
    format = make(*formats)
    assert read(format, [text], in_thought=in_thought) == expected
    assert read(format, list(text), in_thought=in_thought) == expected


FRAGMENTS = [
    *"ab<>{}[]()=\"'\\:, \n|", "<tool_call>", "</tool_call>", '{"name": "add"', '"arguments": ',
    '{"a": 1}', "<function=add>", "<parameter=a>", "</parameter>", "</function>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", "add", BEGIN, CALL, SEP, END, ENDS, "function", "```json", "<think>",
    "</think>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "final",
    "analysis", "to=functions.add", "<TOOLCALL>", "</TOOLCALL>", KIMI, KIMI_CALL, KIMI_ARGS,
    KIMI_END, KIMI_ENDS, LFM, "add(a=1)", "add(a='", "\\u00", "07", "True", GEM, GEM_END, D,
    "call:add{", "a:1", "<|channel>", "<channel|>", "thought\n",
    HERMES, "<|python_tag|>", "a" * 300, '"name"', "é",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(["none", "think", "channel"]),
    st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_the_message_does_not_depend_on_how_the_text_is_cut(
    name: str, thoughts: str, text: str, in_thought: bool, parallel: bool, data: st.DataObject
) -> None:
    format, use = make(name, thoughts), ToolUse(TOOLS, "auto", parallel=parallel)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    whole = read(format, [text], use, in_thought=in_thought)
    assert read(format, pieces, use, in_thought=in_thought) == whole
    assert read(format, list(text), use, in_thought=in_thought) == whole


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FORMATS), st.text())
def test_any_text_is_read(name: str, text: str) -> None:
    content, _, calls = read(make(name), [text])
    assert calls or content == text or name == "harmony"


def test_arguments_come_as_they_are_generated() -> None:
    parser = make("hermes").parser(AUTO, in_thought=False)
    deltas = [
        parser.feed(piece) for piece in ('<tool_call>\n{"name": "a', 'dd", "argu', 'ments": {"a"')
    ]
    assert [bool(delta.calls) for delta in deltas] == [False, True, True]
    assert deltas[1].calls[0].name == "add"
    assert parser.feed(": 1").calls[0].arguments == ": 1"


def test_calls_after_the_first_are_left_out_where_they_may_not_be() -> None:
    use = ToolUse(TOOLS, "auto", parallel=False)
    assert read(make("hermes"), [HERMES + HERMES + "!"], use) == ("!", "", [ADD])


#: Three calls, of which the last equals the first, and something behind them.
REPEATED = {
    "hermes": f"{HERMES}\n{OTHER}\n{HERMES}\n<tool_call>",
    "hermes with other spaces": f"{HERMES}\n{OTHER}\n{HERMES.replace(': 1', ':1')}\n<tool_call>",
    "hermes between fences": f"```\n{OBJECT}```\n```\n{OBJECT_2}```\n```\n{OBJECT}```\nSo",
    "qwen_coder": "".join(
        f"<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n</function>\n</tool_call>\n"
        for a in (1, 12, 1, 3)
    ),
    "llama": "; ".join(f'{{"name": "add", "parameters": {{"a": {a}}}}}' for a in (1, 12, 1, 3)),
    "mistral": f"[TOOL_CALLS][{OBJECT}, {OBJECT_2}, {OBJECT}, {OBJECT_2}] So",
    "mistral by name": '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 12}'
    '[TOOL_CALLS]add[ARGS]{"a": 1} So',
    "deepseek": BEGIN
    + "".join(f'{CALL}add{SEP}{{"a": {a}}}{END}' for a in (1, 12, 1, 3))
    + f"{ENDS} So",
    "nemotron": f"<TOOLCALL>[{OBJECT}, {OBJECT_2}, {OBJECT}, {OBJECT_2}]</TOOLCALL> So",
    "kimi": KIMI
    + "".join(
        f'{KIMI_CALL}functions.add:{n}{KIMI_ARGS}{{"a": {a}}}{KIMI_END}'
        for n, a in enumerate((1, 12, 1, 3))
    )
    + f"{KIMI_ENDS} So",
    "lfm2": f"{LFM}[add(a=1), add(a=12), add(a=1), add(a=3)]{LFM_END} So",
    "gemma": "".join(f"{GEM}call:add{{a:{a}}}{GEM_END}" for a in (1, 12, 1, 3)) + " So",
    "harmony": "".join(
        f'<|channel|>commentary to=functions.add<|message|>{{"a": {a}}}<|end|><|start|>assistant'
        for a in (1, 12, 1, 3)
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_repeated_call_ends_the_message_and_is_left_out(name: str) -> None:
    format, text = make(name.split()[0]), REPEATED[name]
    for pieces in ([text], list(text)):
        assert read(format, pieces) == ("", "", [ADD, ADD_2])
    parser = format.parser(AUTO, in_thought=False)
    for character in text[:-2]:
        parser.feed(character)
    assert parser.repeats_call  # as soon as its arguments are complete


def test_calls_that_differ_in_a_space_of_a_text_are_two() -> None:
    calls = [("weather", f'{{"city": "{city}"}}') for city in ("New York", "NewYork")]
    text = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        for name, arguments in calls
    )
    for pieces in ([text], list(text)):
        assert read(make("hermes"), pieces) == ("", "", calls)


def test_a_repeated_call_that_is_cut_off_is_a_call() -> None:
    """Whether it would have repeated the first is not known."""
    text = HERMES + HERMES.partition(" 1")[0]
    for pieces in ([text], list(text)):
        assert read(make("hermes"), pieces) == ("", "", [ADD, ("add", '{"a":')])


def test_text_is_content_without_tools() -> None:
    assert not make("hermes").parses(ToolUse())
    assert make("hermes").parses(AUTO)
    assert make("hermes", "think").parses(ToolUse())
    format = make("hermes", "think")
    assert read(format, [f"<think>x</think>{HERMES}"], ToolUse()) == (HERMES, "x", [])


@pytest.mark.parametrize(
    ("template", "tools", "thoughts"),
    [
        ("{{ '<tool_call>' }}", "hermes", None),
        (
            "<tool_call> <function= {{ message.reasoning_content }} </think>",
            "qwen_coder",
            "<think>",
        ),
        ("{{ tools }} <|python_tag|>", "llama", None),
        ("[TOOL_CALLS] [THINK] [/THINK]", "mistral", "[THINK]"),
        (f"{BEGIN} <think> </think>", "deepseek", "<think>"),
        ("<|channel|>analysis </think>", "harmony", None),
        ("<TOOLCALL>[ <think> </think>", "nemotron", "<think>"),
        (f"{KIMI} <think></think>", "kimi", "<think>"),
        (f"{LFM}[ </think>", "lfm2", "<think>"),
        ("List of tools: <|tool_list_start|>[", "lfm2", None),
        (f"{GEM}call: <|channel>thought\n<channel|>", "gemma", "<|channel>thought"),
        ("<start_function_call>call:", "gemma", None),
        ("", "hermes", None),
    ],
)
def test_the_format_is_read_off_the_template(
    template: str, tools: str, thoughts: str | None
) -> None:
    format = message_format(template, {})
    assert format.name == tools
    assert format.opens_thought(f"...{thoughts}\n") == (thoughts is not None)
    assert not format.opens_thought("...")


def test_a_named_format_goes_before_the_template() -> None:
    format = message_format(
        "<tool_call> </think>", {"[TOOL_CALLS]": 5, "<s>": 1}, "mistral", "none"
    )
    assert (format.name, format.markers) == ("mistral", {"[TOOL_CALLS]"})
    assert not format.opens_thought("<think>")
    assert not message_format("<tool_call>", {}, "none").parses(AUTO)


@pytest.mark.slow
def test_a_parser_takes_time_that_grows_with_the_text() -> None:
    """A parser that looked at text twice would take minutes."""
    opened = '<tool_call>{"name": "add", "arguments": {"a": "'
    for text in ('<tool_call>{"', opened, " ", "[TOOL_CALLS]"):
        for name in FORMATS:
            read(make(name), [text * (100_000 // len(text))])
            read(make(name), list(text * (10_000 // len(text))))


def test_arguments_are_json_where_the_model_writes_tags() -> None:
    value = '<parameter=city>\n"quoted"\n</parameter>'
    text = f"<tool_call><function=weather>{value}</function></tool_call>"
    ((_, arguments),) = read(make("qwen_coder"), [text])[2]
    assert json.loads(arguments) == {"city": '"quoted"'}


@pytest.mark.parametrize(
    ("tools", "pieces", "in_thought", "number"),
    [
        ("hermes", ["<think>", "\n", "so", "</think>", "\n\n", "yes", "</think>"], False, 4),
        ("hermes", ["so", " it", " is", "</think>", "yes"], True, 4),
        ("hermes", ["so", " it", " is"], True, 3),
        ("hermes", [" ", "<think>", "so", " it"], False, 4),
        ("hermes", ["yes", "<think>", "no", "</think>"], False, 0),
        ("hermes", ["yes"], False, 0),
        ("hermes", [], False, 0),
        (
            "harmony",
            ["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>",
             "assistant", "<|channel|>", "final", "<|message|>", "analysis", "!", "<|return|>"],
            False,
            3,
        ),
        ("harmony", ["<|channel|>", "analysis", "<|message|>", "a"], False, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("spelled", [False, True])
def test_tokens_of_thoughts_are_counted(
    tools: Any, pieces: list[str], in_thought: bool, number: int, spelled: bool
) -> None:
    """With markers that are tokens, and with such that are spelled, a character a token."""
    special = {piece: 1000 + at for at, piece in enumerate(pieces) if piece.startswith("<")}
    if spelled and tools != "harmony":  # whose markers are always tokens
        text = pieces[:number]
        pieces, number = [*"".join(pieces)], len("".join(text))
        special = {}
    tokens = [special.get(piece, at) for at, piece in enumerate(pieces)]
    texts = dict(zip(tokens, pieces, strict=True))
    format = message_format("", special, tools, "none" if tools == "harmony" else "think")
    assert format.has_thoughts
    found = format.num_thought_tokens(
        tokens, lambda some: "".join(texts[token] for token in some), in_thought=in_thought
    )
    assert found == number


def test_harmony_is_chosen_by_its_channels_and_its_turns_end() -> None:
    """The words are those of the template that gpt-oss's checkpoints bring."""
    special = {"<|return|>": 200002, "<|call|>": 200012, "<|end|>": 200007, "<|channel|>": 200005}
    template = '{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking }}'
    format = message_format(template, special)
    assert format.name == "harmony"
    assert format.end_ids == (200002, 200012)
    assert message_format(template, {}).end_ids == ()
    assert message_format("", special).end_ids == ()


def test_a_model_without_thoughts() -> None:
    format = make("hermes")
    assert not format.has_thoughts
    assert format.num_thought_tokens([1, 2], str, in_thought=False) == 0


def test_the_end_of_a_long_spelled_thought_is_found() -> None:
    format = make("hermes", "think")
    for length in (0, 1, 50, 56, 57, 58, 64, 120, 121, 200):
        text = "x" * length + "</think>" + "y" * 70
        found = format.num_thought_tokens(
            [*map(ord, text)], lambda some: "".join(map(chr, some)), in_thought=True
        )
        assert found == length + len("</think>")

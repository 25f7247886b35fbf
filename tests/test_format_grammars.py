"""The grammars that formats of messages make: which outputs they let through."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from aioinfer.errors import GenerationError, RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.formats.family import FamilyFormat
from aioinfer.text.formats.registry import message_format
from aioinfer.text.grammar import GrammarCompiler
from aioinfer.text.message_parser import ToolUse
from aioinfer.text.tokenizer import Tokenizer
from tests import real_tokenizers

END = 2
INTEGER: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["q"],
    "additionalProperties": False,
}
TOOLS = [{"name": "f", "parameters": INTEGER}, {"name": "g", "parameters": TEXT}]
BEGIN, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
KIMI, KIMI_ENDS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL, KIMI_ARGS = "<|tool_call_begin|>functions", "<|tool_call_argument_begin|>"
KIMI_END = "<|tool_call_end|>"
LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
GEM, GEM_END, D = "<|tool_call>", "<tool_call|>", '<|"|>'
COMMENTARY = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
ANALYSIS = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
#: Texts of one call and, where the format can, of two; and the template that shows their form.
CALLS: dict[str, tuple[str, list[str]]] = {
    "hermes": ("", [HERMES, f"{HERMES}\n{HERMES}"]),
    "hermes with tokens": ("", [HERMES, f"{HERMES}\n{HERMES}"]),
    "qwen_coder": (
        "",
        [
            "<tool_call>\n<function=g>\n<parameter=q>\n1\n</parameter>\n<parameter=n>\n1\n"
            "</parameter>\n</function>\n</tool_call>"
        ],
    ),
    "llama": (
        "",
        [
            '{"name": "f", "parameters": {"a": 1}}',
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"q": ";"}}',
        ],
    ),
    "mistral": (
        "",
        [
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
            '{"name": "g", "arguments": {"q": "]"}}]',
        ],
    ),
    "mistral by name": (
        "[ARGS]",
        ['[TOOL_CALLS]f[ARGS]{"a": 1}', '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"q": ""}'],
    ),
    "deepseek": (
        "",
        [
            f'{BEGIN}{CALL}f{SEP}{{"a": 1}}{CALL_END}{ENDS}',
            f'{BEGIN}{CALL}f{SEP}{{"a": 1}}{CALL_END}{CALL}g{SEP}{{"q": "<"}}{CALL_END}{ENDS}',
        ],
    ),
    "deepseek with fences": (
        "```json",
        [f'{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": 1}}\n```{CALL_END}{ENDS}'],
    ),
    "hermes list": (
        "<tool_call>\n[",
        [
            '<tool_call>\n[{"name": "f", "arguments": {"a": 1}}]\n</tool_call>',
            '<tool_call>[{"name": "f", "arguments": {"a": 1}}, '
            '{"name": "g", "arguments": {"q": ""}}]</tool_call>',
        ],
    ),
    "nemotron": (
        "",
        [
            '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>',
            '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, '
            '{"name": "g", "arguments": {"q": ""}}]</TOOLCALL>',
        ],
    ),
    "kimi": (
        "",
        [
            f'{KIMI}{KIMI_CALL}.f:0{KIMI_ARGS}{{"a": 1}}{KIMI_END}{KIMI_ENDS}',
            f'{KIMI}{KIMI_CALL}.f:7{KIMI_ARGS}{{"a": 1}}{KIMI_END}'
            f'{KIMI_CALL}.g:8{KIMI_ARGS}{{"q": "<"}}{KIMI_END}{KIMI_ENDS}',
        ],
    ),
    "lfm2": (
        "",
        [f"{LFM}[f(a=1)]{LFM_END}", f'{LFM}[f(a=1), g(q="x")]{LFM_END}',
         f'{LFM}[f(a=1), g(q="(", n=1)]{LFM_END}'],
    ),
    "gemma": (
        "",
        [
            f"{GEM}call:f{{a:1}}{GEM_END}",
            f"{GEM}call:f{{a:1}}{GEM_END}{GEM}call:g{{q:{D}}}{D}}}{GEM_END}",
            f"{GEM}call:f{{a:1}}{GEM_END}{GEM}call:g{{n:1,q:{D}{D}}}{GEM_END}",
        ],
    ),
    "harmony": ("", [COMMENTARY, ANALYSIS + COMMENTARY]),
}  # fmt: skip
#: Formats whose markers are special tokens.
SPECIAL = ("mistral", "deepseek", "kimi", "harmony", "lfm2", "gemma")
ANSWER = GrammarSpec("json_schema", json.dumps(INTEGER))


class Outputs:
    """Tries outputs against grammars. Special tokens of SmolLM2's stand for those of a format."""

    def __init__(self, folder: Path):
        self._tokenizer = Tokenizer.load(folder)
        self._compiler = GrammarCompiler(self._tokenizer, 49_152, [END])
        self._spare = sorted(self._tokenizer.special_ids - {0, 1, END})
        self._markers: dict[str, int] = {}

    def format(self, name: str, template: str = "", thoughts: Any = "none") -> FamilyFormat:
        family: Any = name.split()[0]
        self._markers = {}
        if family in SPECIAL or "tokens" in name:
            plain = message_format(template, {}, family, thoughts)
            texts = plain.all_markers()
            self._markers = dict(zip(texts, self._spare, strict=False))
        return message_format(template, self._markers, family, thoughts)

    def follows(self, spec: GrammarSpec | None, text: str) -> bool:
        """Whether `text` may be a whole output."""
        assert spec is not None
        state = self._compiler.compile(spec).start()
        markers = "|".join(map(re.escape, self._markers)) or "$^"
        for part in re.split(f"({markers})", text):
            if part in self._markers:
                tokens = [self._markers[part]]
            else:
                tokens = self._tokenizer.encode(part, False)
            try:
                state.accept(tokens)
            except GenerationError:
                return False
        return state.matcher.is_accepting()


@pytest.fixture(scope="module")
def outputs(tokenizer_cache: Path) -> Outputs:
    return Outputs(real_tokenizers.smollm2_folder(tokenizer_cache))


def wrong(call: str) -> str:
    """Returns a call with an argument of the wrong type."""
    call = call.replace('"a": 1', '"a": "s"').replace("=n>\n1\n", "=n>\nno\n")
    return call.replace("(a=1)", '(a="s")').replace("{a:1}", "{a:true}")


@pytest.mark.parametrize("name", CALLS)
def test_calls_follow_their_schemas(outputs: Outputs, name: str) -> None:
    template, calls = CALLS[name]
    format = outputs.format(name, template)
    answer = "<|channel|>final<|message|>Hello" if name == "harmony" else "Hello { <b"
    auto = format.grammar(ToolUse(TOOLS, "auto"), in_thought=False, answer=None)
    required = format.grammar(ToolUse(TOOLS, "required"), in_thought=False, answer=None)
    named = format.grammar(ToolUse(TOOLS, "named", "g"), in_thought=False, answer=None)
    assert outputs.follows(auto, answer)
    assert not outputs.follows(required, answer)
    for call in calls:
        assert outputs.follows(auto, call)
        assert outputs.follows(required, call)
        assert outputs.follows(named, call) == (name == "qwen_coder")
        assert not outputs.follows(auto, wrong(call))
        assert not outputs.follows(required, wrong(call))
    if name not in ("llama", "harmony"):  # there a call is the whole message
        assert outputs.follows(auto, f"Well.\n{calls[0]}")
        assert not outputs.follows(auto, f"Well.\n{wrong(calls[0])}")


@pytest.mark.parametrize(
    "name", ["hermes", "hermes with tokens", "qwen_coder", "deepseek with fences"]
)
def test_a_line_break_behind_a_call_asks_for_no_other(outputs: Outputs, name: str) -> None:
    """Small models write one before they end."""
    template, (call, *_) = CALLS[name]
    format = outputs.format(name, template)
    ended = call.replace(ENDS, f"\n{ENDS}") if ENDS in call else f"{call}\n"
    for choice in ("auto", "required"):
        use = ToolUse(TOOLS, choice)  # type: ignore[arg-type]
        spec = format.grammar(use, in_thought=False, answer=None)
        assert outputs.follows(spec, ended)
        assert not outputs.follows(spec, f"{ended}So")


@pytest.mark.parametrize("name", [name for name in CALLS if len(CALLS[name][1]) > 1])
def test_one_call_where_no_more_are_wanted(outputs: Outputs, name: str) -> None:
    if name == "harmony":
        return  # its second text is a thought and a call
    template, (one, two, *_) = CALLS[name]
    use = ToolUse(TOOLS, "required", parallel=False)
    spec = outputs.format(name, template).grammar(use, in_thought=False, answer=None)
    assert outputs.follows(spec, one)
    assert not outputs.follows(spec, two)


@pytest.mark.parametrize(
    "name",
    ["hermes", "hermes with tokens", "llama", "qwen_coder", "mistral", "deepseek", "kimi", "lfm2",
     "gemma"],
)  # fmt: skip
def test_thoughts_are_free(outputs: Outputs, name: str) -> None:
    template, (call, *_) = CALLS[name]
    format = outputs.format(name, template, "think")
    for choice in ("auto", "required"):
        use = ToolUse(TOOLS, choice)  # type: ignore[arg-type]
        fresh = format.grammar(use, in_thought=False, answer=None)
        opened = format.grammar(use, in_thought=True, answer=None)
        # text cannot spell a special token
        thought = "Hm, {" if "tokens" in name or name in SPECIAL else "Hm, <tool_call> {"
        assert outputs.follows(fresh, f"<think>{thought}</think>\n\n{call}")
        assert outputs.follows(opened, f"{thought}</think>\n\n{call}")
        assert outputs.follows(fresh, call)
        assert not outputs.follows(fresh, f"<think>{thought}")
        assert not outputs.follows(fresh, f"<think>{thought}</think>\n\n{wrong(call)}")
        assert not outputs.follows(opened, f"{thought}</think>\n\n{wrong(call)}")
        assert outputs.follows(opened, "Hm</think>\nYes") == (choice == "auto")


def test_a_call_without_markers_at_the_beginning(outputs: Outputs) -> None:
    use = ToolUse(TOOLS, "auto")
    spec = outputs.format("hermes").grammar(use, in_thought=False, answer=None)
    assert outputs.follows(spec, '{"name": "f", "arguments": {"a": 1}}')
    assert not outputs.follows(spec, '{"name": "f", "arguments": {"a": "s"}}')
    assert not outputs.follows(spec, '{"name": "h", "arguments": {}}')
    assert outputs.follows(spec, '{"age": 3}')
    assert outputs.follows(spec, 'So: {"name": "h"}')


FENCED = '```json\n{\n  "name": "f",\n  "arguments": {\n    "a": 1\n  }\n}\n```'


def test_a_call_between_fences_at_the_beginning(outputs: Outputs) -> None:
    format = outputs.format("hermes")
    for parallel in (False, True):
        use = ToolUse(TOOLS, "auto", parallel=parallel)
        spec = format.grammar(use, in_thought=False, answer=None)
        for text in (FENCED, '\n```\n{"name":"f","arguments":{"a":1}}```'):
            assert outputs.follows(spec, text)
            assert not outputs.follows(spec, wrong(text).replace('"a":1', '"a":"s"'))
            assert outputs.follows(spec, f"{text}\n{text}") == parallel
            assert outputs.follows(spec, f"{text}\n\n") == parallel
            assert outputs.follows(spec, f"So:\n{wrong(text)}")
        assert outputs.follows(spec, FENCED.replace('"f"', '"h"'))
        assert outputs.follows(spec, "```python\nprint()\n```")


def test_an_answer_follows_its_grammar_behind_the_thought(outputs: Outputs) -> None:
    format = outputs.format("hermes", thoughts="think")
    right, not_it = '{"a": 2}', '{"b": 2}'
    for use, call in ((ToolUse(), False), (ToolUse(TOOLS, "auto"), True)):
        spec = format.grammar(use, in_thought=False, answer=ANSWER)
        assert outputs.follows(spec, right)
        assert outputs.follows(spec, f"<think>x</think>\n{right}")
        assert not outputs.follows(spec, not_it)
        assert not outputs.follows(spec, "Yes")
        assert outputs.follows(spec, HERMES) == call
    for kind, source, text in (
        ("json_object", "", '{"z": 1}'),
        ("choice", '["yes", "no"]', "yes"),
        ("lark", 'start: "a" x\nx: /[0-9]+/', "a12"),
    ):
        answer = GrammarSpec(kind, source)  # type: ignore[arg-type]
        spec = format.grammar(ToolUse(), in_thought=True, answer=answer)
        assert outputs.follows(spec, f"x</think>{text}")
        assert not outputs.follows(spec, "x</think>maybe")


def test_a_thought_with_a_budget(outputs: Outputs) -> None:
    format = outputs.format("hermes tokens", thoughts="think")
    for use, answer, end in (
        (ToolUse(), None, "any text {"),
        (ToolUse(), ANSWER, '{"a": 2}'),
        (ToolUse(TOOLS, "required"), None, HERMES),
    ):
        for in_thought, start in ((True, ""), (False, "<think>")):
            spec = format.grammar(use, in_thought=in_thought, answer=answer, thought_budget=2)
            for thought in ("", " a", " a a"):
                assert outputs.follows(spec, f"{start}{thought}</think>{end}")
            assert not outputs.follows(spec, f"{start} a a a</think>{end}")
        assert outputs.follows(spec, end)
    plain = outputs.format("hermes", thoughts="think")
    with pytest.raises(RequestError, match="a token for </think>"):
        plain.grammar(ToolUse(), in_thought=True, answer=None, thought_budget=2)


def test_what_needs_no_grammar_or_cannot_have_one(outputs: Outputs) -> None:
    format = outputs.format("hermes")
    assert format.grammar(ToolUse(TOOLS, "none"), in_thought=False, answer=None) is None
    assert format.grammar(ToolUse(), in_thought=False, answer=ANSWER) is ANSWER
    none = message_format("", {}, "none")
    assert none.grammar(ToolUse(TOOLS, "auto"), in_thought=False, answer=None) is None
    with pytest.raises(RequestError, match=r"chat\.tool_format"):
        none.grammar(ToolUse(TOOLS, "required"), in_thought=False, answer=None)
    answer = GrammarSpec("regex", "a+", param="structured_outputs.regex")
    with pytest.raises(RequestError, match="regex"):
        format.grammar(ToolUse(TOOLS, "auto"), in_thought=False, answer=answer)


def call_of(schema: dict[str, Any], format: FamilyFormat) -> GrammarSpec | None:
    """Returns the grammar of one required call of `f`, whose one argument `v` has a schema."""
    parameters = {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": NODE}
    use = ToolUse([{"name": "f", "parameters": parameters}], "named", "f")
    return format.grammar(use, in_thought=False, answer=None)


NODE = {
    "node": {
        "type": "object",
        "properties": {
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            "n": {"type": "integer"},
        },
        "required": ["n"],
    }
}
#: A schema, values of it in Gemma's notation, and others that are none.
GEMMA_VALUES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string", "maxLength": 3, "minLength": 1}, [f"{D}abc{D}"],
     [f"{D}{D}", f"{D}abcd{D}"]),
    ({"type": "string"}, [f"{D}a\n}}{D}", f"{D}{D}"], ["a", "1"]),
    ({"enum": ["a", 1, None, [1]]}, [f"{D}a{D}", "1", "null", "[1]"], [f"{D}b{D}", "2"]),
    ({"type": "integer", "maximum": 9}, ["9", "-1"], ["10", "1.5", f"{D}1{D}"]),
    ({"type": ["boolean", "null"]}, ["true", "null"], ["1"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
     ["[1]", "[1,2]"], ["[]", "[1,2,3]", f"[{D}1{D}]"]),
    ({"type": "array"}, ["[]", f"[1,{D}a{D},[true],{{b:1}}]"], ["1"]),
    ({"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "null"}}},
     ["{}", "{a:null,b:1}", "{b:1}", "{a:null}"], ["{b:1,a:null}", "{c:1}", "{a:null,}", "{,b:1}"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{x:1,y:2}"], ["{x:true}"]),
    ({"$ref": "#/$defs/node"}, ["{n:1}", "{n:1,next:{n:2,next:null}}"], ["{n:1,next:{}}", "{}"]),
    ({"not": {}}, ["1", f"{D}a{D}", "{a:[]}"], ["a b"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "right", "others"), GEMMA_VALUES)
def test_values_of_gemma_follow_the_schema(
    outputs: Outputs, schema: dict[str, Any], right: list[str], others: list[str]
) -> None:
    format = outputs.format("gemma")
    spec = call_of(schema, format)
    for value in (*right, *others):
        text = f"{GEM}call:f{{v:{value}}}{GEM_END}"
        assert outputs.follows(spec, text) == (value in right), value
        parser = format.parser(ToolUse(TOOLS, "auto"), in_thought=False)
        calls = [*parser.feed(text).calls, *parser.flush().calls]
        if value in right:
            assert list(json.loads("".join(call.arguments for call in calls))) == ["v"]


@pytest.mark.parametrize(
    ("name", "none", "some"),
    [
        (
            "qwen_coder",
            "<tool_call>\n<function=f>\n</function>\n</tool_call>",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n{}\n"
            "</parameter>\n</function>\n</tool_call>",
        ),
        ("lfm2", f"{LFM}[f()]{LFM_END}", f'{LFM}[f(a=1, b="x", c={{"d": []}})]{LFM_END}'),
        ("gemma", f"{GEM}call:f{{}}{GEM_END}", f"{GEM}call:f{{a:1,b:{{c:[]}}}}{GEM_END}"),
    ],
)
def test_a_schema_without_properties_takes_any_arguments(
    outputs: Outputs, name: str, none: str, some: str
) -> None:
    """As of a tool that is not strict, whose schema cannot be enforced."""
    format = outputs.format(name)
    for schema, takes in (({"type": "object"}, True), ({"properties": {}}, False)):
        use = ToolUse([{"name": "f", "parameters": schema}], "auto")
        spec = format.grammar(use, in_thought=False, answer=None)
        assert outputs.follows(spec, none)
        assert outputs.follows(spec, some) == takes


@pytest.mark.parametrize(
    ("schema", "right", "others"),
    [
        ({"type": "boolean"}, ["True", "False"], ["true", "1"]),
        ({"type": ["integer", "null"]}, ["1", "None"], ["null", '"1"']),
        ({"type": "string"}, ['"a"'], ["a", "None"]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[true]"], ["True"]),
    ],
)
def test_values_of_lfm2_follow_the_schema(
    outputs: Outputs, schema: dict[str, Any], right: list[str], others: list[str]
) -> None:
    spec = call_of(schema, outputs.format("lfm2"))
    for value in (*right, *others):
        assert outputs.follows(spec, f"{LFM}[f(v={value})]{LFM_END}") == (value in right), value


def test_a_thought_in_a_channel_is_free(outputs: Outputs) -> None:
    format = outputs.format("gemma", thoughts="channel")
    call = CALLS["gemma"][1][0]
    spec = format.grammar(ToolUse(TOOLS, "required"), in_thought=False, answer=None)
    assert outputs.follows(spec, f"<|channel>thought\nHm, {{<channel|>{call}")
    assert outputs.follows(spec, call)
    assert not outputs.follows(spec, f"<|channel>thought\nHm<channel|>{wrong(call)}")

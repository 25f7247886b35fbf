from __future__ import annotations

import json
from typing import Any

import pytest

from aioinfer.api.decoding import decode
from aioinfer.api.openai.completions import CompletionRequest
from aioinfer.errors import RequestError
from aioinfer.sampling_params import MAX_GRAMMAR_CHARS, GrammarSpec

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 1.50}}}
COMPACT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":1.5}}}'
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


def fields(**body: Any) -> dict[str, Any]:
    raw = json.dumps({"prompt": "x"} | body).encode()
    return decode(raw, CompletionRequest).sampling_fields()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None, "json_schema": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            GrammarSpec("json_schema", COMPACT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "description": "y", "schema": SCHEMA, "strict": True}}},
            GrammarSpec("json_schema", COMPACT),
        ),
        (
            {"response_format": {"type": "structural_tag"} | TAG},
            GrammarSpec(
                "structural_tag",
                '{"structures":[{"begin":"<f>","schema":' + COMPACT + ',"end":"</f>"}],'
                '"triggers":["<f>"]}',
            ),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json_schema", COMPACT)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarSpec("json_schema", COMPACT)),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": True, "backend": None}},
         GrammarSpec("regex", "a+")),
        ({"response_format": {"type": "json_object", "json_schema": None}, "n": 1.0},
         GrammarSpec("json_object", param="response_format")),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, GrammarSpec("choice", '["a","ü"]')),
        ({"structured_outputs": {"grammar": "start: A"}}, GrammarSpec("lark", "start: A")),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            GrammarSpec("json_schema", COMPACT, " ?"),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            GrammarSpec("json_object", "", ""),
        ),
        ({"structured_outputs": {"structural_tag": json.dumps({"a": 1})}},
         GrammarSpec("structural_tag", '{"a":1}')),
        ({"json_schema": SCHEMA, "guided_decoding_backend": "xgrammar"},
         GrammarSpec("json_schema", COMPACT)),
        ({"grammar": 'root ::= "a"'}, GrammarSpec("lark", 'root ::= "a"')),
        ({"json_schema": SCHEMA}, GrammarSpec("json_schema", COMPACT)),
    ],
)  # fmt: skip
def test_fields(body: dict[str, Any], expected: GrammarSpec | None) -> None:
    assert fields(**body).get("grammar") == expected


def test_the_text_of_a_schema_is_kept() -> None:
    """Python's JSON would lose digits and add infinity."""
    raw = b'{"prompt": "x", "json_schema": {"maximum": 1e500, "minimum": 0.10000000000000000001}}'
    grammar = decode(raw, CompletionRequest).sampling_fields()["grammar"]
    assert grammar.source == '{"maximum":1e500,"minimum":0.10000000000000000001}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {}}},
            "response_format.format",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": []}},
            "response_format.triggers",
        ),
        ({"json_schema": '{"a":'}, "json_schema"),
        ({"json_schema": ""}, "json_schema"),
        ({"structured_outputs": {"json": {"enum": list(range(10_000))}}},
         "structured_outputs.json"),
        ({"json_schema": {"const": "x" * MAX_GRAMMAR_CHARS}}, "json_schema"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}},
         "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": True, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
         "response_format.json_schema"),
        ({"response_format": {"schema": {}}}, "response_format.type"),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
         "structured_outputs.disable_additional_properties"),
        ({"response_format": {"type": "json_object"}, "grammar": "start: A"}, "grammar"),
        ({"grammar": "start: A", "json_schema": {}}, "json_schema"),
    ],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        fields(**body)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300

"""Fields of bodies that ask for structured output, made into a `GrammarSpec`: OpenAI's
`response_format`, and vLLM's `structured_outputs`. `SamplingBody.grammars` has the others.

JSON schemas are kept as the text that came: the order of properties and the digits of numbers
count. `text.grammar` says what they may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from aioinfer.errors import FieldError, RequestError
from aioinfer.sampling_params import MAX_GRAMMAR_CHARS, GrammarKind, GrammarSpec
from aioinfer.text.json_schema import MAX_SCHEMA_VALUES
from aioinfer.text.json_values import count_values

#: The default of a field of JSON, empty where it was not given. `Raw | None` is no type for
#: msgspec: null comes as `null`. (A factory, since the API's description cannot show a value.)
NOT_GIVEN: Any = msgspec.field(default_factory=Raw)


def is_given(raw: Raw) -> bool:
    """Whether a field of JSON was given, and not as null."""
    return bytes(raw) not in (b"", b"null")


class SchemaFormat(Struct, kw_only=True):
    """`json_schema` of a `response_format`. The name, the description and `strict` say nothing
    about the output: a schema is always enforced."""

    schema: Raw
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class AnyText(Struct, tag="text"):
    """A `response_format` of any text."""

    def to_grammar(self) -> GrammarSpec | None:
        """Returns the grammar, or None for any text. Raises `RequestError` naming the field."""
        return None


class JsonObject(Struct, tag="json_object"):
    """A `response_format` of any JSON object, or of a schema, as llama.cpp has it."""

    schema: Raw = NOT_GIVEN

    def to_grammar(self) -> GrammarSpec:
        """See `AnyText.to_grammar`."""
        if is_given(self.schema):
            return json_grammar("json_schema", self.schema, "response_format.schema")
        return GrammarSpec("json_object", param="response_format")


class JsonSchema(Struct, tag="json_schema"):
    """A `response_format` of a schema."""

    json_schema: SchemaFormat

    def to_grammar(self) -> GrammarSpec:
        """See `AnyText.to_grammar`."""
        place = "response_format.json_schema.schema"
        return json_grammar("json_schema", self.json_schema.schema, place)


class StructuralTag(Struct, tag="structural_tag"):
    """A `response_format` of texts with schemas in them, as vLLM has it; its newer form, with
    `format`, is not supported."""

    structures: Raw
    triggers: Raw

    def to_grammar(self) -> GrammarSpec:
        """See `AnyText.to_grammar`."""
        tag = b'{"structures":%b,"triggers":%b}' % (self.structures, self.triggers)
        return json_grammar("structural_tag", Raw(tag), "response_format")


ResponseFormat = AnyText | JsonObject | JsonSchema | StructuralTag


class StructuredOutputs(Struct, kw_only=True):
    """vLLM's `structured_outputs`."""

    json: Raw = NOT_GIVEN
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Raw = NOT_GIVEN
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # there is no other library to fall back to

    def to_grammars(self, prefix: str) -> list[GrammarSpec]:
        """Returns the grammars that were given. `prefix` goes before the names of fields in
        errors."""
        if self.disable_additional_properties:
            raise RequestError(
                "disable_additional_properties is not supported: give "
                "'additionalProperties': false in the schema",
                param=f"{prefix}disable_additional_properties",
            )
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        found = []
        if self.json_object:
            found.append(GrammarSpec("json_object", "", whitespace, f"{prefix}json_object"))
        raws: tuple[tuple[GrammarKind, Raw, str], ...] = (
            ("json_schema", self.json, "json"),
            ("structural_tag", self.structural_tag, "structural_tag"),
        )
        for kind, raw, name in raws:
            if is_given(raw):
                found.append(json_grammar(kind, raw, prefix + name, whitespace))
        if self.regex is not None:
            found.append(GrammarSpec("regex", self.regex, None, f"{prefix}regex"))
        if self.choice is not None:
            found.append(_choice_grammar(self.choice, f"{prefix}choice"))
        if self.grammar is not None:
            found.append(GrammarSpec("lark", self.grammar, None, f"{prefix}grammar"))
        return found


def only_grammar(found: Sequence[GrammarSpec]) -> GrammarSpec | None:
    """Returns the only one of these grammars, None if there is none. Raises `RequestError` naming
    the fields if there are several."""
    if len(found) > 1:
        raise RequestError(
            f"{found[0].param} and {found[1].param} cannot be combined: an output follows one "
            f"grammar",
            param=found[1].param,
        )
    return found[0] if found else None


def schema_grammar(schema: dict[str, Any], param: str) -> GrammarSpec:
    """Returns the grammar of a JSON schema that was decoded; `param` is its place in the body."""
    return GrammarSpec("json_schema", msgspec.json.encode(schema).decode(), param=param)


def json_grammar(
    kind: GrammarKind, raw: Raw, param: str, whitespace: str | None = None
) -> GrammarSpec:
    """Returns the grammar of a field that holds JSON: an object, or a text that is one."""
    data = bytes(raw)
    if len(data) > 2 * MAX_GRAMMAR_CHARS:  # white space included; on the event loop
        raise FieldError(param, f"may have at most {2 * MAX_GRAMMAR_CHARS} bytes, not {len(data)}")
    if data[:1] == b'"':  # vLLM takes both
        data = msgspec.json.decode(data, type=str).encode("utf-8", "replace")
    # each value takes two bytes at least
    if len(data) > 2 * MAX_SCHEMA_VALUES and count_values(data) > MAX_SCHEMA_VALUES:
        raise FieldError(param, f"may hold at most {MAX_SCHEMA_VALUES} values")
    try:
        source = msgspec.json.format(data, indent=-1).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FieldError(param, f"is not valid JSON: {error}") from error
    return GrammarSpec(kind, source, whitespace, param)


def _choice_grammar(choices: list[str], param: str) -> GrammarSpec:
    return GrammarSpec("choice", msgspec.json.encode(choices).decode(), None, param)

"""The texts of grammars as llguidance takes them, made of `GrammarSpec`s, and the limits of their
sources. These hold what llguidance's own limits do not: its time grows with the square of the
length of a regular expression and of the number of properties, and its stack with the depth of
rules that refer to each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from aioinfer.errors import RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.json_schema import MAX_PATTERN_CHARS, check_schema
from aioinfer.text.schema_rewriting import close_objects, rewrite

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

#: Between the tokens of JSON: a model that may write endless white space sooner or later does.
DEFAULT_WHITESPACE = r" |\n{1,2} {0,20}"
MAX_CHOICES = 2_000
MAX_LARK_CHARS = 32 * 1024
#: Lines of a Lark grammar that may hold a definition, each counted as often as brackets are open in
#: it: rules are descended on the stack of the thread.
MAX_LARK_LEVELS = 500
MAX_TAGS = 64
_GBNF = re.compile(r"(?m)^\s*[\w-]+\s*::=")
_JSON_DIRECTIVE = re.compile(r"%json\s*(?=\{)")
_LARK_OPTION = re.compile(r"\[[^\]\n]*\b(temperature|max_tokens)\b")


def grammar_text(spec: GrammarSpec, is_special: Callable[[str], bool]) -> str:
    """Returns llguidance's text of a grammar. `is_special` tells the texts of special tokens.

    Raises `RequestError`, without a parameter, for a source that is refused before it is compiled.
    """
    whitespace = _whitespace(spec.whitespace)
    match spec.kind:
        case "json_object":
            return _schema_text({"type": "object"}, whitespace)
        case "json_schema":
            return _schema_text(_schema(_parse(spec.source)), whitespace)
        case "regex":
            _check_pattern(spec.source)
            return llguidance.LLMatcher.grammar_from_regex(spec.source)
        case "choice":
            return llguidance.LLMatcher.grammar_from_lark(_choice(_parse(spec.source)))
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(_lark(spec.source))
        case "message":
            return llguidance.LLMatcher.grammar_from_lark(spec.source)
        case "structural_tag":
            return llguidance.LLMatcher.grammar_from_lark(
                _structural_tag(_parse(spec.source), whitespace, is_special)
            )


def _parse(source: str) -> Any:
    try:
        return json.loads(source, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise RequestError("its JSON is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"it is not valid JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _whitespace(pattern: str | None) -> JsonCompileOptions:
    """Returns llguidance's options for the white space between the tokens of JSON, of a pattern
    that has been compiled by itself."""
    pattern = DEFAULT_WHITESPACE if pattern is None else pattern
    return {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}


def _check_pattern(pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise RequestError(
            f"a regular expression may have at most {MAX_PATTERN_CHARS} characters, not "
            f"{len(pattern)}"
        )


def _schema(value: Any) -> Any:
    """Returns a schema, checked, rewritten for llguidance, and with closed objects."""
    schema = check_schema(value)
    rewritten = close_objects(rewrite(schema))
    return rewritten if rewritten is schema else check_schema(rewritten)


def _schema_text(schema: Any, options: JsonCompileOptions) -> str:
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    strict: JsonCompileOptions = {**options, "lenient": False, "coerce_one_of": False}
    return llguidance.LLMatcher.grammar_from_json_schema(_dump(schema), overrides=strict)


def _dump(schema: Any) -> str:
    """Returns the JSON of a schema as llguidance's parser takes it."""
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("a text in the JSON schema holds half of a surrogate pair") from error
    except ValueError as error:
        raise RequestError("a number in the JSON schema is beyond float64") from error
    return text


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not all(isinstance(each, str) for each in choices):
        raise RequestError("a choice must be a list of texts")
    if not 0 < len(choices) <= MAX_CHOICES:
        raise RequestError(f"a choice must have 1 to {MAX_CHOICES} texts, not {len(choices)}")
    return "start: " + " | ".join(map(_quote, choices))


def _quote(text: str) -> str:
    """Returns a text as a literal of Lark. Raises `RequestError` for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("a text holds half of a surrogate pair") from error
    return json.dumps(text, ensure_ascii=False)


def _lark(source: str) -> str:
    if len(source) > MAX_LARK_CHARS:
        raise RequestError(f"it may have at most {MAX_LARK_CHARS} characters, not {len(source)}")
    if _GBNF.search(source):
        try:
            source = gbnf_to_lark(source)
        except Exception as error:  # it raises bare exceptions
            raise RequestError(f"it is not valid GBNF: {str(error)[:300]}") from error
    levels = sum((":" in line) + _max_open(line) for line in source.splitlines())
    if levels > MAX_LARK_LEVELS:
        raise RequestError(
            f"its rules may be nested through at most {MAX_LARK_LEVELS} levels, not {levels}"
        )
    for line in source.splitlines():
        for pattern in line.split("/"):
            _check_pattern(pattern)
    if found := _LARK_OPTION.search(source):
        raise RequestError(f"the attribute {found[1]} of a rule is not supported")
    if "x-guidance" in source:
        raise RequestError("x-guidance is not supported")
    return _with_schemas(source)


def _with_schemas(source: str) -> str:
    """Returns a grammar with the JSON schemas within it checked and rewritten."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    parts, end = [], 0
    for found in _JSON_DIRECTIVE.finditer(source):
        if found.end() < end:
            continue
        try:
            value, after = decoder.raw_decode(source, found.end())
        except (ValueError, RecursionError):
            continue  # no directive, or one that llguidance refuses
        parts += [source[end : found.end()], _dump(_schema(value))]
        end = after
    return "".join([*parts, source[end:]])


def _max_open(line: str) -> int:
    """Returns the maximum number of open brackets in a line, brackets in quotes included."""
    most = level = 0
    for character in line:
        if character in "([{":
            level += 1
            most = max(most, level)
        elif character in ")]}":
            level = max(0, level - 1)
    return most


def _structural_tag(
    tag: Any, whitespace: JsonCompileOptions, is_special: Callable[[str], bool]
) -> str:
    """Returns the Lark grammar of free text in which each trigger begins a structure.

    A trigger ends a lazy lexeme, so that no text goes past it; see llguidance's `docs/syntax.md`
    on tool calls.
    """
    triggers, structures = _read_tag(tag)
    rules = []
    for number, (begin, schema, end) in enumerate(structures):
        trigger = next((each for each in triggers if begin.startswith(each)), None)
        if trigger is None:
            raise RequestError(f"structures[{number}].begin starts with none of the triggers")
        head = (
            f"TEXT {trigger}"
            if trigger.startswith("<") and trigger.endswith(">") and is_special(trigger)
            else f"head_{number}"
        )
        if head.startswith("head"):
            rules.append(f"{head}[lazy]: TEXT {_quote(trigger)}")
        options = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        inner = _dump({"x-guidance": dict(whitespace), **options})
        rest = begin[len(trigger) :]
        parts = [head, _quote(rest) if rest else "", f"%json {inner}", _quote(end) if end else ""]
        rules.append(f"tag_{number}: {' '.join(filter(None, parts))}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    return "\n".join([f"start: ({tags})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])


def _read_tag(tag: Any) -> tuple[list[str], list[tuple[str, Any, str]]]:
    """Returns the triggers and the (begin, schema, end) of a structural tag."""
    if not isinstance(tag, dict) or not {"triggers", "structures"} <= tag.keys():
        raise RequestError("a structural tag must have 'triggers' and 'structures'")
    triggers, structures = tag["triggers"], tag["structures"]
    for name, items in (("triggers", triggers), ("structures", structures)):
        if not isinstance(items, Sequence) or isinstance(items, str):
            raise RequestError(f"{name} must be a list")
        if not 0 < len(items) <= MAX_TAGS:
            raise RequestError(f"{name} must have 1 to {MAX_TAGS} items, not {len(items)}")
    if not all(isinstance(each, str) and each for each in triggers):
        raise RequestError("triggers must hold non-empty texts")
    read = []
    for number, each in enumerate(structures):
        if not isinstance(each, dict) or not isinstance(each.get("begin"), str):
            raise RequestError(f"structures[{number}] must be an object with a text as its 'begin'")
        end = each.get("end", "")
        if not isinstance(end, str):
            raise RequestError(f"structures[{number}].end must be a text")
        read.append((each["begin"], _schema(each.get("schema", True)), end))
    return triggers, read

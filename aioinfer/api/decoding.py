"""Decoding of request bodies: `decode`, which `read_body` uses, and `decode_large` for bodies that
are too large to be decoded on the event loop.

The decoder knows the types and the names of all fields, so a valid body is decoded once and costs
nothing more. A body that it rejects is decoded a second time: two things that other servers accept
and the decoder does not are repaired (an integer that is written `3.0`, and values of refused
fields without effect, see `fields`), or the error is reported in the terms of JSON.

The decoder does not let other threads run while it works, nor does Python while it frees the
decoded values. That takes 20 ms for the longest text that a body may hold, and up to a second for
millions of small values: for so long the event loop would stand still. So the values of a large
body are counted before it is decoded, and only token ids may be many.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Struct

from aioinfer.api.fields import check_undeclared
from aioinfer.errors import FieldError, RequestError
from aioinfer.text.json_values import count_values

#: Prompts in one request; each is a request of its own to the scheduler.
MAX_PROMPTS = 2048

#: Values in lists and objects of a body, token ids not counted: decoding, checking and freeing them
#: takes up to 20 ms, in which the event loop may stand still.
MAX_VALUES = 50_000
#: Token ids in one body: they are decoded in 25 ms.
MAX_TOKEN_IDS = 2**19
#: The pattern of texts without control characters, also at the end. Errors say so in words.
NO_CONTROLS = r"^[^\x00-\x1f\x7f]*(?![\s\S])"

#: Longer bodies are not decoded once more for the value that an error quotes.
_MAX_QUOTED_BODY = 64 * 1024
#: Characters of a value that an error quotes.
_MAX_QUOTED = 80

_NUMBER = re.compile(rb"\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*")
_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WRONG_TYPE = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_WRONG_VALUE = re.compile(r"Expected `([^`]*)` (.*)")
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")
_HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
#: The decoder's names of types, and JSON's with their article.
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


class Body(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base class of all request bodies. Names that a body does not declare are looked up in
    `fields`."""

    #: The field that holds token ids, of which there may be more than of other values.
    token_field: ClassVar[str] = ""
    #: Whether a request without a body is one with all defaults.
    may_be_absent: ClassVar[bool] = False
    #: Names without an entry in `fields` are refused where this is None. Elsewhere they are
    #: ignored, unless they nearly are a declared one, and those named here are ignored as well.
    ignored: ClassVar[Collection[str] | None] = None

    model: str | None = None

    def check(self) -> None:
        """Checks what types cannot express. Raises `RequestError` naming the field."""

    def given(self, *names: str) -> dict[str, Any]:
        """Returns the values of the fields of these names that were given, and not as null."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_one_of(self, *names: str) -> None:
        """Raises `RequestError` unless exactly one of the fields of these names was given."""
        given = list(self.given(*names))
        if not given:
            others = " or ".join(names[1:])
            raise FieldError(names[0], f"or {others} must be given", "missing_required_parameter")
        if len(given) > 1:
            raise FieldError(given[1], f"and {given[0]} cannot be combined")


B = TypeVar("B", bound=Body)


def prepare(kind: type[Struct]) -> None:
    """Has the decoder read the declaration of a body before threads decode one.

    msgspec does so when a type is first used, and without a lock: a thread that decodes the type
    meanwhile reads what is not there yet, and the process crashes.
    """
    for each in (kind, _outline(kind)):
        msgspec.json.Decoder(each)


def decode(raw: bytes, kind: type[B], *, ignores_unknown: bool = False) -> B:
    """Decodes and checks a body. With `ignores_unknown`, unknown field names are ignored.

    Raises `RequestError` naming the field by its path, such as `messages[0].role`.
    """
    try:
        body = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        body = _decode_again(raw, kind, error, ignores_unknown=ignores_unknown)
    body.check()
    return body


def decode_large(raw: bytes, kind: type[B], *, ignores_unknown: bool = False) -> B:
    """Decodes a body as `decode` does.

    Raises `RequestError`, also for more than `MAX_VALUES` values in lists and objects, token ids
    not counted, and for more than `MAX_TOKEN_IDS` of these.
    """
    num_values = count_values(raw)
    if num_values > MAX_VALUES:
        _check_fields(raw, kind, num_values)
    return decode(raw, kind, ignores_unknown=ignores_unknown)


def _check_fields(raw: bytes, kind: type[Body], num_values: int) -> None:
    """Raises `RequestError` naming the field with the most values, unless enough of the body's
    `num_values` are token ids."""
    try:
        members = msgspec.json.decode(raw, type=_outline(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise as_request_error(error, raw) from error
    given = {name: bytes(value) for name, value in msgspec.structs.asdict(members).items()}
    counts = {name: count_values(value) for name, value in given.items()}
    field = kind.token_field
    if field and b'"' not in given[field]:
        if given[field].count(b"[") > MAX_PROMPTS + 1:
            raise FieldError(field, f"may hold at most {MAX_PROMPTS} prompts")
        num_ids = counts.pop(field)
        if num_ids > MAX_TOKEN_IDS:
            raise FieldError(field, f"may hold at most {MAX_TOKEN_IDS} token ids")
        num_values -= num_ids
    if num_values > MAX_VALUES:
        most = max(counts, key=counts.__getitem__)
        place = most if counts[most] else "the body"
        raise FieldError(place, f"may hold at most {MAX_VALUES} values")


@cache
def _outline(kind: type[Struct]) -> type[msgspec.Struct]:
    """Returns a type of objects with the fields of a body, whose values are not decoded."""
    fields = [
        (field.encode_name, msgspec.Raw, msgspec.Raw()) for field in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(f"{kind.__name__}Outline", fields)


S = TypeVar("S", bound=Struct)


def convert_texts(given: Mapping[str, Any], kind: type[S]) -> S:
    """Returns the texts of a query or a form, some in lists, in the types of a struct's fields.
    Raises `RequestError` naming the field."""
    unknown = given.keys() - {field.encode_name for field in msgspec.structs.fields(kind)}
    if unknown and kind.__struct_config__.forbid_unknown_fields:
        raise FieldError(min(unknown), "is not supported here", "unknown_parameter")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise as_request_error(error, b"", kind) from error


def _decode_again(
    raw: bytes, kind: type[B], error: Exception, *, ignores_unknown: bool = False
) -> B:
    """Decodes a body that the decoder rejected with `error`, without refused fields whose values
    change nothing, and with integers for the numbers that are integral.

    Raises `RequestError` naming the field by its path, such as `messages[0].role`.
    """
    given = _members(raw) if isinstance(error, msgspec.ValidationError) else None
    if given is None:
        raise as_request_error(error, raw) from error
    repaired = msgspec.json.encode(_repaired(given, kind, "", ignores_unknown))
    try:
        return msgspec.json.decode(repaired, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as again:
        raise as_request_error(again, repaired, kind) from again


def _repaired(
    given: dict[str, msgspec.Raw], kind: type[Struct], place: str, ignores_unknown: bool
) -> dict[str, msgspec.Raw]:
    """Returns the members of an object at `place` (such as `options.`) that its type declares, with
    integers for integral numbers. Raises `RequestError` for others that are not ignored; of a type
    that has `ignored` names, of the unknown ones for misspelt ones alone."""
    declared = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    ignored: Collection[str] | None = getattr(kind, "ignored", None)  # inner types may lack it
    kept: dict[str, msgspec.Raw] = {}
    for name, value in given.items():
        if name == kind.__struct_config__.tag_field:
            kept[name] = value
            continue
        if name not in declared:
            if kind.__struct_config__.forbid_unknown_fields and name not in (ignored or ()):
                check_undeclared(
                    place + name,
                    _small_value(value),
                    declared,
                    ignores_unknown=ignores_unknown,
                    only_misspelt=ignored is not None,
                )
            continue
        kept[name] = _without_fraction(value)
        # where it is no object, or one of no known type, the decoder will say what is wrong
        if (members := _members(value)) is None:
            continue
        if (inner := _strict_type(declared[name], members)) is not None:
            members = _repaired(members, inner, f"{place}{name}.", ignores_unknown)
            kept[name] = msgspec.Raw(msgspec.json.encode(members))
    return kept


def _members(raw: bytes | msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """Returns the members of an object, None for other JSON."""
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _strict_type(annotation: Any, members: Mapping[str, msgspec.Raw]) -> type[Struct] | None:
    """Returns the type of an object with these members, if a field may hold one of a type that
    knows all members."""
    for each in get_args(annotation) or (annotation,):
        if not (isinstance(each, type) and issubclass(each, Struct)):
            continue
        config = each.__struct_config__
        tag = members.get(config.tag_field) if config.tag_field is not None else None
        if config.tag is None or (tag is not None and _small_value(tag) == config.tag):
            return each if config.forbid_unknown_fields else None
    return None


def _small_value(value: msgspec.Raw) -> Any:
    """Returns a value, or something that equals no other for one that is large."""
    try:
        return msgspec.json.decode(value) if len(bytes(value)) <= _MAX_QUOTED else object()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return object()


def _without_fraction(value: msgspec.Raw) -> msgspec.Raw:
    """Returns `3.0` as `3`, and anything else as it is."""
    text = bytes(value)
    if len(text) < _MAX_QUOTED and (number := _NUMBER.fullmatch(text)):
        parsed = float(number[1])
        if not number[1].lstrip(b"-").isdigit() and parsed.is_integer() and abs(parsed) < 2**53:
            return msgspec.Raw(b"%d" % int(parsed))
    return value


def as_request_error(error: Exception, raw: bytes = b"", kind: Any = None) -> RequestError:
    """Returns the error that answers a body, of type `kind`, which the decoder rejects with
    `error`."""
    if isinstance(error, msgspec.ValidationError):
        return _wrong_field(str(error), raw, kind)
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply", code="invalid_json")
    if "truncated" in str(error) and raw.rstrip()[-1:] == b"}" and _HALF_PAIR.search(raw):
        return RequestError("a text holds half of a surrogate pair", code="invalid_json")
    return RequestError(f"the body is not valid JSON: {error}", code="invalid_json")


def _wrong_field(message: str, raw: bytes, kind: Any) -> RequestError:
    """Makes of msgspec's "Expected `int`, got `str` - at `$.n`" an error that names the parameter
    and quotes its value."""
    found = _PLACE.fullmatch(message)
    assert found is not None  # the pattern matches any text
    what, full_path = found["what"], found["path"] or ""
    path = full_path.replace("[...]", "")
    if missing := _MISSING.fullmatch(what):
        path = f"{path}.{missing[1]}".lstrip(".")
        return FieldError(path, "is missing", "missing_required_parameter")
    place = path or "the body"
    if found["key"]:
        place = f"each name in {place}"
    elif full_path.endswith("[...]"):
        place = f"each value in {place}"
    value = "" if found["key"] or not path else _quoted_at(raw, full_path)
    quoted, code = f", not {value}" if value else "", "invalid_value"
    if wrong := _WRONG_TYPE.fullmatch(what):
        text = f"{place} must be {_expected(wrong[1])}, not {_NAMES.get(wrong[2], wrong[2])}"
        quoted, code = f": {value}" if value else "", "invalid_type"
    elif wrong := _WRONG_VALUE.fullmatch(what):
        rule = wrong[2].replace(f"matching regex {NO_CONTROLS!r}", "without control characters")
        text = f"{place} must be {_expected(wrong[1])} {rule}"
    elif values := _values_at(kind, full_path):
        text = f"{place} must be one of {', '.join(values)}"
    else:
        text, quoted = f"{place}: {what[:1].lower()}{what[1:]}", ""
    return RequestError(text + quoted, param=path or None, code=code, logged=text)


def _values_at(kind: Any, path: str) -> list[str]:
    """Returns the texts of the values that a type has at a path, where these are listed."""
    kinds = _alternatives(kind)
    for name, _, _ in _STEP.findall(path):
        inner: list[Any] = []
        for each in kinds:
            if name and isinstance(each, type) and issubclass(each, Struct):
                found = msgspec.structs.fields(each)
                inner += [field.type for field in found if field.encode_name == name]
                if name == each.__struct_config__.tag_field:
                    inner.append(Literal[each.__struct_config__.tag])
            elif not name and get_origin(each) is list:
                inner += get_args(each)
        kinds = [each for type in inner for each in _alternatives(type)]
    values = [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
    return [*map(repr, values)] + ["true", "false"] * (bool in kinds)


def _alternatives(kind: Any) -> list[Any]:
    """Returns the types of a union, without their bounds."""
    if get_origin(kind) is Annotated:
        return _alternatives(get_args(kind)[0])
    if get_origin(kind) not in (Union, UnionType):
        return [kind]
    return [each for inner in get_args(kind) for each in _alternatives(inner)]


def _expected(types: str) -> str:
    """Returns "an integer or a string" of "int | str | null": null counts as missing."""
    names = [_NAMES.get(name, name) for name in types.split(" | ")]
    return " or ".join(name for name in names if name != "null" or len(names) == 1)


def _quoted_at(raw: bytes, path: str) -> str:
    """Returns the JSON of the value at a path such as `stop[1]`, of a long one its beginning and
    end; an empty text where it cannot be found."""
    if not raw or len(raw) > _MAX_QUOTED_BODY:
        return ""
    try:
        value = msgspec.json.decode(raw)
        for name, index, unknown in _STEP.findall(path):
            if unknown:
                return ""
            value = value[int(index)] if index else value[name]
        text = msgspec.json.encode(value).decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError, LookupError, TypeError):
        return ""
    half = _MAX_QUOTED // 2
    return text if len(text) <= _MAX_QUOTED else f"{text[:half]} … {text[-half:]}"

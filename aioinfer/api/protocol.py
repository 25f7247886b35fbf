"""The parts that request bodies of several APIs share: structured output (OpenAI's
`response_format`, vLLM's `structured_outputs`), sampling parameters, and the rules between fields.

The names are OpenAI's, and vLLM's for what OpenAI does not have. msgspec's own decoder checks types
and names while it decodes; a body that it rejects is examined again in `decoding`, so that a valid
body costs nothing more. `fields` has the names that are refused; null counts as missing. The bounds
of sampling parameters and the sizes of their lists are checked by `SamplingParams`; here are the
limits of the machine (what must fit into an int32) and the rules between fields. Handlers get
bodies from `read_body`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from aioinfer.api.decoding import MAX_VALUES, Body
from aioinfer.api.messages import Message
from aioinfer.api.prompts import Prompt, TokenId, check_prompts, check_truncation, split_prompts
from aioinfer.engine.tools import NO_TOOLS
from aioinfer.errors import FieldError
from aioinfer.sampling_params import (
    MAX_GRAMMAR_CHARS,
    BeamSearch,
    GrammarKind,
    GrammarSpec,
    SamplingParams,
)
from aioinfer.text.json_schema import MAX_SCHEMA_VALUES
from aioinfer.text.json_values import count_values
from aioinfer.text.message_parser import ToolUse

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Length = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0)]


# -------------------------------------------------------------------- structured output
# JSON schemas are kept as the text that came: the order of properties and the digits of numbers
# count. `text.grammar` says what they may hold.

#: The default of a field of JSON, empty where it was not given. `Raw | None` is no type for
#: msgspec: null comes as `null`. (A factory, since the API's description cannot show a value.)
NOT_GIVEN: Any = msgspec.field(default_factory=Raw)


def is_given(raw: Raw) -> bool:
    """Whether a field of JSON was given, and not as null."""
    return bytes(raw) not in (b"", b"null")


class SchemaFormat(Struct, kw_only=True):
    """`json_schema` of a `response_format`. Its name, its description and `strict` say nothing
    about the output: a schema is always enforced."""

    schema: Raw


class AnyText(Struct, tag="text", forbid_unknown_fields=True):
    """A `response_format` of any text."""

    def to_grammar(self) -> GrammarSpec | None:
        """Returns the grammar, or None for any text. Raises `RequestError` naming the field."""
        return None


class JsonObject(Struct, tag="json_object", forbid_unknown_fields=True):
    """A `response_format` of any JSON object, or of a schema, as llama.cpp has it."""

    schema: Raw = NOT_GIVEN

    def to_grammar(self) -> GrammarSpec:
        """See `AnyText.to_grammar`."""
        if is_given(self.schema):
            return json_grammar("json_schema", self.schema, "response_format.schema")
        return GrammarSpec("json_object", param="response_format")


class JsonSchema(Struct, tag="json_schema", forbid_unknown_fields=True):
    """A `response_format` of a schema."""

    json_schema: SchemaFormat

    def to_grammar(self) -> GrammarSpec:
        """See `AnyText.to_grammar`."""
        place = "response_format.json_schema.schema"
        return json_grammar("json_schema", self.json_schema.schema, place)


class StructuralTag(Struct, tag="structural_tag", forbid_unknown_fields=True):
    """A `response_format` of texts with schemas in them, as vLLM has it; its newer form, with
    `format`, is not supported."""

    structures: Raw
    triggers: Raw

    def to_grammar(self) -> GrammarSpec:
        """See `AnyText.to_grammar`."""
        tag = b'{"structures":%b,"triggers":%b}' % (self.structures, self.triggers)
        return json_grammar("structural_tag", Raw(tag), "response_format")


ResponseFormat = AnyText | JsonObject | JsonSchema | StructuralTag


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`. `disable_fallback` has no effect: there is one kind of
    grammars."""

    json: Raw = NOT_GIVEN
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Raw = NOT_GIVEN
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None

    def to_grammars(self) -> list[GrammarSpec]:
        """Returns the grammars that were given. Raises `RequestError` naming the field."""
        place = "structured_outputs."
        if self.disable_additional_properties:
            text = "is not supported: give 'additionalProperties': false in the schema"
            raise FieldError(f"{place}disable_additional_properties", text)
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        found = []
        if self.json_object:
            found.append(GrammarSpec("json_object", "", whitespace, f"{place}json_object"))
        if is_given(self.json):
            found.append(json_grammar("json_schema", self.json, f"{place}json", whitespace))
        if is_given(tag := self.structural_tag):
            found.append(json_grammar("structural_tag", tag, f"{place}structural_tag", whitespace))
        if self.regex is not None:
            found.append(GrammarSpec("regex", self.regex, None, f"{place}regex"))
        if self.choice is not None:
            choices = msgspec.json.encode(self.choice).decode()
            found.append(GrammarSpec("choice", choices, None, f"{place}choice"))
        if self.grammar is not None:
            found.append(GrammarSpec("lark", self.grammar, None, f"{place}grammar"))
        return found


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


# -------------------------------------------------------------------- bodies


class StreamOptions(Struct, kw_only=True):
    """`include_usage` adds a last event that holds the usage, and `continuous_usage_stats` (vLLM's)
    the usage so far to every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class AnyObject(Struct):
    """An object whose members are not read."""


#: The description of a field without effect begins with it.
NO_EFFECT_TEXT = "It has no effect"
#: For how long a prompt stays in the prefix cache before others, in seconds: where a client asks
#: for that, or has tools; and where it asks for long.
RETAIN_S, LONG_RETAIN_S = 300.0, 86_400.0
#: The type of a field that has no effect; `fields.NO_EFFECT` has the reason.
Ignored = Annotated[
    AnyObject | list[Any] | str | float | bool | None, Meta(description=NO_EFFECT_TEXT)
]


class Parameters(Struct, kw_only=True):
    """Base class of objects with sampling parameters."""

    #: The names that `SamplingParams` has for fields of other names; "" where a field of its name
    #: is something else here.
    sampling_names: ClassVar[Mapping[str, str]] = {}

    def sampling_fields(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, under the names of `SamplingParams`. Of
        several fields for one the last that is declared counts. Raises `RequestError`."""
        given = [(name, getattr(self, field)) for field, name in _sampling_names(type(self))]
        return {name: value for name, value in given if value is not None}


@cache
def _sampling_names(kind: type[Parameters]) -> list[tuple[str, str]]:
    """Returns the fields of a type that are sampling parameters, with the names of these."""
    known = {field.name for field in dataclasses.fields(SamplingParams)} - {"grammar"}
    names = ((field, kind.sampling_names.get(field, field)) for field in kind.__struct_fields__)
    return [(field, name) for field, name in names if name in known]


class PromptsBody(Body, Parameters, kw_only=True):
    """Base class of the bodies whose prompts are computed."""

    timeout_s: Seconds | None = None
    priority: Int32 | None = None

    @property
    def prompt_field(self) -> str:
        """The field of the type `Prompts`, if the body has one."""
        return self.token_field

    def check(self) -> None:
        if field := self.prompt_field:
            check_prompts(getattr(self, field), field)

    def prompts(self) -> list[Prompt]:
        """Returns the prompts of this field one by one."""
        field = self.prompt_field
        return split_prompts(getattr(self, field)) if field else []

    @property
    def num_prompts(self) -> int:
        """How many prompts it has: a conversation is one."""
        return len(self.prompts()) or 1


class GenerationBody(PromptsBody, kw_only=True):
    """Base class of the bodies for which text is generated."""

    stream: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None

    @property
    def streams(self) -> bool:
        """Whether the client reads the output while it comes."""
        return bool(self.stream)

    def retain_s(self) -> float:
        """Returns for how long the prefix cache keeps the prompt before others, in seconds: with
        tools, the conversation goes on when they have run."""
        return RETAIN_S if self.tool_use().tools else 0.0

    @property
    def shows_thoughts(self) -> bool:
        """Whether the reply holds thoughts."""
        return True

    def tool_use(self) -> ToolUse:
        """Returns the tools and how they may be called. Raises `RequestError` naming the field."""
        return NO_TOOLS

    def grammars(self) -> list[GrammarSpec]:
        """Returns the grammars that the body asks for. Raises `RequestError` naming the field."""
        return []

    def sampling_fields(self) -> dict[str, Any]:
        """See `Parameters.sampling_fields`; raises `RequestError` also for several grammars."""
        fields, found = super().sampling_fields(), self.grammars()
        if len(found) > 1:
            others = f"and {found[0].param} cannot be combined: an output follows one grammar"
            raise FieldError(found[1].param, others)
        return fields | ({"grammar": found[0]} if found else {})


class CommonSampling(GenerationBody, kw_only=True):
    """The fields that OpenAI's and llama.cpp's APIs have in common for how tokens are sampled, and
    OpenAI's for how long prompts are cached. Fields without effect that clients send often are
    declared as well: a body with one is not decoded a second time."""

    # OpenAI
    metadata: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    store: Ignored = None
    user: Ignored = None
    # llama.cpp
    cache_prompt: Ignored = None
    id_slot: Ignored = None
    return_progress: Ignored = None
    timings_per_token: Ignored = None

    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    json_schema: Raw = NOT_GIVEN

    def grammars(self) -> list[GrammarSpec]:
        found = [GrammarSpec("lark", self.grammar)] if self.grammar else []
        if is_given(self.json_schema):
            found.append(json_grammar("json_schema", self.json_schema, "json_schema"))
        return found

    def retain_s(self) -> float:
        """See `GenerationBody.retain_s`."""
        if self.prompt_cache_retention == "24h":
            return LONG_RETAIN_S
        is_named = self.prompt_cache_key is not None or self.prompt_cache_retention is not None
        return RETAIN_S if is_named else super().retain_s()


class SamplingFields(CommonSampling, kw_only=True):
    """The fields of completions, chat completions and Responses that define how tokens are
    sampled."""

    sampling_names = {"include_stop_str_in_output": "include_stop", "vllm_xargs": "extra_args"}

    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprob_token_ids: list[TokenId] | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    vllm_xargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def grammars(self) -> list[GrammarSpec]:
        outputs = self.structured_outputs
        return ([] if outputs is None else outputs.to_grammars()) + super().grammars()


class SamplingBody(SamplingFields, kw_only=True):
    """The fields that completions and chat completions have in common."""

    n: Int32 | None = None
    max_tokens: Length | None = None
    n_predict: Int32 | None = None
    prompt_logprobs: Int32 | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    truncate_prompt_tokens: Int32 | None = None
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None

    @property
    def usage(self) -> StreamOptions:
        """Which events of a stream hold the usage."""
        return self.stream_options or StreamOptions()

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "needs stream to be true")
        if self.max_tokens == 0:
            self.check_no_output()
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "are not available in a stream")
        if self.use_beam_search and self.stream:
            raise FieldError("stream", "does not go with a beam search, which is known at its end")
        check_truncation(self.truncate_prompt_tokens)

    def grammars(self) -> list[GrammarSpec]:
        format, found = self.response_format, super().grammars()
        if format is not None and (spec := format.to_grammar()) is not None:
            found.insert(0, spec)
        return found

    def beam_width(self) -> tuple[int, str]:
        """Returns how many beams a beam search has, and the field that says so."""
        return 1 if self.n is None else self.n, "n"

    def check_no_output(self) -> None:
        """Raises `RequestError` for a `max_tokens` of 0 where a reply would hold nothing."""
        raise FieldError("max_tokens", "must be at least 1, not 0")

    def prompt_room(self, max_model_len: int) -> int:
        """Returns how many tokens of a prompt leave room for the output."""
        fields = self.sampling_fields()
        output = 0 if "prompt_only" in fields else fields.get("max_tokens") or 1
        return max(1, max_model_len - output)

    def sampling_fields(self) -> dict[str, Any]:
        fields = super().sampling_fields()
        if self.n_predict not in (None, -1):  # which stands for as much as fits
            fields.setdefault("max_tokens", self.n_predict)
        if self.return_progress and self.stream:
            fields["reports_progress"] = True
        if self.use_beam_search:
            given = self.given("length_penalty", "early_stopping")
            width, width_field = self.beam_width()
            fields["beam_search"] = BeamSearch(width, **given, width_field=width_field)
        return fields


def check_messages(messages: list[Message]) -> None:
    """Raises `RequestError` naming the place of a message that is wrong; see `Message.check`."""
    num_values = 0
    for index, message in enumerate(messages):
        num_values += message.count_argument_values()
        if num_values > MAX_VALUES:
            text = f"may hold at most {MAX_VALUES} values in the arguments of tool calls"
            raise FieldError("messages", text)
        message.check(f"messages[{index}]")


#: Fields that are variables of the chat template.
_VARIABLES = ("reasoning_effort", "verbosity", "documents")


def template_options(body: Any) -> dict[str, Any]:
    """Returns the arguments of `Frontend.encode_chat` besides the messages, of a body that has a
    conversation in OpenAI's shape; fields that its type lacks are missing."""
    continues, begins = bool(body.continue_final_message), body.add_generation_prompt
    given = msgspec.structs.asdict(body)
    variables = {name: given.get(name) for name in _VARIABLES}
    return {
        "add_generation_prompt": not continues if begins is None else begins,
        "continue_final_message": continues,
        "template_kwargs": template_variables(body.chat_template_kwargs, **variables),
        "tools": None if given.get("tool_choice") == "none" else given.get("tools") or None,
        "parse_special": bool(given.get("parse_special")),
    }


def template_variables(kwargs: Mapping[str, Any] | None, **fields: Any) -> dict[str, Any] | None:
    """Returns the variables of the chat template: a body's `chat_template_kwargs`, and fields that
    are variables themselves, which do not replace entries of it; None for none."""
    given = {name: value for name, value in fields.items() if value is not None}
    return given | dict(kwargs or {}) or None

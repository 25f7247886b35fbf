"""What clients send: the bodies of requests, decoded and checked.

The names are OpenAI's, and vLLM's for what OpenAI does not have. msgspec's own decoder checks types
while it decodes, so unknown fields cost nothing and are ignored, as OpenAI-compatible servers do;
null counts as missing. The bounds of sampling parameters and the sizes of their lists are checked
by `SamplingParams`; here are the limits of the machine (what must fit into an int32) and the rules
between fields. Handlers get bodies from `read_body`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from aioinfer.api.messages import Message
from aioinfer.errors import RequestError
from aioinfer.sampling_params import MAX_LOGPROBS

#: Prompts in one request; each is a request of its own to the scheduler.
MAX_PROMPTS = 1024

#: Values in lists and objects of a body, token ids not counted: decoding, checking and freeing them
#: takes up to 20 ms, in which the event loop may stand still.
MAX_VALUES = 50_000

#: Entries of a prompt whose types are looked at before other threads may run.
_TYPES_PER_PIECE = 16_384

Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Length = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Body(Struct, kw_only=True):
    """What all bodies have in common."""

    model: str | None = None

    def check(self) -> None:
        """Checks what types cannot express. Raises `RequestError` naming the field."""


class StreamOptions(Struct, kw_only=True):
    """`include_usage` adds a last event that holds the usage."""

    include_usage: bool | None = None


class SamplingBody(Body, kw_only=True):
    """The fields of completions and chat completions that define how tokens are sampled and
    delivered."""

    n: Int32 | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    max_tokens: Length | None = None
    prompt_logprobs: Int32 | None = None
    min_tokens: Int32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout_s: Seconds | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if self.max_tokens == 0:
            self.check_no_output()
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs are not available in a stream", param="prompt_logprobs"
            )

    def check_no_output(self) -> None:
        """Raises `RequestError` for a `max_tokens` of 0 where a reply would hold nothing."""
        raise RequestError("max_tokens must be at least 1, not 0", param="max_tokens")

    def sampling_fields(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, under the names of `SamplingParams`."""
        fields = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            fields["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.include_stop_str_in_output is not None:
            fields["include_stop"] = self.include_stop_str_in_output
        return fields


_SAMPLING_FIELDS = (
    "n", "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
    "logit_bias", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "skip_special_tokens",
    "prompt_logprobs",
)  # fmt: skip


class CompletionRequest(SamplingBody, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    add_special_tokens: bool | None = None
    best_of: Int32 | None = None
    echo: bool | None = None
    logprobs: Int32 | None = None
    return_token_ids: bool | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        if isinstance(self.prompt, list):
            _check_prompts(self.prompt)
        if self.suffix:
            raise RequestError("suffix is not supported", param="suffix")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError("best_of is not supported, unless it equals n", param="best_of")

    def check_no_output(self) -> None:
        if self.stream or not (self.echo or self.prompt_logprobs is not None):
            raise RequestError(
                "max_tokens may be 0 only with echo or prompt_logprobs, and without stream",
                param="max_tokens",
            )

    def sampling_fields(self) -> dict[str, Any]:
        fields = super().sampling_fields()
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
            if self.echo:
                fields["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if fields.get("max_tokens") == 0:
            del fields["max_tokens"]
            fields["prompt_only"] = True
        return fields

    def prompts(self) -> list[Any]:
        """Returns the prompts one by one: texts, or lists of token ids."""
        return (
            [self.prompt]
            if isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
            else self.prompt
        )


def _check_prompts(prompt: list[Any]) -> None:
    kinds: set[type] = set()
    # in pieces: the interpreter switches threads between them, not within
    for start in range(0, len(prompt), _TYPES_PER_PIECE):
        kinds.update(map(type, prompt[start : start + _TYPES_PER_PIECE]))
    if not kinds:
        raise RequestError("the prompt is empty", param="prompt")
    if len(kinds) > 1:
        raise RequestError(
            "prompt must be a text, a list of token ids, a list of texts or a list "
            "of lists of token ids",
            param="prompt",
        )
    if int not in kinds and len(prompt) > MAX_PROMPTS:
        raise RequestError(
            f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(prompt)}", param="prompt"
        )


class ResponseFormat(Struct, kw_only=True):
    """Only `{"type": "text"}` is understood."""

    type: str


class ChatRequest(SamplingBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parse_special: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    response_format: ResponseFormat | None = None

    def check(self) -> None:
        super().check()
        _check_messages(self.messages)
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs must be in [0, {MAX_LOGPROBS}], not {self.top_logprobs}",
                    param="top_logprobs",
                )
        if self.response_format is not None and self.response_format.type != "text":
            raise RequestError(
                f"response_format {self.response_format.type!r} is not supported, only 'text'",
                param="response_format",
            )
        if self.tool_choice not in (None, "auto", "none"):
            raise RequestError(
                "tool_choice must be 'auto' or 'none': no call can be enforced", param="tool_choice"
            )

    def sampling_fields(self) -> dict[str, Any]:
        fields = super().sampling_fields()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return fields


class TokenizeRequest(Body, kw_only=True):
    """`POST /tokenize`, with a `prompt` or with `messages`."""

    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("either prompt or messages must be given", param="prompt")
        _check_messages(self.messages or [])


class DetokenizeRequest(Body, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[TokenId]


def _check_messages(messages: list[Message]) -> None:
    num_values = 0
    for index, message in enumerate(messages):
        num_values += message.count_argument_values()
        if num_values > MAX_VALUES:
            raise RequestError(
                f"the arguments of tool calls may hold at most {MAX_VALUES} values",
                param="messages",
            )
        message.check(f"messages[{index}]")


def template_options(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Returns what `Frontend.encode_chat` takes besides the messages."""
    continues = bool(body.continue_final_message)
    hides_tools = isinstance(body, ChatRequest) and body.tool_choice == "none"
    return {
        "tools": None if hides_tools else body.tools or None,
        "add_generation_prompt": not continues
        if body.add_generation_prompt is None
        else body.add_generation_prompt,
        "continue_final_message": continues,
        "parse_special": bool(body.parse_special),
        "template_kwargs": body.chat_template_kwargs,
    }


B = TypeVar("B", bound=Body)

_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def decode(raw: bytes, kind: type[B], *, check: bool = True) -> B:
    """Decodes a body, and checks it unless `check` is false.

    Raises `RequestError` naming the field by its path, such as `messages[0].role`.
    """
    try:
        body = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise as_request_error(error) from error
    if check:
        body.check()
    return body


def as_request_error(error: Exception) -> RequestError:
    """Returns the error that answers a body which the decoder rejects with `error`."""
    if isinstance(error, msgspec.ValidationError):
        return _wrong_field(str(error))
    if isinstance(error, RecursionError):
        return RequestError("the body is nested too deeply")
    return RequestError(f"the body is not valid JSON: {error}")


def _wrong_field(message: str) -> RequestError:
    """Makes of msgspec's "Expected `int`, got `str` - at `$.n`" an error that names the
    parameter."""
    found = _PLACE.fullmatch(message)
    if found is None:  # the pattern matches any text
        return RequestError(message)
    what, path = found["what"], (found["path"] or "").replace("[...]", "")
    if missing := _MISSING.fullmatch(what):
        path, what = f"{path}.{missing[1]}".lstrip("."), "it is missing"
    return RequestError(f"{path or 'the body'}: {what[:1].lower()}{what[1:]}", param=path or None)

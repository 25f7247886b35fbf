"""Bodies of requests in Ollama's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from aioinfer.api.decoding import Body
from aioinfer.api.protocol import GenerationBody, Ignored, Int32, Int64
from aioinfer.engine.tools import read_tools
from aioinfer.errors import RequestError
from aioinfer.sampling_params import GrammarSpec
from aioinfer.text.message_parser import ToolUse


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """The options that count for a model that is loaded; `fields` has the others."""

    num_predict: Int32 | None = None
    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Int32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaFunction(Struct, kw_only=True):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(Struct, kw_only=True):
    """A call that the model has made."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the message as chat templates read it."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking is not None:
            message["reasoning_content"] = self.thinking
        if self.tool_name is not None:
            message["name"] = self.tool_name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id or "",
                    "function": msgspec.structs.asdict(call.function),
                }
                for call in self.tool_calls
            ]
        return message


class Tagged:
    """A body with a model's name, in which Ollama's default tag may stand."""

    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.model is not None:
            self.model = self.model.removesuffix(":latest")


class OllamaBody(Tagged, GenerationBody, kw_only=True):
    """Base class of the bodies of chats and generations."""

    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None

    @property
    def streams(self) -> bool:
        """See `GenerationBody.streams`."""
        return self.stream is not False

    def check(self) -> None:
        """See `Body.check`."""
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise RequestError("format must be 'json' or a JSON schema", param="format")
        options = self.options or Options()
        if (options.repeat_last_n or -1) != -1 and options.repeat_penalty not in (None, 1):
            raise RequestError(
                "options.repeat_last_n must be -1, for all tokens, or 0, for none: a penalty for "
                "the last ones alone is not supported",
                param="options.repeat_last_n",
                code="unsupported_parameter",
            )

    def sampling_fields(self) -> dict[str, Any]:
        """Returns the sampling parameters that were given, under the names of `SamplingParams`."""
        options = msgspec.structs.asdict(self.options or Options())
        fields = {name: value for name, value in options.items() if value is not None}
        # -1 and -2 stand for as many as fit
        if (length := fields.pop("num_predict", -1)) > 0:
            fields["max_tokens"] = length
        penalty = fields.pop("repeat_penalty", None)
        if fields.pop("repeat_last_n", None) != 0 and penalty is not None:
            fields["repetition_penalty"] = penalty
        if isinstance(self.format, dict):
            source = msgspec.json.encode(self.format).decode()
            fields["grammar"] = GrammarSpec("json_schema", source, param="format")
        elif self.format:
            fields["grammar"] = GrammarSpec("json_object", param="format")
        return fields

    def template_kwargs(self) -> dict[str, Any] | None:
        """Returns the variables of the chat template."""
        if self.think is None:
            return None
        if isinstance(self.think, str):
            return {"enable_thinking": True, "reasoning_effort": self.think}
        return {"enable_thinking": self.think}


class OllamaChat(OllamaBody, kw_only=True):
    """`POST /api/chat`. Without messages it has the model loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None

    def check(self) -> None:
        """See `Body.check`."""
        super().check()
        self.tool_use()
        for index, message in enumerate(self.messages or ()):
            if message.images:
                place = f"messages[{index}].images"
                raise RequestError(f"{place} is not supported", param=place)

    def tool_use(self) -> ToolUse:
        """Returns the tools. Raises `RequestError` naming the place."""
        return read_tools(self.tools, None, parallel=None)

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates read them."""
        return [message.for_template() for message in self.messages or ()]


class OllamaGenerate(OllamaBody, kw_only=True):
    """`POST /api/generate`. Without a prompt it has the model loaded."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None

    def conversation(self) -> list[dict[str, Any]]:
        """Returns the messages as chat templates read them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class ShowRequest(Tagged, Body, kw_only=True):
    """`POST /api/show`. `name` is the older name of `model`; there is no more to show than is
    shown, whatever `verbose` says."""

    name: str | None = None
    verbose: Ignored = None

    def __post_init__(self) -> None:
        self.model = self.model or self.name
        super().__post_init__()

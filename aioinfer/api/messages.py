"""Messages of a conversation: as clients send them, and as chat templates read them.

`protocol` owns the rest of a body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeVar

from msgspec import Struct

from aioinfer.engine.chat_turn import call_input
from aioinfer.errors import FieldError
from aioinfer.media.source import MediaSource
from aioinfer.text.json_values import count_values

T = TypeVar("T")
#: Shorter texts are not searched for JSON values: they cannot hold many.
_SHORT_ARGUMENTS = 1024

#: Parts of a message that are joined at once.
_FEW_PARTS = 16

#: Conversations with more messages, parts and calls are converted for the template in a thread: 1
#: us a message.
_FEW_MESSAGES = 256

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
#: Roles under the names that chat templates know: "developer" is newer, "function" is older.
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


class ImageUrl(Struct, kw_only=True):
    """A picture by its URL, usually a data URL. `detail` has no effect: a model reads pictures in
    its own sizes."""

    url: str
    detail: str | None = None


class InputAudio(Struct, kw_only=True):
    """A clip of sound, base64. `format` has no effect: the file says what it is."""

    data: str
    format: str | None = None


class AudioUrl(Struct, kw_only=True):
    """A clip of sound by its URL, usually a data URL."""

    url: str


class TextPart(Struct, tag="text"):
    """A part of a message's content: a text."""

    text: str

    def shown(self, place: str) -> str:
        """Returns what the model sees of the part, whose place in the body is given."""
        return self.text


class RefusalPart(Struct, tag="refusal"):
    """The text with which an assistant has refused."""

    refusal: str

    def shown(self, place: str) -> str:
        """See `TextPart.shown`."""
        return self.refusal


class ImagePart(Struct, tag="image_url"):
    """A picture."""

    image_url: ImageUrl | str

    def shown(self, place: str) -> MediaSource:
        """See `TextPart.shown`."""
        url = self.image_url if isinstance(self.image_url, str) else self.image_url.url
        return MediaSource(f"{place}.image_url", url)


class AudioPart(Struct, tag="input_audio"):
    """A clip of sound."""

    input_audio: InputAudio

    def shown(self, place: str) -> MediaSource:
        """See `TextPart.shown`."""
        data = self.input_audio.data
        return MediaSource(f"{place}.input_audio.data", data, is_base64=True, is_sound=True)


class AudioUrlPart(Struct, tag="audio_url"):
    """A clip of sound, in vLLM's form."""

    audio_url: AudioUrl | str

    def shown(self, place: str) -> MediaSource:
        """See `TextPart.shown`."""
        url = self.audio_url if isinstance(self.audio_url, str) else self.audio_url.url
        return MediaSource(f"{place}.audio_url", url, is_sound=True)


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | AudioUrlPart


class FunctionCall(Struct, kw_only=True):
    """The call that a model requested; `arguments` is an object, or text as OpenAI has it: JSON of
    one, unless the call was cut off or the model made a mistake."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, kw_only=True):
    """A tool call of an assistant message."""

    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(Struct, kw_only=True):
    """A message of a conversation."""

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    def check(self, where: str) -> None:
        """Raises `RequestError`; `where` is the message's place in the body, such as
        `messages[0]`."""
        if self.content is None and self.role not in ("assistant", "function"):
            raise FieldError(f"{where}.content", "is missing")
        media = (ImagePart, AudioPart, AudioUrlPart)
        refused = media if self.role == "assistant" else RefusalPart
        for index, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, refused):
                raise FieldError(
                    f"{where}.content[{index}]",
                    "is of another role: an assistant's message has no pictures and no sound, and "
                    "others have no refusal",
                )

    @property
    def is_short(self) -> bool:
        """Whether `for_template` takes microseconds: it has to parse the arguments of calls."""
        return not self._calls and (
            not isinstance(self.content, list) or len(self.content) <= _FEW_PARTS
        )

    def count_argument_values(self) -> int:
        """Returns how many values, or a few more, the JSON texts of tool calls' arguments hold."""
        arguments = [call.function.arguments for call in self._calls]
        return sum(_max_values(text) for text in arguments if isinstance(text, str))

    @property
    def _calls(self) -> list[ToolCall]:
        """The calls of the message: `function_call` is the older form of a single one."""
        older = [] if self.function_call is None else [ToolCall(function=self.function_call)]
        return older + (self.tool_calls or [])

    def for_template(self, where: str = "messages") -> dict[str, Any]:
        """Returns the message as chat templates read it; `where` is its place in the body.

        A message with pictures has a list of parts (see `engine.pictures`). Of others, parts are
        joined by newlines; missing content is empty, or the refusal that stands for it. The
        developer's role becomes the system's, whose newer name it is, and a function's the tool's,
        whose older name it is: templates do not know them, and some drop roles that they do not
        know. Arguments of tool calls are objects, as transformers requires in messages.
        """
        message = {
            "role": _TEMPLATE_ROLES.get(self.role, self.role),
            "content": self._content(where) or self.refusal or "",
        }
        fields = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
            "tool_calls": [_call_for_template(call) for call in self._calls] or None,
        }
        return message | {name: value for name, value in fields.items() if value is not None}

    def _content(self, where: str) -> TemplateContent:
        if isinstance(self.content, str):
            return self.content
        return template_content(
            part.shown(f"{where}.content[{index}]") for index, part in enumerate(self.content or ())
        )


#: A message's content for a chat template: a text, or parts as `engine.pictures` reads them.
TemplateContent = str | list[dict[str, Any]]


def template_content(parts: Iterable[str | MediaSource]) -> TemplateContent:
    """Returns the content that texts, pictures and sounds make; texts alone are joined by
    newlines."""
    found = list(parts)
    texts = [part for part in found if isinstance(part, str)]
    if len(texts) == len(found):
        return "\n".join(texts)
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "audio" if part.is_sound else "image", "source": part}
        for part in found
    ]


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments
    if not isinstance(arguments, dict):
        arguments = dict(call_input(arguments or ""))
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": call.type, "function": function} | ({} if call.id is None else {"id": call.id})


def _max_values(text: str) -> int:
    if len(text) > _SHORT_ARGUMENTS:
        return count_values(text.encode("utf-8", "replace"))
    return text.count(",") + text.count("[") + text.count("{")


async def converted(contents: Iterable[Any], convert: Callable[[], T]) -> T:
    """Returns the result of `convert`, which converts messages with these contents for a template
    or for storage; where they have many parts, in a thread. A text is one part."""
    counts = accumulate(len(each) if isinstance(each, list) else 1 for each in contents)
    are_many = any(count > _FEW_MESSAGES for count in counts)
    return await asyncio.to_thread(convert) if are_many else convert()


async def template_messages(messages: Sequence[Message] | None) -> list[dict[str, Any]]:
    """Returns messages as chat templates read them; of many or long ones in a thread."""
    given = messages or ()

    def convert() -> list[dict[str, Any]]:
        return [message.for_template(f"messages[{index}]") for index, message in enumerate(given)]

    is_short = len(given) <= _FEW_MESSAGES and all(message.is_short for message in given)
    return convert() if is_short else await asyncio.to_thread(convert)

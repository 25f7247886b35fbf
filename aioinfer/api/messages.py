"""Messages of a conversation: as clients send them, and as chat templates read them; and the items
that stand for messages in the Responses API, which conversations store.

`protocol` owns the rest of a body.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, TypeVar

from msgspec import UNSET, Struct, UnsetType

from aioinfer.engine.chat_turn import call_input, join_thoughts
from aioinfer.errors import FieldError
from aioinfer.media.source import MediaSource
from aioinfer.text.json_values import count_values
from aioinfer.text.message_blocks import Block

T = TypeVar("T")
#: Shorter texts are not searched for JSON values: they cannot hold many.
_SHORT_ARGUMENTS = 1024

#: Conversations with more messages, parts and calls are converted for the template in a thread: 1
#: us a message.
_FEW_MESSAGES = 256

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
#: Roles under the names that chat templates know: "developer" is newer, "function" is older.
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


class MediaUrl(Struct, kw_only=True):
    """The URL of a picture or a clip of sound, usually a data URL. `detail` has no effect: a model
    reads pictures in its own sizes."""

    url: str


class InputAudio(Struct, kw_only=True):
    """A clip of sound, base64. `format` has no effect: the file says what it is."""

    data: str


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

    image_url: MediaUrl | str

    def shown(self, place: str) -> MediaSource:
        """See `TextPart.shown`."""
        return MediaSource(f"{place}.image_url", _url_of(self.image_url))


class AudioPart(Struct, tag="input_audio"):
    """A clip of sound."""

    input_audio: InputAudio

    def shown(self, place: str) -> MediaSource:
        """See `TextPart.shown`."""
        data = self.input_audio.data
        return MediaSource(f"{place}.input_audio.data", data, is_base64=True, is_sound=True)


class AudioUrlPart(Struct, tag="audio_url"):
    """A clip of sound, in vLLM's form."""

    audio_url: MediaUrl | str

    def shown(self, place: str) -> MediaSource:
        """See `TextPart.shown`."""
        return MediaSource(f"{place}.audio_url", _url_of(self.audio_url), is_sound=True)


def _url_of(given: MediaUrl | str) -> str:
    return given if isinstance(given, str) else given.url


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

    def count_argument_values(self) -> int:
        """Returns how many values, or a few more, the JSON texts of tool calls' arguments hold."""
        texts = [call.function.arguments for call in self.calls]
        return sum(
            text.count(",") + text.count("[") + text.count("{")
            if len(text) <= _SHORT_ARGUMENTS
            else count_values(text.encode("utf-8", "replace"))
            for text in texts
            if isinstance(text, str)
        )

    @property
    def calls(self) -> list[ToolCall]:
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
        return template_message(
            _TEMPLATE_ROLES.get(self.role, self.role),
            shown_content(self.content, f"{where}.content") or self.refusal or "",
            [
                template_call(call.function.name, call.function.arguments, call.id, call.type)
                for call in self.calls
            ],
            name=self.name,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content or self.reasoning,
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


def shown_content(
    content: str | Sequence[ContentPart | Part] | UnsetType | None, place: str
) -> TemplateContent:
    """Returns a content, whose place in the body is given, as chat templates read it."""
    if isinstance(content, str):
        return content
    parts = enumerate(content or ())
    return template_content(part.shown(f"{place}[{index}]") for index, part in parts)


def template_message(
    role: str, content: TemplateContent, calls: Sequence[dict[str, Any]], **fields: Any
) -> dict[str, Any]:
    """Returns a message as chat templates read it, with its calls if it has any, and the fields
    that are not None."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {"role": role, "content": content, **given} | ({"tool_calls": calls} if calls else {})


def template_call(
    name: Any, arguments: str | Mapping[str, Any] | None, id: Any, kind: str = "function"
) -> dict[str, Any]:
    """Returns a call as chat templates read it, with its arguments as an object; without an id if
    that is None."""
    if not isinstance(arguments, Mapping):
        arguments = call_input(arguments or "")
    function = {"name": name, "arguments": dict(arguments)}
    return {"type": kind, "function": function} | ({} if id is None else {"id": id})


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

    # the arguments of calls are parsed
    if len(given) > _FEW_MESSAGES or any(message.calls for message in given):
        return await asyncio.to_thread(convert)
    return await converted((message.content for message in given), convert)


# -------------------------------------------------------------------- items

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")

#: Items of the input by the beginnings of their ids.
_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
}  # fmt: skip


#: A text of an item that has one.
Text = str | UnsetType | None


class Part(Struct, kw_only=True):
    """A part of an item's content: text, a picture by its URL, or a clip of sound. `detail` has no
    effect."""

    type: str
    text: Text = UNSET
    image_url: Text = UNSET
    input_audio: InputAudio | UnsetType | None = UNSET
    detail: Text = UNSET
    refusal: Text = UNSET
    annotations: list[Any] | UnsetType | None = UNSET
    logprobs: list[Any] | UnsetType | None = UNSET

    def shown(self, place: str) -> str | MediaSource:
        """See `TextPart.shown`."""
        if isinstance(self.image_url, str):
            return MediaSource(f"{place}.image_url", self.image_url)
        if isinstance(self.input_audio, InputAudio):
            return AudioPart(self.input_audio).shown(place)
        return (self.refusal if self.type == "refusal" else self.text) or ""

    @classmethod
    def of(cls, block: Block) -> Part:
        """Returns the part of content that a block is."""
        if block.kind == "reasoning":
            return cls(type="reasoning_text", text=block.text)
        return output_text(block.text, block.logprobs)


Content = str | list[Part] | UnsetType | None


class Item(Struct, kw_only=True):
    """An item of a response's input or output: the fields of all types that are understood."""

    id: Text = UNSET
    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | UnsetType | None = UNSET
    summary: list[Part] | UnsetType | None = UNSET
    status: Text = UNSET
    content: Content = UNSET
    call_id: Text = UNSET
    name: Text = UNSET
    arguments: Text = UNSET
    output: Content = UNSET

    @classmethod
    def of(cls, block: Block, status: str) -> Item:
        """Returns the item of a block, with its content so far."""
        item = cls(id=item_id(block), status=status)
        if block.kind == "call":
            item.type, item.call_id = "function_call", block.id
            item.name, item.arguments = block.name, block.text
            return item
        item.content = [Part.of(block)] if block.parts else []
        if block.kind == "reasoning":
            item.type, item.summary = "reasoning", []
        else:
            item.role = "assistant"
        return item

    @property
    def is_reference(self) -> bool:
        """Whether it stands for a stored item, of which it has the id alone."""
        is_bare = self.type == "message" and self.role is UNSET and self.content is UNSET
        return isinstance(self.id, str) and (is_bare or self.type == "item_reference")


def input_items(
    items: str | Iterable[Item] | UnsetType | None,
    taken: Container[Text] = (),
    place: str = "input",
) -> list[Item]:
    """Returns items of input as they are stored and shown: complete, and each with an id of its
    own, which is not among the ids in `taken`.

    Raises `RequestError` naming the place of one that is not supported.
    """
    if isinstance(items, str):
        items = [Item(role="user", content=items)]
    found: dict[Text, Item] = {}
    for index, given in enumerate(items or ()):
        item = _completed(given, f"{place}[{index}]")
        if not item.id or item.id in found or item.id in taken:
            item.id = f"{_PREFIXES[item.type]}_{secrets.token_hex(16)}"
        found[item.id] = item
    return list(found.values())


def _completed(given: Item, place: str) -> Item:
    """Returns an item with the fields that it has by its type."""
    item = Item(id=given.id, type=given.type, status="completed")
    match given.type:
        case "message" if given.role:
            if not isinstance(given.content, str | list) and given.role != "assistant":
                raise FieldError(f"{place}.content", "is missing", "missing_required_parameter")
            kind = "output_text" if given.role == "assistant" else "input_text"
            item.role, item.content = given.role, _parts(given.content, kind, f"{place}.content")
        case "function_call" if given.name:
            item.call_id, item.name = given.call_id or given.id or "", given.name
            item.arguments = given.arguments or ""
        case "function_call_output" if isinstance(given.call_id, str):
            item.call_id, item.output = given.call_id, given.output
            if not isinstance(given.output, str | list):
                raise FieldError(f"{place}.output", "is missing", "missing_required_parameter")
            if not isinstance(given.output, str):
                item.output = _parts(given.output, "input_text", f"{place}.output")
        case "reasoning":
            item.summary = _parts(given.summary, "summary_text", f"{place}.summary")
            item.content = _parts(given.content, "reasoning_text", f"{place}.content")
        case _:
            what = f"of type {given.type[:40]!r} is not supported, or lacks a field"
            raise FieldError(place, what)
    return item


def _parts(content: Content, kind: str, place: str) -> list[Part]:
    """Returns the parts of a content; all parts with a text are of one kind."""
    if isinstance(content, str):
        content = [Part(type=kind, text=content)]
    found: list[Part] = []
    for index, part in enumerate(content or ()):
        where = f"{place}[{index}]"
        if part.type == "input_image" and kind == "input_text":
            if not isinstance(part.image_url, str):
                raise FieldError(f"{where}.image_url", "must be a URL; files are not stored")
            found.append(Part(type="input_image", image_url=part.image_url, detail="auto"))
        elif part.type == "input_audio" and kind == "input_text":
            if not isinstance(part.input_audio, InputAudio):
                raise FieldError(f"{where}.input_audio", "is missing")
            found.append(Part(type="input_audio", input_audio=part.input_audio))
        elif part.type not in _TEXT_PARTS:
            raise FieldError(where, f"of type {part.type[:40]!r} is not supported")
        elif part.type == "refusal":
            found.append(Part(type="refusal", refusal=part.refusal or part.text or ""))
        elif not isinstance(part.text, str):
            raise FieldError(f"{where}.text", "is missing", "missing_required_parameter")
        elif kind == "output_text":
            found.append(output_text(part.text))
        else:
            found.append(Part(type=kind, text=part.text))
    return found


def output_text(text: str, logprobs: Sequence[Any] = ()) -> Part:
    """Returns the part of an answer that a text is."""
    return Part(type="output_text", text=text, annotations=[], logprobs=list(logprobs))


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Returns stored items as the messages that chat templates read. Reasoning, texts and calls of
    the assistant that follow each other are one message."""
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if item.type == "message" and item.role != "assistant":
            role = "user" if item.role == "user" else "system"
            content = shown_content(item.content, f"{place}.content")
            messages.append({"role": role, "content": content})
        elif item.type == "function_call_output":
            content = shown_content(item.output, f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        else:
            _join(messages, item)
    return messages


def _join(messages: list[dict[str, Any]], item: Item) -> None:
    """Adds an item of the assistant's to its message at the end, or begins one."""
    last = messages[-1] if messages else {}
    if (
        last.get("role") != "assistant"
        or (item.type != "function_call" and "tool_calls" in last)
        or (item.type == "message" and last["content"])
    ):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if item.type == "function_call":
        call = template_call(item.name, item.arguments or "", item.call_id or "")
        last.setdefault("tool_calls", []).append(call)
    elif item.type == "reasoning":
        join_thoughts(last, str(shown_content(item.content or item.summary, "")))
    else:
        last["content"] = shown_content(item.content, "")


def item_id(block: Block) -> str:
    """Returns the id of the item that a block is."""
    return f"fc_{block.id.removeprefix('call_')}" if block.kind == "call" else block.id

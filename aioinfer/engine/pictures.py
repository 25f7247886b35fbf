"""Pictures of conversations, or clips of sound, which take the same way: from what a message names
to the prompt that the engine runs.

In messages, as chat templates read them, a picture is a part of a list content: `{"type": "image",
"source": MediaSource}`, which the APIs make; OpenAI's own form, `{"type": "image_url", "image_url":
{"url": ...}}`, is read as well. Of a sound the types are "audio", OpenAI's "input_audio" with
`{"data": ...}`, and "audio_url" with `{"url": ...}`. `PictureReader.read` takes them out, reads and
decodes them, in threads of their own, and `PictureReader.place` finds their places in the encoded
prompt.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any

from aioinfer.config import Config
from aioinfer.errors import FieldError, OverloadedError, RequestError
from aioinfer.features.pictures.planning import MAX_PICTURE_BYTES
from aioinfer.features.pictures.prompt import PromptPictures, place_pictures
from aioinfer.media.picture import decode_picture
from aioinfer.media.sound import decode_sound
from aioinfer.media.source import MediaReader, MediaSource
from aioinfer.models.source import SAMPLE_RATE
from aioinfer.models.vision.format import U8, PictureError, PictureFormat, ProcessedPicture
from aioinfer.text.tokenizer import Tokenizer

#: Pictures that are decoded at a time: each takes some hundred megabytes at its worst.
_THREADS = 2
#: Bytes of pictures and clips that all requests may have together, as the towers take them.
_MAX_HELD_BYTES = 4 * 2**30
#: Bytes of the pictures that are kept for later requests: forty of 1 024 x 1 024 pixels.
_MAX_RECENT_BYTES = 128 * 2**20
#: The types of parts, and what they are for chat templates.
_KINDS = {
    "image": "image", "image_url": "image", "input_image": "image", "audio": "audio",
    "input_audio": "audio", "audio_url": "audio",
}  # fmt: skip


class _RecentPictures:
    """Processed pictures by their files' contents, the least recently used go first: each turn of a
    conversation sends its pictures again, and decoding one takes as long as a prefill of its
    tokens.

    Attributes:
        nbytes: of their pixels.
    """

    _Key = tuple[PictureFormat, bytes]

    def __init__(self) -> None:
        self._pictures: OrderedDict[_RecentPictures._Key, ProcessedPicture] = OrderedDict()
        self.nbytes = 0

    @staticmethod
    def key_of(format: PictureFormat, data: bytes) -> _Key:
        """Returns the key of a file as a model with this format reads it."""
        return format, blake2b(data, digest_size=32).digest()

    def get(self, key: _Key) -> ProcessedPicture | None:
        """Returns a picture, which becomes the most recently used; None if it is not there."""
        if key in self._pictures:
            self._pictures.move_to_end(key)
        return self._pictures.get(key)

    def add(self, key: _Key, picture: ProcessedPicture) -> None:
        """Adds a picture, unless another request has added it; others make room, if it fits at
        all."""
        if key in self._pictures or picture.pixels.nbytes > _MAX_RECENT_BYTES:
            return
        self._pictures[key] = picture
        self.nbytes += picture.pixels.nbytes
        while self.nbytes > _MAX_RECENT_BYTES:
            self.nbytes -= self._pictures.popitem(last=False)[1].pixels.nbytes


class PicturePrompt(list[int]):
    """Token ids of a prompt with pictures. It is a list, so that what counts and echoes a prompt
    need not know of pictures; a part of it is a list without them.

    Attributes:
        pictures: in the prompt.
    """

    def __init__(self, ids: Sequence[int], pictures: PromptPictures):
        super().__init__(ids)
        self.pictures = pictures


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a conversation has pictures."""
    return any(True for _ in _picture_parts(messages))


def first_source(messages: Sequence[Mapping[str, Any]]) -> MediaSource:
    """Returns the first picture of a conversation. Raises `FieldError` for one without a source."""
    place, part = next(_picture_parts(messages))
    return _source_of(part, place)


def not_read(source: MediaSource, model: str = "the model") -> FieldError:
    """Returns the error of a picture or a sound for a model that does not take it."""
    if source.is_sound:
        return FieldError(source.place, f"is a sound, and {model} hears none")
    return FieldError(source.place, f"is a picture, and {model} reads no pictures")


def _picture_parts(
    messages: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the place and the part of each picture."""
    for number, message in enumerate(messages):
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") in _KINDS:
                yield f"messages[{number}].content[{index}]", part


def _source_of(part: Mapping[str, Any], place: str) -> MediaSource:
    source = part.get("source")
    if isinstance(source, MediaSource):
        return source
    is_sound = _KINDS[part["type"]] == "audio"
    if is_sound and "audio_url" not in part:
        sound = part.get("input_audio")
        data = sound.get("data") if isinstance(sound, Mapping) else None
        if not isinstance(data, str):
            raise FieldError(f"{place}.input_audio", "must hold a sound as base64 in 'data'")
        return MediaSource(f"{place}.input_audio.data", data, is_base64=True, is_sound=True)
    name, what = ("audio_url", "a sound") if is_sound else ("image_url", "a picture")
    url = part.get(name, part.get("image"))
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise FieldError(f"{place}.{name}", f"must name {what} by its URL")
    return MediaSource(f"{place}.{name}", url, is_sound=is_sound)


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages as chat templates read them: of a picture or a sound its kind alone."""

    def shown(part: Any) -> Any:
        kind = _KINDS.get(part.get("type") or "") if isinstance(part, Mapping) else None
        if kind == "audio":  # of which Qwen2-Audio's first template looks for the key
            return {"type": kind, kind: ""}
        return part if kind is None else {"type": kind}

    return [
        {**message, "content": [shown(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _as_texts(messages: Sequence[Mapping[str, Any]], mark: str) -> list[dict[str, Any]]:
    """Returns messages whose contents are texts, with `mark` for each picture."""

    def shown(part: Any) -> str:
        if not isinstance(part, Mapping):
            return str(part)
        return mark if part.get("type") in _KINDS else str(part.get("text", ""))

    return [
        {**message, "content": "".join(map(shown, message["content"]))}
        if isinstance(message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def parts_of_texts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages whose contents are lists of parts, for chat templates that read nothing
    else."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


class PictureReader:
    """Reads the pictures of conversations for one model.

    Args:
        format: of the model's pictures.
        config: the whole configuration.
        tokenizer: the model's.
    """

    def __init__(self, format: PictureFormat, config: Config, tokenizer: Tokenizer):
        self._format, self._config = format, config.media
        scheduler = config.scheduler
        # the other requests of a step may each take a token of its budget
        self._max_whole = max(0, scheduler.max_num_batched_tokens - scheduler.max_num_seqs)
        self._reader = MediaReader(config.media)
        self._text_of = tokenizer.special_text
        self._marker = self._text_of(format.marker_id)
        self._threads = ThreadPoolExecutor(_THREADS, "pictures")
        self._held: list[weakref.ref[U8]] = []  # what requests have, while any refers to it
        self._recent = _RecentPictures()
        #: whether the chat template reads contents that are lists alone
        self.wants_parts = _wants_parts(tokenizer)
        self._writes_marker = _writes(tokenizer, [{"type": "image"}], self._marker)
        self._around = _around(tokenizer, format)

    def shutdown(self) -> None:
        """Drops work that has not begun. Does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def sources(self, messages: Sequence[Mapping[str, Any]]) -> list[MediaSource]:
        """Returns where the pictures of a conversation come from, in their order. Raises
        `RequestError` for too many, and for those that the model does not read."""
        sources = [_source_of(part, place) for place, part in _picture_parts(messages)]
        self.check(sources)
        return sources

    def check(self, sources: Sequence[MediaSource]) -> None:
        """Raises `RequestError` for too many pictures, and for those that the model does not
        read."""
        if len(sources) > self._config.max_pictures:
            raise FieldError(
                sources[self._config.max_pictures].place,
                f"is one too many: {self._config.max_pictures} are allowed in a request "
                "(media.max_pictures)",
            )
        for source in sources:
            if source.is_sound != self._format.hears:
                raise not_read(source)

    async def read(self, sources: Sequence[MediaSource]) -> list[ProcessedPicture]:
        """Returns the pictures of a prompt, in their order. Raises `RequestError`, and
        `OverloadedError` where other requests have too many."""
        found, format = [], self._format.among(len(sources))
        for source in sources:  # one after the other: a request does not fill memory by itself
            if self.held_bytes >= _MAX_HELD_BYTES:
                raise OverloadedError("other requests' pictures use all memory; try again later")
            data = await self._reader.read(source)
            key = await asyncio.to_thread(self._recent.key_of, format, data)
            picture = self._recent.get(key)
            if picture is None:
                run = asyncio.get_running_loop().run_in_executor
                picture = await run(self._threads, self._process, format, data, source.place)
                self._held.append(weakref.ref(picture.pixels))
                self._recent.add(key, picture)
            found.append(picture)
        return found

    @property
    def held_bytes(self) -> int:
        """Bytes of the pictures that have not been freed, beyond those that are kept for later
        requests. The feature of pictures and whoever has a prompt let them go at the end of a
        request; nothing waits for the collection of garbage."""
        alive = [(held, pixels.nbytes) for held in self._held if (pixels := held()) is not None]
        self._held = [held for held, _ in alive]
        return sum(nbytes for _, nbytes in alive) - self._recent.nbytes

    def _process(self, format: PictureFormat, data: bytes, place: str) -> ProcessedPicture:
        picture: Any
        if format.hears:
            longest = MAX_PICTURE_BYTES // (4 * SAMPLE_RATE)
            picture = decode_sound(data, SAMPLE_RATE, self._config, place, longest=longest)
        else:
            picture = decode_picture(data, self._config, place)
        try:
            found = format.process(picture)
        except PictureError as error:
            raise FieldError(place, f"cannot be read by this model: {error}") from error
        if found.num_embeddings > self._config.cache_embeddings:
            raise FieldError(
                place,
                f"takes {found.num_embeddings} tokens, and at most {self._config.cache_embeddings} "
                "fit",
            )
        if found.pixels.nbytes > MAX_PICTURE_BYTES:
            raise FieldError(place, "has too many pixels in the sizes in which this model reads it")
        if self._format.is_bidirectional and found.num_embeddings > self._max_whole:
            raise FieldError(
                place,
                f"takes {found.num_embeddings} tokens of one step, and at most {self._max_whole} "
                "fit (scheduler.max_num_batched_tokens less scheduler.max_num_seqs)",
            )
        return found

    def for_template(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], str]:
        """Returns the messages as the chat template reads them, and what stands for each picture in
        the rendered text: the marker that the template writes, or, for one that knows texts alone,
        a random text, which no client can know."""
        if self.wants_parts:
            messages = parts_of_texts(messages)
        if self._writes_marker or self._format.behind is None:
            return for_template(messages), self._marker
        mark = secrets.token_hex(16)
        return _as_texts(messages, mark + self._format.behind), mark

    def expand(self, text: str, pictures: Sequence[ProcessedPicture], marker: str) -> str:
        """Returns a rendered conversation, in which no text of a client has special tokens, with
        each picture's text in the place of its marker. Raises `RequestError` if the chat template
        has written more or fewer markers than there are pictures."""
        pieces = self._between(text, len(pictures), marker)
        found = [pieces[0]]
        for picture, piece in zip(pictures, pieces[1:], strict=True):
            found += self._format.text(picture, self._text_of), piece
        return "".join(found)

    def expand_text(self, text: str, pictures: Sequence[ProcessedPicture], marker: str) -> str:
        """Returns a text that no chat template has written as `expand` does, with what the template
        writes around a picture, unless the text has that itself."""
        mark = secrets.token_hex(16)
        text = text.replace(marker.join(self._around), marker)
        return self.expand(text.replace(marker, mark.join(self._around)), pictures, mark)

    def mark(self, text: str, count: int, marker: str, shown: str) -> str:
        """Returns a rendered conversation as `expand`, with `shown` for each of its pictures, and
        for what the template writes around it: `expand_text` takes it."""
        return shown.join(self._between(text, count, marker.join(self._around)))

    def _between(self, text: str, count: int, marker: str) -> list[str]:
        """Returns the texts before, between and behind so many pictures. Raises `RequestError`."""
        pieces = text.split(marker)
        if len(pieces) != count + 1:
            what = "clips of sound" if self._format.hears else "pictures"
            raise RequestError(
                f"the conversation has {count} {what}, and the chat template has written "
                f"places for {len(pieces) - 1}",
                param="messages",
            )
        return pieces

    def place(self, ids: Sequence[int], pictures: Sequence[ProcessedPicture]) -> PicturePrompt:
        """Returns the prompt of an expanded conversation that was encoded. Raises
        `RequestError`."""
        try:
            return PicturePrompt(*place_pictures(ids, pictures, self._format))
        except ValueError as error:
            message = f"the prompt's pictures cannot be placed: {error}"
            raise RequestError(message, param="prompt") from error


def _wants_parts(tokenizer: Tokenizer) -> bool:
    """Whether the chat template shows a text in a list of parts, and not a text by itself."""
    probe = "probe of the template"
    part = {"type": "text", "text": probe}
    return not _writes(tokenizer, probe, probe) and _writes(tokenizer, [part], probe)


def _around(tokenizer: Tokenizer, format: PictureFormat) -> tuple[str, str]:
    """Returns the special tokens that the chat template writes right before and behind the marker
    of a picture between texts, as their text."""
    probe = "probe of the template"
    text, part = {"type": "text", "text": probe}, {"type": "audio" if format.hears else "image"}
    messages = for_template([{"role": "user", "content": [text, part, text]}])
    try:
        rendered = tokenizer.render_chat(messages).text if tokenizer.has_chat_template else ""
    except RequestError:
        return "", ""
    ids = tokenizer.encode("".join(rendered.split(probe)[1:2]), False)
    if format.marker_id not in ids:  # the picture may be elsewhere
        return "", ""
    start = at = ids.index(format.marker_id)
    end = at + 1
    while start and ids[start - 1] in tokenizer.special_ids:
        start -= 1
    while end < len(ids) and ids[end] in tokenizer.special_ids:
        end += 1
    parts = ids[start:at], ids[at + 1 : end]
    before, behind = ("".join(map(tokenizer.special_text, part)) for part in parts)
    return before, behind


def _writes(tokenizer: Tokenizer, content: Any, text: str) -> bool:
    """Whether the chat template writes a text for the content of a user's message."""
    if not tokenizer.has_chat_template:
        return False
    try:
        return text in tokenizer.render_chat([{"role": "user", "content": content}]).text
    except RequestError:
        return False

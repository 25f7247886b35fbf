"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`: what is said in a file.

Each part of a long file is a prompt of one `Generation`; the parts are computed together, and their
texts come one behind the other.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Literal

from aiohttp import BodyPartReader, web
from msgspec import UNSET, Meta, Struct, UnsetType, field

from aioinfer.api.admission import admit
from aioinfer.api.context import (
    MODELS,
    RATE_LIMITER,
    REQUEST_BODIES,
    HeldBody,
    chunks_of,
    frontend_of,
    note_body,
    receive_form,
)
from aioinfer.api.decoding import Body
from aioinfer.api.delivery import submitted
from aioinfer.api.errors import error_event, json_response
from aioinfer.api.event_stream import EventStream, event_stream
from aioinfer.api.generation import Generation, data_event
from aioinfer.api.http.logs import request_id
from aioinfer.engine.output import Delta, RequestOutput, collect
from aioinfer.engine.transcript import Transcript, mean_logprob
from aioinfer.engine.transcription import Segment, language_names
from aioinfer.engine.word_times import F32
from aioinfer.errors import FieldError

#: The text of a timestamp, which a model may write although it should not.
_TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
#: Formats of a reply whose text is in pieces with their times.
_WITH_TIMES = ("verbose_json", "srt", "vtt")


class TranscriptionForm(Body, kw_only=True):
    """The fields of `/v1/audio/transcriptions` and `translations`, beside `file`."""

    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stream: bool = False
    timestamp_granularities: list[Literal["segment", "word"]] = field(default_factory=list)
    chunking_strategy: str | None = None

    @property
    def has_times(self) -> bool:
        """Whether the reply has the times of pieces of the text."""
        return self.response_format in _WITH_TIMES

    @property
    def granularities(self) -> Sequence[str]:
        """Of what the reply in the format `verbose_json` has the times."""
        return self.timestamp_granularities or ["segment"]

    def check(self) -> None:
        """See `Body.check`."""
        if self.stream and self.response_format not in ("json", "text"):
            raise FieldError("stream", "needs the response_format 'json' or 'text'")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise FieldError("timestamp_granularities", "needs the response_format 'verbose_json'")


class DurationUsage(Struct, kw_only=True):
    """What a transcript counts as: the seconds of the sound."""

    type: Literal["duration"] = "duration"
    seconds: int


class Transcription(Struct, kw_only=True):
    """The reply in the format `json`."""

    text: str
    usage: DurationUsage


class TranscriptDelta(Struct, kw_only=True, tag="transcript.text.delta"):
    """An event of a stream: more of the text."""

    delta: str


class TranscriptDone(Struct, kw_only=True, tag="transcript.text.done"):
    """The last event of a stream: all of the text."""

    text: str
    usage: DurationUsage


class TranscribedSegment(Struct, kw_only=True):
    """A piece of a transcript, in seconds from the beginning; `avg_logprob` and
    `compression_ratio` are of the part of the file that was heard at once, as Whisper's own."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None = None


class TranscribedWord(Struct, kw_only=True):
    """A word, in seconds from the beginning."""

    word: str
    start: float
    end: float


class VerboseTranscription(Struct, kw_only=True):
    """The reply in the format `verbose_json`."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[TranscribedSegment] | UnsetType = UNSET
    words: list[TranscribedWord] | UnsetType = UNSET
    usage: DurationUsage


async def transcribe(request: web.Request) -> web.StreamResponse:
    """Writes down what is said in a file."""
    return await _answer(request, "transcribe")


async def translate(request: web.Request) -> web.StreamResponse:
    """Writes down in English what is said in a file in another language."""
    return await _answer(request, "translate")


async def _answer(
    request: web.Request, task: Literal["transcribe", "translate"]
) -> web.StreamResponse:
    """Answers a form. Raises what `read_body`, `admit`, `submitted` and `collect` do."""
    if all("audio" not in each.input_modalities for each in request.app[MODELS]):
        frontend_of(request).require_transcriber()  # refuses before anything is received
    with HeldBody(request.app[REQUEST_BODIES]) as held:
        form, data = await _receive(request, held)
        transcriber = frontend_of(request).require_transcriber()
        admit(request, None)
        recording = await transcriber.read(data, "file")
        del data
    name = f"audio-{request_id(request)}"
    with transcriber.holding(recording):
        transcript = Transcript(
            transcriber=transcriber,
            submit=lambda prompts, params: submitted(request, Generation(name, prompts, params)),
            recording=recording,
            task=task,
            language=None if form.language is None else transcriber.language_of(form.language),
            params=transcriber.params(
                form.temperature, has_times=form.has_times, logprobs=not form.stream
            ),
            has_times=form.has_times,
            max_len=frontend_of(request).max_model_len,
        )
        prompts = await transcript.prompts(form.prompt)
        async with transcript.submit(prompts, transcript.params) as outputs:
            if form.stream:
                return await _stream(request, transcript, outputs)
            deltas = await collect(outputs)
        deltas = await transcript.complete(deltas)
        weights = await transcript.align(deltas) if "word" in form.granularities else None
        return await asyncio.to_thread(_whole, form, transcript, deltas, weights)


async def _receive(request: web.Request, held: HeldBody) -> tuple[TranscriptionForm, bytes]:
    """Returns the fields of a form, and its file. Raises `RequestError`."""
    await request.app[RATE_LIMITER].enter()
    limit = max(each.config.media.max_bytes for each in request.app[MODELS])

    async def take(part: BodyPartReader) -> None:
        async for chunk in chunks_of(part):
            held.add(chunk, limit)

    form = await receive_form(request, TranscriptionForm, take)
    form.check()
    note_body(request, form)
    return form, await asyncio.to_thread(b"".join, held.take())


async def _stream(
    request: web.Request, transcript: Transcript, outputs: Sequence[RequestOutput]
) -> web.StreamResponse:
    """Sends the texts of all parts, in their order, as they come."""
    response, texts = EventStream(request, outputs), list[str]()
    async with event_stream(request, response, partial(error_event, path=request.path)):
        for output in outputs:  # one after the other
            async for delta in output:
                text = _TIMESTAMP.sub("", delta.text)
                text = text if texts else text.lstrip()
                if text:
                    texts.append(text)
                    await response.write(data_event(TranscriptDelta(delta=text)))
        done = TranscriptDone(text="".join(texts), usage=_usage(transcript))
        await response.write(data_event(done))
    return response


# ---------------------------------------------------------------- in one piece


def _whole(
    form: TranscriptionForm,
    transcript: Transcript,
    deltas: Sequence[Delta],
    weights: Sequence[F32] | None,
) -> web.Response:
    """Returns the reply in the format that the form names. `weights`: of the words' times, if
    these are wanted."""
    if not form.has_times:
        text = _TIMESTAMP.sub("", "".join(delta.text for delta in deltas)).strip()
        if form.response_format == "text":
            return web.Response(text=f"{text}\n")
        return json_response(Transcription(text=text, usage=_usage(transcript)))
    segments = [
        segment
        for part, delta in enumerate(deltas)
        for segment in transcript.transcriber.segments(transcript.recording, part, delta.token_ids)
    ]
    match form.response_format:
        case "srt":
            return web.Response(text="".join(_srt(segments)), content_type="application/x-subrip")
        case "vtt":
            return web.Response(text="".join(_vtt(segments)), content_type="text/vtt")
    written = "en" if transcript.task == "translate" else transcript.language or "en"
    reply = VerboseTranscription(
        task=transcript.task,
        language=language_names().get(written, written),
        duration=round(transcript.recording.duration, 2),
        text="".join(segment.text for segment in segments).strip(),
        usage=_usage(transcript),
    )
    if "segment" in form.granularities:
        reply.segments = [
            _described(transcript, number, segment, deltas[segment.part], form.temperature)
            for number, segment in enumerate(segments)
        ]
    if weights is not None:
        reply.words = [
            TranscribedWord(word=each.text, start=round(each.start, 2), end=round(each.end, 2))
            for part, (delta, own) in enumerate(zip(deltas, weights, strict=True))
            for each in transcript.transcriber.words(
                transcript.recording, part, delta.token_ids, own, written
            )
        ]
    return json_response(reply)


def _described(
    transcript: Transcript, number: int, segment: Segment, delta: Delta, temperature: float
) -> TranscribedSegment:
    return TranscribedSegment(
        id=number,
        seek=int(transcript.recording.starts[segment.part] * 100),
        start=round(segment.start, 2),
        end=round(segment.end, 2),
        text=segment.text,
        tokens=segment.tokens,
        temperature=temperature,
        avg_logprob=mean_logprob(delta),
        compression_ratio=transcript.compression(delta),
        no_speech_prob=transcript.no_speech.get(segment.part),
    )


def _usage(transcript: Transcript) -> DurationUsage:
    return DurationUsage(seconds=math.ceil(transcript.recording.duration))


def _srt(segments: Sequence[Segment]) -> Iterator[str]:
    for number, each in enumerate(segments, 1):
        times = f"{_clock(each.start, ',')} --> {_clock(each.end, ',')}"
        yield f"{number}\n{times}\n{each.text.strip()}\n\n"


def _vtt(segments: Sequence[Segment]) -> Iterator[str]:
    yield "WEBVTT\n\n"
    for each in segments:
        text = each.text.strip().replace("-->", "->")
        yield f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{text}\n\n"


def _clock(seconds: float, point: str) -> str:
    """Returns a time as 00:00:00 with milliseconds behind `point`."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}{point}{milliseconds:03}"

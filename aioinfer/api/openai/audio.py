"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`: what is said in a file.

Each part of a long file is a prompt of one `Generation`; the parts are computed together, and their
texts come one behind the other.
"""

from __future__ import annotations

import asyncio
import math
import re
import zlib
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

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
from aioinfer.api.delivery import collect, submitted
from aioinfer.api.errors import error_event, json_response
from aioinfer.api.event_stream import EventStream
from aioinfer.api.generation import Generation, data_event
from aioinfer.api.http.logs import request_id
from aioinfer.engine.output import Delta
from aioinfer.engine.sources import SourcePrompt
from aioinfer.engine.transcription import Recording, Segment, Transcriber, language_names
from aioinfer.engine.word_times import F32
from aioinfer.errors import FieldError, NotReadyError
from aioinfer.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aioinfer.engine.output import RequestOutput

#: The text of a timestamp, which a model may write although it should not.
_TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
#: How often the rest of a part is transcribed that its transcript leaves out.
_MAX_RESTS = 8
#: Formats of a reply whose text is in pieces with their times.
_WITH_TIMES = ("verbose_json", "srt", "vtt")
#: A part's text is left out where the probability of no speech is above the last, and its
#: mean log-probability is below the first or it can be compressed more than the second says: the
#: defaults of OpenAI's program for Whisper.
_MIN_LOGPROB, _MAX_COMPRESSION, _MAX_NO_SPEECH = -1.0, 2.4, 0.6


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


async def _answer(request: web.Request, task: str) -> web.StreamResponse:
    """Answers a form. Raises what `read_body`, `admit`, `submitted` and `collect` do."""
    if all("audio" not in each.input_modalities for each in request.app[MODELS]):
        frontend_of(request).require_transcriber()  # refuses before anything is received
    with request.app[REQUEST_BODIES].hold() as held:
        form, data = await _receive(request, held)
        transcriber = frontend_of(request).require_transcriber()
        admit(request, None)
        recording = await transcriber.read(data, "file")
        del data
    with transcriber.holding(recording):
        transcript = Transcript(request, form, task, transcriber, recording)
        return await transcript.answer()


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


class Transcript:
    """One request's transcript.

    Attributes:
        language: the code of the language that is spoken, once it is known.
    """

    def __init__(
        self,
        request: web.Request,
        form: TranscriptionForm,
        task: str,
        transcriber: Transcriber,
        recording: Recording,
    ):
        self._request, self._form, self._task = request, form, task
        self._transcriber, self._recording = transcriber, recording
        given = form.language
        self.language = None if given is None else transcriber.language_of(given)
        self._params = transcriber.params(
            form.temperature, has_times=form.has_times, logprobs=not form.stream
        )
        #: of parts whose text is doubtful: the probability of no speech
        self._no_speech: dict[int, float] = {}

    async def answer(self) -> web.StreamResponse:
        """Returns the reply, or sends it as a stream."""
        form, transcriber = self._form, self._transcriber
        if self.language is None:
            self.language = await self._detect() if transcriber.detects_language else "en"
        prompts = transcriber.prompts(
            self._recording, self.language, self._task, text=form.prompt, has_times=form.has_times,
            max_len=frontend_of(self._request).max_model_len,
        )  # fmt: skip
        async with submitted(self._request, self._generation(prompts, self._params)) as outputs:
            if form.stream:
                return await self._stream(outputs)
            deltas = await collect(outputs)
        if form.has_times:
            deltas = await self._with_rests(deltas)
        deltas = await self._without_silence(deltas)
        weights = await self._align(deltas) if "word" in self._granularities else None
        return await asyncio.to_thread(self._whole, deltas, weights)

    @property
    def _granularities(self) -> Sequence[str]:
        """Of what the reply in the format `verbose_json` has the times."""
        return self._form.timestamp_granularities or ["segment"]

    async def _with_rests(self, deltas: list[Delta]) -> list[Delta]:
        """Returns the transcripts of all parts, after what they leave out has become further parts
        (`Transcriber.with_rests`), again and again."""
        parts: Container[int] = range(len(deltas))
        for _ in range(_MAX_RESTS):
            recording, numbers = await asyncio.to_thread(
                self._transcriber.with_rests,
                self._recording,
                [delta.token_ids for delta in deltas],
                parts,
            )
            if not numbers:
                break
            rests = replace(recording, parts=[recording.parts[number] for number in numbers])
            prompts = self._transcriber.prompts(
                rests, self.language or "en", self._task, text="", has_times=True,
                max_len=frontend_of(self._request).max_model_len,
            )  # fmt: skip
            found = await self._run(prompts, self._params)
            for number, delta in zip(numbers, found, strict=True):
                deltas.insert(number, delta)
            self._recording, parts = recording, numbers
        return deltas

    async def _without_silence(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Returns the transcripts of all parts, empty where the text is doubtful and the model
        finds no speech, as in OpenAI's own program for Whisper."""
        if self._transcriber.tokens.no_speech is None:
            return list(deltas)
        doubtful = await asyncio.to_thread(self._doubtful, deltas)
        if not doubtful:
            return list(deltas)
        prompts, params = self._transcriber.presence(self._recording, doubtful)
        found = await self._run(prompts, params)
        for part, delta in zip(doubtful, found, strict=True):
            if delta.logprobs:
                ((_, logprob),) = delta.logprobs[0].top
                self._no_speech[part] = math.exp(logprob)
        return [
            replace(delta, text="", token_ids=[], logprobs=[])
            if self._no_speech.get(part, 0.0) > _MAX_NO_SPEECH
            else delta
            for part, delta in enumerate(deltas)
        ]

    def _doubtful(self, deltas: Sequence[Delta]) -> list[int]:
        """Returns the parts whose transcript is unlikely or repeats itself, or whose sound is
        hardly any."""
        return [
            part
            for part, delta in enumerate(deltas)
            if _mean_logprob(delta) < _MIN_LOGPROB
            or self._compression(delta) > _MAX_COMPRESSION
            or self._transcriber.is_faint(self._recording, part)
        ]

    def _compression(self, delta: Delta) -> float:
        text = self._transcriber.text_of(delta.token_ids).encode()
        return len(text) / max(1, len(zlib.compress(text)))

    async def _align(self, deltas: Sequence[Delta]) -> list[F32]:
        """Returns how much the tokens of each part attend to its sound. Raises `NotReadyError` if
        that was cut short."""
        prompts, params = self._transcriber.alignment(
            self._recording, self.language or "en", self._task,
            [delta.token_ids for delta in deltas], frontend_of(self._request).max_model_len,
        )  # fmt: skip
        async with submitted(self._request, self._generation(prompts, params)) as outputs:
            await collect(outputs)
            found = [output.features(0).get("alignment") for output in outputs]
        weights = [each for each in found if each is not None]
        if len(weights) < len(found):  # as after /pause?mode=abort
            raise NotReadyError("the request was ended before the times of its words were found")
        return weights

    async def _run(
        self, prompts: Sequence[SourcePrompt], params: SamplingParams
    ) -> Sequence[Delta]:
        """Returns what the model writes for each prompt. Raises what `submitted` and `collect`
        do."""
        async with submitted(self._request, self._generation(prompts, params)) as outputs:
            return await collect(outputs)

    def _generation(self, prompts: Sequence[SourcePrompt], params: SamplingParams) -> Generation:
        return Generation(f"audio-{request_id(self._request)}", prompts, params, self._form.stream)

    async def _detect(self) -> str:
        """Returns the language of the beginning. The encoder's output is kept for what follows."""
        prompt, params = self._transcriber.detection(self._recording)
        (delta,) = await self._run([prompt], params)
        return self._transcriber.detected(delta.token_ids[0] if delta.token_ids else -1)

    @property
    def _usage(self) -> DurationUsage:
        return DurationUsage(seconds=math.ceil(self._recording.duration))

    async def _stream(self, outputs: Sequence[RequestOutput]) -> web.StreamResponse:
        """Sends the texts of all parts, in their order, as they come."""
        failure = partial(error_event, path=self._request.path)
        texts: list[str] = []
        async with EventStream(self._request, outputs, failure) as response:
            async for delta in _in_order(outputs):
                text = _TIMESTAMP.sub("", delta.text)
                text = text if texts else text.lstrip()
                if text:
                    texts.append(text)
                    await response.write(data_event(TranscriptDelta(delta=text)))
            done = TranscriptDone(text="".join(texts), usage=self._usage)
            await response.write(data_event(done))
        return response

    # ---------------------------------------------------------------- in one piece

    def _whole(self, deltas: Sequence[Delta], weights: Sequence[F32] | None) -> web.Response:
        """Returns the reply in the format that the form names. `weights`: of the words' times, if
        these are wanted."""
        form = self._form
        if form.has_times:
            return self._with_times(deltas, weights)
        text = _TIMESTAMP.sub("", "".join(delta.text for delta in deltas)).strip()
        if form.response_format == "text":
            return web.Response(text=f"{text}\n")
        return json_response(Transcription(text=text, usage=self._usage))

    def _with_times(self, deltas: Sequence[Delta], weights: Sequence[F32] | None) -> web.Response:
        segments = [
            segment
            for part, delta in enumerate(deltas)
            for segment in self._transcriber.segments(self._recording, part, delta.token_ids)
        ]
        match self._form.response_format:
            case "srt":
                return web.Response(
                    text="".join(_srt(segments)), content_type="application/x-subrip"
                )
            case "vtt":
                return web.Response(text="".join(_vtt(segments)), content_type="text/vtt")
        language = self.language or "en"
        written = "en" if self._task == "translate" else language
        reply = VerboseTranscription(
            task=self._task,
            language=language_names().get(written, written),
            duration=round(self._recording.duration, 2),
            text="".join(segment.text for segment in segments).strip(),
            usage=self._usage,
        )
        if "segment" in self._granularities:
            reply.segments = [self._described(i, each, deltas) for i, each in enumerate(segments)]
        if weights is not None:
            reply.words = [
                TranscribedWord(word=each.text, start=round(each.start, 2), end=round(each.end, 2))
                for part, (delta, own) in enumerate(zip(deltas, weights, strict=True))
                for each in self._transcriber.words(
                    self._recording, part, delta.token_ids, own, written
                )
            ]
        return json_response(reply)

    def _described(
        self, number: int, segment: Segment, deltas: Sequence[Delta]
    ) -> TranscribedSegment:
        delta = deltas[segment.part]
        return TranscribedSegment(
            id=number,
            seek=int(self._recording.starts[segment.part] * 100),
            start=round(segment.start, 2),
            end=round(segment.end, 2),
            text=segment.text,
            tokens=segment.tokens,
            temperature=self._form.temperature,
            avg_logprob=_mean_logprob(delta),
            compression_ratio=self._compression(delta),
            no_speech_prob=self._no_speech.get(segment.part),
        )


async def _in_order(outputs: Sequence[RequestOutput]) -> AsyncIterator[Delta]:
    """Yields the deltas of outputs, all of one before those of the next."""
    for output in outputs:
        async for delta in output:
            yield delta


def _mean_logprob(delta: Delta) -> float:
    found = [each.logprob for each in delta.logprobs or ()]
    return sum(found) / max(1, len(found))


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

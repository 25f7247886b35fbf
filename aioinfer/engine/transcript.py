"""The transcript of one recording: the requests that are made for it, one after the other, and what
is kept of their outputs.

The rules are those of OpenAI's own program for Whisper. `Transcriber` makes the prompts, whoever
owns a `Transcript` computes them.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Literal

from aioinfer.engine.output import Delta, RequestOutput, collect
from aioinfer.engine.sources import SourcePrompt
from aioinfer.engine.transcription import Recording, Transcriber
from aioinfer.engine.word_times import F32
from aioinfer.errors import NotReadyError
from aioinfer.sampling_params import SamplingParams

#: Computes prompts together while its block runs.
Submit = Callable[
    [Sequence[SourcePrompt], SamplingParams], AbstractAsyncContextManager[list[RequestOutput]]
]
#: How often the rest of a part is transcribed that its transcript leaves out.
_MAX_RESTS = 8
#: A part's text is left out where the probability of no speech is above the last, and its
#: mean log-probability is below the first or it can be compressed more than the second says: the
#: defaults of OpenAI's program.
_MIN_LOGPROB, _MAX_COMPRESSION, _MAX_NO_SPEECH = -1.0, 2.4, 0.6


@dataclass(slots=True, kw_only=True)
class Transcript:
    """The transcript of a recording while it is made.

    Attributes:
        transcriber: of the model.
        submit: computes prompts; what it raises, all methods do.
        recording: the sound, and once `complete` has found them, parts to transcribe again.
        task: "transcribe", or "translate" into English.
        language: the code of the language that is spoken; None until the model has said it.
        params: of the transcript's requests, by `Transcriber.params`.
        has_times: whether the transcript has timestamps.
        max_len: the longest sequence.
        no_speech: of parts whose text is doubtful, the probability of no speech.
    """

    transcriber: Transcriber
    submit: Submit
    recording: Recording
    task: Literal["transcribe", "translate"]
    language: str | None
    params: SamplingParams
    has_times: bool
    max_len: int
    no_speech: dict[int, float] = field(default_factory=dict)

    async def prompts(self, text: str) -> list[SourcePrompt]:
        """Returns a prompt for each part, after the language was found; `text` precedes the
        transcript. Raises `RequestError`."""
        if self.language is None:
            self.language = await self._detect() if self.transcriber.detects_language else "en"
        return self._prompts(self.recording, text)

    def _prompts(self, recording: Recording, text: str) -> list[SourcePrompt]:
        return self.transcriber.prompts(
            recording, self.language or "en", self.task, text=text, has_times=self.has_times,
            max_len=self.max_len,
        )  # fmt: skip

    async def _detect(self) -> str:
        """Returns the language of the beginning. The encoder's output is kept for what follows."""
        prompt, params = self.transcriber.detection(self.recording)
        (delta,) = await self._run([prompt], params)
        return self.transcriber.detected(delta.token_ids[0] if delta.token_ids else -1)

    async def _run(self, prompts: Sequence[SourcePrompt], params: SamplingParams) -> list[Delta]:
        """Returns what the model writes for each prompt."""
        async with self.submit(prompts, params) as outputs:
            return await collect(outputs)

    async def complete(self, deltas: list[Delta]) -> list[Delta]:
        """Returns the transcripts of all parts, given those of the first parts: what these leave
        out is transcribed again, and parts without speech have no text."""
        if self.has_times:
            deltas = await self._with_rests(deltas)
        return await self._without_silence(deltas)

    async def _with_rests(self, deltas: list[Delta]) -> list[Delta]:
        """Returns the transcripts of all parts, after what they leave out has become further parts
        (`Transcriber.with_rests`), again and again."""
        parts: Container[int] = range(len(deltas))
        for _ in range(_MAX_RESTS):
            tokens = [delta.token_ids for delta in deltas]
            recording, numbers = await asyncio.to_thread(
                self.transcriber.with_rests, self.recording, tokens, parts
            )
            if not numbers:
                break
            rests = replace(recording, parts=[recording.parts[number] for number in numbers])
            found = await self._run(self._prompts(rests, ""), self.params)
            for number, delta in zip(numbers, found, strict=True):
                deltas.insert(number, delta)
            self.recording, parts = recording, numbers
        return deltas

    async def _without_silence(self, deltas: list[Delta]) -> list[Delta]:
        """Returns the transcripts of all parts, empty where the text is doubtful and the model
        finds no speech."""
        if self.transcriber.tokens.no_speech is None:
            return deltas
        doubtful = await asyncio.to_thread(self._doubtful, deltas)
        if not doubtful:
            return deltas
        prompts, params = self.transcriber.presence(self.recording, doubtful)
        found = await self._run(prompts, params)
        for part, delta in zip(doubtful, found, strict=True):
            if delta.logprobs:
                ((_, logprob),) = delta.logprobs[0].top
                self.no_speech[part] = math.exp(logprob)
        return [
            replace(delta, text="", token_ids=[], logprobs=[])
            if self.no_speech.get(part, 0.0) > _MAX_NO_SPEECH
            else delta
            for part, delta in enumerate(deltas)
        ]

    def _doubtful(self, deltas: Sequence[Delta]) -> list[int]:
        """Returns the parts whose transcript is unlikely or repeats itself, or whose sound is
        hardly any."""
        return [
            part
            for part, delta in enumerate(deltas)
            if mean_logprob(delta) < _MIN_LOGPROB
            or self.compression(delta) > _MAX_COMPRESSION
            or self.transcriber.is_faint(self.recording, part)
        ]

    def compression(self, delta: Delta) -> float:
        """Returns how many times shorter a transcript becomes when it is compressed."""
        text = self.transcriber.text_of(delta.token_ids).encode()
        return len(text) / max(1, len(zlib.compress(text)))

    async def align(self, deltas: Sequence[Delta]) -> list[F32]:
        """Returns how much the tokens of each part attend to its sound (`Transcriber.words`).
        Raises `NotReadyError` if that was cut short."""
        prompts, params = self.transcriber.alignment(
            self.recording, self.language or "en", self.task,
            [delta.token_ids for delta in deltas], self.max_len,
        )  # fmt: skip
        async with self.submit(prompts, params) as outputs:
            await collect(outputs)
            found = [output.features(0).get("alignment") for output in outputs]
        weights = [each for each in found if each is not None]
        if len(weights) < len(found):  # as after /pause?mode=abort
            raise NotReadyError("the request was ended before the times of its words were found")
        return weights


def mean_logprob(delta: Delta) -> float:
    """Returns the mean log-probability of a transcript's tokens, 0 without any."""
    found = [each.logprob for each in delta.logprobs or ()]
    return sum(found) / max(1, len(found))

"""Transcripts of sound by Whisper: from a file to prompts of the engine, from tokens to segments.

A file is decoded in a thread and cut at pauses into parts that the model hears at once; each part
is a request of its own, so that a long file is transcribed as a batch. The sound that waits or is
transcribed is bounded for all requests together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aioinfer.config import Config
from aioinfer.engine.sources import SourcePrompt
from aioinfer.engine.word_times import F32, Word, first_frames, words
from aioinfer.errors import ConfigError, FieldError, OverloadedError, RequestError
from aioinfer.features.alignment.planning import Alignment
from aioinfer.features.speech.planning import SpeechRules
from aioinfer.media.sound import cut_at_pauses, decode_sound, has_sound
from aioinfer.models.json_file import read_json
from aioinfer.models.source import SourceData, SourceFormat
from aioinfer.sampling_params import SamplingParams
from aioinfer.text.tokenizer import Tokenizer

#: Files that are decoded at a time.
_THREADS = 2
#: Seconds of sound that all requests may have together; one alone may have more.
_MAX_HELD_S = 4 * 3600
#: Timestamps a second.
_TIMES = 50
#: What is shorter than these seconds, or of smaller samples (-60 dB), has no word in it.
_MIN_WORD_S, _FAINT = 0.1, 1e-3


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The special tokens of a model that transcribes.

    Attributes:
        start: with which each transcript begins.
        languages: by their codes, such as "en"; empty for a model of one language.
        tasks: "transcribe" and "translate", in models of several languages.
        before: what stands before the text that precedes the transcript.
        rules: of the tokens that follow.
        no_speech: stands for a part without speech; None if the model has none.
        heads: the layer and the number of each head of cross attention that tells where in the
            sound a token is.
    """

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    before: int
    rules: SpeechRules
    no_speech: int | None
    heads: tuple[tuple[int, int], ...]

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> SpeechTokens:
        """Reads a model's tokenizer, `generation_config.json` and `config.json`. Raises
        `ConfigError`."""
        ids = tokenizer.marker_ids

        def of(name: str) -> int:
            if f"<|{name}|>" not in ids:
                raise ConfigError(f"the tokenizer has no token <|{name}|>")
            return ids[f"<|{name}|>"]

        generation = read_json(folder / "generation_config.json", missing_ok=True)
        languages = {code: ids[f"<|{code}|>"] for code in language_names() if f"<|{code}|>" in ids}
        tasks = {name: of(name) for name in ("transcribe", "translate")} if languages else {}
        if not generation.get("is_multilingual", True):
            languages = tasks = {}
        try:
            suppressed, first = (
                tuple(map(int, generation.get(name) or ()))
                for name in ("suppress_tokens", "begin_suppress_tokens")
            )
            latest = generation.get("max_initial_timestamp_index")
            rules = SpeechRules(
                of("notimestamps") + 1, of("endoftext"), suppressed, first,
                None if latest is None else int(latest),
            )  # fmt: skip
            heads = _alignment_heads(generation, read_json(folder / "config.json", missing_ok=True))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"generation_config.json cannot be read: {error}") from error
        no_speech = ids.get("<|nospeech|>", ids.get("<|nocaptions|>"))
        return cls(
            of("startoftranscript"), languages, tasks, of("startofprev"), rules, no_speech, heads
        )


def _alignment_heads(
    generation: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tuple[int, int], ...]:
    """Returns the heads that `generation_config.json` names; if none, all of the upper half of the
    decoder's layers."""
    given = generation.get("alignment_heads")
    if given:
        return tuple((int(layer), int(head)) for layer, head in given)
    layers, heads = config.get("decoder_layers", 0), config.get("decoder_attention_heads", 0)
    return tuple((layer, head) for layer in range(layers // 2, layers) for head in range(heads))


@cache
def language_names() -> Mapping[str, str]:
    """Returns the names of the languages that Whisper knows by their codes: "english" of "en"."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    names: Mapping[str, str] = LANGUAGES
    return names


class Segment(NamedTuple):
    """A piece of a transcript.

    Attributes:
        start, end: in seconds from the beginning of the file.
        text: of the piece.
        tokens: of the text and its two timestamps.
        part: the number of the part of the file that it is from.
    """

    start: float
    end: float
    text: str
    tokens: list[int]
    part: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A file that was decoded and cut.

    Attributes:
        parts: the samples of each part.
        starts: where each begins, in seconds.
        duration: of all, in seconds.
    """

    parts: list[SourceData]
    starts: list[float]
    duration: float


class Transcriber:
    """Makes prompts of sound for one model.

    Args:
        format: of the model's sources.
        tokens: the model's special tokens.
        tokenizer: the model's.
        config: the whole configuration.
    """

    def __init__(
        self, format: SourceFormat, tokens: SpeechTokens, tokenizer: Tokenizer, config: Config
    ):
        self.format, self.tokens = format, tokens
        self._tokenizer, self._config = tokenizer, config.media
        self._held_s = 0.0
        self._threads = ThreadPoolExecutor(_THREADS, "sound")

    def shutdown(self) -> None:
        """Drops work that has not begun. Does not wait."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, data: bytes, place: str) -> Recording:
        """Returns the sound of a file. Raises `FieldError` naming its `place` in the body."""
        run = asyncio.get_running_loop().run_in_executor
        return await run(self._threads, self._read, data, place)

    def _read(self, data: bytes, place: str) -> Recording:
        rate = self.format.rate
        samples = decode_sound(data, rate, self._config, place)
        parts = cut_at_pauses(samples, self.format.max_values)
        starts = [0, *accumulate(map(len, parts))][:-1]
        return Recording(
            [self.format.source(part) for part in parts],
            [start / rate for start in starts],
            len(samples) / rate,
        )

    @contextmanager
    def holding(self, recording: Recording) -> Iterator[None]:
        """Context in which a recording's memory is in use. Raises `OverloadedError` if that is too
        much together with others'."""
        if self._held_s and self._held_s + recording.duration > _MAX_HELD_S:
            raise OverloadedError("other requests' sound uses all memory; try again later")
        self._held_s += recording.duration
        try:
            yield
        finally:
            self._held_s -= recording.duration

    # ---------------------------------------------------------------- prompts

    def language_of(self, given: str) -> str:
        """Returns the code of a language, given by its code or its name. Raises `RequestError`."""
        name = given.strip().lower()
        names = language_names()
        codes = {text: code for code, text in names.items()}
        code = codes.get(name, name.partition("-")[0])
        if not self.tokens.languages and code == "en":
            return code
        if code not in self.tokens.languages:
            raise FieldError(
                "language", "must be the ISO-639-1 code of a language that the model knows"
            )
        return code

    @property
    def detects_language(self) -> bool:
        """Whether the model can say which language it hears."""
        return bool(self.tokens.languages)

    def detection(self, recording: Recording) -> tuple[SourcePrompt, SamplingParams]:
        """Returns the prompt and the parameters of the request whose only token is the language of
        a recording's beginning."""
        prompt = SourcePrompt([self.tokens.start], recording.parts[0])
        allowed = tuple(self.tokens.languages.values())
        return prompt, SamplingParams(
            temperature=0, max_tokens=1, allowed_token_ids=allowed, ignore_eos=True
        )

    def detected(self, token: int) -> str:
        """Returns the code of the language whose token was sampled."""
        codes = {id: code for code, id in self.tokens.languages.items()}
        return codes.get(token, "en")

    def is_faint(self, recording: Recording, part: int) -> bool:
        """Whether a part is too short or too quiet for a word."""
        samples = recording.parts[part].values
        return len(samples) < _MIN_WORD_S * self.format.rate or bool(np.abs(samples).max() < _FAINT)

    def presence(
        self, recording: Recording, parts: Sequence[int]
    ) -> tuple[list[SourcePrompt], SamplingParams]:
        """Returns the prompts and the parameters of requests for one token each, whose
        log-probability for `tokens.no_speech`, which the model must have, says whether a part of a
        recording is without speech."""
        assert self.tokens.no_speech is not None
        prompts = [SourcePrompt([self.tokens.start], recording.parts[part]) for part in parts]
        return prompts, SamplingParams(
            temperature=0, max_tokens=1, logprob_token_ids=(self.tokens.no_speech,),
            ignore_eos=True,
        )  # fmt: skip

    def prompts(
        self,
        recording: Recording,
        language: str,
        task: str,
        *,
        text: str,
        has_times: bool,
        max_len: int,
    ) -> list[SourcePrompt]:
        """Returns a prompt for each part of a recording.

        Args:
            language: its code.
            task: "transcribe" or "translate".
            text: what precedes the transcript of the first part, such as names that it may hold;
                its last tokens count.
            has_times: whether the transcript has timestamps.
            max_len: the longest sequence; half of it is for the text, as Whisper was trained.

        Raises:
            RequestError: the model cannot translate.
        """
        tokens, start = self.tokens, [self.tokens.start]
        if tokens.languages:
            start += [tokens.languages[language], tokens.tasks[task]]
        elif task == "translate":
            raise RequestError("this model knows English alone, and does not translate")
        if not has_times:
            start.append(tokens.rules.first_time - 1)
        found = [SourcePrompt(start, part) for part in recording.parts]
        if text.strip():
            ids = self._tokenizer.encode(f" {text.strip()}", False, param="prompt")
            ids = ids[-(max_len // 2 - 1) :]
            found[0] = SourcePrompt([tokens.before, *ids, *start], found[0].data)
        return found

    def params(self, temperature: float, *, has_times: bool, logprobs: bool) -> SamplingParams:
        """Returns the parameters of a transcript's requests. Raises `RequestError`."""
        rules = replace(self.tokens.rules, has_times=has_times)
        return SamplingParams(
            temperature=temperature,
            logprobs=0 if logprobs else None,
            speech=rules,
        )

    def alignment(
        self, recording: Recording, language: str, task: str, tokens: Sequence[Sequence[int]],
        max_len: int,
    ) -> tuple[list[SourcePrompt], SamplingParams]:  # fmt: skip
        """Returns the prompts and the parameters of requests that compute transcripts once more,
        to find where in the sound their tokens are.

        Args:
            language, task, max_len: as for `prompts`.
            tokens: of the transcript of each part, with its timestamps.
        """
        prompts = self.prompts(
            recording, language, task, text="", has_times=True, max_len=max_len
        )  # fmt: skip
        first, end = len(prompts[0]), self.tokens.rules.end
        found = [
            SourcePrompt([*prompt, *(each for each in ids if each != end)][: max_len - 1], part)
            for prompt, ids, part in zip(prompts, tokens, recording.parts, strict=True)
        ]
        stride = self.format.max_values // self.format.max_tokens
        asked = Alignment(first, stride, self.tokens.heads)
        return found, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, speech=asked)

    # ---------------------------------------------------------------- transcripts

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, without timestamps and special tokens."""
        first = min(self.tokens.rules.first_time, self.tokens.rules.end)
        return self._tokenizer.decode(token for token in tokens if token < first)

    def segments(self, recording: Recording, part: int, tokens: Sequence[int]) -> list[Segment]:
        """Returns the pieces of a part's transcript, between its timestamps."""
        first = self.tokens.rules.first_time
        length = len(recording.parts[part].values) / self.format.rate
        found: list[Segment] = []
        begin, latest, piece = 0.0, 0.0, list[int]()

        def add(end: float) -> None:
            text = self.text_of(piece)
            if text.strip():
                shift = recording.starts[part]
                found.append(Segment(shift + begin, shift + max(begin, end), text, [*piece], part))

        for token in tokens:
            piece.append(token)
            if token < first:
                continue
            latest = min((token - first) / _TIMES, length)
            if len(piece) > 1:  # the timestamp behind a text
                add(latest)
                piece = []
            begin = latest
        add(length)
        return found

    def with_rests(
        self, recording: Recording, transcripts: Sequence[Sequence[int]], parts: Container[int]
    ) -> tuple[Recording, list[int]]:
        """Returns a recording with further parts, and their numbers in it.

        Whisper writes what it hears to the end, and ends with one timestamp, or it leaves out a
        sentence that the sound may cut off, and ends with two: then the sound from there on is to
        be heard again, as in OpenAI's own program. It becomes a part behind the part it is of,
        unless it is silence, for which that program asks the model.

        Args:
            transcripts: the tokens of each part.
            parts: the numbers of those that are looked at.
        """
        found, starts, numbers = list[SourceData](), list[float](), list[int]()
        rate = self.format.rate
        for number, tokens in enumerate(transcripts):
            part, start = recording.parts[number], recording.starts[number]
            found.append(part)
            starts.append(start)
            end = self._open_end(tokens) if number in parts else None
            if end is None or not has_sound(part.values, round(end * rate)):
                continue
            numbers.append(len(found))
            found.append(self.format.source(part.values[round(end * rate) :]))
            starts.append(start + end)
        return Recording(found, starts, recording.duration), numbers

    def _open_end(self, tokens: Sequence[int]) -> float | None:
        """Returns the second at which a transcript ends with two timestamps; None if it does
        not."""
        last = [token for token in tokens if token != self.tokens.rules.end][-2:]
        first = self.tokens.rules.first_time
        if len(last) < 2 or min(last) < first or last[1] == first:
            return None
        return (last[1] - first) / _TIMES

    def words(
        self, recording: Recording, part: int, tokens: Sequence[int], weights: F32, language: str
    ) -> Iterator[Word]:
        """Yields the words of a part's transcript.

        Args:
            tokens: of the transcript.
            weights: float32 [n, frames] of its first n tokens; see `AlignmentUse.output`.
            language: its code.
        """
        shift = recording.starts[part]
        times = [shift + frame / _TIMES for frame in first_frames(weights)]
        # the last token ends where it begins, as one does that the longest sequence has no room for
        times += [times[-1] if times else shift] * (len(tokens) + 1 - len(times))
        text_end = min(self.tokens.rules.first_time, self.tokens.rules.end)
        own = list(zip(tokens, times, times[1:], strict=False))
        for is_text, run in groupby(own, key=lambda each: each[0] < text_end):
            if is_text:
                ids, starts, ends = zip(*run, strict=True)
                yield from words(ids, (*starts, ends[-1]), language, self._tokenizer.decode)

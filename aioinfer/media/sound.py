"""Decoding of sound that clients send, which may be anything: into samples of one channel at one
rate, in a thread, block by block, so that a long file takes no more memory than its samples do.

WAV of whole numbers is read by Python itself; all other formats (FLAC, MP3, Ogg with Vorbis or
Opus, and other WAV) by libsndfile, in a process a file (`media.sound_process`), where the package
`soundfile` is installed (the extra `audio`).
"""

from __future__ import annotations

import io
import math
import os
import struct
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aioinfer.config import MediaConfig
from aioinfer.errors import FieldError

F32 = npt.NDArray[np.float32]
#: Rates of files that are read, in samples a second.
_MIN_RATE, _MAX_RATE = 1000, 384_000
_MAX_CHANNELS = 32
#: Numbers that are decoded at a time, of all channels.
_BLOCK = 2**18
#: The largest sample: the power of larger ones may not be finite in float32.
_MAX_SAMPLE = 2.0**31
#: With which files begin that libsndfile is given, but for MP3 without a tag.
_MAGIC = (b"RIFF", b"RF64", b"fLaC", b"OggS", b"ID3")
#: Zero crossings of the resampler's kernel on either side, and the most steps of a sample that its
#: phases have: another rate is taken for one that differs from it by a thousandth at most.
_CROSSINGS, _MAX_PHASES = 16, 1024
#: The power of silence, beside that of the loudest sound.
_SILENCE = 1e-3


def decode_sound(
    data: bytes, rate: int, config: MediaConfig, place: str, *, longest: int | None = None
) -> F32:
    """Returns the samples float32 [n] of a file, its channels' mean.

    Args:
        data: the file.
        rate: samples a second of the result.
        config: the section `[media]`.
        place: of the file in the body, for errors.
        longest: the maximum of seconds, where that of the configuration is higher.

    Raises:
        FieldError: it is no sound, broken, empty or too long.
    """
    try:
        with _opened(data) as (given, blocks):
            if not _MIN_RATE <= given <= _MAX_RATE:
                raise FieldError(place, f"has {given} samples a second, which is not supported")
            seconds = config.max_seconds if longest is None else min(longest, config.max_seconds)
            setting = " (see media.max_bytes)" if seconds == config.max_seconds else ""
            return _collect(blocks, given, rate, seconds, place, setting)
    except (FieldError, MemoryError):
        raise
    except Exception as error:  # decoders raise whatever they like
        more = "" if find_spec("soundfile") else (
            "; this server reads WAV alone: other formats need its extra `audio`"
        )  # fmt: skip
        raise FieldError(place, f"is not sound, or it is broken{more}") from error


def _collect(
    blocks: Iterator[F32], given: int, rate: int, seconds: int, place: str, setting: str
) -> F32:
    """Returns the samples of all blocks at another rate, of no more than some seconds; `setting`
    ends the message about more. Raises `FieldError`."""
    resampler, longest, count = Resampler(given, rate), seconds * rate, 0
    samples = np.empty(longest, np.float32)  # whose memory is the system's until it is written
    for block in blocks:
        if not (np.abs(block) <= _MAX_SAMPLE).all():  # NaN is not, either
            raise FieldError(place, "has samples that are not finite, or too large")
        made = resampler.push(block)
        if count + len(made) > longest:
            raise FieldError(place, f"is longer than {seconds} seconds{setting}")
        samples[count : count + len(made)] = made
        count += len(made)
    last = resampler.end()[: longest - count]
    samples[count : count + len(last)] = last
    if not count + len(last):
        raise FieldError(place, "has no samples")
    return samples[: count + len(last)]


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[int, Iterator[F32]]]:
    """Context that yields the rate of a file, and its samples in blocks float32 [n]. Raises
    whatever a decoder does."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        try:
            file = wave.open(io.BytesIO(data), "rb")  # noqa: SIM115  (closed with its memory)
        except (wave.Error, EOFError):
            if not find_spec("soundfile"):
                raise
        else:
            yield file.getframerate(), _read_wave(file)
            return
    is_mpeg = len(data) > 1 and data[0] == 0xFF and data[1] >= 0xE0
    if not (is_mpeg or data.startswith(_MAGIC)):
        raise ValueError("an unknown format")
    with _decoding(data) as process:
        assert process.stdout is not None
        given, channels = struct.unpack("<2i", process.stdout.read(8))
        yield given, _read_process(process, channels)


def _read_wave(file: wave.Wave_read) -> Iterator[F32]:
    """Yields the samples of a WAV file of whole numbers."""
    width, channels = file.getsampwidth(), file.getnchannels()
    if width not in (1, 2, 3, 4) or not 1 <= channels <= _MAX_CHANNELS:
        raise ValueError("a form of WAV that is not supported")
    while raw := file.readframes(_BLOCK // channels):
        whole = len(raw) // (width * channels) * width * channels
        yield _as_float(raw[:whole], width).reshape(-1, channels).mean(axis=1, dtype=np.float32)


def _as_float(raw: bytes, width: int) -> F32:
    """Returns whole numbers of `width` bytes as float32 from -1 to 1."""
    if width == 1:
        return np.frombuffer(raw, np.uint8).astype(np.float32) / np.float32(128) - np.float32(1)
    if width == 3:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        raw, width = wide.tobytes(), 4
    numbers: F32 = np.frombuffer(raw, f"<i{width}").astype(np.float32)
    numbers /= 2 ** (8 * width - 1)
    return numbers


@contextmanager
def _decoding(data: bytes) -> Iterator[subprocess.Popen[bytes]]:
    """Context of the process that decodes a file, which ends with it."""
    with open(os.memfd_create("sound"), "w+b", buffering=0) as file:
        file.write(data)
        file.seek(0)
        process = subprocess.Popen(
            # without the folder of the program among those of modules
            [sys.executable, "-P", str(Path(__file__).with_name("sound_process.py"))],
            stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


def _read_process(process: subprocess.Popen[bytes], channels: int) -> Iterator[F32]:
    """Yields the samples of a file that another process decodes. Raises `ValueError` if that could
    not read it to its end."""
    assert process.stdout is not None
    size = 4 * channels
    while raw := process.stdout.read(_BLOCK // channels * size):
        samples = np.frombuffer(raw[: len(raw) // size * size], np.float32)
        yield samples.reshape(-1, channels).mean(axis=1, dtype=np.float32)
    if process.wait():
        raise ValueError("the decoder has failed")


class Resampler:
    """Brings samples to another rate, block by block, by a windowed sinc (band-limited
    interpolation, Smith and Gossett 1984).

    With the rates' ratio N / D in lowest terms, each of D phases of the output has a kernel of its
    own, and reads every N-th place of the input.

    Args:
        given, rate: samples a second of input and output.
    """

    def __init__(self, given: int, rate: int):
        ratio = Fraction(given, rate).limit_denominator(_MAX_PHASES)
        self._step, self._phases = ratio.numerator, ratio.denominator
        cutoff = min(1.0, float(1 / ratio))
        self._reach = math.ceil(_CROSSINGS / cutoff)
        starts = np.arange(self._phases) * self._step
        self._firsts = (starts // self._phases).tolist()
        fractions = (starts % self._phases) / self._phases
        offsets = np.arange(1 - self._reach, self._reach + 1) - fractions[:, None]
        window = np.cos(np.clip(offsets / self._reach, -1, 1) * np.pi / 2) ** 2
        self._kernels = (np.sinc(offsets * cutoff) * window * cutoff).astype(np.float32)
        self._rest = np.zeros(self._reach - 1, np.float32)
        self._num_given = self._num_made = 0

    def push(self, samples: F32) -> F32:
        """Returns what can be made of the samples float32 [n] that follow."""
        if self._step == self._phases:
            return samples
        self._num_given += len(samples)
        self._rest = np.concatenate((self._rest, samples))
        units = (len(self._rest) - 2 * self._reach + 1) // self._step
        if units <= 0:
            return np.zeros(0, np.float32)
        made = np.empty((units, self._phases), np.float32)
        places = np.lib.stride_tricks.sliding_window_view(self._rest, 2 * self._reach)
        for phase, (first, kernel) in enumerate(zip(self._firsts, self._kernels, strict=True)):
            made[:, phase] = places[first :: self._step][:units] @ kernel
        self._rest = self._rest[units * self._step :]
        self._num_made += made.size
        return made.reshape(-1)

    def end(self) -> F32:
        """Returns the last samples, of which the input goes on with silence."""
        if self._step == self._phases:
            return np.zeros(0, np.float32)
        left = -(-self._num_given * self._phases // self._step) - self._num_made
        made = self.push(np.zeros(2 * self._reach + self._step, np.float32))
        while len(made) < left:
            made = np.concatenate((made, self.push(np.zeros(self._step, np.float32))))
        return made[:left]


#: Samples by which loudness is measured: 20 ms at 16 kHz; and how many of them make a pause.
_FRAME, _PAUSE = 320, 10


def cut_at_pauses(samples: F32, longest: int) -> list[F32]:
    """Returns samples float32 [n] in parts of at most `longest`. A part ends at the quietest place
    of the last third that it may have."""
    parts = []
    while len(samples) > longest:
        start = longest - longest // 3
        frames = (longest - start) // _FRAME
        loudness = np.square(samples[start : start + frames * _FRAME]).reshape(frames, _FRAME)
        pause = min(_PAUSE, frames)
        around = np.convolve(loudness.mean(axis=1), np.ones(pause), "valid")
        # of equally quiet places the last one: parts are as long as they may be
        quietest = len(around) - 1 - int(np.argmin(around[::-1]))
        end = start + (2 * quietest + pause) * _FRAME // 2
        parts.append(samples[:end])
        samples = samples[end:]
    return [*parts, samples]


def has_sound(samples: F32, start: int) -> bool:
    """Whether samples float32 [n] have more than silence from `start` on: a frame whose power is
    `_SILENCE` of the loudest one's, or more."""
    frames = len(samples) // _FRAME
    loudness = np.square(samples[: frames * _FRAME]).reshape(frames, _FRAME).mean(axis=1)
    rest = loudness[-(-start // _FRAME) :]
    return bool(len(rest)) and bool(rest.max() >= _SILENCE * loudness.max() > 0)

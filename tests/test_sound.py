"""Decoding of sound: every form of WAV, rates, cuts at pauses, and files that are refused."""

from __future__ import annotations

import io
import wave
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest

from aioinfer.config import MediaConfig
from aioinfer.errors import FieldError
from aioinfer.media.sound import Resampler, cut_at_pauses, decode_sound
from tests.watching import memory_watched

RATE = 16_000
CONFIG = MediaConfig()


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def wav(samples: np.ndarray, rate: int = RATE, width: int = 2) -> bytes:
    """Returns samples [n] or [n, channels] as a WAV file of whole numbers of `width` bytes."""
    numbers = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    if width == 1:
        numbers += 128
    raw = numbers.astype("<i8").reshape(-1, 1).view(np.uint8)[:, :width]
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw.tobytes())
    return buffer.getvalue()


def decode(data: bytes) -> np.ndarray:
    with mock.patch.object(MediaConfig, "max_seconds", 5):
        return decode_sound(data, RATE, CONFIG, "file")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_whole_numbers_of_every_width(width: int) -> None:
    samples = tone(0.3, RATE)
    found = decode(wav(samples, width=width))
    assert found.dtype == np.float32
    assert np.abs(found - samples).max() < 2 ** (1.5 - 8 * min(width, 3)) * 2


def test_channels_are_averaged() -> None:
    samples = tone(0.2, RATE)
    found = decode(wav(np.stack([samples, 0.5 * samples], axis=1)))
    assert np.abs(found - 0.75 * samples).max() < 1e-4


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 44_100, 48_000])
def test_other_rates_keep_the_tone(rate: int) -> None:
    found = decode(wav(tone(1.1, rate), rate))
    expected = tone(1.1, RATE)
    assert abs(len(found) - len(expected)) <= 1
    inner = slice(200, len(expected) - 200)
    assert np.abs(found[inner] - expected[inner]).max() < 1e-3


def test_what_the_rate_cannot_hold_is_left_out() -> None:
    found = decode(wav(tone(0.5, 48_000, hertz=15_000), 48_000))
    assert np.abs(found[200:-200]).max() < 1e-3


def test_blocks_make_no_difference() -> None:
    samples = np.random.default_rng(0).standard_normal(44_100).astype(np.float32)
    whole = Resampler(44_100, RATE)
    expected = np.concatenate((whole.push(samples), whole.end()))
    parts, found = Resampler(44_100, RATE), []
    for block in np.array_split(samples, 97):
        found.append(parts.push(block))
    assert np.allclose(np.concatenate([*found, parts.end()]), expected, atol=1e-6)


def test_cuts_are_in_the_pauses() -> None:
    samples = np.random.default_rng(0).standard_normal(70_000).astype(np.float32)
    for start in (25_000, 47_000):
        samples[start : start + 4000] *= 0.01
    parts = cut_at_pauses(samples, 30_000)
    assert np.array_equal(np.concatenate(parts), samples)
    first, second = len(parts[0]), len(parts[0]) + len(parts[1])
    assert 25_000 < first < 29_000
    assert 47_000 < second < 51_000
    assert max(map(len, parts)) <= 30_000
    # silence, and what fits, are not cut more often than need be
    assert [len(part) for part in cut_at_pauses(np.zeros(30_000, np.float32), 30_000)] == [30_000]
    assert len(cut_at_pauses(np.zeros(75_000, np.float32), 30_000)) == 3


@pytest.mark.skipif(not find_spec("soundfile"), reason="needs the extra `audio`")
@pytest.mark.parametrize(
    ("format", "subtype"),
    [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None), ("WAV", "FLOAT")],
)
def test_compressed_files(format: str, subtype: str | None) -> None:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, tone(1.0, 48_000), 48_000, format=format, subtype=subtype)
    found = decode(buffer.getvalue())
    assert len(found) == pytest.approx(RATE, abs=1200)  # MP3 is padded
    spectrum = np.abs(np.fft.rfft(found[: RATE - 1600]))
    assert abs(np.argmax(spectrum) * RATE / (RATE - 1600) - 440) < 3


GOOD = wav(tone(0.1, RATE))
#: Of each: the file, and a part of the message; test_audio_attacks.py has a hundred more.
REFUSED = {
    "a text": (b"this is no sound at all", "is not sound"),
    "half a head": (GOOD[:20], "is not sound"),
    "no samples": (wav(np.zeros(0)), "has no samples"),
    "a slow rate": (wav(np.zeros(99), 900), "has 900 samples a second"),
    "a long file": (wav(np.zeros(6 * RATE)), "is longer than 5 seconds (see media.max_bytes)"),
    "a broken FLAC": (b"fLaC" + bytes(200), "is not sound"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(FieldError, match="file ") as raised:
        decode(data)
    assert message in raised.value.message
    assert raised.value.param == "file"


@pytest.mark.extended
@pytest.mark.skipif(not find_spec("soundfile"), reason="needs the extra `audio`")
def test_hours_of_silence_take_no_more_memory_than_the_longest_file() -> None:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros((7200 * 8000, 2), np.int16), 8000, format="FLAC")
    with memory_watched() as memory, pytest.raises(FieldError, match="3600 seconds"):
        decode_sound(buffer.getvalue(), RATE, CONFIG, "file")  # an hour is the maximum
    assert memory.most < 300 * 2**20


def test_files_that_are_cut_or_changed_anywhere_end_with_samples_or_an_error() -> None:
    source = np.random.default_rng(0)
    for _ in range(25):
        data = bytearray(GOOD[: source.integers(1, len(GOOD))])
        for place in source.integers(0, min(60, len(data)), 3):
            data[place] = source.integers(0, 256)
        try:
            found = decode(bytes(data))
        except FieldError:
            continue
        assert len(found) <= 5 * RATE
        assert np.isfinite(found).all()

"""Broken and hostile files as sound: each is answered 400 with a message, or heard; none holds the
event loop up, takes much memory or leaves a process behind."""

from __future__ import annotations

import asyncio
import gzip
import io
import struct
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from aioinfer.config import MediaConfig
from tests.functional.conftest import Served, serve
from tests.functional.test_audio import LENGTH
from tests.hostile_files import (
    BIG,
    Make,
    at_bounded_cost,
    cuts,
    noise,
    nothing_left,
    params,
    put,
    riff,
)
from tests.hostile_files import riff_chunk as chunk
from tests.source_models import RATE, save_model
from tests.test_sound import tone, wav

soundfile = pytest.importorskip("soundfile", reason="needs the extra `audio`")

pytestmark = pytest.mark.asyncio(loop_scope="session")


def head(
    *, code: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, align: int | None = None,
    more: bytes = b"", size: int | None = None,
) -> bytes:  # fmt: skip
    """Returns the chunk of a WAV file's form."""
    whole = channels * bits // 8 % 2**16 if align is None else align
    numbers = code, channels, rate, rate * whole % 2**32, whole, bits
    return chunk(b"fmt ", struct.pack("<HHIIHH", *numbers) + more, size)


def lie(data: bytes = bytes(4000), size: int | None = None, **fields: Any) -> bytes:
    """Returns a WAV file of any form."""
    return riff(head(**fields), chunk(b"data", data, size))


def floats(*values: float, kind: str = "f") -> bytes:
    form = {"code": 3, "bits": struct.calcsize(kind) * 8}
    return lie(struct.pack(f"<{len(values)}{kind}", *values) * 500, **form)


def extensible(guid: bytes, valid: int = 16) -> bytes:
    more = struct.pack("<HHI", 22, valid, 1) + guid
    return lie(code=0xFFFE, more=more)


def sound_file(format: str, subtype: str | None = None, seconds: float = 1, **fields: Any) -> bytes:
    buffer, samples = io.BytesIO(), fields.pop("samples", tone(seconds, fields.get("rate", RATE)))
    soundfile.write(buffer, samples, fields.get("rate", RATE), format=format, subtype=subtype)
    return buffer.getvalue()


def flac() -> bytes:
    return sound_file("FLAC", "PCM_16")


def opus() -> bytes:
    return sound_file("OGG", "OPUS")


def vorbis() -> bytes:
    return sound_file("OGG", "VORBIS")


def mp3() -> bytes:
    return sound_file("MP3")


def streaminfo(rate: int, channels: int, bits: int, samples: int, block: int = 4096) -> bytes:
    """Returns the head of a FLAC file."""
    packed = rate << 44 | channels - 1 << 41 | bits - 1 << 36 | samples
    info = struct.pack(">HH", block, block) + bytes(6) + packed.to_bytes(8, "big") + bytes(16)
    return b"fLaC" + flac_block(0, info, is_last=True)


def flac_block(kind: int, data: bytes, *, size: int | None = None, is_last: bool = False) -> bytes:
    length = len(data) if size is None else size
    return bytes([kind | 128 * is_last]) + length.to_bytes(3, "big") + data


def with_blocks(*blocks: bytes) -> bytes:
    """Returns a FLAC file with more blocks before its frames."""
    whole = flac()
    return whole[:4] + bytes([whole[4] & 127]) + whole[5:42] + b"".join(blocks) + whole[42:]


def page(data: bytes, kind: int = 2, position: int = 0, lacing: bytes | None = None) -> bytes:
    """Returns a page of an Ogg file, with no sum."""
    sizes = bytes([len(data)]) if lacing is None else lacing
    return (
        b"OggS" + struct.pack("<BBqIII", 0, kind, position, 1, 0, 0) + bytes([len(sizes)])
        + sizes + data
    )  # fmt: skip


def summed(data: bytes) -> bytes:
    """Returns an Ogg file with the sums of its pages (CRC-32 without reflection)."""
    table = list(range(256))
    for number in table:
        value = number << 24
        for _ in range(8):
            value = value << 1 ^ (value >> 31) * 0x104C11DB7
        table[number] = value
    found = bytearray()
    for each in data.split(b"OggS")[1:]:
        sum, whole = 0, b"OggS" + each[:18] + bytes(4) + each[22:]
        for byte in whole:
            sum = sum << 8 & BIG ^ table[sum >> 24 ^ byte]
        found += whole[:22] + struct.pack("<I", sum) + whole[26:]
    return bytes(found)


def changed(data: bytes, place: int, *others: int) -> bytes:
    """Returns an Ogg file with other bytes at a place, and right sums."""
    return summed(put(data, place, *others))


def tag(size: int, data: bytes = b"") -> bytes:
    """Returns an ID3 tag of a size of 28 bits."""
    seven = bytes(size >> shift & 127 for shift in (21, 14, 7, 0))
    return b"ID3\4\0\0" + seven + data


def silence(format: str, subtype: str | None, seconds: int = 1800) -> bytes:
    """Returns much silence in a small file."""
    return sound_file(format, subtype, samples=np.zeros(seconds * RATE, np.int16))


GOOD = wav(tone(0.5, RATE))
PNG = b"\x89PNG\r\n\x1a\n"
PCM, OTHER = b"\1\0\0\0\0\0\x10\0\x80\0\0\xaa\0\x38\x9b\x71", b"\x99" * 16
FRAME = b"\xff\xfb\x90\x00"
#: The message of a file that is refused; "" for one that is heard; None for one that some releases
#: of libsndfile read and others do not.
NO, EMPTY, SPEED, LONG, WILD = (
    "is not sound, or it is broken", "has no samples", "samples a second, which", "is longer than",
    "not finite",
)  # fmt: skip
#: Files of other kinds, by their beginnings.
OTHERS: dict[str, bytes] = {
    "empty": b"", "a byte": b"\0", "a space": b" ", "a text": b"this is no sound at all" * 9,
    "json": b'{"file": "a.wav"}', "html": b"<html><audio src=x></html>", "a script": b"#!/bin/sh\n",
    "a playlist": b"#EXTM3U\nfile:///etc/passwd\n", "zip": b"PK\3\4" + bytes(99),
    "gzip": gzip.compress(GOOD), "pdf": b"%PDF-1.7\n" + bytes(99), "elf": b"\x7fELF" + bytes(99),
    "png": PNG + bytes(99), "gif": b"GIF89a" * 9, "mp4": b"\0\0\0\x20ftypisom" + bytes(99),
    "webm": b"\x1aE\xdf\xa3" + bytes(99), "midi": b"MThd\0\0\0\6" + bytes(9),
    "asf": b"\x30\x26\xb2\x75" + bytes(99), "mat": b"MATLAB 5.0 MAT-file" + bytes(200),
    "avi": riff(chunk(b"LIST", bytes(99)), form=b"AVI "), "webp": riff(bytes(99), form=b"WEBP"),
    "zeros": bytes(5000), "ones": b"\xff" * 5000, "noise": noise(5000),
}  # fmt: skip
#: Files of formats that libsndfile would read and the server does not.
FOREIGN = ["AIFF", "AU", "CAF", "W64", "VOC", "PAF", "NIST", "MAT5", "SVX", "IRCAM"]
WAV: dict[str, tuple[bytes, str | None]] = {
    "the magic": (b"RIFF", NO), "a form": (riff(), NO),
    "no head": (riff(chunk(b"data", bytes(9))), NO),
    "no data": (riff(head()), NO), "big-endian": (riff(head(), kind=b"RIFX"), NO),
    "data first": (riff(chunk(b"data", bytes(99)), head()), NO),
    "two heads": (riff(head(), head(rate=8000), chunk(b"data", bytes(4000))), ""),
    "two datas": (riff(head(), chunk(b"data", bytes(4000)), chunk(b"data", bytes(9))), ""),
    "a short head": (riff(chunk(b"fmt ", b"\1\0\1\0"), chunk(b"data", bytes(99))), NO),
    "a head of 4 GB": (riff(head(size=BIG), chunk(b"data", bytes(99))), NO),
    "a size of 0": (riff(head(), chunk(b"data", bytes(4000)), size=0), None),
    "data of 4 GB": (lie(size=BIG), ""), "data of nothing": (lie(b""), EMPTY),
    "data of size 0": (lie(size=0), EMPTY), "half a sample": (lie(b"\1"), EMPTY),
    "an odd end": (lie(bytes(4001)), ""), "no channels": (lie(channels=0), NO),
    "33 channels": (lie(channels=33), NO), "65535 channels": (lie(channels=65_535), NO),
    "32 channels": (lie(channels=32), ""), "no rate": (lie(rate=0), SPEED),
    "1 a second": (lie(rate=1), SPEED), "999 a second": (lie(rate=999), SPEED),
    "384001 a second": (lie(rate=384_001), SPEED), "2**32 a second": (lie(rate=BIG), None),
    "a prime rate": (lie(noise(200_000), rate=383_981), ""), "1000 a second": (lie(rate=1000), ""),
    "0 bits": (lie(bits=0), NO), "1 bit": (lie(bits=1), None), "7 bits": (lie(bits=7), None),
    "12 bits": (lie(bits=12), None), "64 bits": (lie(bits=64), NO),
    "65535 bits": (lie(bits=65_535), NO),
    "no alignment": (lie(align=0), None), "a wide alignment": (lie(align=65_535), None),
    "an unknown code": (lie(code=0x1234), NO), "MP3 inside": (lie(mp3(), code=0x55, bits=0), None),
    "FLAC inside": (lie(flac(), code=0xF1AC), NO), "a law": (lie(code=7, bits=8), ""),
    "ADPCM of no blocks": (lie(code=2, bits=4, align=0, more=bytes(4)), NO),
    "ADPCM of wide blocks": (lie(code=0x11, bits=4, align=65_535, more=b"\2\0\xff\xff"), None),
    "GSM": (lie(noise(650), code=0x31, bits=0, align=65, more=b"\2\0\x40\1"), None),
    "an extension": (extensible(PCM), ""), "a wrong one": (extensible(OTHER), NO),
    "a short one": (lie(code=0xFFFE), NO), "an extension of 99 bits": (extensible(PCM, 99), None),
    "NaN": (floats(float("nan")), WILD), "infinity": (floats(0.0, float("-inf")), WILD),
    "1e38": (floats(1e38), WILD), "1e308": (floats(1e308, kind="d"), WILD),
    "1e6": (floats(1e6, -1e6), ""), "denormal": (floats(1e-42), ""),
    "100000 chunks": (riff(chunk(b"junk") * 100_000, GOOD[12:]), ""),
    "nested lists": (riff(b"LIST\xff\xff\xff\x7f" * 20_000, GOOD[12:]), None),
    "a file in a file": (riff(chunk(b"junk", GOOD), GOOD[12:]), ""),
    "an exabyte": (riff(chunk(b"ds64", b"\xff" * 28), GOOD[12:], kind=b"RF64"), None),
    "no ds64": (riff(GOOD[12:], kind=b"RF64"), None),
    "a tag first": (tag(20, bytes(20)) + GOOD, None),
    "13 seconds": (wav(np.zeros(13 * RATE)), LONG),
    "1000 seconds": (lie(bytes(10**6), bits=8, rate=1000), LONG),
}  # fmt: skip
COMPRESSED: dict[str, tuple[Make, str | None]] = {
    "flac: the magic": (lambda: b"fLaC", NO), "flac: noise": (lambda: b"fLaC" + noise(4000), NO),
    "flac: a head alone": (lambda: flac()[:42], None),
    "flac: 2**36 samples": (lambda: streaminfo(RATE, 1, 16, 2**36 - 1), None),
    "flac: more samples than there are": (lambda: put(flac(), 22, 255, 255, 255, 255), None),
    "flac: no samples": (lambda: streaminfo(RATE, 1, 16, 0), None),
    "flac: no rate": (lambda: streaminfo(0, 1, 16, 999) + flac()[42:], None),
    "flac: a high rate": (lambda: streaminfo(655_350, 1, 16, 999) + flac()[42:], None),
    "flac: 8 channels": (lambda: streaminfo(RATE, 8, 16, 999) + flac()[42:], None),
    "flac: 4 bits": (lambda: streaminfo(RATE, 1, 4, 999) + flac()[42:], None),
    "flac: blocks of nothing": (lambda: streaminfo(RATE, 1, 16, 999, 0) + flac()[42:], None),
    "flac: no head": (lambda: b"fLaC" + flac()[42:], None),
    "flac: a block of 16 MB": (lambda: with_blocks(flac_block(6, b"", size=2**24 - 1)), None),
    "flac: a picture of 4 GB": (
        lambda: with_blocks(flac_block(6, b"\0\0\0\3" + b"\xff" * 28)), None,
    ),
    "flac: a comment of 4 GB": (lambda: with_blocks(flac_block(4, b"\xff" * 8)), None),
    "flac: 50000 blocks": (lambda: with_blocks(flac_block(1, b"") * 50_000), None),
    "flac: reserved blocks": (lambda: with_blocks(flac_block(126, noise(99))), None),
    "flac: noise for frames": (lambda: flac()[:42] + noise(9000), None),
    "flac: half an hour of silence": (lambda: silence("FLAC", "PCM_16"), LONG),
    "ogg: the magic": (lambda: b"OggS", NO), "ogg: noise": (lambda: b"OggS" + noise(4000), NO),
    "ogg: an unknown codec": (lambda: summed(page(b"\x80theora" + bytes(40)) * 20), NO),
    "ogg: empty pages": (lambda: summed(page(b"", lacing=bytes(255)) * 3000), NO),
    "ogg: a page without its end": (lambda: page(b"", lacing=b"\xff" * 255), NO),
    "ogg: opus of no channels": (lambda: changed(opus(), 37, 0), None),
    "ogg: opus of 255 channels": (lambda: changed(opus(), 37, 255), None),
    "ogg: opus of a long skip": (lambda: changed(opus(), 38, 255, 255), None),
    "ogg: opus of a wide gain": (lambda: changed(opus(), 44, 255, 127), None),
    "ogg: vorbis of no channels": (lambda: changed(vorbis(), 39, 0), None),
    "ogg: vorbis of no rate": (lambda: changed(vorbis(), 40, 0, 0, 0, 0), None),
    "ogg: a position beyond all": (lambda: changed(opus(), 6, *b"\xff" * 7, 127), None),
    "ogg: two streams": (lambda: opus() + vorbis(), None),
    "ogg: a stream in a stream": (lambda: opus()[:60] + vorbis() + opus()[60:], None),
    "ogg: a minute of silence": (lambda: silence("OGG", "OPUS", 60), LONG),
    "mp3: a frame's head": (lambda: FRAME, NO),
    "mp3: empty frames": (lambda: FRAME + bytes(9000), None),
    "mp3: heads alone": (lambda: FRAME * 5000, None),
    "mp3: frames of noise": (lambda: (FRAME + noise(413)) * 200, None),
    "mp3: a free rate": (lambda: (b"\xff\xfb\x00\x00" + bytes(400)) * 99, None),
    "mp3: a reserved rate": (lambda: (b"\xff\xfb\xfc\x00" + bytes(400)) * 99, None),
    "mp3: layer 1": (lambda: (b"\xff\xff\x90\x00" + noise(300)) * 99, None),
    "mp3: a tag of 256 MB": (lambda: tag(2**28 - 1) + mp3(), None),
    "mp3: a tag alone": (lambda: tag(20, bytes(20)), NO),
    "mp3: 10000 tags": (lambda: tag(9, bytes(9)) * 10_000 + mp3(), None),
    "mp3: a tag before a picture": (lambda: tag(20, bytes(20)) + PNG + bytes(999), NO),
    "mp3: a tag before AIFF": (lambda: tag(20, bytes(20)) + sound_file("AIFF"), NO),
    "mp3: a tag before AU": (lambda: tag(20, bytes(20)) + sound_file("AU"), NO),
    "mp3: a minute of silence": (lambda: silence("MP3", None, 60), LONG),
}  # fmt: skip
CUTS = cuts({"flac": flac, "opus": opus, "vorbis": vorbis, "mp3": mp3}, 1, 5, 50, 99)
CASES: dict[str, tuple[Make, str | None]] = {
    **{name: (lambda data=data: data, NO) for name, data in OTHERS.items()},
    **{format: (lambda format=format: sound_file(format), NO) for format in FOREIGN},
    **{f"wav: {name}": (lambda data=data: data, text) for name, (data, text) in WAV.items()},
    **COMPRESSED,
    **{name: (make, None) for name, make in CUTS.items()},
}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hearing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    save_model("whisper", folder, max_target_positions=LENGTH)
    settings: dict[str, Any] = {
        "parallel.executor": "inline", "model.path": str(folder), "model.dtype": "float32",
        "model.max_model_len": LENGTH, "media.max_bytes": 2**21,
        "cache.cpu_memory_gib": 0.05,
    }  # fmt: skip
    async with serve(**settings) as served:
        with mock.patch.object(MediaConfig, "max_seconds", 12):
            async with nothing_left():
                yield served


@pytest.mark.parametrize("name", params({name: case[1] for name, case in CASES.items()}))
async def test_a_file_is_refused_or_heard(name: str, hearing: Served) -> None:
    make, message = CASES[name]
    data = await asyncio.to_thread(make)

    async def transcribe() -> tuple[int, dict[str, Any]]:
        form = aiohttp.FormData({"language": "en"}, default_to_multipart=True)
        form.add_field("file", io.BytesIO(data), filename="a.wav")
        async with hearing.http.post("/v1/audio/transcriptions", data=form) as response:
            return response.status, await response.json()

    status, reply = await at_bounded_cost(transcribe)
    if message is not None:
        assert status == (400 if message else 200)
    if status != 200:
        error = reply["error"]
        assert (status, error["param"]) == (400, "file")
        assert (message or "file ") in error["message"]

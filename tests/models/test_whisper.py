"""Whisper base out of two packages: it writes down what espeak-ng says."""

from __future__ import annotations

import asyncio
import difflib
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
import transformers

from aioinfer import LLM
from aioinfer.config import MediaConfig
from aioinfer.engine.word_times import first_frames
from aioinfer.media.sound import decode_sound
from aioinfer.text.tokenizer import Tokenizer
from tests.functional.conftest import Served, serve
from tests.models.ctranslate2 import convert_whisper
from tests.real_tokenizers import bare_folder
from tests.source_models import reference_times

SENTENCE = "My name is Robert and I live in London. Please open the window and close the door."
RATE = 16_000
SETTINGS = {"model.dtype": "float32", "cache.cpu_memory_gib": 0.7}


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    converted = tmp_path_factory.mktemp("whisper")
    convert_whisper(pytestconfig.getoption("--models") / "whisper-base", converted)
    return converted


def speak(text: str, folder: Path, speed: int) -> bytes:
    """Returns a text, spoken, as a WAV file."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("needs espeak-ng")
    file = folder / "speech.wav"
    command = ["espeak-ng", "-v", "en-us", "-s", str(speed), "-w", str(file), text]
    subprocess.run(command, check=True)
    return file.read_bytes()


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The sentence, as a WAV file."""
    return speak(SENTENCE, tmp_path_factory.mktemp("speech"), 140)


@pytest.fixture(scope="module")
def whisper(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), settings=SETTINGS) as llm:
        yield llm


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def transcribe(llm: LLM, data: bytes, *, has_times: bool = False) -> tuple[Any, list[Any]]:
    """Returns the recording and the outputs of its parts."""
    transcriber = llm.frontend.require_transcriber()

    async def run() -> tuple[Any, list[Any]]:
        recording = await transcriber.read(data, "file")
        prompts: list[Any] = transcriber.prompts(
            recording, "en", "transcribe", text="", has_times=has_times, max_len=448
        )
        params = [transcriber.params(0.0, has_times=has_times, logprobs=False)] * len(prompts)
        return recording, await llm._generate(prompts, params, [0] * len(prompts))

    return llm.run(run())


def test_a_spoken_sentence_is_written_down(whisper: LLM, speech: bytes) -> None:
    _, (output,) = transcribe(whisper, speech)
    assert words(output.text) == words(SENTENCE)


def test_a_folder_with_a_bare_vocabulary_writes_the_same(
    whisper: LLM, speech: bytes, folder: Path, tmp_path: Path
) -> None:
    added = json.loads((folder / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    named = {"additional_special_tokens": [each["content"] for each in added]}
    bare = bare_folder(folder / "tokenizer.json", tmp_path / "bare", special_tokens_map=named)
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (bare / name).symlink_to(folder / name)
    ours, original = Tokenizer.load(bare), Tokenizer.load(folder)
    assert ours.special_ids == original.special_ids
    assert ours.special_tokens == original.special_tokens
    with LLM(str(bare), settings=SETTINGS) as llm:
        assert words(transcribe(llm, speech)[1][0].text) == words(SENTENCE)
        (output,) = transcribe(llm, speech, has_times=True)[1]
    assert output.token_ids == transcribe(whisper, speech, has_times=True)[1][0].token_ids


def test_sentences_have_their_times(whisper: LLM, speech: bytes) -> None:
    recording, (output,) = transcribe(whisper, speech, has_times=True)
    segments = whisper.frontend.require_transcriber().segments(recording, 0, output.token_ids)
    assert words("".join(each.text for each in segments)) == words(SENTENCE)
    assert 0 <= segments[0].start < 1
    assert recording.duration - 1.5 < segments[-1].end <= recording.duration


def test_the_tokens_are_transformers_s(whisper: LLM, speech: bytes, folder: Path) -> None:
    _, (output,) = transcribe(whisper, speech)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )
    samples = decode_sound(speech, RATE, MediaConfig(), "file")
    extract = transformers.WhisperFeatureExtractor(feature_size=80)
    features = extract(samples, sampling_rate=RATE, return_tensors="pt").input_features
    start = torch.tensor([[50258, 50259, 50359, 50363]])
    found = model.generate(
        features, decoder_input_ids=start, max_new_tokens=60, return_timestamps=False
    )
    expected = [each for each in found[0].tolist() if each not in start]
    assert output.token_ids[: len(expected)] == expected
    assert len(output.token_ids) <= len(expected) + 1  # its end


def test_words_have_transformers_s_times(whisper: LLM, speech: bytes, folder: Path) -> None:
    recording, (output,) = transcribe(whisper, speech, has_times=True)
    transcriber, ids = whisper.frontend.require_transcriber(), output.token_ids
    prompts, params = transcriber.alignment(recording, "en", "transcribe", [ids], 448)
    (found,) = whisper.run(whisper._generate(list[Any](prompts), [params], [0]))
    weights = found.completions[0].features["alignment"]
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )
    samples = decode_sound(speech, RATE, MediaConfig(), "file")
    extract = transformers.WhisperFeatureExtractor(feature_size=80)
    inputs = {
        "input_features": extract(samples, sampling_rate=RATE, return_tensors="pt").input_features
    }
    heads = transcriber.tokens.heads
    times = reference_times(model, inputs, len(samples), heads, prompts[0], len(weights))
    assert [frame / 50 for frame in first_frames(weights)] == pytest.approx(times)
    timed = list(transcriber.words(recording, 0, ids, weights, "en"))
    assert words("".join(f"{each.text} " for each in timed)) == words(SENTENCE)
    assert all(0.05 < each.end - each.start < 1.5 for each in timed)


def test_a_long_file_is_cut_between_sentences(whisper: LLM, speech: bytes) -> None:
    samples = decode_sound(speech, RATE, MediaConfig(), "file")
    pause = np.zeros(RATE // 2, np.float32)
    long = np.concatenate([samples, pause] * 9)[: -len(pause)]
    from tests.test_sound import wav

    recording, outputs = transcribe(whisper, wav(long))
    assert len(recording.parts) > 1
    found = words(" ".join(output.text for output in outputs))
    # Whisper hears "you" in silence
    assert [word for word in found if word != "you"] == words(SENTENCE) * 9


#: Of which Whisper base leaves out the eighth, which ends with the first part, where it writes
#: timestamps.
SENTENCES = (
    "They could not find the key to the garden door.",
    "Tomorrow we will visit the museum with our teacher.",
    "The doctor asked him to drink more water in the evening.",
    "Every window of the house was painted green and white.",
    "She opened the box and found a golden ring inside.",
    "The farmer sold his horse and bought a new tractor.",
    "In winter the river freezes and people walk across it.",
    "Please bring me a clean shirt and a pair of socks.",
    "The music stopped and all the guests went home.",
)


async def post(served: Served, file: bytes, fields: list[tuple[str, str]]) -> Any:
    """Returns the reply for a file."""
    form = aiohttp.FormData(fields, default_to_multipart=True)
    form.add_field("file", io.BytesIO(file), filename="speech.wav")
    async with served.http.post("/v1/audio/transcriptions", data=form) as response:
        return await response.json()


async def test_silence_and_noise_have_no_text(folder: Path, speech: bytes) -> None:
    """Whisper hears "you" in silence."""
    from tests.test_sound import wav

    silence = np.zeros(3 * RATE, np.float32)
    noise = np.random.default_rng(0).normal(0, 0.01, 3 * RATE).astype(np.float32)
    settings = {"model.path": str(folder), "model.dtype": "float32", "model.max_model_len": 448}
    async with serve(**settings, **{"cache.num_blocks": 64, "cache.block_size": 16}) as served:
        for sound, format in ((silence, "json"), (noise, "verbose_json"), (silence[:400], "json")):
            assert not (await post(served, wav(sound), [("response_format", format)]))["text"]
        assert words((await post(served, speech, []))["text"]) == words(SENTENCE)


@pytest.mark.extended
async def test_a_sentence_before_a_cut_is_kept(folder: Path, tmp_path: Path) -> None:
    pause = np.zeros(RATE // 5, np.float32)

    def spoken() -> bytes:
        from tests.test_sound import wav

        files = [speak(sentence, tmp_path, 150) for sentence in SENTENCES]
        sounds = [decode_sound(file, RATE, MediaConfig(), "file") for file in files]
        return wav(np.concatenate([part for sound in sounds for part in (sound, pause)]))

    file = await asyncio.to_thread(spoken)
    settings = {"model.path": str(folder), "model.dtype": "float32", "model.max_model_len": 448}
    async with serve(**settings, **{"cache.num_blocks": 64, "cache.block_size": 16}) as served:
        both = [("timestamp_granularities[]", name) for name in ("segment", "word")]
        found = await post(served, file, [*both, ("response_format", "verbose_json")])
    expected = words(" ".join(SENTENCES))
    matcher = difflib.SequenceMatcher(None, words(found["text"]), expected, autojunk=False)
    # a word may be misheard; the sentence has an eighth of them
    assert sum(block.size for block in matcher.get_matching_blocks()) > 0.95 * len(expected)
    assert words(" ".join(each["word"] for each in found["words"])) == words(found["text"])
    assert len({each["seek"] for each in found["segments"]}) == 3  # parts, and the rest of one
    for kind in ("segments", "words"):
        starts = [each["start"] for each in found[kind]]
        assert starts == sorted(starts)

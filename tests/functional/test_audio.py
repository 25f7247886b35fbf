"""Transcripts over HTTP: every format through OpenAI's client, streams, long files, and forms that
are refused."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch

from aioinfer.cli.server_process import _ready_text
from aioinfer.config import MediaConfig
from aioinfer.engine import transcript
from tests.functional.conftest import Served, openai_client, serve
from tests.functional.test_stream_events import declared_by, kinds, read
from tests.source_models import (
    ID,
    RATE,
    SECONDS,
    encoder_inputs,
    make_tokenizer,
    save_model,
    sound,
)
from tests.test_sound import wav
from tests.vision_models import conversation, picture, reference_output
from tests.vision_models import save_model as save_vision_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

SAMPLES = sound(1.4, 1)
FILE = ("speech.wav", wav(SAMPLES / 2), "audio/wav")
LENGTH = 40
CLIP = picture(140, 10, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model("whisper", folder, max_target_positions=LENGTH)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hearing(model: tuple[Path, Any]) -> AsyncIterator[Served]:
    settings: dict[str, Any] = {
        "parallel.executor": "inline", "model.path": str(model[0]), "model.dtype": "float32",
        "model.max_model_len": LENGTH, "media.max_bytes": 2**20,
        "server.served_model_names": ["hearing"], "cache.cpu_memory_gib": 0.05,
    }  # fmt: skip
    async with serve(**settings) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def client(hearing: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(hearing) as opened:
        yield opened


async def test_each_format_has_the_reference_s_text(
    client: openai.AsyncOpenAI, model: tuple[Path, Any]
) -> None:
    given: dict[str, Any] = {"model": "hearing", "file": FILE, "language": "de"}
    create = client.audio.transcriptions.create
    plain = await create(**given)
    expected = await asyncio.to_thread(expected_text, model[1])
    assert len(expected) > 3
    assert plain.text.startswith(expected)  # the reference counts the first tokens twice
    assert plain.usage is not None
    assert (plain.usage.type, plain.usage.seconds) == ("duration", 2)
    assert await create(**given, response_format="text") == f"{plain.text}\n"
    found = await create(
        **given, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (found.language, found.duration) == ("german", 1.4)
    segments = found.segments or []
    assert "".join(each.text for each in segments).strip() == found.text
    assert all(0 <= each.start <= each.end <= 1.4 for each in segments)
    assert all(each.avg_logprob < 0 for each in segments)
    srt = await create(**given, response_format="srt")
    vtt = await create(**given, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(segments)
    if segments:
        assert srt.startswith(f"1\n00:00:0{segments[0].start:.3f} --> ".replace(".", ","))


def expected_text(model: Any) -> str:
    data = np.round(SAMPLES / 2 * 32767).astype(np.float32) / 32768
    inputs = encoder_inputs("whisper", data, model)
    ids = model.generate(**inputs, language="de", task="transcribe", max_new_tokens=LENGTH - 4)
    tokens = [token for token in ids[0].tolist() if token < 256]
    decoded: str = make_tokenizer().decode(tokens)
    return decoded.strip()


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_the_events_of_a_stream_are_declared(hearing: Served, path: str) -> None:
    form = aiohttp.FormData({"language": "en", "stream": "true"})
    form.add_field("file", FILE[1], filename=FILE[0], content_type=FILE[2])
    async with hearing.http.post(path, data=form) as response:
        found = await read(response, await declared_by(hearing))
    assert kinds(found) == {"transcript.text.delta", "transcript.text.done"}


async def test_a_stream_has_the_whole_text_in_parts(client: openai.AsyncOpenAI) -> None:
    whole = await client.audio.transcriptions.create(model="hearing", file=FILE, language="en")
    stream = await client.audio.transcriptions.create(
        model="hearing", file=FILE, language="en", stream=True
    )
    *deltas, done = [event async for event in stream]
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert len(deltas) > 1
    assert done.type == "transcript.text.done"
    assert "".join(event.delta for event in deltas) == done.text
    assert done.text.strip() == whole.text


async def test_the_language_is_detected_and_the_source_encoded_once(
    client: openai.AsyncOpenAI, hearing: Served, model: tuple[Path, Any]
) -> None:
    found = await client.audio.transcriptions.create(
        model="hearing", file=FILE, response_format="verbose_json"
    )
    data = np.round(SAMPLES / 2 * 32767).astype(np.float32) / 32768
    inputs = encoder_inputs("whisper", data, model[1])
    expected = model[1].detect_language(**inputs)[0].item()
    names = {ID["<|en|>"]: "english", ID["<|de|>"]: "german", ID["<|fr|>"]: "french"}
    assert found.language == names[expected]
    form = {"response_format": "verbose_json"}
    translated = await post(hearing, "/v1/audio/translations", form, FILE[1])
    assert translated["language"] == "english"


async def test_where_nobody_speaks_is_no_text(
    client: openai.AsyncOpenAI, model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random texts are unlikely, so that the model is asked."""
    data = np.round(SAMPLES / 2 * 32767).astype(np.float32) / 32768
    inputs = encoder_inputs("whisper", data, model[1])
    start = torch.tensor([[ID["<|startoftranscript|>"]]])
    with torch.inference_mode():
        logits = model[1](**inputs, decoder_input_ids=start).logits[0, 0]
    expected = logits.softmax(0)[ID["<|nospeech|>"]].item()
    create: Any = client.audio.transcriptions.create
    given = {"model": "hearing", "file": FILE, "language": "fr"}
    found = await create(**given, response_format="verbose_json")
    assert found.segments
    for each in found.segments:
        assert each.no_speech_prob == pytest.approx(expected, rel=1e-3)
    monkeypatch.setattr(transcript, "_MAX_NO_SPEECH", expected / 2)
    both = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
    silent = await create(**given, **both)
    assert (silent.text, silent.segments, silent.words) == ("", [], [])
    assert (await create(**given)).text == await create(**given, response_format="srt") == ""


async def test_a_long_file_is_its_parts(client: openai.AsyncOpenAI) -> None:
    parts = [sound(SECONDS - 0.1, seed) for seed in (5, 6, 7)]
    silence = np.zeros(RATE // 10, np.float32)
    long = np.concatenate([each for part in parts for each in (part, silence)])
    create = client.audio.transcriptions.create
    given: dict[str, Any] = {"model": "hearing", "language": "fr"}
    file = ("long.wav", wav(long / 4), "audio/wav")
    found = await create(**given, file=file, response_format="verbose_json")
    assert found.duration == 6.0
    seeks = sorted({each.seek for each in found.segments or []} | {0, 600})
    assert len(seeks) > 3
    starts = [each.start for each in found.segments or []]
    assert starts == sorted(starts)
    text = (await create(**given, file=file)).text
    stream = await create(**given, file=file, stream=True)
    *_, done = [event async for event in stream]
    assert done.text.strip() == text


@pytest.mark.parametrize("seconds", [1.4, 5.0])
async def test_words_have_times(client: openai.AsyncOpenAI, seconds: float) -> None:
    create = client.audio.transcriptions.create
    file = ("a.wav", wav(sound(seconds, 1) / 2), "audio/wav")
    given: Any = {"model": "hearing", "file": file, "response_format": "verbose_json"}
    found, plain = [
        await create(**given, language="fr", prompt="Zoé", timestamp_granularities=kinds)
        for kinds in (["word"], ["word", "segment"])
    ]
    assert found.segments is None
    assert plain.segments
    assert found.words == plain.words
    # bytes that are no character may have fallen apart
    text = "".join(word.word for word in found.words or ()).replace("\ufffd", "")
    assert text == "".join(found.text.replace("\ufffd", "").split())
    starts = [word.start for word in found.words or ()]
    assert starts == sorted(starts)
    assert all(0 <= word.start <= word.end <= seconds for word in found.words or ())


async def test_a_prompt_and_a_temperature_change_the_text(
    client: openai.AsyncOpenAI, hearing: Served
) -> None:
    given: dict[str, Any] = {"model": "hearing", "file": FILE, "language": "en"}
    create = client.audio.transcriptions.create
    texts = [
        (await create(**given)).text,
        (await create(**given, prompt="Names: Æneas, Zoë")).text,
        (await create(**given, temperature=1.0)).text,
        (await post(hearing, "/v1/audio/translations", {}, FILE[1]))["text"],
    ]
    assert len(set(texts)) == 4


async def post(
    hearing: Served, path: str, fields: dict[str, str], data: bytes | None, status: int = 200
) -> dict[str, Any]:
    """Sends a form, and returns the reply."""
    form = aiohttp.FormData(default_to_multipart=True)
    for field, value in fields.items():
        form.add_field(field, value)
    if data is not None:
        form.add_field("file", io.BytesIO(data), filename="a.wav")
    async with hearing.http.post(path, data=form) as response:
        reply: dict[str, Any] = await response.json()
        assert response.status == status, reply
    return reply


#: Of each: the fields of the form, its file, the status, the parameter and a part of the message.
REFUSED: dict[str, tuple[dict[str, str], bytes | None, int, str | None, str]] = {
    "no file": ({}, None, 400, "file", "has no file"),
    "an empty file": ({}, b"", 400, "file", "is not sound"),
    "no sound": ({}, b"GIF89a" * 9, 400, "file", "is not sound"),
    "too many bytes": ({}, bytes(2**20 + 1), 413, None, ""),
    "too long": ({}, wav(np.zeros(13 * 8000), 8000), 400, "file", "longer than 12"),
    "another model": ({"model": "other"}, FILE[1], 404, "model", "does not exist"),
    "a format": ({"response_format": "xml"}, FILE[1], 400, "response_format", "one of 'json'"),
    "a temperature": ({"temperature": "hot"}, FILE[1], 400, "temperature", "must be a number"),
    "a high one": ({"temperature": "1.5"}, FILE[1], 400, "temperature", "<= 1"),
    "a language": ({"language": "xx"}, FILE[1], 400, "language", "ISO-639-1"),
    "a field": ({"speed": "2"}, FILE[1], 400, "speed", "is not supported"),
    "long fields": (
        {f"a{i}": "a" * 16_000 for i in range(5)}, FILE[1], 400, "a4", "fields of the form"
    ),
    "a field as text and as list": (
        {"timestamp_granularities": "x", "timestamp_granularities[]": "word"}, FILE[1], 400,
        "timestamp_granularities", "needs",
    ),
    "a stream of pieces": (
        {"stream": "true", "response_format": "srt"}, FILE[1], 400, "stream", "needs"
    ),
    "words of a text": (
        {"timestamp_granularities[]": "word"}, FILE[1], 400, "timestamp_granularities", "needs"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_form_that_is_refused(
    name: str, hearing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MediaConfig, "max_seconds", 12)
    fields, data, status, param, message = REFUSED[name]
    reply = await post(hearing, "/v1/audio/transcriptions", fields, data, status)
    assert reply["error"]["param"] == param
    assert message in reply["error"]["message"]


async def test_other_bodies_and_models_are_refused(hearing: Served, served: Served) -> None:
    reply = await hearing.post("/v1/audio/transcriptions", 415, model="hearing")
    assert "multipart/form-data" in reply["error"]["message"]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        reply = await hearing.post(path, 400, **body)
        assert "/v1/audio/transcriptions" in reply["error"]["message"]
        assert reply["error"]["param"] == next(iter(body))
    assert "/v1/audio/transcriptions -F file=@" in _ready_text(hearing.url, hearing.frontend)
    assert (await hearing.post("/api/show", model="hearing"))["capabilities"] == []
    reply = await post(served, "/v1/audio/transcriptions", {}, FILE[1], 400)
    assert "does not transcribe" in reply["error"]["message"]
    async with hearing.http.get("/v1/models") as response:
        (first, *_) = (await response.json())["data"]
    assert first["input_modalities"] == ["audio"]
    async with hearing.http.get("/openapi.json") as response:
        described = json.loads(await response.read())
    form = described["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    assert "file" in form["multipart/form-data"]["schema"]["properties"]


# -------------------------------------------------------------------- sound in conversations


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def listening(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, Any]]:
    folder = tmp_path_factory.mktemp("voxtral")
    model = save_vision_model("voxtral", folder)
    settings: dict[str, Any] = {
        "parallel.executor": "inline", "model.path": str(folder), "model.dtype": "float32",
        "media.max_pictures": 2, "server.served_model_names": ["listening"],
    }  # fmt: skip
    async with serve(**settings) as served:
        yield served, model


async def test_a_conversation_has_sound(listening: tuple[Served, Any]) -> None:
    served, model = listening
    messages: Any = conversation("Before ", CLIP, " and behind", hears=True)
    limits: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    async with openai_client(served) as client:
        chat = await client.chat.completions.create(model="listening", messages=messages, **limits)
        parts = messages[0]["content"]
        items: Any = [p if "text" not in p else p | {"type": "input_text"} for p in parts]
        response = await client.responses.create(
            model="listening", input=[{"role": "user", "content": items}], temperature=0,
            max_output_tokens=6,
        )  # fmt: skip
    whole = await served.post(
        "/v1/chat/completions", messages=messages, return_token_ids=True, **limits
    )
    prompt, (choice,) = whole["prompt_token_ids"], whole["choices"]
    expected = await asyncio.to_thread(reference_output, model, "voxtral", prompt, [CLIP], 6)
    assert choice["token_ids"] == expected.tokens
    assert chat.choices[0].message.content == choice["message"]["content"] == response.output_text
    tokens = await served.post("/tokenize", messages=messages)
    (sound,) = (p["input_audio"] for p in messages[0]["content"] if p["type"] == "input_audio")
    by_url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{sound['data']}"}}
    same = [p if p["type"] == "text" else by_url for p in messages[0]["content"]]
    given = [{"role": "user", "content": same}]
    reply = await served.post("/v1/chat/completions", messages=given, **limits)
    assert reply["choices"][0]["message"] == choice["message"]
    text = (await served.post("/apply-template", messages=messages))["prompt"]
    given = {"prompt_string": text, "multimodal_data": [sound["data"]]}
    reply = await served.post("/completion", prompt=given, temperature=0, n_predict=6)
    assert reply["content"] == response.output_text
    assert chat.usage is not None
    assert tokens["count"] == len(prompt) == chat.usage.prompt_tokens
    async with served.http.get("/v1/models") as response:
        (first, *_) = (await response.json())["data"]
    assert first["input_modalities"] == ["text", "audio"]


def heard(data: Any, count: int = 1) -> list[dict[str, Any]]:
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return [{"role": "user", "content": [part] * count}]


def url_of(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "audio_url", "audio_url": url}]}]


AT = "messages[0].content[0]"
#: Of each: the messages, and the parameter and a part of the error.
SOUNDS_REFUSED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "no base64": (heard("@@@@"), f"{AT}.input_audio.data", "is not valid base64"),
    "an empty sound": (heard(""), f"{AT}.input_audio.data", "is empty"),
    "no sound": (heard("R0lGODlh"), f"{AT}.input_audio.data", "is not sound"),
    "no data": (heard(None), f"{AT}.input_audio.data", "str"),
    "no part": (
        [{"role": "user", "content": [{"type": "input_audio"}]}], f"{AT}.input_audio", "is missing",
    ),
    "a picture": (conversation(CLIP), f"{AT}.image_url", "reads no pictures"),
    "a picture's URL": (url_of("data:image/png;base64,R0lG"), f"{AT}.audio_url", "and no sound"),
    "no URL": (url_of("a.wav"), f"{AT}.audio_url", "a data URL with a sound (data:audio/wav;"),
    "too many": (heard("R0lG", 3), "messages[0].content[2].input_audio.data", "too many"),
    "six minutes": (
        heard(base64.b64encode(wav(np.zeros(360 * 1000), 1000, width=1)).decode()),
        f"{AT}.input_audio.data", "is longer than 327 seconds",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUNDS_REFUSED)
async def test_a_sound_that_is_refused(name: str, listening: tuple[Served, Any]) -> None:
    messages, param, message = SOUNDS_REFUSED[name]
    error = (await listening[0].post("/v1/chat/completions", 400, messages=messages))["error"]
    assert error["param"] == param
    assert message in error["message"]
